"""Backends and devices as fixtures, poisoned fresh memory, and a hypothesis profile that gives the same cases every time.

Tests that take `backend` and `device` run once per pair that dispatch lists on this machine, so a backend added there
runs them unchanged.
"""

from __future__ import annotations

import pytest
import simt
import torch
from hypothesis import HealthCheck, settings

from m2po_kernels import dispatch
from m2po_kernels.errors import BackendUnavailable

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
PAIRS = [(device, backend) for device in DEVICES for backend in dispatch.candidates(torch.device(device))]
if dispatch.why_not("triton", "cpu") is None:  # TRITON_INTERPRET=1: all tests also on triton, in its interpreter
    PAIRS.append(("cpu", "triton"))
if simt.compiler() and not torch.cuda.is_available():  # the CUDA kernels' own source, on the host
    simt.install()
    PAIRS.append(("cpu", "cuda"))

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    # One check per example is wanted here; the shapes are what makes generation slow, not filtering.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        pairs = PAIRS
        named = f"{metafunc.module.__name__} {metafunc.function.__name__}"
        if "logits" in named or "linear" in named:  # not every backend starts from logits
            pairs = [(device, name) for device, name in PAIRS if hasattr(dispatch.load(name), "log_softmax")]
        ids = [f"{device}-{backend}" for device, backend in pairs]
        metafunc.parametrize(("device", "backend"), pairs, indirect=True, ids=ids, scope="session")
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that the test puts its tensors on."""
    return request.param


@pytest.fixture(scope="session")
def backend(device: str, request: pytest.FixtureRequest) -> str:
    """A backend that can serve `device`; test_dispatch.py fails where a backend that was built cannot."""
    reason = dispatch.why_not(request.param, device)
    if reason:
        pytest.skip(f"{request.param} on {device}: {reason}")
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fibers take 14 s for 2^24 tokens. (First, so that -m sees the mark.)"""
    for item in items:
        if item.path.name == "test_large.py" and "cpu-cuda" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A dtype that the backend under test declines is no failure; that it says so is tested in test_triton.py."""
    try:
        return (yield)
    except BackendUnavailable as error:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("backend") in ("triton", "cuda") and "is float64" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory():
    """Fresh memory holds NaN (integers: the largest value), so a kernel that reads what it never wrote shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_as_gpus_do():
    """Where Triton's interpreter gives other bits than a GPU, in what the kernels use.

    It cuts fp32 off to bfloat16, where a GPU rounds to even (3.6 to 3.9). And it labels the result of a comparison with the type
    of what was compared, so that a later cast of it, or a mask made of it, takes true for a number of that type (3.9, not 3.6).
    """
    if dispatch.why_not("triton", "cpu") is not None:
        yield
        return
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    truncate, binary = InterpreterBuilder.create_fp_trunc, InterpreterBuilder.binary_op

    def create_fp_trunc(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16:
            return truncate(self, src, dst_type)
        rounded = torch.from_numpy(numpy.array(src.data)).to(torch.bfloat16).view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    def binary_op(self, lhs, rhs, op):
        result = binary(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == numpy.bool_ else result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
        patch.setattr(InterpreterBuilder, "binary_op", binary_op)
        yield


@pytest.fixture(autouse=True)
def _no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test names its backend and its checks itself: variables of the surrounding shell would change what it tests."""
    for name in ("M2PO_BACKEND", "M2PO_CHECK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def threads():
    """Calls torch.set_num_threads and puts the number back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
