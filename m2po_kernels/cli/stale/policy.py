"""The policy: a small Llama from the transformers library, its supervised warm start, and the copy that samples."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...logits import selective_log_softmax
from ..shared import CliError, need
from . import task as tasks
from .plan import Plan
from .task import Task


class Rollouts(NamedTuple):
    """What the inference copy wrote. Rows: responses; columns: their tokens, padded to the longest allowed."""

    prompts: Tensor  # int64 [N, P]
    responses: Tensor  # int64 [N, R]
    mask: Tensor  # bool [N, R]: up to the end token
    log_probs: Tensor  # fp32 [N, R]: from bf16 logits, as an engine reports them
    entropy: Tensor  # fp32 [N, R], of the distribution that each token was drawn from
    rewards: Tensor  # fp32 [N]

    def rows(self, where: slice) -> Rollouts:
        return Rollouts(*(tensor[where] for tensor in self))


def generator(*numbers: int) -> torch.Generator:
    """Random numbers for one purpose, the same in every run that names the same numbers, whatever was drawn before."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator().manual_seed(state)


def new_model(plan: Plan, seed: int) -> Any:
    """A fresh fp32 LlamaForCausalLM with weights drawn from `seed`."""
    transformers = need("transformers", "stale")
    config = transformers.LlamaConfig(
        vocab_size=tasks.VOCABULARY,
        hidden_size=plan.width,
        intermediate_size=2 * plan.width,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def response_log_probs(model: Any, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy), fp32 [N, R], of the response tokens under `model`; the entropy is detached.

    Padding within a prompt is a token like any other, so no attention mask is needed.
    """
    tokens = torch.cat([prompts, responses[:, :-1]], dim=1)
    logits = model(tokens, use_cache=False, logits_to_keep=responses.shape[1]).logits
    log_probs, entropy = selective_log_softmax(logits, responses, return_entropy=True)
    return log_probs, entropy


class Engine:
    """The inference copy: bf16 weights of its own, refreshed by `load`. Its log-probs are not quite the trainer's."""

    def __init__(self, model: Any, task: Task) -> None:
        self.model = copy.deepcopy(model).to(torch.bfloat16)
        self.task = task
        self.load(model)

    @torch.no_grad()
    def load(self, model: Any) -> None:
        torch._foreach_copy_(list(self.model.parameters()), list(model.parameters()))

    @torch.no_grad()
    def sample(self, prompts: Tensor, random: torch.Generator) -> Rollouts:
        """One response to each prompt at temperature 1, by inverting the distribution function at uniform numbers.

        The numbers depend on `random` alone, so policies that differ little answer alike (common random numbers).
        """
        uniform = torch.rand(self.task.response_length, len(prompts), generator=random)
        cache = need("transformers", "stale").DynamicCache(config=self.model.config)
        tokens, chosen, scores, entropies = prompts, [], [], []
        for u in uniform:
            logits = self.model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            log_probs = logits.float().log_softmax(-1)
            probs = log_probs.exp()
            token = (probs.cumsum(-1) < u[:, None]).sum(-1).clamp(max=tasks.VOCABULARY - 1)
            chosen.append(token)
            scores.append(log_probs.gather(-1, token[:, None])[:, 0])
            entropies.append(-(probs * log_probs).sum(-1))
            tokens = token[:, None]
        responses = torch.stack(chosen, 1)
        rewards = self.task.rewards(prompts, responses)
        mask = tasks.valid_tokens(responses)
        return Rollouts(prompts, responses, mask, torch.stack(scores, 1), torch.stack(entropies, 1), rewards)


def warm_start(plan: Plan, task: Task, seed: int) -> tuple[Any, int]:
    """(model, steps): supervised until its own sampled responses earn `warm_reward`, so that rewards are mixed."""
    model = new_model(plan, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.warm_learning_rate, weight_decay=0.0, fused=True)
    engine = Engine(model, task)
    for step in range(1, plan.warm_limit + 1):
        prompts = task.prompts(plan.warm_batch, generator(seed, 1, step))
        responses, mask = task.solutions(prompts, plan.warm_mistakes, generator(seed, 6, step))
        log_probs, _ = response_log_probs(model, prompts, responses)
        loss = -(log_probs * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % plan.warm_check_every == 0:
            engine.load(model)
            if float(evaluate(plan, engine, seed).rewards.mean()) >= plan.warm_reward:
                return model, step
    raise CliError(f"the warm start of seed {seed} did not reach a reward of {plan.warm_reward:g} in {plan.warm_limit} steps")


def evaluate(plan: Plan, engine: Engine, seed: int) -> Rollouts:
    """One response to each of a fixed set of prompts of this seed, drawn with the same random numbers each time."""
    prompts = engine.task.prompts(plan.eval_prompts, generator(seed, 2))
    return engine.sample(prompts, generator(seed, 3))
