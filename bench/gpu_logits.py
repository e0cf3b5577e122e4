"""Log-probs, and GRPO's loss, from logits on a GPU: forward and backward against a copy of as many bytes, and the peers.

`python -m bench.gpu_logits` (a minute or two, or `--budget`), part of `bench/gpu.sh`. `--quick --device cpu` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2po_kernels import grpo_loss, selective_log_softmax

from . import machine
from .device_time import Rows, Work, attempt, copy_ms, measure, say
from .logits import DTYPES, TOLERANCE, function, why_absent

CASES = ((8192, 151936, "bf16"), (8192, 32768, "bf16"), (32768, 151936, "bf16"))
QUICK_CASES = ((64, 1000, "bf16"),)
SEQUENCE = 1024  # rows of a sequence, the last of which has no token in the GRPO case
LOG_PROBS = ("triton", "native", "eager", "log_softmax", "compiled", "trl")
GRPO = ("triton", "native", "liger", "torch")
INPLACE = ("triton", "native", "eager", "liger")  # write their gradient over the logits
CLIP = 0.2


@dataclass(frozen=True)
class Batch:
    """logits [B, T, V] with a gradient; ids, old log-probs and mask [B, T]; advantages [B]."""

    logits: Tensor
    ids: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor


def make(rows: int, vocab: int, dtype: str, device: str) -> Batch:
    """Logits as a language model gives them (spread 3, one column well above the rest); a tenth of the tokens is not valid."""
    generator = torch.Generator(device).manual_seed(rows + vocab)
    length = min(SEQUENCE, rows)
    shape = (rows // length, length)
    logits = torch.empty(*shape, vocab, dtype=DTYPES[dtype], device=device).normal_(0, 3, generator=generator)
    ids = torch.randint(vocab, shape, device=device, generator=generator)
    logits.scatter_(-1, ids[..., None], 12.0)
    old = torch.empty(shape, device=device).normal_(-0.5, 0.3, generator=generator)
    advantages = torch.empty(shape[0], device=device).normal_(generator=generator)
    mask = torch.rand(shape, device=device, generator=generator) < 0.9
    return Batch(logits.requires_grad_(), ids, old, advantages, mask)


def why_not(name: str, device: str) -> str | None:
    """None if the contender runs on `device` here, else why not."""
    if name in ("torch", "compiled"):
        return None
    if name == "liger":
        if device == "cpu":
            return "its kernels run on a GPU"
        try:
            import liger_kernel.transformers.grpo_loss  # noqa: F401
        except ImportError as error:
            return f"pip install liger-kernel ({error})"
        return None
    return why_absent(name, device)


def log_probs_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """log-probs [B, T] from logits [B, T, V] and ids [B, T]."""
    if name in ("log_softmax", "compiled"):
        flat = function("log_softmax")
        if name == "compiled":
            flat = torch.compile(flat, fullgraph=True, dynamic=False)
        return lambda logits, ids: flat(logits.flatten(0, 1), ids.flatten()).view(ids.shape)
    return function(name)


def grpo_of(name: str, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The sum over valid tokens of GRPO's clipped loss, of logits [B, T, V]. The last row of a sequence has no token here."""
    ids, old, mask = (t[:, :-1].contiguous() for t in (batch.ids, batch.old, batch.mask))
    advantages = batch.advantages
    if name == "torch":
        return lambda logits: torch_grpo(logits, ids, old, advantages, mask)
    if name == "liger":
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        valid = mask.float()
        options: dict[str, Any] = {"temperature": 1.0, "beta": 0.0, "eps_low": CLIP, "eps_high": CLIP, "loss_type": "grpo"}

        def theirs(logits: Tensor) -> Tensor:
            per_token, *_ = triton_grpo_loss(logits, old, None, ids, advantages, valid, inplace=True, reduce=False, **options)
            return (per_token * valid).sum()

        return theirs
    shifted = torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)  # shift=1 pairs row t with token t + 1

    def ours(logits: Tensor) -> Tensor:
        lp = selective_log_softmax(logits, shifted, shift=1, inplace=True, backend=name)
        assert isinstance(lp, Tensor)
        return grpo_loss(lp, old, advantages, mask, reduction="sum", backend=name).loss

    return ours


def torch_grpo(logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The same in plain torch code, as trainers write it; fp64 for fp64 logits, else fp32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ratio = (wide[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0] - old).exp()
    per_token = -torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return torch.where(mask, per_token, 0.0).sum()


def work_of(task: str, name: str, batch: Batch) -> Work:
    """What is timed. A contender that writes its gradient over the logits gets them back before each run, untimed."""
    leaf = batch.logits
    master = leaf.detach().clone() if name in INPLACE else None

    def reset() -> None:
        if master is not None:
            leaf.detach().copy_(master)

    if task == "grpo":
        loss = grpo_of(name, batch)
        return Work(lambda: loss(leaf), lambda out: torch.autograd.grad(out, leaf)[0], reset)
    run, flow = log_probs_of(name), batch.old
    return Work(lambda: run(leaf, batch.ids), lambda out: torch.autograd.grad(out, leaf, flow.to(out.dtype))[0], reset)


def gate(task: str, name: str, vocab: int, dtype: str, device: str) -> None:
    """Raise unless values and gradient of a few rows agree with fp64, within what bench.logits allows."""
    batch = make(64, vocab, dtype, device)
    wide = batch.logits.detach().double().requires_grad_()
    if task == "grpo":
        want = grpo_of("torch", batch)(wide)
        (want_grad,) = torch.autograd.grad(want, wide)
    else:
        want = wide.log_softmax(-1).gather(-1, batch.ids[..., None])[..., 0]
        (want_grad,) = torch.autograd.grad(want, wide, batch.old.double())
    work = work_of(task, name, batch)
    work.reset()
    got = work.forward()
    assert work.backward is not None
    value, grad = got.detach().clone(), work.backward(got)
    summed = batch.ids.numel() if task == "grpo" else 1  # the loss is a sum over tokens
    off = float((value.double() - want.detach()).abs().max()) / summed, float((grad.double() - want_grad).abs().max())
    if not max(off) <= TOLERANCE[dtype]:
        raise AssertionError(f"off by {max(off)}, allowed is {TOLERANCE[dtype]}; no time is reported")


def compare(rows: Rows, n: int, vocab: int, dtype: str, names: dict[str, list[str]], device: str, seconds: float) -> None:
    """The rows of one shape."""
    say(f"{n} x {vocab} {dtype}")
    n_bytes = n * vocab * DTYPES[dtype].itemsize
    copies = copy_ms(n_bytes, device), copy_ms(2 * n_bytes, device)
    for task in ("log_probs", "grpo"):
        for name in names[task]:
            row = {
                "case": f"{task}/{n}x{vocab}/{dtype}",
                "what": task,
                "rows": n,
                "vocab": vocab,
                "dtype": dtype,
                "backend": name,
            }
            attempt(rows, row, lambda task=task, name=name: _measured(task, name, n, vocab, dtype, copies, device, seconds))


def _measured(
    task: str, name: str, n: int, vocab: int, dtype: str, copies: tuple[float, float], device: str, seconds: float
) -> dict[str, Any]:
    gate(task, name, vocab, dtype, device)
    times = measure(work_of(task, name, make(n, vocab, dtype, device)), device, seconds)
    return {
        **times,
        "forward_percent_of_copy": round(100 * copies[0] / times["forward_ms"], 1),
        "backward_percent_of_copy": round(100 * copies[1] / times["backward_ms"], 1),
    }


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 if anything failed. What could be measured is in the rows all the same."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_logits", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="64 x 1000 only, rows go nowhere unless --out is given")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender and task")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no new shape is begun")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-gpu-logits.jsonl; the file is replaced")
    args = parser.parse_args(argv)
    shared = machine.facts(args.device) | {name: machine.version(name) for name in ("trl", "liger-kernel")}
    out = args.out or (None if args.quick else machine.RESULTS / f"{machine.slug(str(shared['device']))}-gpu-logits.jsonl")
    rows = Rows(out, shared)
    names: dict[str, list[str]] = {"log_probs": [], "grpo": []}
    for task, wanted in (("log_probs", LOG_PROBS), ("grpo", GRPO)):
        for name in wanted:
            reason = why_not(name, args.device)
            if reason is None:
                names[task].append(name)
            else:
                say(f"{name} is left out: {reason}")
    start, left_out = time.perf_counter(), []
    for n, vocab, dtype in QUICK_CASES if args.quick else CASES:
        if time.perf_counter() - start > args.budget:
            left_out.append(f"{n}x{vocab}")
            continue
        compare(rows, n, vocab, dtype, names, args.device, args.seconds)
    if left_out:
        say(f"no time for {', '.join(left_out)}")
    return rows.finish()


if __name__ == "__main__":
    raise SystemExit(main())
