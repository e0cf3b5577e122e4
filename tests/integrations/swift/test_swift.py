"""The adapter in ms-swift's own trainer: `swift rlhf --rlhf_type grpo` with a tiny Qwen2, on a CPU.

Training is in fp32. The bound 1e-6 on the relative difference of a gradient to the fp64 reference is 17 roundings of 2^-24: the
two layers of the model are some 30 operations one after another, each of which rounds once or twice, and roundings of independent
sign add up as the root of their number, which makes 6 to 8. One other token in the selection changes a gradient by 1e-2 or more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paper
import pytest
import reference
from swift.rlhf_trainers import GRPOConfig
from swift.trainers import TrainerFactory
from transformers import AutoModelForCausalLM

from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations import swift as adapter

BOUND = 1e-6
EXAMPLE = Path(__file__).parents[3] / "examples" / "swift" / "m2po_plugin.py"
METRICS = {
    "m2/before",
    "m2/after",
    "m2/masked_fraction",
    "m2/trust_region_fraction",
    "m2/threshold",
    "m2/cut",
    "m2/approx_kl",
    "m2/ratio_max",
    "m2/unscored_tokens",
}


def layout(accumulation: int, per_generation: int, iterations: int = 1, **options: Any) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_iterations": iterations,
        "max_steps": 4,
        **options,
    }


# name -> options of ms-swift, what job.py changes, and what the reference must know of it
ONE_RANK: dict[str, dict[str, Any]] = {
    "one-micro-batch": {"options": layout(1, 1, per_device_train_batch_size=8)},
    "two-windows-of-a-generation": {"options": layout(2, 4)},
    "one-window-of-a-generation": {"options": layout(4, 4, per_device_train_batch_size=2)},
    "a-window-of-two-iterations": {"options": layout(4, 2, 2)},
    "windows-across-iterations": {"options": layout(2, 3, 2)},
    "kl-and-cap": {"options": layout(2, 2, 2, beta=0.05, delta=1.2), "reference": {"kl_coef": 0.05, "ratio_cap": 1.2}},
    "overlong": {
        # A seed with which no completion is empty: for one ms-swift 4.6.0 takes the prompt's log-probs too, and stops.
        "options": layout(2, 2, overlong_filter="true", max_completion_length=40, max_length=128, seed=7, learning_rate=1e-4),
        "reference": {"overlong_filter": True},
    },
    "unscored": {"options": layout(2, 4), "tweak": {"unscored": True}},
    "threshold": {"options": layout(2, 4), "tweak": {"m2_threshold": 0.1}, "reference": {"threshold": 0.1}},
    "checkpointing": {"options": layout(2, 4, gradient_checkpointing="true")},
    "linear": {"options": layout(2, 3, 2), "tweak": {"linear_log_probs": True}},
    "linear-kl-entropy": {
        "options": layout(2, 2, beta=0.05, log_entropy="true"),
        "tweak": {"linear_log_probs": True},
        "reference": {"kl_coef": 0.05},
    },
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "ranks-one-window": {"options": layout(2, 2)},
    "ranks-two-windows": {"options": layout(2, 4, per_device_train_batch_size=2)},
    "ranks-across-iterations": {"options": layout(2, 3, 2)},
    "ranks-unscored": {"options": layout(2, 4), "tweak": {"unscored": True}},
    "ranks-linear": {"options": layout(2, 3, 2), "tweak": {"linear_log_probs": True}},
}
RESTART = {
    "through": {"options": layout(2, 2, save_strategy="steps", save_steps=2)},
    "resumed": {"options": layout(2, 2)},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "refuse-loss-type": (layout(2, 2, loss_type="grpo"), "loss_type must be 'dapo'"),
    "refuse-future": (layout(4, 2), "gradient_accumulation_steps must divide steps_per_generation * num_iterations"),
    "refuse-straddling": (layout(2, 3), "gradient_accumulation_steps must divide steps_per_generation * num_iterations"),
    "refuse-top-p": (layout(2, 2, top_p=0.9), "top_p must be 1.0"),
    "refuse-temperature": (layout(2, 2, temperature=0.7), "temperature must be 1.0 unless use_vllm is true"),
}
ENDS_EARLY = {"ends-early": {"options": layout(2, 2), "tweak": {"ends_early": True}}}
PLUGIN = {"plugin": {"options": layout(2, 2, external_plugins=str(EXAMPLE))}}
MISSING_ON_RANK_1 = {"missing": {"options": layout(2, 2), "tweak": {"missing_on_rank": 1}}}


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")


@pytest.fixture(scope="session")
def one_rank(run_job: Callable[..., Any], folder: Path) -> dict[str, list[Any]]:
    RESTART["resumed"]["options"]["resume_from_checkpoint"] = str(folder / "through" / "out" / "checkpoint-2")
    refused = {name: {"options": options} for name, (options, _) in REFUSED.items()}
    return run_job({**ONE_RANK, **RESTART, **refused, **ENDS_EARLY, **PLUGIN})


@pytest.fixture(scope="session")
def two_ranks(run_job: Callable[..., Any]) -> dict[str, list[Any]]:
    return run_job({**TWO_RANKS, **MISSING_ON_RANK_1}, ranks=2)


def check(case: dict[str, Any], ranks: list[Any], model: Any) -> None:
    """The gradient of each step, on each rank, is that of the whole batch of all ranks."""
    for steps in zip(*ranks, strict=True):
        micro_batches = [m for step in steps for m in step["micro_batches"]]
        assert len(micro_batches) == len(ranks) * case["options"]["gradient_accumulation_steps"]
        wanted = reference.gradient(model, steps[0]["weights"], micro_batches, **case.get("reference", {}))
        for step in steps:
            assert paper.difference(step["gradient"], wanted) < BOUND
        assert steps[0]["logs"].keys() >= METRICS


@pytest.mark.parametrize("name", ONE_RANK)
def test_gradient_is_that_of_the_whole_batch(name: str, one_rank: Any, model: Any) -> None:
    assert len(one_rank[name][0]) == 4
    check(ONE_RANK[name], one_rank[name], model)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_gradient_is_that_of_the_whole_batch_of_two_ranks(name: str, two_ranks: Any, model: Any) -> None:
    assert len(two_ranks[name][0]) == 4
    check(TWO_RANKS[name], two_ranks[name], model)


def test_log_probs_from_hidden_states_need_no_logits(one_rank: Any, two_ranks: Any) -> None:
    assert one_rank["windows-across-iterations"][0][-1]["head_calls"] > 0  # the control
    for step in one_rank["linear"][0] + one_rank["linear-kl-entropy"][0] + two_ranks["ranks-linear"][1]:
        assert step["head_calls"] == 0
    assert all("entropy/mean" in step["logs"] for step in one_rank["linear-kl-entropy"][0])


def test_the_window_ends_with_the_optimizer_step(one_rank: Any) -> None:
    (result,) = one_rank["ends-early"]
    assert result["error"].startswith("InvalidArgument: the optimizer step ends after micro-batch 1 of the 2 that were selected")


@pytest.mark.parametrize("name", ["two-windows-of-a-generation", "one-window-of-a-generation"])
def test_a_selection_for_each_micro_batch_gives_another_gradient(name: str, one_rank: Any, model: Any) -> None:
    differences = []
    for step in one_rank[name][0]:
        wrong = reference.gradient(model, step["weights"], step["micro_batches"], per_micro_batch=True)
        differences.append(paper.difference(step["gradient"], wrong))
    assert max(differences) > 1e-2


def test_a_selection_for_each_rank_gives_another_gradient(two_ranks: Any, model: Any) -> None:
    differences = []
    for steps in zip(*two_ranks["ranks-one-window"], strict=True):
        micro_batches = [m for step in steps for m in step["micro_batches"]]
        wrong = reference.gradient(model, steps[0]["weights"], micro_batches, per_micro_batch=True)
        differences.append(paper.difference(steps[0]["gradient"], wrong))
    assert max(differences) > 1e-2


def test_the_logger_gets_the_metrics_of_the_whole_batch(two_ranks: Any) -> None:
    for step in two_ranks["ranks-unscored"][0]:
        logs = step["logs"]
        assert logs["m2/unscored_tokens"] == 8  # two tokens of each micro-batch of each rank
        assert logs["m2/after"] <= logs["m2/threshold"] == 0.04 < logs["m2/before"]
        assert 0 < logs["m2/masked_fraction"] < logs["m2/trust_region_fraction"] < 1
        assert logs["m2/ratio_max"] > 1
        assert logs["m2/approx_kl"] > 0


def test_a_restart_goes_on_with_the_same_gradients(one_rank: Any) -> None:
    through, resumed = one_rank["through"][0], one_rank["resumed"][0]
    assert len(through) == 4
    assert len(resumed) == 2
    for a, b in zip(through[2:], resumed, strict=True):
        assert paper.difference(b["gradient"], a["gradient"]) == 0
        assert b["logs"]["m2/cut"] == a["logs"]["m2/cut"]


def test_the_example_turns_it_on(one_rank: Any, folder: Path) -> None:
    """As an external plugin, without anything of job.py: it puts the adapter's own class into the place of the recording one."""
    lines = [json.loads(line) for line in (folder / "plugin" / "out" / "logging.jsonl").read_text().splitlines()]
    assert len([line for line in lines if line.get("m2/threshold") == 0.04]) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_before_training(name: str, one_rank: Any) -> None:
    (result,) = one_rank[name]
    assert result["error"].startswith(f"InvalidArgument: {REFUSED[name][1]}")
    assert "\n" not in result["error"]


def test_missing_log_probs_on_one_rank_stop_all(two_ranks: Any) -> None:
    for result in two_ranks["missing"]:
        assert result["error"].startswith("MissingBehaviorLogProbs: rollout_per_token_logps is None; expected --use_vllm true")


def options(**changed: Any) -> SimpleNamespace:
    """The options that a trainer is made with: ms-swift's own defaults, but for the loss."""
    plain = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(GRPOConfig)}
    return SimpleNamespace(**{**plain, "loss_type": "dapo", "steps_per_generation": 1, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"loss_type": "bnpo"},
        {"importance_sampling_level": "sequence"},
        {"rollout_importance_sampling_mode": "token_truncate"},
        {"off_policy_sequence_mask_delta": 0.1},
        {"top_entropy_quantile": 0.2},
        {"epsilon": 0.3},
        {"epsilon_high": 0.28},
        {"delta": 1.0},
        {"top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.1},
        {"repetition_penalty": 1.05},
        {"structured_outputs_regex": "[0-9]+"},
        {"sdar_loss_coef": 0.1},
        {"chord_sft_dataset": ["some/data"]},
        {"use_liger_kernel": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_refuses_what_m2po_does_not_go_with(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(InvalidArgument, match=rf"^{name} must be .* for M2PO, as .*; got "):
        adapter.M2POTrainer(args=options(**changed), template=SimpleNamespace(sequence_parallel_size=1))


def test_refuses_sequence_parallelism() -> None:
    with pytest.raises(InvalidArgument, match=r"^sequence_parallel_size must be 1 for M2PO, as .*; got 2$"):
        adapter.M2POTrainer(args=options(), template=SimpleNamespace(sequence_parallel_size=2))


def test_refuses_to_split_a_micro_batch() -> None:
    trainer = SimpleNamespace(model=SimpleNamespace(training=True), args=SimpleNamespace(per_device_train_batch_size=4))
    with pytest.raises(InvalidArgument, match=r"^per_device_train_batch_size must be at least .*; got 4$"):
        adapter.M2POTrainer._compute_loss_chunked(trainer)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", TrainerFactory.TRAINER_MAPPING["grpo"])
    for name in ("settings", "linear_log_probs"):
        monkeypatch.setattr(adapter.M2POTrainer, name, getattr(adapter.M2POTrainer, name))
    adapter.register(m2_threshold=0.02, linear_log_probs=True)
    assert TrainerFactory.get_trainer_cls(SimpleNamespace(rlhf_type="grpo")) is adapter.M2POTrainer
    assert adapter.M2POTrainer.settings == {"m2_threshold": 0.02, "scope": "quadrants"}
    assert adapter.M2POTrainer.linear_log_probs
    with pytest.raises(InvalidArgument, match="m2_threshold must be >= 0"):
        adapter.register(m2_threshold=-1.0)


def test_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2po_kernels.integrations.common.version", lambda distribution: "4.7.0")
    with pytest.warns(UserWarning, match=r"ms-swift 4\.6\.0; installed is ms-swift 4\.7\.0"), pytest.raises(InvalidArgument):
        adapter.M2POTrainer(args=options(loss_type="grpo"))
