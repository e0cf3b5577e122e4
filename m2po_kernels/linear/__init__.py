"""From hidden states: linear_log_probs and linear_m2po_loss. The public names are those of m2po_kernels."""

from .functions import LinearLossOutput, linear_log_probs, linear_m2po_loss

__all__ = ["LinearLossOutput", "linear_log_probs", "linear_m2po_loss"]
