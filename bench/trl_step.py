"""A whole optimizer step of TRL with M2PO: log-probs and loss from hidden states by this package, against TRL's own head.

`build/integrations/trl/bin/python -m bench.trl_step` after `make test-trl` (about 40 minutes on 2 quiet cores; `--quick`: a tiny
model). Each run of a contender is a process of its own: weights and rollouts from fixed seeds, one step that is not timed, then
timed ones. The contenders take turns, and no row is written unless their gradients agree. Rows go to
bench/results/<machine>-trl-step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from . import machine
from .memory import MB, peak_bytes, reset_peak

CONTENDERS = {"m2po": True, "trl": False}  # what linear_log_probs is
SHARES = (0.0, 0.5)  # of the prompts whose completions get equal rewards, so no advantage; 45.6 % in the recorded rollouts
NOISE = 0.05  # of the behaviour log-probs: so little that nothing is dropped, as a token at the cut could differ between heads

# Relative to the norm of the gradient. A gate against wrong results: both are fp32, through 30 layers in another order of sums.
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A Llama of this shape, and per optimizer step `accumulation` micro-batches of `batch` completions."""

    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    batch: int
    accumulation: int
    prompt: int
    completion: int


CASES = {
    "smollm2-135m": Case(49152, 576, 1536, 30, 9, 3, 4, 2, 16, 256),
    "qwen2.5-0.5b": Case(151936, 896, 4864, 24, 14, 2, 4, 1, 16, 128),
    "quick": Case(4000, 64, 128, 2, 4, 2, 4, 2, 8, 32),
}


def child(name: str, case: Case, share: float, steps: int, gradients: Path) -> dict[str, Any]:
    """Trains with contender `name`; times and memory of `steps` steps. The gradient of each parameter goes to `gradients`."""
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from m2po_kernels.integrations.trl import M2POConfig, M2POTrainer

    from .trl_rollouts import Rollouts, prompts, rewards, tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.width,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    times: list[float] = []

    class Watch(TrainerCallback):
        before = 0.0

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == steps + 1:
                self.before = reset_peak()
            self.start = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.start)
            if len(times) == 1:
                torch.save([p.grad for p in model.parameters()], gradients)

    watch = Watch()

    args = M2POConfig(
        output_dir=str(gradients.parent / "out"),
        linear_log_probs=CONTENDERS[name],
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.accumulation,
        steps_per_generation=case.accumulation,
        num_iterations=steps + 2,  # one generation for all steps
        num_generations=2,
        max_completion_length=case.completion,
        max_steps=steps + 2,
        learning_rate=0.0,  # every step is the same one
        max_grad_norm=0.0,
        optim="sgd",
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = M2POTrainer(
        LlamaForCausalLM(config),
        rewards(share),
        args,
        train_dataset=prompts(case.batch * case.accumulation // 2),
        processing_class=tokenizer(),
        rollout_func=Rollouts(case.prompt, case.completion, NOISE),
        callbacks=[watch],
    )
    trainer.train()
    extra = (peak_bytes() - watch.before) / MB
    dropped = [row["m2/masked_fraction"] for row in trainer.state.log_history if "m2/masked_fraction" in row]
    # The first step loads what is loaded once, and takes its log-probs from the generation. The last is for the memory: before it
    # freed memory goes back to the system, which costs time.
    return {"seconds": times[1:-1], "extra_mb": extra, "masked_fraction": max(dropped)}


def run(name: str, case: str, share: float, steps: int, gradients: Path) -> dict[str, Any]:
    """`child` in a process of its own."""
    arguments = ["--child", name, case, str(share), str(steps), str(gradients)]
    done = subprocess.run([sys.executable, "-m", "bench.trl_step", *arguments], cwd=machine.ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}, {case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gate(case: str, files: dict[str, Path]) -> float:
    """Raise unless the gradients agree; returns how far they are apart."""
    ours, theirs = (torch.load(files[name], mmap=True) for name in CONTENDERS)
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True)) ** 0.5
    norm = sum(float(b.double().square().sum()) for b in theirs) ** 0.5
    if not apart <= TOLERANCE * norm:
        raise AssertionError(f"{case}: the gradients are {apart / norm:.1e} of their norm apart; no time is reported")
    return apart / norm


def compare(case: str, share: float, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The rows of one case: `rounds` processes of each contender by turns."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.pt" for name in CONTENDERS}
        for _ in range(rounds):
            for name, results in seen.items():
                results.append(run(name, case, share, steps, files[name]))
        apart = gate(case, files)
    rows = []
    for name, results in seen.items():
        samples = sorted(second for result in results for second in result["seconds"])
        rows.append(
            {
                "case": f"trl-step/{case}/{share:g}",
                "backend": name,
                **CASES[case]._asdict(),
                "share_without_advantage": share,
                "samples": len(samples),
                "min_ms": round(samples[0] * 1e3, 1),
                "median_ms": round(median(samples) * 1e3, 1),
                "p90_ms": round(samples[int(0.9 * (len(samples) - 1))] * 1e3, 1),
                "extra_mb": round(max(result["extra_mb"] for result in results), 1),
                "masked_fraction": max(result["masked_fraction"] for result in results),
                "gradients_apart": apart,
            }
        )
        print("  {case} {backend}: {median_ms} ms, {extra_mb} MB".format(**rows[-1]), file=sys.stderr, flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.trl_step", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model; rows go nowhere unless --out is given")
    parser.add_argument("--cases", nargs="+", choices=[name for name in CASES if name != "quick"], default=["smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=2, help="processes of each contender")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in each process")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-trl-step.jsonl; the file is replaced")
    parser.add_argument("--child", nargs=5, metavar=("NAME", "CASE", "SHARE", "STEPS", "GRADIENTS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        name, case, share, steps, gradients = args.child
        print(json.dumps(child(name, CASES[case], float(share), int(steps), Path(gradients))))
        return 0
    facts = machine.facts() | {name: machine.version(name) for name in ("trl", "transformers")}
    rows = []
    for case in ["quick"] if args.quick else args.cases:
        for share in SHARES:
            rows += compare(case, share, 1 if args.quick else args.rounds, args.steps)
    if args.quick and args.out is None:
        return 0
    out = args.out or machine.RESULTS / f"{machine.slug(str(facts['device']))}-trl-step.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    print(f"{len(rows)} rows written to {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
