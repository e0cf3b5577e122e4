"""The typer application: the commands, `--version`, and how errors leave it (one line on stderr, exit code 2)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import M2POError
from .bench import bench
from .check import check
from .collect import collect
from .demo import demo
from .doctor import doctor
from .inspect import inspect
from .shared import CliError
from .stale.command import stale

# The base of all usage errors. typer has its own copy of click in some versions and imports click in others.
_UsageErrorBase: type[Exception] = typer.BadParameter.__mro__[2]


class _Commands(TyperGroup):
    """Prints each error as one line instead of a usage text in a box."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = functools.partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except (CliError, M2POError) as error:
            code = _fail(str(error))
        except _UsageErrorBase as error:
            code = _fail(error.format_message())  # type: ignore[attr-defined]
        except typer.Abort:
            code = _fail("aborted")
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print("m2po: error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _version(wanted: bool) -> None:
    if wanted:
        print(f"m2po-kernels {__version__}")
        raise typer.Exit


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact M2 token selection and the M2PO loss: what runs here, is it right, how stale are my rollouts."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


for _command in (doctor, check, inspect, demo, collect, stale, bench):
    app.command()(_command)
