"""Log-probs from hidden states, by verl's own options: the same gradients and no logits. The bound is that of test_gradients."""

from __future__ import annotations

from functools import partial

import jobs
import pytest
import tiny
import workers
from test_gradients import BOUND, LAYOUTS
from transformers import Qwen2ForCausalLM
from verl.workers.engine import FSDPEngine
from verl.workers.engine.fsdp import transformer_impl

from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations import verl_head

ONE_BY_ONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}


@pytest.fixture(autouse=True)
def no_logits(request, monkeypatch):
    """verl's own engine takes log-probs of logits by this function."""
    if request.function is not test_temperature:
        monkeypatch.setattr(transformer_impl, "logprobs_from_logits", lambda **_: pytest.fail("logits were made"))


@pytest.fixture(scope="module")
def head_of(model_path, world):
    """A maker of actors whose log-probs are from hidden states; each is made once, and starts anew each time."""
    made = {}

    def make(*overrides):
        if overrides not in made:
            made[overrides] = workers.make_actor(workers.compose(model_path, *workers.HEAD, *overrides))
        workers.restart(made[overrides])
        return made[overrides]

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", [workers.nested_batch, workers.padded_batch])
def test_one_step(head_of, model_path, form, layout):
    sequences = tiny.rollouts(model_path, 12, seed=1)
    reference, counts = tiny.gradient(tiny.load(model_path), [sequences])
    assert 0 < counts["dropped"] < counts["region"]
    actor = head_of()
    metrics = workers.update(actor, form(sequences), mini_batch=12, **LAYOUTS[layout])
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND
    assert metrics["m2/masked_fraction"] == pytest.approx([counts["dropped"] / counts["valid"]])


def test_without_padding(head_of, model_path):
    """verl rolls the labels itself then. One sequence at a time: on a CPU no attention keeps packed sequences apart."""
    sequences = tiny.rollouts(model_path, 6, seed=1)
    reference, _ = tiny.gradient(tiny.load(model_path), [sequences])
    actor = head_of("actor_rollout_ref.model.use_remove_padding=True")
    workers.update(actor, workers.nested_batch(sequences), mini_batch=6, **ONE_BY_ONE)
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND


def test_entropy_has_a_gradient(head_of, model_path):
    sequences = tiny.rollouts(model_path, 6, seed=7)
    reference = tiny.gradient_with_terms(tiny.load(model_path), sequences, **workers.COEFFICIENTS)
    actor = head_of(*workers.TERMS)
    batch = workers.nested_batch(sequences, reference=True)
    workers.update(actor, batch, mini_batch=6, entropy=True, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND


def test_temperature(head_of, actor, model_path):
    """As verl's own head does it, and not as without one."""
    sequences = tiny.rollouts(model_path, 6, seed=8)

    def gradient(worker, temperature):
        workers.restart(worker)
        layout = {"mini_batch": 6, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
        workers.update(worker, workers.nested_batch(sequences), temperature=temperature, **layout)
        return worker.actor.engine.steps[0].gradient

    own = gradient(actor, 0.6)
    assert tiny.difference(gradient(head_of(), 0.6), own) < BOUND
    assert tiny.difference(gradient(head_of(), 1.0), own) > 1e-2


def test_two_ranks(model_path, tmp_path):
    layout = "micro-batches of 3"
    ranks = jobs.on_two_ranks(partial(jobs.train, overrides=workers.HEAD, layouts=[layout]), model_path, tmp_path)
    shares = [jobs.share(model_path, rank) for rank in range(2)]
    for i in range(2):
        for rank in ranks:
            step = rank[layout]["steps"][i]
            mini_batch = [s for share in shares for s in share[6 * i :][:6]]
            reference, _ = tiny.gradient(tiny.load(model_path, step.weights), [mini_batch])
            assert tiny.difference(step.gradient, reference) < BOUND


def test_the_attention_of_the_model_is_left_as_it_was(model_path):
    """It is another one while the head is tried."""
    model = Qwen2ForCausalLM.from_pretrained(model_path, attn_implementation="sdpa")
    with verl_head._on_a_cpu(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"


def test_half_of_the_options(model_path, world):
    config = workers.compose(model_path, workers.HEAD[1])
    with pytest.raises(InvalidArgument, match=r"use_fused_kernels must be True with fused_kernel_options\.impl_backend=m2po"):
        workers.make_actor(config)


def test_a_head_that_the_package_does_not_know(model_path, world, monkeypatch):
    """It is tried when the model is built: better none than wrong log-probs."""
    build = FSDPEngine._build_module

    def with_another_head(engine):
        module = build(engine)
        module.lm_head.register_forward_hook(lambda _module, _inputs, logits: 2 * logits)
        return module

    monkeypatch.setattr(FSDPEngine, "_build_module", with_another_head)
    with pytest.raises(InvalidArgument, match="use the model's own head instead"):
        workers.make_actor(workers.compose(model_path, *workers.HEAD))
