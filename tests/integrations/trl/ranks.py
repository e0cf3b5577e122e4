"""One of two gloo ranks: `torchrun --nproc-per-node 2 ranks.py OUT` runs every case and writes what it saw to OUT/<rank>.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest  # noqa: F401  (settings for trl)
import tiny
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from tiny import Recorded, config, gradient
from whole import whole_batch

from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.integrations.trl_config import check_logprobs_mode

LAYOUTS = [(4, 1, 1, 1), (2, 2, 2, 1), (2, 2, 4, 2)]
FIELDS = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "sampling_per_token_logps",
)  # fmt: skip


def gradients(layout: tuple[int, int, int, int], out: str, linear: bool, **kwargs: Any) -> dict[str, Any]:
    """Relative errors of the gradients that DDP averaged, and the metrics of each step."""
    errors, apart = [], []

    def check(trainer: Recorded, seen: list[dict[str, Any]]) -> None:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        everywhere = gather_object([{name: inputs[name] for name in FIELDS} for inputs in seen])
        want = whole_batch(policy, everywhere).gradient
        other = whole_batch(policy, everywhere, per_micro_batch=True).gradient
        errors.append(float((gradient(policy) - want).norm() / want.norm()))
        apart.append(float((other - want).norm() / want.norm()))

    trainer = Recorded(config(out, layout, linear_log_probs=linear, ddp_backend="gloo"), check, **kwargs)
    trainer.train()
    logged = [{name: row[name] for name in row if name.startswith("m2/")} for row in trainer.state.log_history]
    return {"errors": errors, "apart": apart, "logged": logged}


def missing_on_one(out: str) -> str:
    """What a rank raises where rank 1 alone has no log-probs of the engine."""

    def rollout(prompts: list[str], trainer: Recorded) -> dict[str, Any]:
        result = tiny.rollout(prompts, trainer)
        return result | {"logprobs": None} if trainer.accelerator.process_index == 1 else result

    try:
        Recorded(config(out, ddp_backend="gloo"), rollout_func=rollout).train()
    except MissingBehaviorLogProbs as error:
        return str(error)
    return "nothing was raised"


def tied_on_one(completions: list[str], **_: Any) -> list[float]:
    """Rewards that leave rank 1 without an advantage."""
    return [float(i) * (dist.get_rank() == 0) for i in range(len(completions))]


def raw_log_probs() -> str:
    """What a rank raises where the server, which rank 0 alone talks to, has log-probs of another distribution."""
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "raw_logprobs"}})
    accelerator = Accelerator(cpu=True)
    try:
        check_logprobs_mode(SimpleNamespace(vllm_client=client if accelerator.is_main_process else None), accelerator)
    except InvalidArgument as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    out = Path(sys.argv[1])
    seen: dict[str, Any] = {}
    for linear in (True, False):
        for layout in LAYOUTS:
            seen[f"{layout} {linear}"] = gradients(layout, str(out / "run"), linear)
        seen[f"tied {linear}"] = gradients((4, 1, 1, 1), str(out / "run"), linear, rewards=tied_on_one)
    seen["missing"] = missing_on_one(str(out / "run"))
    seen["raw"] = raw_log_probs()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
