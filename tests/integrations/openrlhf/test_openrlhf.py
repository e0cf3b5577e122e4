"""The adapter in OpenRLHF's own ActorPPOTrainer, with its Actor, replay buffer and accumulation, on a CPU.

DeepSpeed is a stand-in that divides losses by the accumulation and averages gradients over the ranks.
Training is in fp32. The bound 1e-6 on the relative difference of a gradient to the fp64 reference is 17 roundings of 2^-24: the
two layers of the model are some 30 operations one after another, each of which rounds once or twice, and roundings of independent
sign add up as the root of their number, which makes 6 to 8. One other token in the selection changes a gradient by 1e-2 or more.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import paper
import pytest
import ranks_job
import ray
import reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils import Experience
from openrlhf.trainer.ray import ppo_actor

from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.integrations import openrlhf as adapter

BOUND = 1e-6


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "one"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-micro-batch": ({"accumulated_gradient": 1, "micro_batch": 6}, {}),
    "three": ({"accumulated_gradient": 3}, {}),
    "six-of-one": ({"accumulated_gradient": 6, "micro_batch": 1}, {}),
    "two-epochs": ({"accumulated_gradient": 3, "train.max_epochs": 2}, {}),
    "unscored": ({"unscored": 2}, {}),
    "cap": ({"actor.dual_clip": 1.2}, {"ratio_cap": 1.2}),
    "threshold": ({"m2_threshold": 0.1}, {"threshold": 0.1}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_is_that_of_the_whole_batch(name: str) -> None:
    options, of_reference = LAYOUTS[name]
    run = engine.Run(12, **options)  # two optimizer steps an epoch
    windows = list(run.windows())
    assert len(windows) == 2 * options.get("train.max_epochs", 1) == len(run.strategy.gradients)
    for window, weights, gradient in zip(windows, run.strategy.weights, run.strategy.gradients, strict=True):
        wanted = reference.gradient(engine.actor(), weights, window, **of_reference)
        assert paper.difference(gradient, wanted) < BOUND


def test_a_selection_for_each_micro_batch_gives_another_gradient() -> None:
    run = engine.Run(12)
    differences = []
    for window, weights, gradient in zip(run.windows(), run.strategy.weights, run.strategy.gradients, strict=True):
        wrong = reference.gradient(engine.actor(), weights, window, per_micro_batch=True)
        differences.append(paper.difference(gradient, wrong))
    assert max(differences) > 1e-2


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(ranks_job.job, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for i, parts in enumerate(zip(*(r["windows"] for r in ranks), strict=True)):
        window = [m for part in parts for m in part]
        wanted = reference.gradient(engine.actor(), ranks[0]["weights"][i], window)
        for r in ranks:
            assert paper.difference(r["gradients"][i], wanted) < BOUND
    assert ranks[0]["status"]["m2/unscored_tokens"] == 12  # one in each of 6 sequences of each rank
    assert all(r["error"].startswith("rollout_log_probs is None; expected --algo.advantage.is_correction_level") for r in ranks)


def test_the_status_has_the_metrics() -> None:
    status = engine.Run(12).status
    assert status["m2/threshold"] == pytest.approx(0.04)
    assert status["m2/after"] <= 0.04 < status["m2/before"]
    assert 0 < status["m2/masked_fraction"] < status["m2/trust_region_fraction"] < 1
    assert status["m2/masked_fraction"] == pytest.approx(status["ppo_clip_ratio"])  # of the parts, weighted by their tokens
    assert status["m2/ratio_max"] > 1
    assert status["m2/approx_kl"] > 0
    assert status["m2/unscored_tokens"] == 0
    assert "m2/cut" not in status


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"algo.advantage.is_correction_level": "off"}, MissingBehaviorLogProbs),
        ({"algo.advantage.is_correction_level": "seq"}, InvalidArgument),
        ({"algo.advantage.is_correction_mode": "clip"}, InvalidArgument),
        ({"algo.advantage.is_correction_gating": "tv"}, InvalidArgument),
        ({"algo.advantage.is_correction_threshold": [0.0, 2.0]}, InvalidArgument),
        ({"actor.eps_clip_low_high": (0.2, 0.28)}, InvalidArgument),
        ({"rollout.top_p": 0.9}, InvalidArgument),
        ({"actor.policy_loss_type": "gspo"}, InvalidArgument),
        ({"actor.loss_agg_mode": "seq-mean"}, InvalidArgument),
        ({"train.dynamic_batch_enable": True}, InvalidArgument),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_refuses(changed: dict[str, Any], error: type[Exception]) -> None:
    ((name, value),) = changed.items()
    shown = re.escape(repr(tuple(value) if isinstance(value, list) else value))
    with pytest.raises(error, match=rf"^--{name} must be .* for M2PO.*; got {shown}$"):
        engine.trainer(**changed)


def test_refuses_a_rollout_that_is_no_multiple_of_the_optimizer_step() -> None:
    with pytest.raises(InvalidArgument, match=r"^--train\.batch_size must divide .* = 20 for M2PO, .*; got 6$"):
        engine.trainer(**{"rollout.batch_size": 10, "rollout.n_samples_per_prompt": 2})


def test_moves_only_what_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer moves each micro-batch before it trains on it; the selection moves none."""
    moved: list[Experience] = []
    run = engine.Run(6)  # to_device is called for the buffer too
    with monkeypatch.context() as patch:
        plain = Experience.to_device
        patch.setattr(Experience, "to_device", lambda self, device: moved.append(self) or plain(self, device))
        with engine.without_cuda(torch.device("cpu")):
            run.trainer.ppo_train(0.0)
    assert len(moved) == 3


def test_the_selection_is_made_without_dropout() -> None:
    run = engine.Run(12)
    del run.forwards_in_training[:12]  # of the rollouts
    # The first step starts from the log-probs of the buffer; the second has three forwards of its own.
    assert run.forwards_in_training == [True] * 3 + [False] * 3 + [True] * 3


def test_refuses_an_optimizer_step_over_two_rollouts() -> None:
    wanted = r"^--train\.batch_size must divide the samples of every rollout, .* has 1 of 3 micro-batches$"
    with pytest.raises(InvalidArgument, match=wanted):
        engine.Run(8)


def test_missing_log_probs() -> None:
    with pytest.raises(
        MissingBehaviorLogProbs, match=r"^rollout_log_probs is None; expected --algo.advantage.is_correction_level"
    ):
        engine.Run(6, missing=True)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class that train_ppo_ray hands to Ray is ours, and makes our trainer."""
    before = ppo_actor.PolicyModelActor
    monkeypatch.setattr(ppo_actor, "PolicyModelActor", before)
    monkeypatch.setattr(ppo_actor, "ActorPPOTrainer", ppo_actor.ActorPPOTrainer)
    with pytest.raises(InvalidArgument, match="m2_threshold must be >= 0"):
        adapter.register(m2_threshold=-1.0)
    adapter.register(m2_threshold=0.02)
    parent, ours = (a.__ray_metadata__.modified_class for a in (before, ppo_actor.PolicyModelActor))
    assert issubclass(ours, parent)
    monkeypatch.setattr(parent, "init_model_from_pretrained", lambda self, *args: ppo_actor.ActorPPOTrainer)
    made = ours.__new__(ours).init_model_from_pretrained("strategy", "model")
    assert made.func is adapter.M2POTrainer
    assert made.keywords == {"m2_threshold": 0.02, "scope": "quadrants"}
    assert isinstance(ppo_actor.PolicyModelActor, ray.actor.ActorClass)
    assert ray.is_initialized() is False


def test_the_hooks_are_as_released() -> None:
    """What the adapter stands on but what the tests above do not run."""
    forward = list(inspect.signature(PolicyLoss.forward).parameters)
    assert forward[1:6] == ["log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs"]
    spec = importlib.util.find_spec("openrlhf.cli.train_ppo_ray")
    assert spec is not None
    tree = ast.parse(Path(spec.origin or "").read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "openrlhf.trainer.ray.ppo_actor"]
    assert [a.name for n in imports for a in n.names] == ["PolicyModelActor"]
    actor = ast.parse(inspect.getsource(ppo_actor))
    calls = [n.func.id for n in ast.walk(actor) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert calls.count("ActorPPOTrainer") == 1


def test_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2po_kernels.integrations.common.version", lambda distribution: "0.12.0")
    with pytest.warns(UserWarning, match=r"openrlhf 0\.11\.2; installed is openrlhf 0\.12\.0"):
        engine.trainer()
