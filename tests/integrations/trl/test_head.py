"""add_linear_head on models of many families: log-probs, entropy and gradients are those of the model's own logits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from m2po_kernels import linear_m2po_loss, m2po_loss
from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations.transformers import add_linear_head, linear_head

TEMPERATURE = 0.7
VOCAB = 61
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "phi": {},  # a bias at the head
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def make(family: str, **options: float) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL | FAMILIES[family] | options)
    # Without dropout, and experts that take fp64.
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()


def batch(ignored: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, of which some are not scored."""
    ids = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if ignored:
        labels[:, :4] = -100
        labels[1, 6:] = -100
    return ids, labels


def dense(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy from logits, 0 where the label is -100."""
    scaled = (model(input_ids=ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    scored = labels[:, 1:] != -100
    log_probs = scaled.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    return log_probs * scored, -(scaled.exp() * scaled).sum(-1) * scored


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_and_gradients(family):
    model = make(family)
    ids, labels = batch()
    want, entropy = dense(model, ids, labels)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad((want * weights).sum(), list(model.parameters()), allow_unused=True)
    with linear_head(model, temperature=TEMPERATURE, entropy=True):
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        torch.testing.assert_close(out.log_probs, want, rtol=0, atol=1e-12)
        torch.testing.assert_close(out.entropy, entropy.detach(), rtol=0, atol=1e-12)
        got = torch.autograd.grad((out.log_probs * weights).sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(got, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_load_balancing_loss(family):
    model = make(family)
    ids, labels = batch()
    attention = torch.ones_like(ids)
    want = model(input_ids=ids, attention_mask=attention, output_router_logits=True).aux_loss
    with linear_head(model):
        out = model(input_ids=ids, attention_mask=attention, labels=labels, fused_lm_head=True, output_router_logits=True)
    torch.testing.assert_close(out.aux_loss, want)


def test_other_calls_are_as_before_and_so_is_the_model_afterwards():
    model = make("llama")
    ids, labels = batch()
    before, greedy = model(input_ids=ids, labels=labels), {"max_new_tokens": 3, "do_sample": False}
    generated = model.generate(ids, **greedy)
    with linear_head(model):
        after = model(input_ids=ids, labels=labels)
        assert torch.equal(model.generate(ids, **greedy), generated)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)
    assert "forward" not in model.__dict__


def test_a_deep_copy_has_weights_of_its_own():
    model = make("llama")
    ids, labels = batch()
    with linear_head(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.lm_head.weight.mul_(2)
        assert not torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
        ours, theirs = (m(input_ids=ids, labels=labels, fused_lm_head=True).log_probs for m in (model, other))
        assert not torch.equal(ours, theirs)


def test_over_trls_own_head_and_back():
    model = make("llama")
    add_fused_lm_head(model, temperature=TEMPERATURE)
    ids, labels = batch()
    own = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    with linear_head(model, temperature=TEMPERATURE):
        ours = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    torch.testing.assert_close(ours, own.to(ours.dtype), rtol=1e-6, atol=1e-6)
    assert type(model(input_ids=ids, labels=labels, fused_lm_head=True)).__name__ == "FusedCausalLMOutput"


def test_shifted_labels():
    model = make("llama")
    ids, labels = batch()
    with linear_head(model):
        want = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        shifted = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)
        got = model(input_ids=ids, shift_labels=shifted, fused_lm_head=True).log_probs
    torch.testing.assert_close(got[:, :-1], want, rtol=0, atol=1e-12)
    assert torch.equal(got[:, -1], torch.zeros(3, dtype=got.dtype))


def test_a_loss_in_place_of_log_probs():
    model = make("llama")
    ids, labels = batch(ignored=False)
    log_probs = dense(model, ids, labels)[0][:, -4:]
    behavior = log_probs.detach() + 0.4 * torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    terms = {"behavior_log_probs": behavior, "advantages": torch.tensor([1.0, -1.0, 0.0]), "mask": torch.ones(3, 4)}
    loss = m2po_loss(log_probs, **terms).loss
    want = torch.autograd.grad(loss, list(model.parameters()))
    with linear_head(model, temperature=TEMPERATURE):
        out = model(input_ids=ids, labels=ids, fused_lm_head=True, head=partial(linear_m2po_loss, **terms, logits_to_keep=4))
        got = torch.autograd.grad(out.loss, list(model.parameters()))
    torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_head_in_fp32_under_autocast():
    model = make("llama").float()
    ids, labels = batch()
    with linear_head(model, fp32=True), torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model(input_ids=ids).last_hidden_state
        got = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    logits = hidden.float()[:, :-1] @ model.lm_head.weight.T
    want = logits.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] != -100)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_peft_model():
    model = get_peft_model(make("llama").float(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    ids, labels = batch()
    want, _ = dense(model, ids, labels)
    with linear_head(model, temperature=TEMPERATURE):
        got = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_an_adapter_at_the_head_is_refused():
    model = get_peft_model(make("llama"), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(InvalidArgument, match=r"must be a torch\.nn\.Linear: .*target_modules.*got Linear"):
        add_linear_head(model)


def test_missing_labels_are_refused():
    model = make("llama")
    with linear_head(model), pytest.raises(InvalidArgument, match="needs labels="):
        model(input_ids=batch()[0], fused_lm_head=True)


class Doubled(LlamaForCausalLM):
    """A head whose config does not tell all."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


def test_a_model_that_does_more_to_its_logits_is_refused():
    model = Doubled(make("llama").config)
    with pytest.raises(InvalidArgument, match="Doubled: log-probs from hidden states differ from those of its logits"):
        add_linear_head(model)
    assert "forward" not in model.__dict__


def test_a_config_that_the_model_does_not_follow_is_refused():
    """MPT's config has a logit_scale that transformers 5.24.0 does not apply."""
    with pytest.raises(InvalidArgument, match="MptForCausalLM: log-probs from hidden states differ"):
        add_linear_head(make("mpt", logit_scale=0.5))


def test_tiny_model_is_what_the_trainer_tests_use():
    add_linear_head(tiny.model())
