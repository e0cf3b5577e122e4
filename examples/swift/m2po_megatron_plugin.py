"""Turns M2PO on in Megatron-SWIFT: megatron rlhf --rlhf_type grpo --external_plugins THIS_FILE ..."""

from m2po_kernels.integrations.swift_megatron import register

register(m2_threshold=0.04)
