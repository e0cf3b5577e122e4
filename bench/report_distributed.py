"""From the rows of bench.distributed to the tables of docs/distributed.md. `python -m bench.report_distributed ROWS`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from .machine import ROOT
from .report import put_between_markers

PAGE = ROOT / "docs" / "distributed.md"
MANY = 1024  # ranks that the model speaks of
MOST_TOKENS = 1 << 31  # in one selection
Row = dict[str, Any]


def buffer_bytes(ranks: int) -> int:
    """What one rank hands to the collectives of a solve() of fp32 log-probs in all: docs/distributed.md counts it."""
    return 82_000 + 40 * ranks


def block(rows: list[Row]) -> str:
    """What was measured, and the model of many ranks made of it."""
    facts = rows[0]
    found = {(row["ranks"], row["tokens_per_rank"], row["share"], row["backend"]): row for row in rows}
    head = ["ranks", "tokens a rank", "candidates", "gather and sort", "its bytes", "add", "solve", "its bytes"]
    lines = [
        f"Median ms until the last rank is done; gloo over loopback, the cores divided among the ranks; {facts['device']}; torch "
        f"{facts['torch']}, m2po_kernels {facts['m2po_kernels']} at {facts['commit']}; {facts['date']}.",
        "",
        *_header([*head, "solve against gather and sort", "add + solve against it"]),
    ]
    for ranks, tokens, share in dict.fromkeys(key[:3] for key in found):
        peer, add, solve = (found[(ranks, tokens, share, name)] for name in ("gather_and_sort", "add", "solve"))
        base, own, added = peer["median_ms"], solve["median_ms"], add["median_ms"]
        cells = [str(ranks), _power(tokens), f"{share:.1%}", _ms(base), f"{peer['buffer_bytes']:,}", _ms(added), _ms(own)]
        lines.append(_line([*cells, f"{solve['buffer_bytes']:,}", f"{base / own:.1f}x", f"{base / (added + own):.1f}x"]))
    return "\n".join([*lines, "", *_model(found)])


def _model(found: dict[tuple, Row]) -> list[str]:
    """At MANY ranks, from what two ranks took."""
    sizes = sorted({key[1] for key in found if key[0] == 2})
    share = min(key[2] for key in found)
    together, alone = (found[(2, sizes[0], share, name)] for name in ("solve", "solve_local"))
    calls = together["collectives"]
    # A ring all-reduce of two ranks takes two steps. Noise can make the difference negative on a machine that is not quiet.
    step = max(0.0, together["median_ms"] - alone["median_ms"]) / (2 * calls)
    tree, ring = (calls * steps * step for steps in (2 * math.log2(MANY), 2 * (MANY - 1)))
    check = ""
    if (4, sizes[0], share, "solve") in found:
        measured = found[(4, sizes[0], share, "solve")]["median_ms"]
        expected = alone["median_ms"] + calls * 2 * (4 - 1) * step
        check = (
            f" Its one check: for 4 ranks with {_power(sizes[0])} tokens each it says {_ms(expected)} ms around a ring, and "
            f"{_ms(measured)} were measured, with two processes on each core."
        )
    received = 2 * (MANY - 1) * buffer_bytes(MANY) // MANY
    head = ["tokens a rank", "solve, own part", "solve, tree", "solve, ring", "gather and sort, at least"]
    lines = [
        f"The model at {MANY:,} ranks, {share:.1%} candidates: one step of a collective took s = {step:.3g} ms here, in which "
        f"two processes wake each other up. {calls} all-reduces add {_ms(tree)} ms along a tree, {_ms(ring)} ms around a ring. "
        f"Each rank hands over {buffer_bytes(MANY):,} B.{check}",
        "",
        *_header([*head, "a rank receives for it", "for solve"]),
    ]
    for tokens in (n for n in sizes if n * MANY < MOST_TOKENS):
        local, peer = (found[(2, tokens, share, name)]["median_ms"] for name in ("solve_local", "gather_and_sort"))
        cells = [_power(tokens), *(_ms(local + x) for x in (0.0, tree, ring)), _ms(peer * MANY / 2)]
        lines.append(_line([*cells, f"{4 * tokens * (MANY - 1):,} B", f"{received:,} B"]))
    return lines


def _header(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---:"] * len(cells))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _power(tokens: int) -> str:
    return f"2^{tokens.bit_length() - 1}"


def _ms(value: float) -> str:
    """Three digits are what the spread of the samples bears."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.report_distributed", description=__doc__)
    parser.add_argument("rows", type=Path, help="JSON lines, as bench.distributed writes them")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the tables go, between marker comments")
    args = parser.parse_args(argv)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    if not rows:
        raise SystemExit(f"{args.rows}: no rows; expected JSON lines as bench.distributed writes them")
    args.page.write_text(put_between_markers(args.page.read_text(), block(rows), str(args.page)))
    print(f"{args.page}: tables replaced", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
