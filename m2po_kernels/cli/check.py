"""`m2po check`: every backend that runs on a device against the fp64 oracle. The gradient oracle of GPU runners."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from .. import dispatch
from .batches import all_cases
from .comparisons import Row, compare_all
from .doctor import backend_reason
from .shared import CliError, one_line, print_json, progress_bar, stdout_console


def check(
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: cuda if there is one, else cpu.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare every backend with the fp64 oracle: masks, losses, gradients. Exit code 1 on any failure.

    The cases: T1 to T12 of docs/semantics.md, the bundled rollouts with their published figures, and random batches over
    dtypes, staleness, ties and every option. Errors are relative to the sum of the absolute terms; the bounds are derived in
    m2po_kernels/cli/oracle.py. A backend may decline fp64 log-probs with a reason; declining anything else is a failure.
    """
    where = _device(device)
    names, not_run = _backends(backend, where)
    rows, messages = _run(names, where)
    ok = all(row.ok for row in rows)
    if as_json:
        table = [{**asdict(row), "ok": row.ok} for row in rows]
        print_json({"device": str(where), "ok": ok, "rows": table, "failures": messages, "not_run": not_run})
    else:
        _print(where, rows, messages, not_run)
    raise typer.Exit(0 if ok else 1)


def _device(given: str | None) -> torch.device:
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(1, device=device).cpu()
    except Exception as error:  # torch raises RuntimeError, AssertionError or NotImplementedError, by kind of device
        raise CliError(f"--device {given!r} cannot be used: {one_line(error)}") from error
    return device


def _backends(given: list[str] | None, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The backends to run, and the reason for each that cannot."""
    for name in given or ():
        if name not in dispatch.BACKENDS:
            raise CliError(f"--backend must be one of {', '.join(dispatch.BACKENDS)}; got {name!r}")
    reasons = {name: backend_reason(name, device) for name in dict.fromkeys(given or dispatch.BACKENDS)}
    not_run = {name: reason for name, reason in reasons.items() if reason is not None}
    if given and not_run:
        name, reason = next(iter(not_run.items()))
        raise CliError(f"--backend {name} cannot run on {device}: {reason}")
    return [name for name, reason in reasons.items() if reason is None], not_run


def _run(names: list[str], device: torch.device) -> tuple[list[Row], list[str]]:
    cases = list(all_cases())
    with progress_bar() as progress:
        task = progress.add_task("against the oracle", total=len(cases) * len(names))
        return compare_all(cases, names, device, lambda: progress.advance(task))


def _print(device: torch.device, rows: list[Row], messages: list[str], not_run: dict[str, str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = stdout_console()
    table = Table(title=f"Against the fp64 oracle on {device}", title_justify="left")
    for heading in ("backend", "cases of", "masks equal", "loss error", "gradient error", "M2 before", "-> after", "result"):
        table.add_column(heading, justify="left" if heading in ("backend", "cases of", "result") else "right")
    last = None
    for row in rows:
        if last not in (None, row.backend):
            table.add_section()
        last = row.backend
        table.add_row(row.backend, row.group, *_cells(row))
    console.print(table)
    console.print("Errors: the largest of the group, relative to the sum of absolute terms (bound 1e-6; fp64 1e-13).")
    for name, reason in not_run.items():
        console.print(f"{name} did not run: {escape(reason)}")
    for reason in dict.fromkeys(f"{row.backend} declined fp64 log-probs: {row.declined_why}" for row in rows if row.declined):
        console.print(escape(reason))
    for message in messages:
        console.print(f"[red]FAILED[/] {escape(message)}")
    failed = sum(row.failures for row in rows)
    total = sum(row.cases for row in rows)
    console.print(f"[red]{failed} of {total} failed[/]" if failed else f"[green]all {total} passed[/]")


def _cells(row: Row) -> list[Any]:
    masks = f"{row.masks_equal}/{row.masks_compared}" if row.masks_compared else "-"
    verdict = "[green]ok[/]" if row.ok else f"[red]{row.failures} failed[/]"
    if row.declined and not row.cases:
        return [masks, "-", "-", "-", "-", "declined" if row.ok else verdict]
    return [masks, f"{row.loss_error:.1e}", f"{row.grad_error:.1e}", f"{row.m2_before:.6g}", f"{row.m2_after:.6g}", verdict]
