"""A causal LM of transformers whose head and log-softmax are `linear_log_probs`: docs/integrations/transformers.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput

from m2po_kernels import LinearLossOutput, linear_log_probs
from m2po_kernels.errors import InvalidArgument

from .common import check_version

_IGNORED = -100  # the label of a position that is not scored


@dataclass
class LinearHeadOutput(ModelOutput):
    """What a model with a linear head returns to `fused_lm_head=True`.

    log_probs: of each label, [B, L - 1] ([B, L] for shift_labels); 0 where it is -100. entropy: likewise, detached; if asked for.
    loss: that of `head=`, if one was given; log_probs is then None. aux_loss: load balancing, for output_router_logits=True.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


@contextmanager
def linear_head(
    model: PreTrainedModel, *, temperature: float = 1.0, entropy: bool = False, fp32: bool = False
) -> Iterator[PreTrainedModel]:
    """Within it `model` has what `add_linear_head` adds; afterwards it is as before."""
    causal_lm = _causal_lm(model)
    before = causal_lm.__dict__.get("forward")
    add_linear_head(model, temperature=temperature, entropy=entropy, fp32=fp32)
    try:
        yield model
    finally:
        _restore(causal_lm, before)


def add_linear_head(model: PreTrainedModel, *, temperature: float = 1.0, entropy: bool = False, fp32: bool = False) -> None:
    """Makes `model(..., labels=ids, fused_lm_head=True)` return a `LinearHeadOutput`; other calls are as before.

    model: a causal LM with an nn.Linear as its head, or a PEFT model of one; before it is wrapped by DDP or FSDP.
    temperature: of the log-probs. entropy: whether to return it. fp32: multiply by the head in fp32, outside autocast.

    labels are token ids, [B, L], -100 where nothing is wanted: such a row is not multiplied. Shifted ones go as shift_labels=.
    head=f: a function of (hidden, weight, token_ids, **options) in the place of `linear_log_probs`: `linear_m2po_loss` with
    the rest of its arguments bound by functools.partial. Tensors must be bound, not passed: FSDP casts those it sees.

    Raises InvalidArgument where the model's own logits are not what the head and its config say.
    """
    check_version("transformers")
    causal_lm = _causal_lm(model)
    before, own_forward = causal_lm.__dict__.get("forward"), causal_lm.forward
    options = {"temperature": temperature, **_of_config(causal_lm)}

    @wraps(type(causal_lm).forward)  # generate() reads the signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        head: Callable[..., LinearLossOutput] | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            kwargs |= {name: ids for name, ids in given.items() if ids is not None}
            # Of the class where it can be: a method bound here would be of this model in a deep copy of it too.
            return type(self).forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)
        ids = labels if shift_labels is None else shift_labels
        if ids is None:
            raise InvalidArgument("fused_lm_head=True needs labels= or shift_labels=; got neither")
        config = self.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        states = self.base_model(*args, **kwargs | {"use_cache": False})
        module, shift = _head_of(self), int(shift_labels is None)
        device = module.weight.device
        hidden, ids = states.last_hidden_state.to(device), ids.to(device)
        compute = head or partial(_log_probs, mask=(ids != _IGNORED)[:, shift:], return_entropy=entropy)

        def of_hidden(hidden: Tensor) -> tuple[Tensor | None, ...]:
            with torch.autocast(device.type, enabled=False) if fp32 else nullcontext():
                hidden = hidden.float() if fp32 else hidden
                out = compute(hidden, module.weight, ids.clamp(min=0), bias=module.bias, shift=shift, **options)
            return out.loss, out.log_probs, out.entropy

        loss, log_probs, entropies = _as_forward_of(module, of_hidden, hidden)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            experts = config.num_experts, config.num_experts_per_tok
            aux_loss = load_balancing_loss_func(states.router_logits, *experts, kwargs.get("attention_mask"))
        return LinearHeadOutput(loss=loss, log_probs=log_probs, entropy=entropies, aux_loss=aux_loss)

    causal_lm.forward = MethodType(forward, causal_lm)
    try:
        _check(causal_lm, own_forward, temperature)
    except InvalidArgument:
        _restore(causal_lm, before)
        raise


def _restore(module: nn.Module, before: Callable[..., Any] | None) -> None:
    del module.forward
    if before is not None:
        module.forward = before


def _as_forward_of(head: nn.Module, of_hidden: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """of_hidden(hidden); with FSDP2 as the head's forward, whose hooks gather its weight and reduce the gradient."""
    if not isinstance(head, FSDPModule):
        return of_hidden(hidden)
    before = head.__dict__.get("forward")
    head.forward = of_hidden
    try:
        return head(hidden)
    finally:
        _restore(head, before)


def _log_probs(*args: Any, return_entropy: bool, **kwargs: Any) -> LinearHeadOutput:
    """`linear_log_probs` with the fields of a loss."""
    result = linear_log_probs(*args, return_entropy=return_entropy, **kwargs)
    log_probs, entropy = result if isinstance(result, tuple) else (result, None)
    return LinearHeadOutput(log_probs=log_probs.clone(), entropy=entropy)  # no view: FSDP2 hooks what comes out


def _causal_lm(model: Any) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT


def _head_of(model: PreTrainedModel) -> nn.Linear:
    """Looked up on each call: FSDP and PEFT replace modules after the forward was added."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InvalidArgument(
            f"the head of {type(model).__name__} must be a torch.nn.Linear: leave it out of PEFT's target_modules and "
            f"modules_to_save, or use the model's own head (M2POConfig: linear_log_probs=False); got {type(head).__name__}"
        )
    return head


def _of_config(model: PreTrainedModel) -> dict[str, Any]:
    """What the model does to its logits after the head, by the names that transformers' configs have for it."""
    config = model.config.get_text_config()

    def first(*names: str) -> float | None:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    scale = first("logit_scale", "output_multiplier", "lm_head_multiplier")  # Cohere; Muse Glimmer; Falcon-H1
    if scale is None and (scaling := first("logits_scaling")) is not None:  # Granite, MiniCPM3 divide; HyperCLOVA X multiplies
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return {"logit_scale": 1.0 if scale is None else scale, "logit_softcap": first("final_logit_softcapping")}


@torch.no_grad()
def _check(model: PreTrainedModel, own_forward: Callable[..., Any], temperature: float) -> None:
    """Raises where log-probs by the head differ from those of the model's own logits, on eight tokens. Skipped for shards."""
    weight, embeddings = _head_of(model).weight, model.get_input_embeddings().weight
    if hasattr(weight, "full_tensor") or hasattr(embeddings, "full_tensor"):
        raise InvalidArgument("model must be whole, as its head is tried out: add the head before fully_shard; got DTensors")
    if weight.is_meta or embeddings.is_meta or 0 in (weight.numel(), embeddings.numel()):
        return  # not loaded yet, or partitioned by ZeRO-3
    ids = torch.arange(8, device=embeddings.device).remainder(weight.shape[0])[None]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = own_forward(input_ids=ids, use_cache=False).logits.to(weight.device, torch.float32)
        got = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    finally:
        for module, mode in modes:
            module.training = mode
    scaled = logits[:, :-1] / temperature
    want = scaled.log_softmax(-1).gather(-1, ids[:, 1:, None].to(weight.device))[..., 0]
    # The model rounds its logits to its dtype: the product, the scale and three steps of the softcap, for the token and for
    # the sum. Products of one dtype differ by the order of their sums: below, as many roundings as a sum of fp32 has terms.
    bound = (10 * torch.finfo(weight.dtype).eps + weight.shape[1] * torch.finfo(torch.float32).eps) * scaled.abs().max()
    if not (got - want).abs().max() <= bound.clamp(min=1e-6):
        raise InvalidArgument(
            f"{type(model).__name__}: log-probs from hidden states differ from those of its logits by up to "
            f"{float((got - want).abs().max()):.3g}; expected a head that multiplies once, then scales and softcaps as its "
            "config says (use the model's own head instead)"
        )
