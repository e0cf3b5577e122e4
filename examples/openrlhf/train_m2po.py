"""OpenRLHF's PPO on Ray with M2PO: takes the place of `python -m openrlhf.cli.train_ppo_ray`, with the same options."""

import runpy

from m2po_kernels.integrations.openrlhf import register

if __name__ == "__main__":
    register(m2_threshold=0.04)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
