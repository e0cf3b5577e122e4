"""Turns M2PO on in ms-swift: swift rlhf --rlhf_type grpo --external_plugins THIS_FILE ..."""

from m2po_kernels.integrations.swift import register

register(m2_threshold=0.04)
