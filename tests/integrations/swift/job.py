"""Runs `swift rlhf` with the adapter, once for each case, and writes down what each optimizer step saw.

python job.py FOLDER CASES, or under torchrun. FOLDER has model and data.jsonl; CASES is JSON: name -> {"options": ..., "tweak":
...}.
For each case and rank: FOLDER/name/rank.pt, a list of steps, each with its micro-batches and the gradient before optimizer.step;
or an "error".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from swift.pipelines import rlhf_main
from swift.rewards import ORM, orms
from swift.trainers import TrainerFactory, mixin
from transformers import TrainerCallback

from m2po_kernels import M2POError
from m2po_kernels.integrations import swift as adapter

OPTIONS = {
    "rlhf_type": "grpo",
    "model_type": "qwen2",
    "template": "qwen2_5",
    "reward_funcs": "digits",
    "use_vllm": "false",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 8,
    "max_length": 64,
    "max_steps": 3,
    "loss_type": "dapo",
    "beta": 0,
    "tuner_type": "full",
    "torch_dtype": "float32",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "split_dataset_ratio": 0,
    "attn_impl": "eager",
    "dataloader_num_workers": 0,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "max_grad_norm": 0,
    "gradient_checkpointing": "false",
    "temperature": 1.0,
    "use_hf": "true",
    "use_cpu": "true",
}
NOISE = 0.4


class Digits(ORM):
    """A reward that differs between completions: their digits and length."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) + 0.01 * len(text) for text in completions]


class Recorder(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.steps.append(
            {
                "head_calls": trainer.head_calls,
                "micro_batches": [_plain(m) for m in trainer.seen],
                "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
                "gradient": {n: p.grad.clone() for n, p in model.named_parameters()},
            }
        )
        trainer.seen.clear()
        trainer.head_calls = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "m2/before" in logs:
            self.trainer.steps[-1]["logs"] = dict(logs)


def _plain(micro_batch: dict[str, Any]) -> dict[str, Any]:
    batch, inputs = micro_batch["grpo_batch"], micro_batch["model_inputs"]
    names = ("completion_mask", "truncated_mask", "advantages", "rollout_per_token_logps", "ref_per_token_logps")
    return {
        **{name: getattr(batch, name) for name in names},
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
    }


class Trainer(adapter.M2POTrainer):
    """The adapter under test with a stale rollout engine: noise on its log-probs; notes what is trained on."""

    tweak: ClassVar[dict[str, Any]] = {}
    made: ClassVar[Trainer | None] = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        self.head_calls = 0  # since the generation or the optimizer step before
        self.model.get_output_embeddings().register_forward_hook(self.count_head_call)
        self.add_callback(Recorder(self))
        type(self).made = self

    def count_head_call(self, *args: Any) -> None:
        self.head_calls += 1

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        micro_batches = super()._generate_and_score_completions(inputs)
        rank = self.accelerator.process_index
        noise = torch.Generator().manual_seed(1000 * self.state.global_step + rank)
        for micro_batch in micro_batches:
            batch = micro_batch["grpo_batch"]
            batch.rollout_per_token_logps += NOISE * torch.randn(batch.completion_mask.shape, generator=noise)
            if self.tweak.get("unscored"):
                batch.rollout_per_token_logps[0, :2] = torch.nan
        if self.tweak.get("missing_on_rank") == rank:
            micro_batches[-1]["grpo_batch"].rollout_per_token_logps = None
        self.head_calls = 0
        return micro_batches

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.tweak.get("ends_early"):
            self.accelerator.gradient_state._set_sync_gradients(True)
        loss = super().training_step(model, inputs, *args, **kwargs)
        step = (self._step - 1) % self.args.steps_per_generation
        self.seen.append(self._buffered_inputs[step])
        return loss


def run(folder: Path, name: str, options: dict[str, Any], tweak: dict[str, Any]) -> None:
    (folder / name).mkdir(exist_ok=True)
    paths = {"model": folder / "model", "dataset": folder / "data.jsonl", "output_dir": folder / name / "out"}
    arguments = {**OPTIONS, **paths, "add_version": "false", **options}
    if "RANK" in os.environ:
        arguments["ddp_backend"] = "gloo"
    Trainer.tweak, Trainer.made = tweak, None
    adapter.register(m2_threshold=tweak.get("m2_threshold", 0.04), linear_log_probs=tweak.get("linear_log_probs", False))
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.Trainer"
    result: Any
    try:
        rlhf_main([str(x) for key, value in arguments.items() for x in (f"--{key}", value)])
        result = Trainer.made.steps if Trainer.made else None  # None: a plugin has chosen another class
    except M2POError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(result, folder / name / f"{rank}.pt")


if __name__ == "__main__":
    mixin.check_local_model_is_latest = lambda *args, **kwargs: None  # asks the network
    orms["digits"] = Digits
    for name, case in json.loads(sys.argv[2]).items():
        run(Path(sys.argv[1]), name, case.get("options", {}), case.get("tweak", {}))
