"""M2PO in Trinity-RFT, on verl's engines: `algorithm.policy_loss_fn: m2po_kernels.integrations.trinity.M2POPolicyLossFn`.

The selection is made by the engines of m2po_kernels.integrations.verl, which verl loads for VERL_ENGINE_VENDOR=m2po.
docs/integrations/trinity.md
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn

from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations.common import check_version
from m2po_kernels.integrations.verl_step import current_step


class M2POPolicyLossFn(PolicyLossFn):
    """`algorithm.policy_loss_fn_args` are m2_threshold and scope, as in `m2po_kernels.m2po_loss`.

    loss_agg_mode: Trinity-RFT puts algorithm.loss_agg_mode here.
    """

    def __init__(
        self,
        backend: str = "verl",
        m2_threshold: float = 0.04,
        scope: str = "quadrants",
        loss_agg_mode: str | None = "token-mean",
        **others: Any,
    ):
        check_version("trinity-rft")
        super().__init__(backend=backend)
        if backend != "verl":
            raise InvalidArgument(f"trainer.trainer_type must be verl with M2PO, which selects in verl's engines; got {backend}")
        if loss_agg_mode not in (None, "token-mean"):
            raise InvalidArgument(
                f"algorithm.loss_agg_mode must be token-mean, the paper's denominator, with M2PO; got {loss_agg_mode}"
            )
        if others:
            raise InvalidArgument(
                "algorithm.policy_loss_fn_args must be m2_threshold, scope and loss_agg_mode with M2PO, which selects tokens and "
                f"clips none; got {', '.join(f'{name}={value}' for name, value in others.items())}"
            )
        self._settings = {"m2_threshold": m2_threshold, "scope": scope}

    # Trinity-RFT reads the names of the parameters to know which fields to pass.
    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, advantages: Tensor, action_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        return current_step().loss(logprob, old_logprob, advantages, action_mask, **self._settings)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"m2_threshold": 0.04, "scope": "quadrants", "loss_agg_mode": "token-mean"}
