"""A page and a plot of the rows that bench.linear wrote: results/<machine>-linear.md and .png.

`python -m bench.linear_report [FILE.jsonl]`; without a file, all of bench/results/*-linear.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator

from . import machine

LABELS = {
    "products": "the three products alone",
    "m2po": "linear_m2po_loss",
    "dense": "plain PyTorch, [N, V] logits",
    "trl": "TRL's log-probs",
    "liger": "Liger's fused-linear GRPO",
    "cce": "cut-cross-entropy",
}
# Okabe and Ito's, told apart by colour-blind readers.
COLOURS = {
    "products": "#777777",
    "m2po": "#0072b2",
    "dense": "#d55e00",
    "trl": "#e69f00",
    "liger": "#009e73",
    "cce": "#cc79a7",
}


def page(rows: list[dict], plot: str) -> str:
    """The Markdown page."""
    first = rows[0]
    peers = ", ".join(f"{name} {first[name]}" for name in ("trl", "liger-kernel", "cut-cross-entropy") if first.get(name))
    lines = [
        f"# Loss and gradients from hidden states on {first['device']}",
        "",
        f"Forward + backward, {first['threads']} threads; torch {first['torch']}{', ' + peers if peers else ''}; "
        f"m2po_kernels {first['m2po_kernels']} at {first['commit']}; {first['date']}. Extra memory holds the gradients. "
        "How it is measured: [bench/README.md](../README.md).",
        "",
    ]
    cases = [row for row in rows if row["case"].startswith("linear/")]
    for share in dict.fromkeys(row["share_without_advantage"] for row in cases):
        own = [row for row in cases if row["share_without_advantage"] == share]
        ours = next(row for row in own if row["backend"] == "m2po")
        lines += [
            f"## {own[0]['rows']} tokens, H = {own[0]['width']}, V = {own[0]['vocab']}, {own[0]['dtype']}, "
            f"{share:.0%} without advantage",
            "",
            "| | median ms | least ms | samples | over ours | over the products | extra MB | GFLOP |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {LABELS[row['backend']]} | {row['median_ms']} | {row['min_ms']} | {row['samples']} | "
            f"{row['median_ms'] / ours['median_ms']:.2f} | {row['times_products']} | {row['extra_mb']} | {row['gflop']} |"
            for row in own
        ]
        lines.append("")
    lines += [
        "## Growing with the tokens, one workspace",
        "",
        f"![time and memory]({plot})",
        "",
        "| tokens | ms | extra MB | beside the gradients, MB |",
        "| ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['rows']} | {row['min_ms']} | {row['extra_mb']} | {row['extra_mb'] - row['outputs_mb']:.1f} |"
        for row in rows
        if row["case"].startswith("linear-scaling/")
    ]
    return "\n".join([*lines, *_growth(rows)]) + "\n"


def _growth(rows: list[dict]) -> list[str]:
    """What the last column means, by token."""
    own = [row for row in rows if row["case"].startswith("linear-scaling/")]
    if len(own) < 2:
        return []
    few, many = own[0], own[-1]
    beside = [row["extra_mb"] - row["outputs_mb"] for row in (few, many)]
    each = 1e6 * (beside[1] - beside[0]) / (many["rows"] - few["rows"])
    row_bytes = many["width"] * (4 if many["dtype"] == "fp32" else 2)
    return [
        "",
        f"The gradients are those of the weight and of the hidden states, {row_bytes:,} bytes a token. Beside them stands the "
        f"workspace, which has a limit; from {few['rows']:,} to {many['rows']:,} tokens the column grows by {each:,.0f} bytes a "
        "token: chunks that come nearer to that limit, the allocator's pages, and at most 16 bytes a token for log-probs, "
        "indices and coefficients.",
    ]


def draw(rows: list[dict], out: Path) -> None:
    """Every contender's time over the share without advantage; then this package over the tokens, the others where they ran."""
    first = rows[0]
    cases = [row for row in rows if row["case"].startswith("linear/")]
    own = [row for row in rows if row["case"].startswith("linear-scaling/")]
    figure, (shares, time, memory) = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    for name in dict.fromkeys(row["backend"] for row in cases):
        of = [row for row in cases if row["backend"] == name]
        style = {"color": COLOURS[name], "marker": "o", "ms": 4, "ls": "--" if name == "products" else "-"}
        shares.plot([100 * row["share_without_advantage"] for row in of], [row["median_ms"] / 1e3 for row in of], **style)
        shares.plot([], [], label=LABELS[name], **style)
    shares.set_title(f"forward + backward, {first['rows']} tokens, medians")
    shares.set(xlabel="tokens without advantage, %", ylabel="s", ylim=(0, None))
    tokens = [row["rows"] for row in own]
    ours = {"color": COLOURS["m2po"], "marker": "o", "ms": 4}
    time.plot(tokens, [row["min_ms"] / 1e3 for row in own], **ours)
    memory.plot(tokens, [row["extra_mb"] for row in own], **ours)
    beside = [row["extra_mb"] - row["outputs_mb"] for row in own]
    memory.plot(tokens, beside, **{**ours, "ls": ":", "mfc": "white"}, label="linear_m2po_loss, beside the gradients")
    for row in cases:
        if own and row["share_without_advantage"] == own[0]["share_without_advantage"] and row["backend"] != "m2po":
            dot = {"color": COLOURS[row["backend"]], "marker": "D", "ls": ""}
            time.plot([row["rows"]], [row["min_ms"] / 1e3], **dot)
            memory.plot([row["rows"]], [row["extra_mb"]], **dot)
    share = f"{own[0]['share_without_advantage']:.0%} without advantage" if own else ""
    time.set(title=f"quickest, {share}", ylabel="s")
    memory.set(title=f"extra memory, {share}", ylabel="MB")
    for axes in (time, memory):
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_xticks(tokens, [str(n) for n in tokens])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.minorticks_off()
    for axes in (shares, time, memory):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(
        f"Loss and gradients from hidden states: H = {first['width']}, V = {first['vocab']:,}, {first['dtype']}; "
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}",
        fontsize=11,
    )
    figure.savefig(out, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.linear_report", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="rows; default: bench/results/*-linear.jsonl")
    files = parser.parse_args(argv).files or sorted(machine.RESULTS.glob("*-linear.jsonl"))
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        plot = file.with_suffix(".png")
        draw(rows, plot)
        file.with_suffix(".md").write_text(page(rows, plot.name))
        print(f"{file.with_suffix('.md')} and {plot} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
