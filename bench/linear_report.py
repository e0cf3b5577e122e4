"""A page and a plot of the rows that bench.linear wrote: results/<machine>-linear.md and .png.

`python -m bench.linear_report [FILE.jsonl]`; without a file, all of bench/results/*-linear.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import machine

LABELS = {
    "products": "the three products alone",
    "m2po": "linear_m2po_loss",
    "dense": "plain PyTorch, [N, V] logits",
    "trl": "TRL's log-probs",
    "liger": "Liger's fused-linear GRPO",
    "cce": "cut-cross-entropy",
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
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], out: Path) -> None:
    """Time and memory over the number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = [row for row in rows if row["case"].startswith("linear-scaling/")]
    tokens = [row["rows"] for row in own]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.loglog(tokens, [row["min_ms"] / 1e3 for row in own], marker="o")
    left.set(title="forward + backward", xlabel="tokens", ylabel="s")
    right.semilogx(tokens, [row["extra_mb"] for row in own], marker="o", label="all")
    beside = [row["extra_mb"] - row["outputs_mb"] for row in own]
    right.semilogx(tokens, beside, marker="o", label="beside the gradients")
    right.set(title="extra memory", xlabel="tokens", ylabel="MB", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.set_xticks(tokens, [str(n) for n in tokens], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)
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
