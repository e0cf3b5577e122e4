"""Heads whose vocabulary is split over the ranks of a process group (gloo): linear_ranks.py on 2 and 4 processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m2po_kernels.linear.vocab_parallel import combine

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_vocabulary(ranks, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "linear_ranks.py")]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    report = "\n".join(f"rank {rank}:\n{output}" for rank, output in enumerate(outputs))
    assert [process.returncode for process in running] == [0] * ranks, report


def test_combining_is_in_the_order_of_the_ranks():
    """Every rank gets the same bits from the same gathered numbers; a rank without columns changes none."""
    g = torch.Generator().manual_seed(0)
    everyone = torch.randn(4, 4, 50, generator=g)
    everyone[:, 1] = -everyone[:, 1].abs()
    everyone[1:, 2] = -torch.inf  # rank 0 has the token
    results = [combine(everyone, rank) for rank in range(4)]
    assert all(torch.equal(r.log_prob, results[0].log_prob) for r in results)
    shares = sum(r.log_share.double().exp() for r in results)
    assert bool(((shares - 1).abs() < 4 * 2.0**-24).all())
    empty = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])[None, :, None].expand(1, 4, 50)
    padded = combine(torch.cat([empty, everyone]), 1)
    assert torch.equal(padded.log_prob, results[0].log_prob)
    assert torch.equal(padded.entropy, results[0].entropy)
