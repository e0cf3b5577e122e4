"""verl on a CPU: a platform for the tests. VERL_USE_EXTERNAL_MODULES=cpu_platform loads it, VERL_PLATFORM=cpu chooses it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_args, **_kwargs):
    return None


def _zero(*_args, **_kwargs):
    return 0


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        mem_get_info=lambda *_: (1, 1),
        get_device_name=lambda *_: "cpu",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        **dict.fromkeys(["set_device", "synchronize", "empty_cache", "ipc_collect"], _nothing),
        **dict.fromkeys(
            ["max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "max_memory_cached"], _zero
        ),
    )

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "NO_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
