"""The adapter in AReaL's own PPOActor and FSDP engine, on a CPU.

Training is in fp32. The bound 1e-6 on the relative difference of a gradient to the fp64 reference is 17 roundings of 2^-24: the
model is some 10 operations one after another, each of which rounds once or twice forward and again backward, and roundings of
independent sign add up as the root of their number, which makes 5 to 7. One other token in the selection changes a gradient by
1e-2 or more.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import areal.engine
import engine
import paper
import pytest
import ranks_job
import reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from areal.api import TrainEngine
from areal.api.cli_args import GenerationHyperparameters, MicroBatchSpec, RejectionSamplingConfig
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.trainer import PPOTrainer
from areal.trainer.ppo import actor as ppo
from areal.utils import stats_tracker

from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.integrations import areal as adapter

BOUND = 1e-6


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "one"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# name -> options, what the reference must know of them, micro-batches of an optimizer step
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "one-step": ({"ppo_n_minibatches": 1}, {}, 1),
    "four-micro-batches": ({"ppo_n_minibatches": 1, "mb_spec": MicroBatchSpec(n_mbs=4)}, {}, 4),
    "two-steps": ({"mb_spec": MicroBatchSpec(n_mbs=2)}, {}, 2),
    "four-steps": ({"ppo_n_minibatches": 4, "mb_spec": MicroBatchSpec(n_mbs=2)}, {}, 2),
    "unscored": ({"unscored": True, "mb_spec": MicroBatchSpec(n_mbs=2)}, {}, 2),
    "cap": ({"c_clip": 1.2, "mb_spec": MicroBatchSpec(n_mbs=2)}, {"ratio_cap": 1.2}, 2),
    "threshold": ({"m2_threshold": 0.1, "mb_spec": MicroBatchSpec(n_mbs=2)}, {"threshold": 0.1}, 2),
    "all-tokens": ({"scope": "all", "mb_spec": MicroBatchSpec(n_mbs=2)}, {"scope": "all"}, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_is_that_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    options, of_reference, n = LAYOUTS[name]
    run = engine.run(tmp_path, **options)
    assert len(run.gradients) == options.get("ppo_n_minibatches", 2)
    assert set(run.n_micro_batches) == {n}
    for batch, weights, gradient in zip(run.batches, run.weights, run.gradients, strict=True):
        wanted = reference.gradient(engine.Bigrams(), weights, [batch], **of_reference)
        assert paper.difference(gradient, wanted) < BOUND


def test_areals_own_option_gives_another_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: AReaL's own masking of each micro-batch, on the same data."""
    ours = engine.run(tmp_path, ppo_n_minibatches=1, mb_spec=MicroBatchSpec(n_mbs=4))
    stats_tracker.export_all()  # its lists are of equal length only between two exports
    monkeypatch.setattr(adapter, "M2POActor", lambda config, engine, scope: ppo.PPOActor(config, engine))
    theirs = engine.run(tmp_path, ppo_n_minibatches=1, mb_spec=MicroBatchSpec(n_mbs=4))
    assert paper.difference(theirs.gradients[0], ours.gradients[0]) > 1e-2


def test_a_micro_batch_without_a_scored_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.trajectories

    def trajectories(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        made = plain(*args, **kwargs)
        made[0]["loss_mask"].zero_()
        return made

    monkeypatch.setattr(engine, "trajectories", trajectories)
    run = engine.run(tmp_path, ppo_n_minibatches=1, mb_spec=MicroBatchSpec(n_mbs=8))
    assert run.n_micro_batches == [8]
    wanted = reference.gradient(engine.Bigrams(), run.weights[0], run.batches)
    assert paper.difference(run.gradients[0], wanted) < BOUND


def test_the_selection_is_made_without_dropout(tmp_path: Path) -> None:
    assert engine.run(tmp_path).in_training == [("forward", False), ("train_batch", True)] * 2


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(ranks_job.job, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    differences = []
    for i, batches in enumerate(zip(*(r["batches"] for r in ranks), strict=True)):
        wanted = reference.gradient(engine.Bigrams(), ranks[0]["weights"][i], list(batches))
        wrong = reference.gradient(engine.Bigrams(), ranks[0]["weights"][i], list(batches), per_micro_batch=True)
        for r in ranks:
            assert paper.difference(r["gradients"][i], wanted) < BOUND
            differences.append(paper.difference(r["gradients"][i], wrong))
    assert max(differences) > 1e-2
    assert all(r["error"].startswith("'logprobs' is not in the batch; expected the rollout's") for r in ranks)


def test_the_stats_have_the_metrics(tmp_path: Path) -> None:
    stats_tracker.export_all()
    engine.run(tmp_path, unscored=True)
    stats = stats_tracker.export_all()
    own = {name.removeprefix("ppo_actor/update/"): value for name, value in stats.items() if "/m2/" in name}
    assert own["m2/threshold"] == pytest.approx(0.04)
    assert own["m2/after"] <= 0.04 < own["m2/before"]
    assert 0 < own["m2/masked_fraction"] < own["m2/trust_region_fraction"] < 1
    assert own["m2/unscored_tokens"] == 4  # one in each of 8 sequences, mean of two steps
    assert {"m2/cut", "m2/approx_kl", "m2/ratio_max"} <= own.keys()


@pytest.mark.parametrize(
    "changed",
    [
        {"use_sapo_loss": True},
        {"importance_sampling_level": "sequence"},
        {"rejection_sampling": RejectionSamplingConfig()},
        {"enable_tree_training": True},
        {"recompute_logprob": True},
        {"use_decoupled_loss": True},
        {"eps_clip": 0.4},
        {"eps_clip_higher": 0.28},
        {"c_clip": 1.0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_refuses(changed: dict[str, Any], tmp_path: Path) -> None:
    ((name, _),) = changed.items()
    with pytest.raises(InvalidArgument, match=rf"^actor\.{name} must be .*, as .*; got "):
        engine.Engine(engine.config(tmp_path, **changed))


def test_refuses_an_actor_without_threshold(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^actor\.m2_threshold must be set"):
        adapter.M2POActor(engine.config(tmp_path, m2_threshold=None), None)


class Reached(Exception):
    """AReaL's own PPOTrainer goes on."""


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes AReaL's PPOTrainer after `register`, as far as it gets without GPUs: up to its tokenizer."""

    def reached(*args: Any) -> None:
        raise Reached

    monkeypatch.setattr("areal.trainer.rl_trainer.load_hf_processor_and_tokenizer", reached)
    monkeypatch.setattr("areal.trainer.rl_trainer.is_single_controller", lambda: False)
    monkeypatch.setattr(areal.engine, "FSDPPPOActor", FSDPPPOActor, raising=False)
    monkeypatch.setattr(PPOTrainer, "__init__", PPOTrainer.__init__)
    adapter.register()
    adapter.register()  # a second one changes nothing

    def make(*, rollout: str = "sglang:d1", sampler: dict[str, Any] | None = None, teacher: Any = None, **actor: Any) -> None:
        PPOTrainer(
            SimpleNamespace(
                actor=engine.config(tmp_path, **actor),
                gconfig=GenerationHyperparameters(**(sampler or {})),
                rollout=SimpleNamespace(backend=rollout),
                teacher=teacher,
                tokenizer_path="",
            )
        )

    return make


def test_the_trainer_is_made(make_trainer: Callable[..., None]) -> None:
    for allowed in ({}, {"temperature": 0.7, "sampler": {"temperature": 0.7}}, {"rollout": "vllm:d1"}):
        with pytest.raises(Reached):
            make_trainer(**allowed)


@pytest.mark.parametrize("backend", ["megatron", "archon"])
def test_refuses_engines_with_areals_own_masking(backend: str, make_trainer: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match=rf"^actor\.backend must be fsdp with actor\.m2_threshold, as .*; got '{backend}'$"):
        make_trainer(backend=f"{backend}:d1")
    with pytest.raises(Reached):
        make_trainer(backend=f"{backend}:d1", m2_threshold=None)


@pytest.mark.parametrize(
    "changed",
    [
        {"top_p": 0.9},
        {"top_k": 50},
        {"greedy": True},
        {"frequency_penalty": 0.5},
        {"use_beam_search": True},
        {"temperature": 0.7},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_refuses_samplers_of_another_distribution(changed: dict[str, Any], make_trainer: Callable[..., None]) -> None:
    ((name, value),) = changed.items()
    with pytest.raises(InvalidArgument, match=rf"^gconfig\.{name} must be .* with actor\.m2_threshold, as .*; got {value!r}$"):
        make_trainer(sampler=changed)


def test_refuses_log_probs_from_before_the_temperature(make_trainer: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match=r"^gconfig\.temperature must be 1\.0 .*, as vLLM .*; got 0\.7$"):
        make_trainer(rollout="vllm:d1", temperature=0.7, sampler={"temperature": 0.7})


def test_refuses_before_anything_is_made(make_trainer: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match=r"^actor\.eps_clip must be 0\.2"):
        make_trainer(eps_clip=0.4)
    with pytest.raises(InvalidArgument, match=r"^teacher must be None .*; got 'a teacher'$"):
        make_trainer(teacher="a teacher")


def test_refuses_a_teacher(tmp_path: Path) -> None:
    run = engine.Engine(engine.config(tmp_path))
    with pytest.raises(InvalidArgument, match=r"^teacher must not be set"):
        run.actor.engine.train_batch({"teacher_logp": torch.zeros(1)}, None, None)


def test_missing_log_probs(tmp_path: Path) -> None:
    with pytest.raises(MissingBehaviorLogProbs, match=r"^'logprobs' is not in the batch; expected the rollout's"):
        engine.run(tmp_path, missing=True)


def test_without_the_option_all_is_areals(tmp_path: Path) -> None:
    assert type(engine.Engine(engine.config(tmp_path, m2_threshold=None)).actor) is ppo.PPOActor


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal.engine, "FSDPPPOActor", FSDPPPOActor, raising=False)
    monkeypatch.setattr(PPOTrainer, "__init__", PPOTrainer.__init__)
    for scope in ("all", "quadrants"):
        adapter.register(scope=scope)
        chosen = areal.engine.FSDPPPOActor
        assert chosen.scope == scope
        assert getattr(adapter, chosen.__name__) is chosen  # as the workers of a single controller find it
    with pytest.raises(InvalidArgument, match=r"^scope must be"):
        adapter.register(scope="some")
    made = []

    class Made(adapter.M2POFSDPPPOActor):
        def __init__(self, config: Any):
            made.append(config)

        def create_process_group(self, parallel_strategy: Any) -> None: ...

    monkeypatch.setattr(areal.engine, "FSDPPPOActor", Made)
    monkeypatch.setattr("areal.trainer.rl_trainer.is_single_controller", lambda: False)
    trainer = SimpleNamespace(scheduler=None)
    PPOTrainer._create_train_engine(trainer, "config", SimpleNamespace(backend="fsdp", parallel=None))
    assert made == ["config"]


def test_the_hooks_are_as_released() -> None:
    """What the adapter stands on but what the tests above do not run."""
    assert list(inspect.signature(TrainEngine.train_batch).parameters) == ["self", "input_", "loss_fn", "loss_weight_fn"]
    assert list(inspect.signature(TrainEngine.forward).parameters) == ["self", "input_", "output_seqlens", "aggregate_fn"]
    assert list(inspect.signature(ppo.grpo_loss_fn).parameters)[:3] == ["logprobs", "entropy", "input_data"]
    assert isinstance(inspect.getattr_static(TrainEngine, "data_parallel_group"), property)
    update = ast.parse(textwrap.dedent(inspect.getsource(ppo.PPOActor._ppo_update)))
    calls = {ast.unparse(n.func) for n in ast.walk(update) if isinstance(n, ast.Call)}
    assert "self.engine.train_batch" in calls


def test_names_both_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("m2po_kernels.integrations.common.version", lambda distribution: "1.1.0")
    with pytest.warns(UserWarning, match=r"areal 1\.0\.4; installed is areal 1\.1\.0"):
        engine.Engine(engine.config(tmp_path))
