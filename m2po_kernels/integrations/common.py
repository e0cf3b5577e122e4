"""What the adapters share: the versions they are tested with, the window of one optimizer step, the names of logged metrics."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m2po_kernels import M2Accumulator, Part, Selection
from m2po_kernels.distributed import Ranks
from m2po_kernels.errors import InvalidArgument

# By distribution. Hooks were read in these releases, and tests/integrations runs against them.
TESTED = {
    "trl": "1.16.0",
    "transformers": "5.24.0",
    "verl": "0.9.1",
    "ms-swift": "4.6.0",
    "openrlhf": "0.11.2",
    "trinity-rft": "0.6.0",
    "areal": "1.0.4",
}


def check_version(distribution: str) -> None:
    """Warns, naming both, where the installed version of `distribution` is not the one that the adapter is tested with."""
    installed, tested = version(distribution), TESTED[distribution]
    if installed != tested:
        warnings.warn(
            f"m2po_kernels.integrations is tested with {distribution} {tested}; installed is {distribution} {installed}",
            stacklevel=3,
        )


# Options of a sampler that make another distribution of it than the softmax that a trainer computes: the values that do not.
_WHOLE = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,), "do_sample": (True,)}


def check_sampler(options: Mapping[str, Any], where: str) -> None:
    """Raises InvalidArgument for options of the rollout, found under `where`, that make M2PO's ratio one of two samplers."""
    for name, values in _WHOLE.items():
        value = options.get(name)
        if value is not None and value not in values:
            raise InvalidArgument(
                f"{where}.{name} must be {values[0]} with M2PO, or tokens are sampled from another distribution than that whose "
                f"log-probs the trainer computes; got {value}"
            )
    temperature = options.get("temperature")
    if temperature is not None and not temperature > 0:
        raise InvalidArgument(f"{where}.temperature must be > 0 with M2PO, as greedy tokens have no log-probs; got {temperature}")


class MicroBatch(NamedTuple):
    """What the selection needs, as `m2po_loss` takes it; behaviour log-probs are NaN where the engine did not score a token."""

    log_probs: Tensor
    behavior_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor


class Share(NamedTuple):
    """One micro-batch's share of a window: what the loss takes for it."""

    behavior_log_probs: Tensor
    mask: Tensor  # bool: without the tokens that the engine did not score
    part: Part


@dataclass(frozen=True)
class Window:
    """The selection of one optimizer step, made before its first micro-batch is trained on.

    unscored_tokens: of all ranks, 0-d int64; valid tokens whose behaviour log-prob is NaN. They are left out of everything.
    """

    selection: Selection
    shares: Sequence[Share]
    unscored_tokens: Tensor

    def metrics(self) -> dict[str, float]:
        """For a logger, by the names that the adapters share, the same on all ranks. Waits for the device."""
        values = self.selection.metrics.to_dict()
        logged = {
            "m2/before": values["m2_before"],
            "m2/after": values["m2_after"],
            "m2/masked_fraction": values["masked_fraction"],
            "m2/trust_region_fraction": values["trust_region_fraction"],
            "m2/threshold": self.selection.m2_threshold,
            "m2/approx_kl": values["approx_kl"],
            "m2/ratio_max": values["ratio_max"],
            "m2/unscored_tokens": float(self.unscored_tokens),
        }
        if values["dropped_tokens"]:  # else there is no cut, and one infinity would be the mean of all steps
            logged["m2/cut"] = values["m2_cut"]
        return logged


def steps_of_window(step: int, n: int, uses: int) -> range:
    """The micro-batches of the optimizer step that begins at `step`, where TRL and ms-swift generate every `uses` of them.

    Raises InvalidArgument if they need a generation that is still to come.
    """
    since_generation = step % uses
    if since_generation + n > uses:
        raise InvalidArgument(
            f"gradient_accumulation_steps: {n} micro-batches from {since_generation} of steps_per_generation * "
            f"num_iterations = {uses} on need a generation that is still to come"
        )
    return range(step, step + n)


def check_window_end(steps: range, step: int, ends: bool) -> int:
    """The place of micro-batch `step` in its window. Raises InvalidArgument if the optimizer step ends at another place."""
    done, n = steps.index(step) + 1, len(steps)
    if ends != (done == n):
        raise InvalidArgument(
            f"the optimizer step {'ends' if ends else 'goes on'} after micro-batch {done} of the {n} that were selected "
            "together; expected gradient_accumulation_steps to be as at the start"
        )
    return done - 1


def select_window(
    micro_batches: Iterable[MicroBatch],
    *,
    m2_threshold: float = 0.04,
    scope: str = "quadrants",
    group: Any = None,
    replicated_over: Any = None,
) -> Window:
    """One selection over all micro-batches of one optimizer step, on all ranks of `group`; arguments as in `M2Accumulator`.

    Raises MissingBehaviorLogProbs on all ranks if a micro-batch of any has none, and what `M2Accumulator.solve` raises.
    """
    accumulator, ranks = M2Accumulator(m2_threshold=m2_threshold, scope=scope), Ranks(group)
    shares, unscored = [], []
    for log_probs, behavior, advantages, mask in micro_batches:
        mask = mask != 0
        if behavior is not None:
            missing = mask & behavior.isnan()
            unscored.append(missing.count_nonzero())
            mask = mask & ~missing
        part = accumulator.add(log_probs, behavior, advantages, mask)
        shares.append(Share(log_probs if behavior is None else behavior, mask, part))
    selection = accumulator.solve(group, replicated_over=replicated_over)
    # After it: what raises there raises on all ranks, so that none is left waiting here.
    n_unscored = torch.stack(unscored).sum() if unscored else torch.zeros((), dtype=torch.int64, device=ranks.default_device())
    return Window(selection, shares, ranks.sum(n_unscored))
