"""What the functions return: frozen, on the device of the inputs, without a host sync until `to_dict()`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .errors import InvalidArgument, describe
from .parts import Part

COUNTS = (
    "valid_tokens",
    "trust_region_tokens",
    "candidate_tokens",
    "dropped_tokens",
    "nonfinite_tokens",
    "clipped_tokens",
    "first_nonfinite",
)
FLOATS = (
    "m2_before",
    "m2_after",
    "masked_fraction",
    "trust_region_fraction",
    "m2_cut",
    "ratio_mean",
    "ratio_max",
    "approx_kl",
    "clip_fraction",
)


@dataclass(frozen=True)
class Metrics:
    """Statistics of one batch as 0-d tensors on its device. Reading one costs no sync; `to_dict()` is the one place that does.

    counts: int64 [7], in the order of `COUNTS`; floats: fp64 [9] (fp32 where the device has no fp64), in the order of `FLOATS`.
    docs/semantics.md defines each. All fractions are of the valid tokens and 0 when there are none.
    """

    counts: Tensor
    floats: Tensor

    @property
    def valid_tokens(self) -> Tensor:
        """Valid tokens, counted before dropping. int64."""
        return self.counts[0]

    @property
    def trust_region_tokens(self) -> Tensor:
        """Size of T. int64."""
        return self.counts[1]

    @property
    def candidate_tokens(self) -> Tensor:
        """Tokens of T with v above the threshold: the only ones that can be dropped. int64; 0 where a selection was given."""
        return self.counts[2]

    @property
    def dropped_tokens(self) -> Tensor:
        """Valid tokens with M = 0. int64."""
        return self.counts[3]

    @property
    def nonfinite_tokens(self) -> Tensor:
        """Valid tokens where the log-ratio or any input used is NaN or infinite. int64."""
        return self.counts[4]

    @property
    def m2_before(self) -> Tensor:
        """Mean v over T before dropping; 0 if T is empty."""
        return self.floats[0]

    @property
    def m2_after(self) -> Tensor:
        """Mean v over what is left of T; 0 if nothing is."""
        return self.floats[1]

    @property
    def masked_fraction(self) -> Tensor:
        """Dropped tokens / valid tokens."""
        return self.floats[2]

    @property
    def trust_region_fraction(self) -> Tensor:
        """Size of T / valid tokens."""
        return self.floats[3]

    @property
    def m2_cut(self) -> Tensor:
        """The smallest dropped v; inf when nothing is dropped."""
        return self.floats[4]

    @property
    def ratio_mean(self) -> Tensor:
        """Mean of exp(d) over valid tokens, before dropping."""
        return self.floats[5]

    @property
    def ratio_max(self) -> Tensor:
        """Largest exp(d) over valid tokens, before dropping; 0 when there are none."""
        return self.floats[6]

    @property
    def approx_kl(self) -> Tensor:
        """Mean of exp(d) - d - 1 over valid tokens."""
        return self.floats[7]

    @property
    def clip_fraction(self) -> Tensor:
        """Share of valid tokens whose gradient PPO's clip takes: 0.2 / 0.2 in `m2po_loss`, the given bounds in `grpo_loss`."""
        return self.floats[8]

    def to_dict(self) -> dict[str, float | int]:
        """Plain numbers, for a logger. Waits for the device."""
        counts = dict(zip(COUNTS, self.counts.tolist(), strict=True))
        floats = dict(zip(FLOATS, self.floats.tolist(), strict=True))
        return {**floats, **{name: counts[name] for name in ("valid_tokens", "dropped_tokens", "nonfinite_tokens")}}


@dataclass(frozen=True)
class Selection:
    """Which tokens of a batch Algorithm 1 keeps. Positional: it holds for these positions whatever the log-probs are by then.

    keep: bool, shape of the `log_probs` it was made from; M of the paper, False where not valid. From `M2Accumulator.solve`: [N],
        the tokens of this rank in the order in which they were added.
    metrics: over all that the selection was made over, so from `solve` over every part of every rank of the group.
    parts: the handles that `M2Accumulator.add` returned on this rank; none from `select`.
    accumulator: serial number of the one that made it, as its parts have it; 0 from `select`.
    """

    keep: Tensor
    metrics: Metrics
    m2_threshold: float
    scope: str
    parts: tuple[Part, ...] = ()
    accumulator: int = 0

    def keep_of(self, part: Part) -> Tensor:
        """M of one micro-batch: bool, in the shape in which it was added. InvalidArgument for a part of another selection."""
        if not isinstance(part, Part) or part.accumulator != self.accumulator:
            raise InvalidArgument(
                f"part must be a handle that add() returned to the accumulator of this selection, which has {len(self.parts)}; "
                f"got {describe(part)}"
            )
        return self.keep[part.start : part.start + part.shape.numel()].view(part.shape)


@dataclass(frozen=True)
class LossOutput:
    """Result of `m2po_loss` and `grpo_loss`.

    loss: 0-d (shape of `log_probs` for reduction="none"), fp32, or fp64 for fp64 log-probs; attached to the graph of `log_probs`.
    """

    loss: Tensor
    metrics: Metrics
