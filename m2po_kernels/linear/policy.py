"""The loss in one walk: rows whose gradient is settled on sight get it in the visit that first reads them; candidates wait."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..exact import Unit, to_key
from ..inputs import wide_dtype
from ..results import COUNTS, FLOATS
from ..rule import Batch, Rule
from .args import Inputs, LinearArgs
from .plan import Work
from .walk import Walk, only

OPS = torch.ops.m2po_kernels
# Metrics that need the log-prob of every valid token, and so are over the computed ones alone.
RATIO_METRICS = slice(FLOATS.index("ratio_mean"), FLOATS.index("approx_kl") + 1)


def rows_with_gradient(batch: Batch, rule: Rule) -> Tensor:
    """Which tokens can have a gradient or a part in the selection. bool, shape of the batch's tensors."""
    valid = batch.mask != 0
    if rule.kl_coef > 0:
        return valid
    if batch.keep is not None:
        return valid & batch.keep & (batch.advantages != 0)
    return valid if rule.scope == "all" else valid & (batch.advantages != 0)


def stand_in(computed: Tensor, log_probs: Tensor, batch: Batch) -> Tensor:
    """`log_probs` where computed, elsewhere the behaviour's: there d is 0, which no sum takes part in. In the batch's shape."""
    shape = batch.behavior_log_probs.shape
    return torch.where(computed.reshape(shape), log_probs.reshape(shape), batch.behavior_log_probs.to(log_probs.dtype))


def over_computed(counts: Tensor, floats: Tensor, computed: Tensor, batch: Batch, rule: Rule) -> tuple[Tensor, Tensor]:
    """The metrics of `batch` with those of ratio and KL taken over the computed tokens.

    What a given selection dropped was in T by rule, so it is counted there, computed or not. Where it was not, its v is unknown.
    """
    own = batch._replace(mask=computed.reshape(batch.mask.shape), keep=None, denominators=None, weights=None)
    nonfinite = "drop" if rule.nonfinite == "drop" else "propagate"
    _, own_counts, own_floats = OPS.select(*own, *replace(rule, nonfinite=nonfinite).args())
    counts, floats = counts.clone(), floats.clone()
    floats[RATIO_METRICS] = own_floats[RATIO_METRICS]
    if batch.keep is not None:
        valid, region, dropped, clipped = (
            COUNTS.index(f"{name}_tokens") for name in ("valid", "trust_region", "dropped", "clipped")
        )
        unseen = (counts[dropped] - (computed.reshape(batch.keep.shape) & ~batch.keep).sum()).clamp(min=0)
        if rule.scope == "quadrants":  # the 0 that stands in for its log-ratio is in none; with "all" each token is counted
            counts[region] += unseen
        share = counts[region].to(floats.dtype) / counts[valid].clamp(min=1).to(floats.dtype)
        floats[FLOATS.index("trust_region_fraction")] = share
        cut, clip, before, after = (FLOATS.index(name) for name in ("m2_cut", "clip_fraction", "m2_before", "m2_after"))
        floats[cut] = torch.where(unseen > 0, math.nan, floats[cut])
        partly = own_counts[valid] < counts[valid]
        for metric, of in ((clip, clip), (before, before), (after, before)):
            floats[metric] = torch.where(partly, own_floats[of], floats[metric])
        counts[clipped] = torch.where(partly, own_counts[clipped], counts[clipped])
    return counts, floats


class Coefficients:
    """d loss / d log-prob without the loss's divisor, as far as it is known before the cut."""

    def __init__(self, batch: Batch, rule: Rule, dtype: torch.dtype) -> None:
        device = batch.mask.device
        tensors = (batch.behavior_log_probs, batch.advantages, batch.mask, batch.ref_log_probs, batch.weights, batch.keep)
        self._flat = [None if t is None else t.reshape(-1) for t in tensors]
        self._rule = rule
        self.one = torch.ones((), dtype=dtype, device=device)
        # A divisor of 0 makes the loss and the gradient 0, whatever the sums hold.
        given = batch.denominators
        self.scales = torch.ones(2, dtype=wide_dtype(device), device=device) if given is None else (given != 0).to(given.dtype)
        self._cuts = [_cut(v, dtype, device) for v in (float("inf"), Unit.of(rule.m2_threshold, dtype).candidate_above)]

    def on_sight(self, log_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(coefficient, whether it waits for the cut) of tokens with these log-probs. [n] each.

        It waits where it is one thing if all candidates stay and another if all go.
        """
        rows = Batch(log_probs, *(None if t is None else t[tokens] for t in self._flat))  # type: ignore[arg-type]
        if_kept, if_gone = (OPS.policy_loss_backward(self.one, self.scales, cut, *rows, *self._rule.args()) for cut in self._cuts)
        return if_kept, (if_kept != if_gone) & ~if_kept.isnan()

    def after_cut(self, batch: Batch, cut: Tensor) -> Tensor:
        """The coefficient of every token of the whole batch. [N]"""
        return OPS.policy_loss_backward(self.one, self.scales, cut, *batch, *self._rule.args()).reshape(-1)


def _cut(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The cut that drops a v above `value`, and none that equals it."""
    key = to_key(torch.full((1,), value, dtype=dtype, device=device))
    return torch.cat([key, torch.full_like(key, -1)])


def loss_forward(inputs: Inputs, batch: Batch, rule: Rule, args: LinearArgs) -> tuple[Tensor, ...]:
    """The results of the op linear_m2po_loss (ops.py). `batch.log_probs` is not read; inputs.rows names the rows to compute."""
    assert inputs.rows is not None
    walk = Walk(inputs, args, with_gradients=True)
    n, dtype, device = inputs.token_ids.shape[0], args.sum_dtype, inputs.hidden.device
    to_compute = walk.tokens(inputs.rows)  # before anything else of that length: finding them takes three times what they do
    # A token that is not computed has the behaviour's log-prob until the end: there d is 0, which no sum takes part in.
    whole = batch._replace(log_probs=torch.empty(batch.mask.shape, dtype=dtype, device=device).copy_(batch.behavior_log_probs))
    log_probs = whole.log_probs.view(-1)
    entropy = torch.zeros(n if args.with_entropy else 0, dtype=dtype, device=device)
    coefficients = Coefficients(batch, rule, dtype)
    waiting = torch.zeros(n, dtype=torch.bool, device=device)
    settled = computed = 0
    for tokens in to_compute:
        visit = walk.visit(tokens)
        computed += tokens.shape[0]
        log_probs[tokens] = visit.rows.log_prob
        if visit.rows.entropy is not None:
            entropy[tokens] = visit.rows.entropy
        if walk.gradients.any:
            coefficient, waits = coefficients.on_sight(visit.rows.log_prob, tokens)
            waiting[tokens] = waits
            visit, order = only(visit, (coefficient != 0) & ~waits)
            settled += order.shape[0]
            walk.add_gradient(visit, coefficient[order])
    loss, scales, cut, counts, floats = OPS.policy_loss(*whole, *rule.args())
    counts, floats = over_computed(counts, floats, inputs.rows, whole, rule)
    recomputed = 0
    if walk.gradients.any:
        final = coefficients.after_cut(whole, cut)
        for tokens in walk.tokens(waiting & (final != 0)):
            recomputed += tokens.shape[0]
            walk.add_gradient(walk.visit(tokens), final[tokens])
    work = Work(computed, settled, recomputed)
    rows = torch.tensor([work.computed, work.settled, work.recomputed], dtype=torch.int64)
    log_probs.masked_fill_(~inputs.rows, 0.0)
    return loss, log_probs, entropy, counts, floats, scales[0].to(dtype), rows, *walk.finish()
