"""The gradient before the optimizer step, against that of the whole batch in fp64, and what is refused.

The bound of 1e-6 is that of the tests of verl, for the same model and the same reason.
"""

from __future__ import annotations

import inspect
import pathlib

import jobs
import pytest
import tiny
import trinity_jobs
import workers
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity.common.config import load_config
from verl.workers.engine.fsdp import transformer_impl

from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.integrations import common

BOUND = 1e-6
LAYOUT = {"mini_batch": 4, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize("layout", trinity_jobs.LAYOUTS)
def test_one_step(actor, model_path, layout):
    sequences = tiny.rollouts(model_path, 12, seed=1)
    reference, counts = tiny.gradient(tiny.load(model_path), [sequences])
    assert 0 < counts["dropped"] < counts["region"]
    workers.restart(actor)
    actor.actor.set_loss_fn(trinity_jobs.make_loss(m2_threshold=0.04))
    metrics = workers.update(actor, trinity_jobs.make_batch(sequences), mini_batch=12, **trinity_jobs.LAYOUTS[layout])
    (step,) = actor.actor.engine.steps
    assert tiny.difference(step.gradient, reference) < BOUND
    for value in metrics["actor/m2/masked_fraction"]:  # one of each micro-batch, all alike
        assert value == pytest.approx(counts["dropped"] / counts["valid"])


def test_log_probs_from_hidden_states(model_path, world, monkeypatch):
    """By verl's options, as trainer.trainer_config.model sets them."""
    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", lambda **_: pytest.fail("logits were made"))
    sequences = tiny.rollouts(model_path, 12, seed=1)
    reference, _ = tiny.gradient(tiny.load(model_path), [sequences])
    actor = workers.make_actor(workers.compose(model_path, *workers.HEAD, m2po=()))
    actor.actor.set_loss_fn(trinity_jobs.make_loss())
    workers.update(actor, trinity_jobs.make_batch(sequences), mini_batch=12, **trinity_jobs.LAYOUTS["micro-batches of 4"])
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND


def test_a_threshold_of_ones_own(actor, model_path):
    sequences = tiny.rollouts(model_path, 12, seed=1)
    reference, _ = tiny.gradient(tiny.load(model_path), [sequences], tau=0.1)
    workers.restart(actor)
    actor.actor.set_loss_fn(trinity_jobs.make_loss(m2_threshold=0.1, loss_agg_mode="token-mean"))
    workers.update(actor, trinity_jobs.make_batch(sequences), mini_batch=12, **trinity_jobs.LAYOUTS["micro-batches of 4"])
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND


def test_unscored_tokens_are_left_out(actor, model_path):
    sequences = tiny.rollouts(model_path, 12, seed=3, unscored=0.2)
    reference, _ = tiny.gradient(tiny.load(model_path), [sequences])
    workers.restart(actor)
    actor.actor.set_loss_fn(trinity_jobs.make_loss())
    workers.update(actor, trinity_jobs.make_batch(sequences), mini_batch=12, **trinity_jobs.LAYOUTS["micro-batches of 4"])
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND


def test_a_stock_loss_depends_on_the_micro_batches(actor, model_path, monkeypatch):
    """What docs/integrations/trinity.md says of it: about three times the gradient for three micro-batches."""
    monkeypatch.delenv("VERL_ENGINE_VENDOR")
    stock, norms = workers.make_actor(workers.compose(model_path, m2po=())), []
    stock.actor.set_loss_fn(trinity_jobs.make_loss("ppo", clip_range=0.2))
    for layout in ("one micro-batch", "micro-batches of 4"):
        workers.restart(stock)
        batch = trinity_jobs.make_batch(tiny.rollouts(model_path, 12, seed=1))
        workers.update(stock, batch, mini_batch=12, **trinity_jobs.LAYOUTS[layout])
        gradient = stock.actor.engine.steps[0].gradient
        norms.append(sum(float(g.square().sum()) for g in gradient.values()) ** 0.5)
    assert 2 < norms[1] / norms[0] < 4.5


@pytest.fixture(scope="module")
def two_ranks(model_path, tmp_path_factory):
    return jobs.on_two_ranks(trinity_jobs.train, model_path, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("layout", trinity_jobs.LAYOUTS)
def test_two_ranks(two_ranks, model_path, layout):
    sequences = [s for rank in range(2) for s in trinity_jobs.share(model_path, rank)]
    reference, _ = tiny.gradient(tiny.load(model_path), [sequences])
    for rank in two_ranks:
        assert tiny.difference(rank[layout].gradient, reference) < BOUND


def test_recomputed_old_log_probs(actor, model_path):
    """As with bypass_old_logprobs: false."""
    batch = trinity_jobs.make_batch(tiny.rollouts(model_path, 4, seed=1))
    batch["old_log_probs"] = batch["old_log_probs"] * 1.01
    workers.restart(actor)
    actor.actor.set_loss_fn(trinity_jobs.make_loss())
    with pytest.raises(MissingBehaviorLogProbs, match=r"algorithm\.bypass_old_logprobs: true"):
        workers.update(actor, batch, **LAYOUT)
    assert not actor.actor.engine.steps


def test_an_engine_that_does_not_select(model_path, world, monkeypatch):
    monkeypatch.delenv("VERL_ENGINE_VENDOR")
    stock = workers.make_actor(workers.compose(model_path, m2po=()))
    stock.actor.set_loss_fn(trinity_jobs.make_loss())
    with pytest.raises(InvalidArgument, match="VERL_ENGINE_VENDOR=m2po"):
        workers.update(stock, trinity_jobs.make_batch(tiny.rollouts(model_path, 4, seed=1)), **LAYOUT)


def test_arguments():
    with pytest.raises(InvalidArgument, match=r"algorithm\.loss_agg_mode must be token-mean"):
        trinity_jobs.make_loss(loss_agg_mode="seq-mean-token-sum")
    with pytest.raises(InvalidArgument, match=r"policy_loss_fn_args must be .*; got clip_range=0\.2, clip_range_high=0\.28"):
        trinity_jobs.make_loss(clip_range=0.2, clip_range_high=0.28)
    with pytest.raises(InvalidArgument, match=r"trainer\.trainer_type must be verl"):
        POLICY_LOSS_FN.get(trinity_jobs.M2PO)(backend="tinker")


def test_another_version_warns(monkeypatch):
    monkeypatch.setitem(common.TESTED, "trinity-rft", "0.0")
    with pytest.warns(UserWarning, match=r"tested with trinity-rft 0\.0; installed is trinity-rft 0\.6\.0"):
        trinity_jobs.make_loss()


def test_default_arguments_are_those_of_the_class():
    """Trinity-RFT's validator takes default_args() where a configuration has none."""
    loss = POLICY_LOSS_FN.get(trinity_jobs.M2PO)
    parameters = inspect.signature(loss.__init__).parameters
    assert loss.default_args() == {name: parameters[name].default for name in ("m2_threshold", "scope", "loss_agg_mode")}
    assert loss(backend="verl").select_keys == ["old_log_probs", "advantages", "response_mask"]


def test_the_example_is_a_configuration():
    example = pathlib.Path(__file__).parents[3] / "examples/trinity/m2po.yaml"
    algorithm = load_config(str(example)).algorithm
    assert algorithm.policy_loss_fn == trinity_jobs.M2PO
    assert algorithm.bypass_old_logprobs
    POLICY_LOSS_FN.get(algorithm.policy_loss_fn)(backend="verl", **algorithm.policy_loss_fn_args)
