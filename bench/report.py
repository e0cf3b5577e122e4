"""From the rows of bench/results/ to a table in README.md, a table of every case, and a plot. `python -m bench.report`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from . import report_gpu
from .contenders import LABELS, TASKS
from .machine import RESULTS, ROOT

# Ends of the names of files that other commands make pages of:
DISTRIBUTED = "-distributed"  # bench.distributed, whose table is in docs/distributed.md
LINEAR = "-linear"  # bench.linear; bench.linear_report makes its page
REAL_MODEL = "-real-model"  # bench.real_model, whose tables are in docs/real-model.md
LOGITS = "-logits"  # the end of the name of a file that bench.logits wrote
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
# Blue, orange, green and purple of Okabe and Ito's set, told apart by colour-blind readers, and grey for the copy.
STYLES = {
    "sort_based": ("#d55e00", "o"),
    "compiled": ("#e69f00", "s"),
    "eager": ("#56b4e9", "^"),
    "native": ("#0072b2", "D"),
    "copy": ("#777777", "x"),
}
SHORT = {"sort_based": "(a) sort-based", "compiled": "(b) compiled", "eager": "eager", "native": "native"}


class Results:
    """The rows of one file, by (task, tokens, share, contender)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        if not rows:
            raise SystemExit(f"{path}: no rows; expected JSON lines as bench.compare writes them")
        self.facts = rows[0]
        self.cost = next((row for row in rows if row["what"] == "import"), None)
        self.rows = {(row["what"], row["tokens"], row["share"], row["backend"]): row for row in rows if row["what"] != "import"}
        self.tokens = sorted({key[1] for key in self.rows})
        self.shares = sorted({key[2] for key in self.rows})
        self.names = [name for name in STYLES if any(key[3] == name for key in self.rows)]

    def median(self, task: str, tokens: int, share: float, name: str) -> float | None:
        """ms, or None where the contender has no such row."""
        row = self.rows.get((task, tokens, share, name))
        return row["median_ms"] if row else None

    @property
    def best(self) -> str:
        """The package's backend that the ratios are shown for."""
        return "native" if "native" in self.names else "eager"

    def machine(self) -> str:
        """Where and with what, in one line."""
        f = self.facts
        return (
            f"{f['device']}, {f['threads']} threads; torch {f['torch']}, Python {f['python']}, m2po_kernels {f['m2po_kernels']}"
            f" at {f['commit']}; {f['date']}"
        )


def summary(results: Results) -> str:
    """The README's table: forward + backward as called, for each batch; then memory and import."""
    best = results.best
    names = [name for name in results.names if name != "copy"]
    head = [
        "tokens",
        "candidates",
        *(SHORT[name] for name in names),
        f"{best} against (a)",
        "gradient buffer reused",
        "forward / copy (c)",
    ]
    lines = [
        f"Forward + backward as called, fp32, median ms, measured in one run on {results.machine()}.",
        "",
        *_header(head),
    ]
    for tokens in results.tokens:
        for share in results.shares if tokens == results.tokens[-1] else results.shares[:1]:
            times = [results.median("forward_backward", tokens, share, name) for name in names]
            rows = [
                results.rows.get((t, tokens, share, best), {}) for t in ("forward_backward", "forward_backward_reused", "forward")
            ]
            called, reused = (row.get("speedup_over_sort_based") for row in rows[:2])
            lines.append(
                _line([_power(tokens), f"{share:.1%}", *map(_ms, times), _times(called), _times(reused), _ratio(rows[2])])
            )
    lines += [
        "",
        "(c) copies 17 B a token, the bytes of forward and backward together, so it moves twice as many as they do; the forward "
        "alone reads 13. The other contenders and the copy empty the caches between rounds: run alone, again and again, a "
        "batch of 2^20 tokens takes about two thirds of this. "
        f"All cases: [{results.path.stem}](bench/results/{results.path.stem}.md).",
        "",
        *_costs(results),
    ]
    return "\n".join(lines)


def logits_summary(rows: list[dict]) -> str:
    """The README's table of bench.logits: forward + backward, median ms and the memory it adds."""
    names = [row["backend"] for row in rows if row["case"] == rows[0]["case"]]
    facts = rows[0]
    lines = [
        "Log-probs of chosen tokens from logits, forward + backward (ours with `inplace=True`), median ms (MB added), in one run "
        f"on {facts['device']}, {facts['threads']} threads; torch {facts['torch']}, trl {facts['trl']}; {facts['date']}.",
        "",
        *_header(["logits", *names, "native against log_softmax", "against trl"]),
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["backend"]: row for row in rows if row["case"] == case}
        cells = [
            _ms(own[name]["median_ms"]) + ("" if own[name]["extra_mb"] is None else f" ({own[name]['extra_mb']:.0f} MB)")
            for name in names
        ]
        best = own.get("native") or own[names[-1]]
        cells += [_times(best["speedup_over_log_softmax"]), _times(best["speedup_over_trl"])]
        lines.append(_line([case.removeprefix("logits/").replace("/", " "), *cells]))
    return "\n".join(lines)


def every_case(results: Results) -> str:
    """All rows as a table: median (90th percentile) in ms."""
    names = [name for name in results.names if name != "copy"]
    lines = [
        f"# {results.facts['device']}",
        "",
        f"{results.machine()}. Median (90th percentile) in ms; ratios are of medians in this run.",
        "Made by `python -m bench.report` from the rows beside it.",
        "",
        *_header(
            [
                "task",
                "tokens",
                "candidates",
                *(SHORT[n] for n in names),
                f"{results.best} against (a)",
                f"{results.best} / copy (c)",
            ]
        ),
    ]
    for task in TASKS:
        for tokens in results.tokens:
            for share in results.shares:
                rows = [results.rows.get((task, tokens, share, name)) for name in names]
                best = results.rows.get((task, tokens, share, results.best), {})
                cells = [f"{_ms(row['median_ms'])} ({_ms(row['p90_ms'])})" if row else "" for row in rows]
                speedup = _times(best.get("speedup_over_sort_based"))
                lines.append(_line([task, _power(tokens), f"{share:.1%}", *cells, speedup, _ratio(best)]))
    return "\n".join([*lines, "", *_costs(results), ""])


def plot(results: Results, path: Path) -> None:
    """Time per token of forward + backward as called against the number of tokens, a panel for each share; log axes."""
    shares = results.shares
    figure, axes = plt.subplots(1, len(shares), figsize=(4.2 * len(shares) + 0.6, 4.4), sharey=True, squeeze=False)
    for axis, share in zip(axes[0], shares, strict=True):
        for name in results.names:
            colour, marker = STYLES[name]
            task = "copy" if name == "copy" else "forward_backward"
            points = [(n, t * 1e6 / n) for n in results.tokens if (t := results.median(task, n, share, name))]
            style = {"linestyle": "--", "linewidth": 1.2} if name == "copy" else {"linewidth": 1.8}
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=LABELS[name], **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(results.tokens, [f"$2^{{{n.bit_length() - 1}}}$" for n in results.tokens])
        axis.set_xlabel("tokens in the batch")
        axis.set_title(f"{share:.1%} of the trust region above the threshold", fontsize=10)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(True, which="major", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("nanoseconds a token (median; lower is better)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle("M2PO select + loss + backward, as called", fontsize=12, y=0.985)
    figure.text(0.5, 0.905, results.machine(), ha="center", fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.06, 1, 0.93))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def put_between_markers(text: str, block: str, name: str) -> str:
    """`text` with what stands between the marker comments replaced by `block`."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{name}: expected one line {BEGIN} and after it one line {END}, between which the table goes")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def _costs(results: Results) -> list[str]:
    lines = []
    tokens = results.tokens[-1]
    peaks = [results.rows.get(("forward", tokens, share, results.best), {}) for share in results.shares]
    said = [
        f"{row['peak_rss_mb']:g} MB at {row['share']:.1%} (limit {row['peak_limit_mb']:g})"
        for row in peaks
        if row.get("peak_rss_mb")
    ]
    if said:
        lines.append(f"Memory that the {results.best} forward of {_power(tokens)} tokens adds at its peak: {', '.join(said)}.")
    if results.cost:
        lines.append(f"`import m2po_kernels` adds {results.cost['added_ms']:.0f} ms to `import torch`.")
    return lines


def _header(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---:" for _ in cells])]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _power(tokens: int) -> str:
    """Powers of two as such."""
    return f"2^{tokens.bit_length() - 1}" if tokens & (tokens - 1) == 0 else str(tokens)


def _ms(value: float | None) -> str:
    """Three digits are what the spread of the samples bears."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x"


def _ratio(row: dict) -> str:
    return f"{row['times_copy']:.2f}" if row else ""


def mine(file: Path) -> bool:
    """Whether a file of rows is one that this command makes pages of: of bench.compare, of bench.logits, or of a GPU run."""
    with file.open() as rows:
        first = json.loads(rows.readline() or "{}")
    return report_gpu.is_gpu(file) or file.stem.endswith(LOGITS) or first.get("what") in TASKS


def made(files: list[Path], readme: Path) -> dict[Path, str]:
    """What each page is that `files` of rows go into: those beside them, and README.md with its tables."""
    pages: dict[Path, str] = {}
    gpus: dict[Path, list[Path]] = {}
    blocks = []
    for file in files:
        if report_gpu.is_gpu(file):
            page = file.with_name(file.stem.removesuffix(report_gpu.LOGITS).removesuffix(report_gpu.TOKENS) + "-gpu.md")
            gpus.setdefault(page, []).append(file)
        elif file.stem.endswith(LOGITS):
            blocks.append(logits_summary([json.loads(line) for line in file.read_text().splitlines()]))
        else:
            results = Results(file)
            pages[file.with_suffix(".md")] = every_case(results)
            blocks.append(summary(results))
    pages |= {page: report_gpu.page(own) for page, own in gpus.items()}
    if blocks:
        pages[readme] = put_between_markers(readme.read_text(), "\n\n".join(blocks), str(readme))
    return pages


def main(argv: list[str] | None = None) -> int:
    """The command: for each file of rows a table of all cases and a plot beside it; the summaries into the README."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="rows; default: every .jsonl in bench/results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="where the table goes, between marker comments")
    args = parser.parse_args(argv)
    files = args.files or [
        file for file in sorted(RESULTS.glob("*.jsonl")) if not file.stem.endswith((DISTRIBUTED, LINEAR, REAL_MODEL))
    ]
    if not files:
        parser.error(f"no rows in {RESULTS}: run `python -m bench.compare` first")
    for file in files:
        if not file.is_file():
            parser.error(f"files: {file} is no file; expected JSON lines as bench.compare writes them")
    if not args.files:
        files = [file for file in files if mine(file)]
    for page, text in made(files, args.readme).items():
        page.write_text(text)
        print(f"{page} written", file=sys.stderr)
    for file in files:
        if not report_gpu.is_gpu(file) and not file.stem.endswith(LOGITS):
            plot(Results(file), file.with_suffix(".png"))
            print(f"{file.with_suffix('.png')} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
