"""The oracle: the paper's algorithm and loss, literal, unfused, in fp64 or exact arithmetic. Imports torch alone.

Only tests, benchmarks and `m2po check` use it; no kernel shares code with it. Upstream variants stand in variants.py.
"""

from .algorithm1 import log_ratio, select_literal, select_sorted, trust_region
from .linear import LinearOracle, linear_loss_oracle, linear_oracle
from .logits import LogitsOracle, logits_oracle
from .loss import OracleResult, grpo_oracle, m2po_oracle
from .variants import areal_mask, repository_clip_bounds

__all__ = [
    "LinearOracle",
    "LogitsOracle",
    "OracleResult",
    "areal_mask",
    "grpo_oracle",
    "linear_loss_oracle",
    "linear_oracle",
    "log_ratio",
    "logits_oracle",
    "m2po_oracle",
    "repository_clip_bounds",
    "select_literal",
    "select_sorted",
    "trust_region",
]
