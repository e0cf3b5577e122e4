"""What looks wrong in a file of rollouts although it can be read: notes of `m2po inspect`, one line each."""

from __future__ import annotations

from torch import Tensor

from .rollouts import Columns, Rollouts

# A log-prob is at most 0. bfloat16 logits of size 32 are rounded by up to 0.125, and a log-prob made of them can end above it.
ABOVE_ROUNDING = 0.25


def notes(rollouts: Rollouts, columns: Columns) -> tuple[str, ...]:
    """Nothing where all looks as it should."""
    valid = rollouts.mask != 0
    if not bool(valid.any()):
        return (f"no token is valid: {columns.mask!r} is 0 everywhere",)
    found = []
    for name, tensor in ((columns.log_probs, rollouts.log_probs), (columns.behavior_log_probs, rollouts.behavior_log_probs)):
        here = tensor[valid]
        above = int((here > ABOVE_ROUNDING).sum())
        if above:
            found.append(f"{name!r} is above 0 at {above:,} of {here.numel():,} valid tokens, as no log-prob is: probabilities?")
        elif not bool(here.any()):
            found.append(f"{name!r} is 0 at every valid token: was it recorded?")
    if bool((rollouts.log_probs[valid] == rollouts.behavior_log_probs[valid]).all()):
        found.append(
            f"{columns.log_probs!r} and {columns.behavior_log_probs!r} are equal at every valid token: an engine's log-probs "
            "seldom have the bits of the trainer's, even when fresh; is one a copy of the other?"
        )
    elif _misaligned(rollouts, valid):
        found.append(
            f"{columns.log_probs!r} fits {columns.behavior_log_probs!r} far better one token away: is one of them shifted?"
        )
    advantages = rollouts.advantages
    spread = advantages if advantages.shape == valid.shape else advantages.reshape(-1, *[1] * (valid.dim() - 1)).expand_as(valid)
    if not bool(spread[valid].any()):
        found.append(f"{columns.advantages!r} is 0 at every valid token: T is empty, and nothing can be dropped or learnt")
    return tuple(found)


def _misaligned(rollouts: Rollouts, valid: Tensor) -> bool:
    """Whether the mean |d| is less than half as large with one of the two columns moved by a token."""
    lp, behavior = rollouts.log_probs.float(), rollouts.behavior_log_probs.float()
    both = valid[..., 1:] & valid[..., :-1]
    if int(both.sum()) < 100:  # chance could do it
        return False

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a - b)[both].abs().mean())

    here = distance(lp[..., 1:], behavior[..., 1:])
    return min(distance(lp[..., 1:], behavior[..., :-1]), distance(lp[..., :-1], behavior[..., 1:])) < here / 2
