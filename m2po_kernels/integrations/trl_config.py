"""`M2POConfig`: GRPOConfig with M2PO's options, and what of it has no place beside them. docs/integrations/trl.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import broadcast_object_list
from trl import GRPOConfig

from m2po_kernels import M2Accumulator
from m2po_kernels.errors import InvalidArgument

_SAMPLED = "M2PO weighs a token by how likely it was to be sampled, and the trainer's log-probs know of temperature alone"
# Options of GRPO that M2PO has no place for: the values that leave each off, and why.
_OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "loss_type": (("dapo",), "M2PO divides by the tokens of the optimizer batch"),
    "importance_sampling_level": (("token",), "M2PO selects tokens"),
    "epsilon": ((0.2,), "M2PO selects tokens and clips nothing, so leave it out"),
    "epsilon_high": ((None,), "M2PO selects tokens and clips nothing, so leave it out"),
    "off_policy_mask_threshold": ((None,), "M2PO selects by itself"),
    "top_entropy_quantile": ((1.0,), "M2PO selects by itself"),
    "entropy_coef": ((0.0,), "M2PO has no entropy bonus"),
    "use_adaptive_entropy": ((False,), "M2PO has no entropy bonus"),
    "use_bias_correction_kl": ((False,), "the KL term of M2PO is not weighted by the ratio"),
    "vllm_importance_sampling_correction": (
        (False,),
        "M2PO's ratio is to the rollout engine already, and would count twice",
    ),
    "top_p": ((1.0,), _SAMPLED),
    "top_k": ((0, -1, None), _SAMPLED),
    "min_p": ((None, 0.0), _SAMPLED),
    "repetition_penalty": ((1.0,), _SAMPLED),
    "vllm_structured_outputs_regex": ((None,), _SAMPLED),
}
# What generation_kwargs may set beside those values: where a completion ends and how its text is made, not how likely a token is.
_ENDS = (
    "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip


@dataclass
class M2POConfig(GRPOConfig):
    """GRPOConfig with M2PO's options. What M2PO has no place for is refused; `delta` caps ratios where A < 0.

    m2_threshold, scope: as in `m2po_loss`.
    linear_log_probs: log-probs and loss from hidden states by this package, through `add_linear_head`; False: by TRL's head.
    """

    m2_threshold: float = field(default=0.04, metadata={"help": "Bound on the mean squared log-ratio of the trust region."})
    scope: str = field(default="quadrants", metadata={"help": "Where tokens may be dropped: 'quadrants', or 'all' as in AReaL."})
    linear_log_probs: bool = field(default=True, metadata={"help": "Log-probs and loss by m2po_kernels, not by TRL's head."})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Not with M2PO."})
    vllm_importance_sampling_correction: bool = field(default=False, metadata={"help": "Not with M2PO."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (values, why) in _OFF.items():
            if getattr(self, name) not in values:
                raise InvalidArgument(f"{name} must be {values[0]!r}: {why}; got {getattr(self, name)!r}")
        for name, value in (self.generation_kwargs or {}).items():  # they overrule the options
            values, _ = ((self.temperature,), "") if name == "temperature" else _OFF.get(name, ((), ""))
            if name not in _ENDS and value not in values:
                raise InvalidArgument(f"generation_kwargs may set {', '.join(_ENDS)} alone: {_SAMPLED}; got {name}={value!r}")
        M2Accumulator(m2_threshold=self.m2_threshold, scope=self.scope)  # checks them
        if self.delta is not None and not self.delta > 1:
            raise InvalidArgument(f"delta must be > 1, as it caps the ratio, or None; got {self.delta!r}")
        uses = self.steps_per_generation * self.num_iterations
        if uses % self.gradient_accumulation_steps:
            raise InvalidArgument(
                f"gradient_accumulation_steps must divide steps_per_generation * num_iterations = {uses}, so that no optimizer "
                f"step needs a generation that is still to come; got {self.gradient_accumulation_steps}"
            )
        if self.parallelism_config is not None and self.parallelism_config.tp_enabled:
            size = self.parallelism_config.tp_size
            raise InvalidArgument(f"parallelism_config must have tp_size=1: every rank must have tokens of its own; got {size}")


def check_logprobs_mode(generation: Any, accelerator: Any) -> None:
    """Raises on all ranks unless the vLLM server's log-probs are those of the distribution that it sampled from."""
    modes = [None]
    if accelerator.is_main_process:  # the one that has a client
        modes = [generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]]
    (mode,) = broadcast_object_list(modes)
    if mode != "processed_logprobs":
        raise InvalidArgument(f"the vLLM server must run with --logprobs-mode processed_logprobs; it runs with {mode}")
