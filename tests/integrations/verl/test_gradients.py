"""The gradient before each optimizer step against that of the whole mini-batch in fp64.

1e-6, relative, over all parameters: training is in fp32, whose rounding (6e-8) the forward and backward of this model, two layers
deep, make a few times larger. A token more or less in the selection is 1e-3 and more here: the control below.
"""

from __future__ import annotations

import math

import jobs
import pytest
import tiny
import torch
import workers

BOUND = 1e-6
LAYOUTS = {
    "one micro-batch": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 12},
    "micro-batches of 4": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4},
    "micro-batches of 1": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", [workers.nested_batch, workers.padded_batch])
def test_one_step(actor, model_path, form, layout):
    sequences = tiny.rollouts(model_path, 12, seed=1)
    reference, counts = tiny.gradient(tiny.load(model_path), [sequences])
    assert 0 < counts["dropped"] < counts["region"]
    workers.restart(actor)
    metrics = workers.update(actor, form(sequences), mini_batch=12, **LAYOUTS[layout])
    (step,) = actor.actor.engine.steps
    assert tiny.difference(step.gradient, reference) < BOUND
    logged = {name: value[0] for name, value in metrics.items()}
    assert logged["m2/masked_fraction"] == pytest.approx(counts["dropped"] / counts["valid"])
    assert logged["m2/trust_region_fraction"] == pytest.approx(counts["region"] / counts["valid"])
    assert logged["m2/before"] > 0.04 > logged["m2/after"]
    assert logged["m2/threshold"] == pytest.approx(0.04)  # verl averages over micro-batches
    assert logged["m2/cut"] > 0.04
    assert {"m2/approx_kl", "m2/ratio_max", "m2/unscored_tokens", "actor/pg_loss"} <= logged.keys()


def test_the_cut_is_logged_where_there_is_one(actor, model_path):
    """An infinity of the first mini-batch would be the mean that verl logs."""
    fresh, stale = tiny.rollouts(model_path, 6, seed=1, noise=0.0), tiny.rollouts(model_path, 6, seed=2)
    workers.restart(actor)
    metrics = workers.update(
        actor, workers.nested_batch(fresh + stale), mini_batch=6, use_dynamic_bsz=False, micro_batch_size_per_gpu=2
    )
    nothing, something = metrics["m2/masked_fraction"]
    assert nothing == 0 < something
    (cut,) = metrics["m2/cut"]
    assert 0.04 < cut < math.inf


def test_selecting_in_each_micro_batch_is_another_gradient(model_path):
    sequences = tiny.rollouts(model_path, 12, seed=1)
    model = tiny.load(model_path)
    whole, _ = tiny.gradient(model, [sequences])
    split, _ = tiny.gradient(model, [sequences[:4], sequences[4:8], sequences[8:]])
    assert tiny.difference(split, whole) > 1e-3


def test_many_steps_and_epochs(actor, model_path):
    """Two epochs of two mini-batches: the weights move, each step selects with those of then."""
    sequences = tiny.rollouts(model_path, 12, seed=2)
    workers.restart(actor)
    workers.update(
        actor, workers.nested_batch(sequences), mini_batch=6, epochs=2, use_dynamic_bsz=False, micro_batch_size_per_gpu=2
    )
    steps = actor.actor.engine.steps
    assert len(steps) == 4
    for i, step in enumerate(steps):
        mini_batch = sequences[6 * (i % 2) :][:6]
        reference, _ = tiny.gradient(tiny.load(model_path, step.weights), [mini_batch])
        assert tiny.difference(step.gradient, reference) < BOUND
    assert any(not torch.equal(steps[0].weights[name], steps[3].weights[name]) for name in steps[0].weights)


def test_unscored_tokens_are_left_out_and_counted(actor, model_path):
    sequences = tiny.rollouts(model_path, 12, seed=3, unscored=0.2)
    unscored = tiny.count_unscored(sequences)
    reference, counts = tiny.gradient(tiny.load(model_path), [sequences])
    assert 0 < unscored < counts["valid"]
    workers.restart(actor)
    metrics = workers.update(
        actor, workers.nested_batch(sequences), mini_batch=12, use_dynamic_bsz=False, micro_batch_size_per_gpu=3
    )
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND
    assert metrics["m2/unscored_tokens"] == pytest.approx([unscored])


def test_entropy_and_kl_terms_are_added_by_verl(model_path, world):
    """Once each, over all valid tokens, dropped or not."""
    sequences = tiny.rollouts(model_path, 6, seed=7)
    reference = tiny.gradient_with_terms(tiny.load(model_path), sequences, **workers.COEFFICIENTS)
    actor = workers.make_actor(workers.compose(model_path, *workers.TERMS))
    batch = workers.nested_batch(sequences, reference=True)
    workers.update(actor, batch, mini_batch=6, entropy=True, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    assert tiny.difference(actor.actor.engine.steps[0].gradient, reference) < BOUND


def test_restart_from_a_checkpoint(actor, model_path, tmp_path):
    """The step after a checkpoint is loaded is, to the bit, the one that came after it was saved."""
    first, second = tiny.rollouts(model_path, 6, seed=4), tiny.rollouts(model_path, 6, seed=5)
    layout = {"mini_batch": 6, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    workers.restart(actor)
    workers.update(actor, workers.nested_batch(first), **layout)
    actor.save_checkpoint(str(tmp_path))
    workers.update(actor, workers.nested_batch(second), **layout)
    expected = actor.actor.engine.steps[-1]
    workers.restart(actor)
    actor.load_checkpoint(str(tmp_path))
    workers.update(actor, workers.nested_batch(second), **layout)
    (step,) = actor.actor.engine.steps
    for name in expected.weights:
        assert torch.equal(step.weights[name], expected.weights[name])
        assert torch.equal(step.gradient[name], expected.gradient[name])


@pytest.fixture(scope="module")
def two_ranks(model_path, tmp_path_factory):
    return jobs.on_two_ranks(jobs.train, model_path, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("layout", jobs.LAYOUTS)
def test_two_ranks(two_ranks, model_path, layout):
    """Each rank has half of each mini-batch. Both hold the gradient of the whole, and log the same."""
    first, second = two_ranks
    shares = [jobs.share(model_path, rank) for rank in range(2)]
    assert tiny.count_unscored(shares[0]) != tiny.count_unscored(shares[1])
    steps = first[layout]["steps"]
    assert len(steps) == 2
    for i, step in enumerate(steps):
        mini_batch = [s for share in shares for s in share[6 * i :][:6]]
        reference, counts = tiny.gradient(tiny.load(model_path, step.weights), [mini_batch])
        assert 0 < counts["dropped"] < counts["region"]
        assert tiny.difference(step.gradient, reference) < BOUND
        assert tiny.difference(second[layout]["steps"][i].gradient, reference) < BOUND
        for rank in (first, second):
            assert rank[layout]["metrics"]["m2/masked_fraction"][i] == pytest.approx(counts["dropped"] / counts["valid"])
            assert rank[layout]["metrics"]["m2/unscored_tokens"][i] == pytest.approx(tiny.count_unscored(mini_batch))
