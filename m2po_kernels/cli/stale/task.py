"""The task: add up digits, modulo 10, showing the work. Verifiable, and harder with every digit.

A prompt is n digits in a field of fixed width, and "=". The work is the running sums modulo 10, the last of which is the
answer, and then the end token:

    3 8 5 1 . . . . =    ->    3 1 6 7 end

Only the answer is checked: the token before the end token. A response that does not end in time earns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD, EQUALS, END = 10, 11, 12
VOCABULARY = 13


@dataclass(frozen=True)
class Task:
    """levels: numbers of digits, one per difficulty; prompt i of a batch has difficulty i modulo their number."""

    levels: tuple[int, ...]

    @property
    def prompt_length(self) -> int:
        return max(self.levels) + 1

    @property
    def response_length(self) -> int:
        """The longest right response, and one token to spare."""
        return max(self.levels) + 2

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """int64 [count, prompt_length]."""
        field = max(self.levels)
        digits = torch.randint(10, (count, field), generator=generator)
        length = torch.tensor(self.levels).repeat(-(-count // len(self.levels)))[:count]
        used = torch.arange(field) < length[:, None]
        return torch.cat([torch.where(used, digits, PAD), torch.full((count, 1), EQUALS)], dim=1)

    def answers(self, prompts: Tensor) -> Tensor:
        """int64 [count]: the sum of the digits modulo 10."""
        return torch.where(prompts < PAD, prompts, 0).sum(1) % 10

    def solutions(self, prompts: Tensor, mistakes: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens, mask), [count, response_length]: the shown work of each prompt; the mask ends with the end token.

        mistakes: the probability that a step adds a wrong digit; the work goes on from there.
        """
        digits = prompts[:, :-1]
        wrong = torch.rand(digits.shape, generator=generator) < mistakes
        off = torch.randint(1, 10, digits.shape, generator=generator)
        sums = (digits + torch.where(wrong, off, 0)).cumsum(1) % 10
        tokens = torch.where(digits < PAD, sums, END)
        # The end token after the longest prompt, and the token to spare.
        tokens = torch.cat([tokens, torch.full((len(prompts), 2), END)], dim=1)
        return tokens, valid_tokens(tokens)

    def rewards(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """fp32 [count]: 1 where the token before the first end token is the answer, else 0."""
        ended = responses == END
        first = torch.where(ended.any(1), ended.int().argmax(1), 0)
        before = responses.gather(1, (first - 1).clamp(min=0)[:, None])[:, 0]
        return ((first > 0) & (before == self.answers(prompts))).float()


def valid_tokens(responses: Tensor) -> Tensor:
    """bool, as responses: the tokens up to the first end token, that one included."""
    ended = (responses == END).int()
    return ended.cumsum(1) - ended == 0
