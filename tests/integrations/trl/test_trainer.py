"""M2POTrainer in real optimizer steps of TRL: its gradient is that of the whole optimizer batch."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import tiny
import torch
from tiny import Recorded, config, gradient
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from whole import whole_batch

# Training is in fp32, the reference in fp64. A gradient goes through some 20 products and normalisations, each sum of at most
# 98 terms: about sqrt(20) roundings of 6e-8 relative where they are independent. 2e-7 to 4e-7 is what comes out.
TOLERANCE = 1e-6

LAYOUTS = [
    (8, 1, 1, 1),  # one micro-batch
    (4, 2, 2, 1),  # TRL's default: an optimizer step for each generation
    (2, 4, 4, 1),
    (4, 2, 4, 1),  # two steps for each generation: the first has TRL's log-probs from generation
    (2, 2, 4, 2),  # and each generation used twice
    (2, 4, 2, 2),  # each micro-batch twice in one step
]


class Check:
    """What the callback calls before each optimizer step."""

    def __init__(self, **reference: Any):
        self.reference = reference
        self.errors: list[float] = []
        self.losses: list[float] = []
        self.apart: list[float] = []
        self.dropped = 0

    def __call__(self, trainer: Recorded, seen: list[dict[str, Any]]) -> None:
        assert len(seen) == trainer.args.gradient_accumulation_steps
        policy = trainer.model
        want = whole_batch(policy, seen, **self.reference)
        other = whole_batch(policy, seen, **self.reference, per_micro_batch=True).gradient
        norm = want.gradient.norm()
        self.errors.append(float((gradient(policy) - want.gradient).norm() / norm))
        self.apart.append(float((other - want.gradient).norm() / norm))
        self.losses.append(want.loss)
        self.dropped += want.dropped

    def holds(self, steps: int = 3) -> None:
        assert len(self.errors) == steps
        assert max(self.errors) <= TOLERANCE, self.errors
        assert self.dropped > 0  # otherwise nothing was tested


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradient_is_that_of_the_whole_optimizer_batch(layout, linear, out):
    check = Check()
    Recorded(config(out, layout, linear_log_probs=linear), check).train()
    check.holds()
    if layout[1] > 1:  # the negative control: selecting in each micro-batch gives another gradient
        assert max(check.apart) > 1e-3, check.apart


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
@pytest.mark.parametrize("layout", [(8, 1, 1, 1), (4, 2, 2, 1), (2, 4, 4, 1), (4, 2, 4, 1), (1, 8, 8, 1)], ids=str)
def test_sequences_without_advantage_change_nothing(layout, linear, out):
    """Half of the groups have equal rewards, so that whole micro-batches may be without an advantage."""
    check = Check()
    Recorded(config(out, layout, linear_log_probs=linear), check, rewards=tiny.tied).train()
    check.holds()


def forwards(args: tiny.M2POConfig, **kwargs: Any) -> list[tuple[bool, int]]:
    """Of one optimizer step, in their order: whether with a gradient, and of how many sequences."""
    seen: list[tuple[bool, int]] = []

    class Counted(Recorded):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            hook = self.model.base_model.register_forward_pre_hook(
                lambda _, __, given: seen.append((torch.is_grad_enabled(), len(given["input_ids"]))), with_kwargs=True
            )
            with hook:
                return super()._compute_loss(model, inputs)

    trainer = Counted(args, **kwargs)
    trainer.train()
    return seen


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
def test_a_micro_batch_goes_through_the_model_no_more_than_needed(linear, out):
    """The first of a step once, each other one once more for the selection, and none where TRL has the log-probs already."""
    options = {"steps": 1, "linear_log_probs": linear}
    rewards = {"rewards": lambda completions, **_: [float(i) for i in range(len(completions))]}
    assert forwards(config(out, (8, 1, 1, 1), **options), **rewards) == [(True, 8)]
    assert forwards(config(out, (4, 2, 2, 1), **options), **rewards) == [(False, 4), (True, 4), (True, 4)]
    assert forwards(config(out, (4, 2, 4, 1), **options), **rewards) == [(True, 4), (True, 4)]


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
def test_sequences_without_advantage_have_no_forward_with_a_gradient(linear, out):
    options = {"steps": 1, "linear_log_probs": linear}
    assert sorted(forwards(config(out, (8, 1, 1, 1), **options), rewards=tiny.tied)) == [(False, 4), (True, 4)]
    first, rest, *more = forwards(config(out, (4, 2, 2, 1), **options), rewards=tiny.tied)
    assert first == (False, 4)
    assert sum(n for has_gradient, n in [rest, *more] if has_gradient) <= 5  # four, or one in a micro-batch that has none
    with_kl = config(out, (8, 1, 1, 1), **options, beta=0.1, model_init_kwargs={"dtype": "float32"})
    tiny.model().save_pretrained(f"{out}/model")
    assert forwards(with_kl, rewards=tiny.tied, policy=f"{out}/model") == [(True, 8)]


def test_sharded_ranks_go_through_the_model_equally_often(out):
    """Whatever their advantages are: FSDP and ZeRO-3 gather the weights in each forward, and each rank waits for the others."""
    for rewards in (tiny.tied, tiny.reward):
        seen: list[int] = []

        class Sharded(Recorded):
            def _compute_loss(self, model: Any, inputs: dict[str, Any], seen: list[int] = seen) -> torch.Tensor:
                self.is_fsdp_enabled = True
                hook = self.model.base_model.register_forward_hook(lambda *_: seen.append(1))
                with hook:
                    return super()._compute_loss(model, inputs)

        Sharded(config(out, (4, 2, 2, 1), steps=1), rewards=rewards).train()
        assert len(seen) == 3


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
def test_scope_all_selects_whatever_the_sign(linear, out):
    check = Check(scope="all")
    trainer = Recorded(config(out, scope="all", linear_log_probs=linear), check, rewards=tiny.tied)
    trainer.train()
    check.holds()
    assert trainer.state.log_history[0]["m2/trust_region_fraction"] == 1


def test_reentrant_checkpointing_is_off_where_nothing_has_a_gradient(out):
    check = Check()
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="None of the inputs have requires_grad=True")
        Recorded(config(out, **reentrant), check).train()
    check.holds()


def test_temperature_and_checkpointing(out):
    check = Check(temperature=0.7)
    Recorded(config(out, temperature=0.7, gradient_checkpointing=True), check).train()
    check.holds()


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
def test_kl_to_the_reference_model(linear, out, tmp_path):
    folder = str(tmp_path / "model")
    tiny.model().save_pretrained(folder)
    check = Check(beta=0.3)
    trainer = Recorded(
        config(out, beta=0.3, linear_log_probs=linear, model_init_kwargs={"dtype": "float32"}), check, policy=folder
    )
    trainer.train()
    check.holds()
    assert trainer.state.log_history[1]["kl"] > trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-9)


def test_turns_of_an_environment_do_not_count(out):
    check = Check()
    trainer = Recorded(config(out), check, rollout_func=tiny.turns)
    trainer.train()
    check.holds()


def test_unscored_tokens_are_left_out_and_counted(out):
    check = Check()
    trainer = Recorded(config(out), check, rollout_func=tiny.unscored)
    trainer.train()
    check.holds()
    assert trainer.state.log_history[0]["m2/unscored_tokens"] == 8  # one in each sequence
    assert math.isfinite(trainer.state.log_history[0]["m2/before"])


def test_metrics_are_in_the_log(out):
    trainer = Recorded(config(out))
    trainer.train()
    for logged in trainer.state.log_history[:3]:
        assert logged["m2/before"] > 0.04 >= logged["m2/after"] > 0
        assert 0 < logged["m2/masked_fraction"] < logged["m2/trust_region_fraction"] < 1
        assert logged["m2/threshold"] == 0.04
        assert {"m2/cut", "m2/approx_kl", "m2/ratio_max", "m2/unscored_tokens", "entropy", "loss", "reward"} <= logged.keys()
        assert 0 < logged["entropy"] < math.log(98)


def test_loss_in_the_log_is_that_of_the_whole_optimizer_batch(out):
    check = Check()
    trainer = Recorded(config(out), check)
    trainer.train()
    assert [row["loss"] for row in trainer.state.log_history[:3]] == pytest.approx(check.losses, abs=1e-4)


def test_mixture_of_experts_has_its_load_balancing_loss(out):
    """The same with both heads, and another gradient than without it."""
    gradients = []
    for linear, coefficient in [(True, 0.5), (False, 0.5), (True, 0.0)]:
        torch.manual_seed(0)
        policy = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=98, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
                pad_token_id=0, eos_token_id=1, bos_token_id=None,
            )
        )  # fmt: skip
        args = config(out, steps=1, linear_log_probs=linear, router_aux_loss_coef=coefficient)
        Recorded(args, lambda trainer, _: gradients.append(_routed(trainer.model)), policy=policy).train()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
    assert (gradients[0] - gradients[2]).norm() > 1e-3 * gradients[2].norm()


def _routed(policy: torch.nn.Module) -> torch.Tensor:
    """An expert that no token chose has no gradient."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()])


def test_an_infinite_threshold_drops_nothing(out):
    trainer = Recorded(config(out, steps=1, m2_threshold=math.inf))
    trainer.train()
    assert trainer.state.log_history[0]["m2/masked_fraction"] == 0
    assert "m2/cut" not in trainer.state.log_history[0]


@pytest.mark.parametrize("layout", [(4, 2, 2, 1), (2, 2, 4, 1)], ids=str)
def test_restart_from_a_checkpoint(layout, out, tmp_path):
    """At the end of a generation the restarted run is the uninterrupted one; amid one TRL makes a new one, and M2PO follows."""
    straight = Recorded(config(out, layout, steps=4, save_strategy="steps", save_steps=1))
    straight.train()
    check = Check()
    again = Recorded(config(str(tmp_path / "again"), layout, steps=4), check)
    again.train(resume_from_checkpoint=f"{out}/checkpoint-3")
    check.holds(steps=1)
    if layout[1] == layout[2]:
        torch.testing.assert_close(again.model.state_dict(), straight.model.state_dict(), rtol=1e-6, atol=1e-7)


def test_evaluation_selects_over_its_own_batch(out):
    args = config(out, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, steps=1)
    check = Check()
    trainer = Recorded(args, check, eval_dataset=tiny.dataset().select(range(2)))
    trainer.train()
    check.holds(steps=1)
    logged = next(row for row in trainer.state.log_history if "eval_loss" in row)
    assert math.isfinite(logged["eval_loss"])
    assert logged["eval_m2/after"] <= 0.04


def test_bf16_runs(out):
    trainer = Recorded(config(out, bf16=True, steps=2))
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
