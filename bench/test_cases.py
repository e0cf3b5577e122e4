"""pytest-benchmark cases: task x tokens x share of candidates x contender, each compared with the oracle before it is timed."""

from __future__ import annotations

from functools import lru_cache

import pytest

from . import contenders, gate
from .data import SHARES, TOKENS, TokenBatch, make_batch

ROUNDS = {TOKENS[0]: 30, TOKENS[1]: 10, TOKENS[2]: 3}
BATCHES = [(tokens, share) for tokens in TOKENS for share in SHARES]
CASES = [
    pytest.param(tokens, share, task, name, id=f"{task}-{tokens}-{share:g}-{name}")
    for tokens, share in BATCHES
    for task in contenders.TASKS
    for name in contenders.NAMES
    if contenders.has(name, task)
]


@lru_cache(maxsize=1)
def _batch(tokens: int, share: float) -> tuple[TokenBatch, gate.Oracle]:
    """The cases are ordered by batch, so one is held at a time: at 2^24 tokens it takes half a gigabyte."""
    batch = make_batch(tokens, share)
    return batch, gate.Oracle.of(batch)


@pytest.mark.parametrize(("tokens", "share", "task", "name"), CASES)
def test_task(benchmark, tokens: int, share: float, task: str, name: str) -> None:
    reason = contenders.why_not(name)
    if reason:
        pytest.skip(f"{name}: {reason}")
    batch, oracle = _batch(tokens, share)
    call = contenders.make_call(name, task, batch)
    gate.check(oracle, call, f"{name} {task}, {tokens} tokens, {share:.1%} candidates")
    benchmark.group = f"{task}, {tokens} tokens, {share:.1%} candidates"
    benchmark.extra_info.update(tokens=tokens, share=share, measured_share=batch.measured_share, task=task, contender=name)
    benchmark.pedantic(call.run, setup=call.reset, rounds=ROUNDS[tokens])
    call.reset()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("way", contenders.copy_calls(0))
def test_copy(benchmark, tokens: int, way: str) -> None:
    call = contenders.copy_calls(tokens)[way]
    benchmark.group = f"copy of {contenders.COPY_BYTES_PER_TOKEN} B a token, {tokens} tokens"
    benchmark.extra_info.update(tokens=tokens, contender="copy", way=way)
    benchmark.pedantic(call.run, rounds=30, warmup_rounds=3)
