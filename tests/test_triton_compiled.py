"""The Triton kernels compiled ahead of time, as shipped: registers, spills, shared memory, 16-byte loads. Needs no GPU."""

from __future__ import annotations

import pytest

from m2po_kernels.backends import triton as backend_module

if not backend_module._is_installed():
    pytest.skip("the package triton is not installed", allow_module_level=True)

from bench.triton_report import CHIPS, Chip, Variant, figures, variants

# One per kernel and maker in the default run; all of them take about a quarter of an hour.
QUICK = {
    ("sm_80", "loss, plain, fp32"),
    ("sm_80", "backward, plain, fp32"),
    ("sm_90", "loss, per sequence, fp32"),
    ("sm_90", "backward, every option, bf16"),
}
CASES = [
    pytest.param(
        variant, chip, id=f"{chip.name}-{variant.name}", marks=() if (chip.name, variant.name) in QUICK else pytest.mark.slow
    )
    for chip in CHIPS
    for variant in variants()
]


@pytest.mark.parametrize(("variant", "chip"), CASES)
def test_fits_the_chip_without_spilling(variant: Variant, chip: Chip):
    made = figures(variant, chip)
    assert not made.problems(variant, chip)
    if "softmax" in variant.name:
        assert made.wide_loads >= 1
    elif "plain" in variant.name and (chip.target.backend == "cuda" or "fp32" in variant.name):
        assert made.wide_loads >= 3  # both log-probs and the advantages
    elif "every option, fp32" in variant.name:
        assert made.wide_loads >= 5  # rows with a stride: those, reference log-probs and weights
