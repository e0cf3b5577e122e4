"""Log-probs from hidden states in verl's FSDP engine, so that [tokens, vocabulary] never exists.

verl's own options ask for it: `model.use_fused_kernels=True` with `model.fused_kernel_options.impl_backend=m2po`. For a backend
that it does not know verl leaves the model's forward as it is, but takes log-probs and entropy from its output all the same.
docs/integrations/verl.md
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.workers.engine import FSDPEngineWithLMHead

from m2po_kernels import linear_log_probs
from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations.transformers import LinearHeadOutput, add_linear_head

BACKEND = "m2po"


def asked_for(model_config: Any) -> bool:
    """Whether the options of the model ask for log-probs by this package. Raises InvalidArgument if they do so by half."""
    backend = (model_config.fused_kernel_options or {}).get("impl_backend")
    if backend == BACKEND and not model_config.use_fused_kernels:
        raise InvalidArgument(
            f"actor_rollout_ref.model.use_fused_kernels must be True with fused_kernel_options.impl_backend={BACKEND}; got False"
        )
    return backend == BACKEND


class LinearHeadEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, with `linear_log_probs` as head and log-softmax where the options of the model ask for it."""

    def __init__(self, model_config: Any, *args: Any, **kwargs: Any):
        self._linear_head = asked_for(model_config)
        super().__init__(model_config, *args, **kwargs)

    def _build_module(self) -> Any:
        module = super()._build_module()
        if self._linear_head:
            with _on_a_cpu(module), warnings.catch_warnings():
                # The tests of verl are of this, with the transformers that verl asks for.
                warnings.filterwarnings("ignore", message="m2po_kernels.integrations is tested with transformers")
                add_linear_head(module)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if not self._linear_head or "temperature" not in inputs:  # which verl puts there for a fused head
            return inputs, output_args
        temperature = inputs.pop("temperature")
        entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)

        def head(hidden: Tensor, weight: Tensor, token_ids: Tensor, **options: Any) -> LinearHeadOutput:
            options |= {"temperature": temperature, "return_entropy": entropy, "entropy_grad": entropy}
            result = linear_log_probs(hidden, weight, token_ids, **options)
            log_probs, entropies = result if isinstance(result, tuple) else (result, None)
            # No views: FSDP2 hooks what comes out, and an operation in place on a view would lose the hook.
            return LinearHeadOutput(log_probs=log_probs.clone(), entropy=None if entropies is None else entropies.clone())

        if "shift_labels" not in inputs:  # verl rolls them only where it removes the padding
            inputs["shift_labels"] = inputs["input_ids"].roll(-1, dims=1)
        return inputs | {"fused_lm_head": True, "head": head}, output_args


@contextmanager
def _on_a_cpu(module: Any) -> Iterator[None]:
    """verl builds a model on the CPU, where `add_linear_head` tries eight tokens and flash attention does not run."""
    configs = [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]  # a vision tower has its own
    own = [config._attn_implementation for config in configs]
    module.config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, name in zip(configs, own, strict=True):
            config._attn_implementation = name
