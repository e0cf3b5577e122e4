"""What the commands share: the error that becomes one line on stderr, consoles, progress, JSON, formats."""

from __future__ import annotations

import importlib
import json
import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# rich is imported where it is used: comparisons.py runs without the extra `cli`.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PIPE_WIDTH = 140  # columns of a table that goes to a file or a pipe, where rich would assume 80 and wrap


class CliError(Exception):
    """A wrong file or option: its message is printed as one line on stderr, and the exit code is 2."""


def stdout_console() -> Console:
    """Console for results."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def stderr_console() -> Console:
    """Console for progress and notes, so that stdout holds nothing but results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def progress_bar() -> Progress:
    """A bar on stderr that is gone when the work is done; none where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = stderr_console()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def need(module: str, extra: str = "cli") -> ModuleType:
    """The module, or a CliError that says which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed; run: pip install 'm2po-kernels[{extra}]'") from error


def print_json(value: Any) -> None:
    """Strict JSON on stdout: a number that is not finite becomes null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def number(value: float, digits: int = 6) -> str:
    """A number for a table: `digits` significant digits."""
    return f"{value:.{digits}g}"


def share(value: float) -> str:
    """A fraction as a percentage for a table."""
    return f"{100 * value:.2f} %"


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
