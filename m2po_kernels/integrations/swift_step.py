"""What M2PO in ms-swift's two GRPO trainers has in common: the options, the window of an optimizer step and the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from m2po_kernels import m2po_loss
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs

from .common import MicroBatch, Share, Window, select_window

_CLIPS_NOTHING = "M2PO selects tokens and clips nothing, so leave it out"
UNSEEN = "the log-probs that are trained on are without it"
# What each option must be, and why.
EXPECTED = {
    "loss_type": ("dapo", "M2PO divides by the tokens of the whole optimizer step, and 'dapo' is the loss that does so"),
    "importance_sampling_level": ("token", "M2PO weighs each token by its own ratio"),
    "rollout_importance_sampling_mode": (None, "M2PO weighs by the ratio to the rollout engine itself"),
    "off_policy_sequence_mask_delta": (None, "it would drop tokens that the selection has counted"),
    "top_entropy_quantile": (1.0, "it would drop tokens that the selection has counted"),
    "epsilon": (0.2, _CLIPS_NOTHING),
    "epsilon_high": (None, _CLIPS_NOTHING),
    "top_p": (1.0, UNSEEN),
    "top_k": (-1, UNSEEN),
    "repetition_penalty": (1.0, UNSEEN),
}


def check_options(args: Any, expected: dict[str, tuple[Any, str]]) -> None:
    """Raises InvalidArgument for an option of ms-swift that M2PO cannot go with."""
    for name, (wanted, why) in expected.items():
        value = getattr(args, name)
        if value != wanted:
            raise InvalidArgument(f"{name} must be {wanted!r} for M2PO, as {why}; got {value!r}")
    if args.delta is not None and not args.delta > 1:
        raise InvalidArgument(f"delta must be > 1 for M2PO, as it caps the ratio, or None; got {args.delta!r}")


def select(micro_batches: Iterable[tuple[Any, Any]], trainer: Any, **ranks: Any) -> Window:
    """The window of an optimizer step. micro_batches: a GRPOBatch and its current log-probs each."""

    def taken() -> Iterator[MicroBatch]:
        for batch, log_probs in micro_batches:
            mask = batch.completion_mask
            if trainer.overlong_filter:
                mask = mask & ~batch.truncated_mask[:, None]
            yield MicroBatch(log_probs, batch.rollout_per_token_logps, batch.advantages, mask)

    try:
        return select_window(taken(), **trainer.settings, **ranks)
    except MissingBehaviorLogProbs as error:
        raise MissingBehaviorLogProbs(
            "rollout_per_token_logps is None; expected --use_vllm true, and of a multi_turn_scheduler rollout_logprobs that has "
            f"a number for each token of the completion ({error})"
        ) from None


def loss_of(log_probs: Tensor, batch: Any, window: Window, share: Share, trainer: Any) -> Tensor:
    """The M2PO loss of one micro-batch, with the KL term and the cap that ms-swift's options ask for."""
    return m2po_loss(
        log_probs,
        share.behavior_log_probs,
        batch.advantages,
        share.mask,
        ref_log_probs=batch.ref_per_token_logps,
        kl_coef=0.0 if trainer.kl_in_reward else trainer.beta,
        ratio_cap=trainer.args.delta,
        selection=window.selection,
        part=share.part,
    ).loss
