"""The Megatron adapter. Megatron does not run on a CPU, so two things are tested: the adapter's own code, with stand-ins for
Megatron and for the class it inherits from, and that the released source of that class has the hooks which the stand-in has.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import paper
import pytest
import torch
from swift.rl_core.data import GRPOBatch

from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.integrations import swift_step

N_MICRO_BATCHES = 3


class Parent:
    """The part of MegatronGRPOTrainer that the adapter uses."""

    def __init__(self, args: Any, template: Any, **kwargs: Any):
        self.args, self.template = args, template
        self.temperature, self.vllm_version_ge_0_10_2 = args.temperature, args.vllm_is_new
        self.beta, self.kl_in_reward, self.overlong_filter = args.beta, False, args.overlong_filter
        self.steps_per_generation = args.steps_per_generation
        self.unwrapped_models = [SimpleNamespace(training=True)]
        self._step = 0
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def _on_train_step_batch(self, encoded_batches: list[dict[str, Any]]) -> None: ...

    def compute_per_token_logps(
        self, model: Any, data_iterator: Iterator[Any], no_grad: bool = True, temperature: float = 1.0
    ) -> Any:
        return next(data_iterator)["current"], None

    def loss_func(self, output_tensor: torch.Tensor, data: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        return output_tensor.sum() * math.nan, {"loss": torch.tensor(math.nan), "of the parent": 1}

    def _all_reduce_metric(
        self, metric: dict[str, torch.Tensor], reduction: Any = None, group: Any = None
    ) -> dict[str, torch.Tensor]:
        return metric


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    mpu = SimpleNamespace(
        is_pipeline_last_stage=lambda: True,
        get_data_parallel_group=lambda: None,
        get_tensor_and_context_parallel_group=lambda: None,
        get_data_parallel_world_size=lambda: 1,
    )
    for name, content in {
        "megatron": {},
        "megatron.core": {"mpu": mpu},
        "swift.megatron": {},
        "swift.megatron.trainers": {"MegatronGRPOTrainer": Parent},
    }.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["swift"], "megatron", sys.modules["swift.megatron"], raising=False)
    sys.modules["swift.megatron"].trainers = sys.modules["swift.megatron.trainers"]  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "m2po_kernels.integrations.swift_megatron", raising=False)
    return importlib.import_module("m2po_kernels.integrations.swift_megatron")


def options(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "rollout_importance_sampling_mode": None,
            "off_policy_sequence_mask_delta": None,
            "top_entropy_quantile": 1.0,
            "epsilon": 0.2,
            "epsilon_high": None,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "router_replay_mode": "disabled",
            "calculate_per_token_loss": False,
            "temperature": 1.0,
            "vllm_is_new": True,
            "beta": 0.0,
            "delta": None,
            "overlong_filter": False,
            "steps_per_generation": 2,
            "num_microbatches": N_MICRO_BATCHES,
            **changed,
        }
    )


def batches(seed: int, *, moved: bool) -> list[dict[str, Any]]:
    """Micro-batches as ms-swift hands them over. moved: the log-probs of the generation are not the current ones."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(N_MICRO_BATCHES):
        shape = (2, 9)
        current = -torch.rand(shape, generator=generator) * 3
        batch = GRPOBatch(
            completion_mask=torch.rand(shape, generator=generator) < 0.8,
            truncated_mask=torch.tensor([False, True]),
            seq_lengths=torch.tensor([9, 9]),
        )
        batch.old_per_token_logps = torch.full(shape, torch.nan) if moved else current
        batch.rollout_per_token_logps = current + 0.4 * torch.randn(shape, generator=generator)
        batch.ref_per_token_logps = current + 0.1 * torch.randn(shape, generator=generator)
        batch.advantages = torch.randn((2, 1), generator=generator).expand(shape)
        made.append({"grpo_batch": batch, "current": current})
    return made


def step(trainer: Any, made: list[dict[str, Any]]) -> torch.Tensor:
    """One optimizer step as Megatron's schedule does it; the gradient with respect to the log-probs."""
    trainer._on_train_step_batch(made)
    gradients = []
    for data in reversed(made):  # the schedule of a pipeline need not keep their order
        log_probs = data["current"].clone().requires_grad_()
        loss, report = trainer.loss_func(log_probs, {"grpo_batch": data["grpo_batch"]})
        assert report["of the parent"] == 1
        assert report["loss"] == loss
        (loss / N_MICRO_BATCHES).backward()
        gradients.append(log_probs.grad)
    trainer._step += 1
    return torch.stack(gradients[::-1])


def whole(made: list[dict[str, Any]], *, overlong: bool = False, beta: float = 0.0) -> torch.Tensor:
    """The same gradient for the whole batch, in fp64."""
    x = torch.stack([m["current"] for m in made]).double().requires_grad_()
    columns = ("rollout_per_token_logps", "advantages", "ref_per_token_logps", "completion_mask")
    b, a, ref, mask = (torch.stack([getattr(m["grpo_batch"], name) for m in made]) for name in columns)
    if overlong:
        mask = mask & ~torch.stack([m["grpo_batch"].truncated_mask for m in made])[..., None]
    paper.loss([paper.Tokens(x[mask], b[mask], a[mask], ref[mask])], kl_coef=beta).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("moved", [False, True], ids=["fresh", "moved"])
@pytest.mark.parametrize("changed", [{}, {"overlong_filter": True}, {"beta": 0.05}], ids=["plain", "overlong", "kl"])
def test_gradient_is_that_of_the_whole_batch(adapter: Any, moved: bool, changed: dict[str, Any]) -> None:
    trainer = adapter.M2POMegatronTrainer(options(**changed), SimpleNamespace(padding_free=False))
    trainer._step = int(moved)
    made = batches(5, moved=moved)
    got = step(trainer, made)
    wanted = whole(made, overlong=changed.get("overlong_filter", False), beta=changed.get("beta", 0.0))
    # exp(d) of a d that is rounded to fp32 (|d| < 4, so by 2^-23), the factors and the sums of its gradient: 8 times 2^-24.
    torch.testing.assert_close(got.double(), wanted, rtol=2**-21, atol=2**-26)
    metrics = trainer._metrics["train"]
    assert metrics["m2/after"][0] <= 0.04 < metrics["m2/before"][0]
    assert metrics["m2/unscored_tokens"] == [0.0]


@pytest.mark.parametrize("moved", [False, True], ids=["fresh", "moved"])
def test_every_stage_of_a_pipeline_takes_part_in_a_forward(adapter: Any, monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    """Two stages, one after the other, as a send does not wait. What is received but was never sent would be waited for."""
    sent: deque[torch.Tensor] = deque()
    stage = 0
    monkeypatch.setattr(adapter.mpu, "is_pipeline_last_stage", lambda: stage == 1)

    def forward(
        self: Parent, model: Any, data_iterator: Iterator[Any], no_grad: bool = True, temperature: float = 1.0
    ) -> tuple[torch.Tensor | None, None]:
        data = next(data_iterator)
        if stage == 0:
            sent.append(data["current"])
            return None, None
        return sent.popleft(), None

    monkeypatch.setattr(Parent, "compute_per_token_logps", forward)
    first, last = (adapter.M2POMegatronTrainer(options(), SimpleNamespace(padding_free=False)) for _ in range(2))
    first._step = last._step = int(moved)
    made = batches(5, moved=moved)
    of_first = batches(5, moved=moved)
    for data in of_first:
        data["grpo_batch"].old_per_token_logps = None
    first._on_train_step_batch(of_first)
    assert len(sent) == (N_MICRO_BATCHES if moved else 0)
    assert first._window is None
    assert not first._metrics["train"]
    stage = 1
    torch.testing.assert_close(step(last, made).double(), whole(made), rtol=2**-21, atol=2**-26)  # as above
    assert not sent


def test_evaluation_is_the_parents(adapter: Any) -> None:
    trainer = adapter.M2POMegatronTrainer(options(), SimpleNamespace(padding_free=False))
    trainer.unwrapped_models[0].training = False
    loss, _ = trainer.loss_func(torch.ones(1), {})
    assert loss.isnan()


def test_missing_log_probs(adapter: Any) -> None:
    trainer = adapter.M2POMegatronTrainer(options(), SimpleNamespace(padding_free=False))
    made = batches(5, moved=False)
    made[1]["grpo_batch"].rollout_per_token_logps = None
    with pytest.raises(MissingBehaviorLogProbs, match=r"^rollout_per_token_logps is None; expected --use_vllm true"):
        trainer._on_train_step_batch(made)


@pytest.mark.parametrize(
    "changed",
    [
        {"loss_type": "grpo"},
        {"importance_sampling_level": "sequence"},
        {"rollout_importance_sampling_mode": "token_mask"},
        {"off_policy_sequence_mask_delta": 0.1},
        {"top_entropy_quantile": 0.2},
        {"epsilon": 0.3},
        {"epsilon_high": 0.28},
        {"delta": 1.0},
        {"top_p": 0.9},
        {"top_k": 50},
        {"repetition_penalty": 1.05},
        {"router_replay_mode": "R2"},
        {"calculate_per_token_loss": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_refuses(adapter: Any, changed: dict[str, Any]) -> None:
    ((name, value),) = changed.items()
    with pytest.raises(InvalidArgument, match=rf"^{name} must be .* for M2PO, as .*; got {value!r}$"):
        adapter.M2POMegatronTrainer(options(**changed), None)


def test_refuses_log_probs_from_before_the_temperature(adapter: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^temperature must be 1\.0 unless vLLM is 0\.10\.2 or newer.*; got 0\.7$"):
        adapter.M2POMegatronTrainer(options(temperature=0.7, vllm_is_new=False), None)


def test_register(adapter: Any) -> None:
    adapter.register(m2_threshold=0.02, scope="all")
    assert sys.modules["swift.megatron.trainers"].MegatronGRPOTrainer is adapter.M2POMegatronTrainer  # type: ignore[attr-defined]
    assert adapter.M2POMegatronTrainer.settings == {"m2_threshold": 0.02, "scope": "all"}
    with pytest.raises(InvalidArgument, match="m2_threshold must be >= 0"):
        adapter.register(m2_threshold=-1.0)


def source(path: str) -> ast.Module:
    spec = importlib.util.find_spec("swift")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())


def functions(path: str, owner: str) -> dict[str, list[str]]:
    """The methods of a class, with the names of their parameters."""
    (found,) = [n for n in source(path).body if isinstance(n, ast.ClassDef) and n.name == owner]
    return {f.name: [a.arg for a in f.args.args] for f in found.body if isinstance(f, ast.FunctionDef)}


def test_the_hooks_are_as_released() -> None:
    trainers = "megatron/trainers/"
    grpo = functions(trainers + "grpo_trainer.py", "MegatronGRPOTrainer")
    rollout = functions(trainers + "rollout_mixin.py", "MegatronRolloutMixin")
    rlhf = functions(trainers + "rlhf_mixin.py", "MegatronRLHFTrainer")
    base = functions(trainers + "base.py", "BaseMegatronTrainer")
    assert grpo["__init__"] == ["self", "args", "template"]
    assert grpo["loss_func"] == ["self", "output_tensor", "data"]
    assert rollout["_on_train_step_batch"] == ["self", "encoded_batches"]
    assert rlhf["compute_per_token_logps"] == ["self", "model", "data_iterator", "no_grad", "temperature"]
    assert base["_all_reduce_metric"] == ["self", "metric", "reduction", "group"]
    text = ast.unparse(source(trainers + "grpo_trainer.py")) + ast.unparse(source(trainers + "rollout_mixin.py"))
    for attribute in (
        "temperature",
        "steps_per_generation",
        "beta",
        "kl_in_reward",
        "overlong_filter",
        "_step",
        "vllm_version_ge_0_10_2",
    ):
        assert f"self.{attribute} = " in text
    # The hook gets the micro-batches of one optimizer step, before the step is counted.
    assert "self._on_train_step_batch(encoded_batches)\n        self._step += 1" in text
    # The loss has two results. It is multiplied for a schedule that divides by the micro-batches and averages over data-parallel
    # ranks.
    assert "dp_size = mpu.get_data_parallel_world_size()\n            normalizer = num_items_in_batch / dp_size" in text
    assert "loss = loss * self.args.num_microbatches" in text
    assert "return (loss, reporting_metric)" in text
    # A forward without gradients is received from the stage before this one and sent to the one after it.
    helper = ast.unparse(source("megatron/utils/utils.py"))
    assert "if not mpu.is_pipeline_first_stage():\n        recv_shape_buffer" in helper
    assert "send_to_next_pipeline_rank(output_tensor)\n        output_tensor = None" in helper
    assert "if labels is None or output_tensor is None:\n        return (None, routing_topk_idx)" in ast.unparse(
        source(trainers + "utils.py")
    )
    options = ast.unparse(source("megatron/arguments/megatron_args.py"))
    for name in (*swift_step.EXPECTED, "delta", "router_replay_mode", "calculate_per_token_loss"):
        assert f"    {name}: " in options
    entry = ast.unparse(source("megatron/pipelines/train/rlhf.py"))
    assert "'grpo': 'MegatronGRPOTrainer'" in entry
    assert "getattr(module, trainer_cls_name)" in entry
