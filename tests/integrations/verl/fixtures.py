"""verl on a CPU, for its tests and those of Trinity-RFT. To be imported before verl is."""

from __future__ import annotations

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
# pytest puts it on the path. It has a folder trl, which verl would take for that package, as it is not installed here.
sys.path.remove(str(HERE.parent))
# VERL_ENGINE_DEVICE: the engines are registered for devices that are not here.
os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_USE_EXTERNAL_MODULES="cpu_platform",
    VERL_ENGINE_VENDOR="m2po",
    VERL_ENGINE_DEVICE="cuda",
    M2PO_CHECK="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import workers  # noqa: E402


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("model"))
    tiny.save_model(path)
    return path


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A process group of this process alone."""
    workers.join(0, 1, tmp_path_factory.mktemp("world") / "store")
    yield
    torch.distributed.destroy_process_group()
