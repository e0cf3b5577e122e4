"""One module per backend, each with the same functions: why_not, select, policy_loss, policy_loss_backward."""
