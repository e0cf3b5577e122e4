"""What `m2po check` runs, without its command line: each case on each backend, gathered into one row for each group of cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..errors import BackendUnavailable
from .batches import Case
from .oracle import Comparison, Expected, compare
from .shared import one_line


@dataclass
class Row:
    """One backend on one group of cases; errors are the largest of the group."""

    backend: str
    group: str
    cases: int = 0
    masks_equal: int = 0
    masks_compared: int = 0
    loss_error: float = 0.0
    grad_error: float = 0.0
    m2_before: float = 0.0
    m2_after: float = 0.0
    declined: int = 0
    declined_why: str = ""
    failures: int = 0

    @property
    def ok(self) -> bool:
        """No failure. Cases that the backend declined with a reason do not count, see `check`."""
        return self.failures == 0

    def add(self, case: Case, result: Comparison) -> None:
        """Takes one comparison into the row."""
        self.cases += 1
        if not case.clip:
            self.masks_compared += 1
            self.masks_equal += result.mask_differs == 0
        self.loss_error = _worse(self.loss_error, result.loss_error)
        self.grad_error = _worse(self.grad_error, result.grad_error)
        self.m2_before = max(self.m2_before, result.m2_before)
        self.m2_after = max(self.m2_after, result.m2_after)
        self.failures += bool(result.problems)


def compare_all(
    cases: Iterable[Case], names: list[str], device: torch.device, advance: Callable[[], None] = lambda: None
) -> tuple[list[Row], list[str]]:
    """Every case on every backend of `names`: the rows, backend by backend, and one message for each failure.

    advance: called after each comparison.
    """
    rows: dict[tuple[str, str], Row] = {}
    messages: list[str] = []
    for case in cases:
        expected = Expected.of(case)
        for name in names:
            row = rows.setdefault((name, case.group), Row(name, case.group))
            problems = _one(row, case, expected, name, device)
            messages += [f"{name}, {case.group}, {case.name}: {problem}" for problem in problems]
            advance()
    return [row for name in names for row in rows.values() if row.backend == name], messages


def _one(row: Row, case: Case, expected: Expected, name: str, device: torch.device) -> tuple[str, ...]:
    try:
        result = compare(case, expected, name, device)
    except BackendUnavailable as error:
        row.declined += 1
        row.declined_why = str(error)
        if case.inputs[0].dtype == torch.float64:
            return ()
        row.failures += 1
        return (f"declined: {error}",)
    except Exception as error:  # a crash of one case is that case's failure; the others still have to be seen
        row.cases += 1
        row.failures += 1
        return (f"raised {one_line(error)}",)
    row.add(case, result)
    return result.problems


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
