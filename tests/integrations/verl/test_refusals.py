"""What is refused, each by a message that names the option to set."""

from __future__ import annotations

import re

import jobs
import pytest
import tiny
import workers
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp import transformer_impl

from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations import common

LAYOUT = {"mini_batch": 4, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}


@pytest.fixture
def batch(model_path):
    return workers.nested_batch(tiny.rollouts(model_path, 4, seed=6))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.rollout_correction.bypass_mode=False"], "algorithm.rollout_correction.bypass_mode=True"),
        (["algorithm.rollout_correction.rollout_is=token"], "rollout_correction.rollout_is must be null"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_correction.rollout_rs must be null"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"], "policy_loss.loss_mode must be m2po"),
        (["actor_rollout_ref.rollout.top_p=0.95"], r"actor_rollout_ref\.rollout\.top_p must be 1\.0 .*; got 0\.95"),
        (["actor_rollout_ref.rollout.top_k=50"], r"rollout\.top_k must be -1 .*; got 50"),
        (["+actor_rollout_ref.rollout.repetition_penalty=1.1"], r"rollout\.repetition_penalty must be 1\.0 .*; got 1\.1"),
        (["actor_rollout_ref.rollout.do_sample=False"], r"rollout\.do_sample must be True .*; got False"),
        (["actor_rollout_ref.rollout.temperature=0"], r"rollout\.temperature must be > 0 .*; got 0"),
        (["actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"], r"rollout\.logprobs_mode must be processed_logprobs"),
    ],
)
def test_configurations(model_path, overrides, named):
    config = workers.compose(model_path, *overrides)
    with pytest.raises(Exception, match=named) as caught:  # hydra wraps what a class raises
        omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert isinstance(caught.value.__cause__, InvalidArgument)
    assert "\n" not in str(caught.value.__cause__)


@pytest.mark.parametrize("name", ["rollout_correction", "rollout"])
def test_interpolations_left_out(model_path, name):
    """Workers do not see the rest of the configuration: without the interpolation they cannot know."""
    (left_out,) = (option for option in workers.M2PO if f".policy_loss.{name}=" in option)
    config = workers.compose(model_path, m2po=tuple(option for option in workers.M2PO if option != left_out))
    with pytest.raises(Exception, match=re.escape(left_out.replace("=", "='") + "'")):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)


@pytest.mark.parametrize("options", [("top_k=0",), ("temperature=0.6",), ("name=sglang", "logprobs_mode=null")], ids=str)
def test_samplers_that_leave_the_distribution_whole(model_path, options):
    config = workers.compose(model_path, *(f"actor_rollout_ref.rollout.{option}" for option in options))
    omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)


def test_options_without_effect_are_named_once(model_path, world, batch):
    changed = ("clip_ratio_high=0.28", "clip_ratio_c=10.0", "policy_loss.ppo_kl_coef=0.2")
    config = workers.compose(model_path, *(f"actor_rollout_ref.actor.{option}" for option in changed))
    with pytest.warns(UserWarning, match="has no effect with M2PO") as warned:
        workers.update(workers.make_actor(config), batch, **LAYOUT)
    messages = [str(w.message) for w in warned if "has no effect" in str(w.message)]
    assert len(messages) == 2
    assert "policy_loss.ppo_kl_coef=0.2" in messages[0]
    assert "clip_ratio_high=0.28, clip_ratio_c=10.0" in messages[1]


def test_verls_defaults_warn_of_nothing(model_path, world, batch, recwarn):
    workers.update(workers.make_actor(workers.compose(model_path)), batch, **LAYOUT)
    assert not [w for w in recwarn if "has no effect" in str(w.message)]


@pytest.mark.parametrize(
    ("m2po", "overrides", "named"),
    [
        (workers.M2PO, ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], "loss_agg_mode must be token-mean"),
        ((), ["actor_rollout_ref.actor.policy_loss.loss_mode=m2po"], "policy_loss._target_ must be"),
        ((), [], "VERL_ENGINE_VENDOR is m2po, but the loss is not"),
    ],
)
def test_losses(model_path, world, batch, m2po, overrides, named):
    actor = workers.make_actor(workers.compose(model_path, *overrides, m2po=m2po))
    with pytest.raises(InvalidArgument, match=named):
        workers.update(actor, batch, **LAYOUT)
    assert not actor.actor.engine.steps


def test_an_engine_that_does_not_select(model_path, world, batch, monkeypatch):
    monkeypatch.delenv("VERL_ENGINE_VENDOR")
    actor = workers.make_actor(workers.compose(model_path))
    with pytest.raises(InvalidArgument, match="VERL_ENGINE_VENDOR=m2po"):
        workers.update(actor, batch, **LAYOUT)


def test_importance_sampling_weights_in_the_batch(actor, batch):
    batch["rollout_is_weights"] = batch["advantages"] * 0 + 1
    workers.restart(actor)
    with pytest.raises(InvalidArgument, match="rollout_is=null"):
        workers.update(actor, batch, **LAYOUT)


def test_dynamic_batching_that_changes_its_mind(actor, batch, monkeypatch):
    calls, split = [], transformer_impl.prepare_micro_batches

    def other_each_time(data, **arguments):
        calls.append(data)
        return split(data if len(calls) % 2 else tu.index_select_tensor_dict(data, [0, 2, 1, 3]), **arguments)

    monkeypatch.setattr(transformer_impl, "prepare_micro_batches", other_each_time)
    workers.restart(actor)
    with pytest.raises(InvalidArgument, match=r"actor\.use_dynamic_bsz=False"):
        workers.update(actor, batch, **LAYOUT)
    assert not actor.actor.engine.steps


def test_two_losses_of_one_micro_batch(actor, batch, monkeypatch):
    once = actor.loss_fn
    workers.restart(actor)
    monkeypatch.setattr(actor.actor, "loss_fn", lambda **arguments: once(**arguments) and once(**arguments))
    with pytest.raises(InvalidArgument, match="asked twice"):
        workers.update(actor, batch, **LAYOUT)


def test_log_probs_missing_on_one_of_two_ranks(model_path, tmp_path):
    for errors in jobs.on_two_ranks(jobs.lose_log_probs, model_path, tmp_path):
        assert len(errors) == 3
        for message in errors.values():
            assert "bypass_mode=True" in message
            assert "calculate_log_probs=True" in message


def test_another_version_warns(model_path, world, monkeypatch):
    monkeypatch.setitem(common.TESTED, "verl", "0.0")
    with pytest.warns(UserWarning, match=r"tested with verl 0\.0; installed is verl 0\.9\.1"):
        workers.make_actor(workers.compose(model_path))
