"""`m2po demo`: the bundled real rollouts through the selection and the loss, and every backend beside the sort-based way."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from .. import dispatch, reference
from ..loss import m2po_loss
from ..selection import select
from .cases import ROLLOUT_FIGURES
from .doctor import backend_reason
from .plots import save_plot
from .rollouts import Rollouts, bundled
from .shared import CliError, number, progress_bar, share, stdout_console
from .staleness import Staleness, measure

TAU = 0.04
N_SYNTHETIC = 1 << 20
N_WARM_UP, N_TIMED = 2, 7
SORT_BASED = "sort-based torch"
PLOTTED = "log_probs_step4"


@dataclass(frozen=True)
class Way:
    """One way of computing mask and loss of the four tensors of a batch on a device."""

    name: str
    device: str
    mask: Callable[..., Tensor]
    loss: Callable[..., Tensor]


@dataclass(frozen=True)
class Timing:
    """One way on one batch: how its mask compares with the oracle's, and its median time."""

    batch: str
    way: Way
    loss: float
    mask_differs: int
    milliseconds: float


def demo(
    out: Annotated[Path, typer.Option(help="Where to write the picture of the step-4 rollouts.")] = Path("out/m2po_demo.png"),
) -> None:
    """Show real rollouts going through M2PO, and every backend that runs here beside the sort-based PyTorch way."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    ways, not_run = _ways(devices)
    batches = {"rollouts, step 4": bundled(PLOTTED), "synthetic, 2^20": synthetic_batch()}
    with progress_bar() as progress:
        task = progress.add_task("measuring the rollouts", total=len(ROLLOUT_FIGURES) + 1 + len(batches) * (N_WARM_UP + N_TIMED))
        measured: dict[str, Staleness] = {}
        for figures in ROLLOUT_FIGURES:
            measured[figures.column] = measure(bundled(figures.column), TAU)
            progress.advance(task)
        progress.update(task, description="drawing")
        save_plot(measured[PLOTTED], f"SmolLM2-135M rollouts, {PLOTTED}", out)
        progress.advance(task)
        timings: list[Timing] = []
        for label, batch in batches.items():
            progress.update(task, description=f"timing on {label}")
            timings += _compare_and_time(label, ways, batch, lambda: progress.advance(task))
    _print(measured, batches, timings, not_run, out)


def sort_based_mask(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """M by a full sort and a cumulative sum in the dtype of the log-ratios, as trainers write it in torch."""
    d = log_probs.detach() - behavior_log_probs
    signed = d * (advantages[:, None] if advantages.dim() < d.dim() else advantages)
    region = ((signed > 0) & mask.bool()).flatten()
    positions = region.nonzero().flatten()
    values, order = torch.sort(d.square().flatten()[positions], descending=True, stable=True)
    n = values.numel()
    remaining = values.flip(0).cumsum(0).flip(0) / torch.arange(n, 0, -1, device=d.device)
    keep = mask.bool().flatten().clone()
    keep[positions[order[remaining > TAU]]] = False
    return keep.view(d.shape)


def sort_based_loss(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The M2PO loss around `sort_based_mask`, one torch operation after the other."""
    keep = sort_based_mask(log_probs, behavior_log_probs, advantages, mask)
    spread = advantages[:, None] if advantages.dim() < log_probs.dim() else advantages
    d = torch.where(keep, log_probs - behavior_log_probs, 0.0)
    return (-d.exp() * spread * keep).sum() / mask.sum()


def synthetic_batch() -> Rollouts:
    """2^20 tokens in 1,024 sequences, all valid; mostly fresh, with a stale tail: some 0.5 % of T are candidates."""
    rng = torch.Generator().manual_seed(0)
    shape = (1024, N_SYNTHETIC // 1024)
    behavior = torch.rand(shape, generator=rng).clamp(min=1e-6).log()
    noise = torch.randn(shape, generator=rng)
    stale = torch.rand(shape, generator=rng) < 0.007
    d = torch.where(stale, noise * 0.6, noise * 0.05)
    return Rollouts(behavior + d, behavior, torch.randn(shape[0], generator=rng), torch.ones(shape, dtype=torch.bool))


def _ways(devices: list[str]) -> tuple[list[Way], dict[str, str]]:
    """The sort-based way and each backend that runs, per device; and why the others do not run there."""
    ways: list[Way] = []
    not_run: dict[str, str] = {}
    for device in devices:
        ways.append(Way(SORT_BASED, device, sort_based_mask, sort_based_loss))
        for name in dispatch.BACKENDS:
            reason = backend_reason(name, device)
            if reason is None:
                ways.append(_backend_way(name, device))
            else:
                not_run[f"{name} on {device}"] = reason
    return ways, not_run


def _backend_way(name: str, device: str) -> Way:
    return Way(
        name,
        device,
        lambda *batch: select(*batch, m2_threshold=TAU, backend=name).keep,
        lambda *batch: m2po_loss(*batch, m2_threshold=TAU, backend=name).loss,
    )


def _compare_and_time(label: str, ways: list[Way], batch: Rollouts, advance: Callable[[], None]) -> list[Timing]:
    """First every mask against the oracle's, then the times of forward + backward. A backend that is wrong ends the demo.

    The ways take turns, so that what else the machine does meets all of them.
    """
    right = reference.m2po_oracle(*batch, m2_threshold=TAU).keep
    placed = {way: Rollouts(*(tensor.to(way.device) for tensor in batch)) for way in ways}
    differs = {way: int((way.mask(*placed[way]).cpu() != right).sum()) for way in ways}
    for way, count in differs.items():
        if count and way.name != SORT_BASED:
            raise CliError(f"backend {way.name} on {label}: its mask differs from the oracle's at {count} tokens; run m2po check")
    times: dict[Way, list[float]] = {way: [] for way in ways}
    losses: dict[Way, float] = {}
    for _ in range(N_WARM_UP + N_TIMED):
        for way in ways:
            seconds, losses[way] = _forward_backward(way, placed[way])
            times[way].append(seconds)
        advance()
    medians = {way: 1e3 * statistics.median(times[way][N_WARM_UP:]) for way in ways}
    return [Timing(label, way, losses[way], differs[way], medians[way]) for way in ways]


def _forward_backward(way: Way, batch: Rollouts) -> tuple[float, float]:
    """(seconds, loss)."""
    log_probs = batch.log_probs.detach().requires_grad_()
    start = time.perf_counter()
    loss = way.loss(log_probs, *batch[1:])
    loss.backward()
    if way.device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start, loss.item()


def _print(
    measured: dict[str, Staleness], batches: dict[str, Rollouts], timings: list[Timing], not_run: dict[str, str], out: Path
) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = stdout_console()
    valid = next(iter(measured.values())).metrics["valid_tokens"]
    table = Table(title=f"Real rollouts (SmolLM2-135M, {valid:,} valid tokens), M2 threshold {TAU:g}", title_justify="left")
    table.add_column("current log-probs")
    for heading in ("T", "candidates", "dropped", "of valid", "M2 before", "-> after", "loss", "PPO clip 0.2 would clip"):
        table.add_column(heading, justify="right")
    for column, staleness in measured.items():
        metrics = staleness.metrics
        table.add_row(
            column.removeprefix("log_probs_"),
            *(f"{n:,}" for n in (staleness.trust_region, staleness.candidates, metrics["dropped_tokens"])),
            share(float(metrics["masked_fraction"])),
            f"{metrics['m2_before']:.6f}",
            f"{metrics['m2_after']:.6f}",
            f"{staleness.loss:.8f}",
            share(staleness.clipped_share),
        )
    console.print(table)

    beside = Table(title="Forward + backward, the same batch", title_justify="left")
    for heading in ("batch", "device", "way"):
        beside.add_column(heading)
    for heading in ("loss", "mask against the oracle", "ms (median)", "sort-based / this"):
        beside.add_column(heading, justify="right")
    base = {(row.batch, row.way.device): row.milliseconds for row in timings if row.way.name == SORT_BASED}
    for label in batches:
        for row in (row for row in timings if row.batch == label):
            mask = "equal" if not row.mask_differs else f"[red]{row.mask_differs:,} tokens differ[/]"
            ratio = "" if row.way.name == SORT_BASED else f"{base[label, row.way.device] / row.milliseconds:.1f}"
            cells = (f"{row.loss:.8f}", mask, number(row.milliseconds, 3), ratio)
            beside.add_row(label, row.way.device, row.way.name, *cells)
        beside.add_section()
    console.print(beside)
    tally = select(*batches["synthetic, 2^20"], m2_threshold=TAU).metrics
    fraction = int(tally.candidate_tokens) / max(int(tally.trust_region_tokens), 1)
    machine = f"{torch.get_num_threads()} threads, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    console.print(
        f"synthetic: {N_SYNTHETIC:,} tokens, {share(fraction)} of T are candidates. Median of {N_TIMED} after {N_WARM_UP}, "
        f"{machine}, torch {torch.__version__}."
    )
    ran = dict.fromkeys(f"{row.way.name} on {row.way.device}" for row in timings if row.way.name != SORT_BASED)
    console.print(f"backends that ran: {', '.join(ran)}")
    for name, reason in not_run.items():
        console.print(f"{name} did not run: {escape(reason)}")
    if not torch.cuda.is_available():
        console.print("no GPU here: everything ran on the CPU")
    console.print(f"picture: {out}", markup=False)
