"""What verl loads by itself (entry point group `verl.plugins`): nothing, unless VERL_ENGINE_VENDOR=m2po asks for the engine.

verl imports its plugins wherever it is imported, and its engines take seconds: runs without M2PO shall not pay for them.
"""

import os

if os.environ.get("VERL_ENGINE_VENDOR") == "m2po":
    import m2po_kernels.integrations.verl  # noqa: F401
