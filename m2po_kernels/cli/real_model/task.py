"""The task of `m2po collect`: one-digit additions and subtractions, whose answers a regular expression can verify."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

import torch
from torch import Tensor

DESCRIPTION = "one-digit additions and subtractions"


class Problem(NamedTuple):
    """What is asked, and the right answer."""

    question: str
    answer: int


def problems(number: int, seed: int) -> list[Problem]:
    """`number` problems, the same for the same seed; all different while there are enough (200)."""
    every = [(a, sign, b) for a in range(10) for sign in "+-" for b in range(10)]
    shuffled = random.Random(seed).sample(every, len(every))
    chosen = (shuffled[i % len(shuffled)] for i in range(number))
    return [Problem(f"What is {a} {sign} {b}?", a + b if sign == "+" else a - b) for a, sign, b in chosen]


def reward(text: str, answer: int) -> float:
    """1 if the last number in `text` is the answer, else 0. A minus counts only right before the digits and after no digit."""
    numbers = re.findall(r"(?<![\d.])-?\d+(?![\d]|\.\d)", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def group_advantages(rewards: Tensor, samples: int) -> Tensor:
    """(reward - group mean) / (group standard deviation + 1e-6) for rewards [groups * samples]; exactly 0 where a group agrees.

    samples: 2 or more.
    """
    groups = rewards.view(-1, samples)
    agrees = (groups == groups[:, :1]).all(1, keepdim=True)
    centred = groups - groups.mean(1, keepdim=True)
    return torch.where(agrees, 0.0, centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()
