"""The sdist installs in a fresh environment: with a compiler the extension is there, with nvcc CUDA's too; what is not says why.

The fresh environments see this environment's torch through a .pth file, so that nothing large is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.package

CALL = """
import torch, m2po_kernels
from m2po_kernels import dispatch
assert m2po_kernels.__file__.startswith({prefix!r}), m2po_kernels.__file__
lp = torch.tensor([1.0, -1.0, 1.0, -1.0], requires_grad=True)
out = m2po_kernels.m2po_loss(lp, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4))
out.loss.backward()
assert abs(out.loss.item() - 0.5876006) < 1e-6, out.loss
print(dispatch.choose(torch.device("cpu")))
print(dispatch.why_not("native", "cpu"))
"""


def command(*arguments: str | Path, **environment: str) -> str:
    """Runs it without this shell's settings for the package; returns its output, and shows it where the command fails."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("M2PO_", "PYTHON", "CC", "CXX"))}
    done = subprocess.run(
        [str(a) for a in arguments],
        env={**clean, **environment},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built from the files as they are, by this environment's setuptools."""
    out = tmp_path_factory.mktemp("sdist")
    command(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT)
    (archive,) = out.glob("*.tar.gz")
    return archive


def fresh_python(folder: Path) -> Path:
    """The interpreter of a new environment that sees this one's packages, but not this checkout."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = Path(command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, sdist: Path, **environment: str) -> None:
    """As a user does, with pip's build isolation; the dependencies are the outer environment's."""
    command(python, "-m", "pip", "install", "--no-deps", sdist, **environment)


def test_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for path in [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "m2po_kernels").rglob("*.py")]:
        assert str(path.relative_to(ROOT)) in names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "m2po_kernels/data/smollm2_rollouts.safetensors"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", "_build.json"))]


def test_install_with_a_compiler(sdist, tmp_path):
    python = fresh_python(tmp_path / "env")
    install(python, sdist, M2PO_BUILD="cpu")
    chosen, reason = command(python, "-c", CALL.format(prefix=str(tmp_path))).splitlines()
    assert (chosen, reason) == ("native", "None")
    installed = Path(command(python, "-c", "import m2po_kernels; print(m2po_kernels.__file__)").strip()).parent
    assert (installed / "data" / "smollm2_rollouts.safetensors").is_file()


def test_install_with_a_compiler_and_no_nvcc(sdist, tmp_path):
    python = fresh_python(tmp_path / "env")
    install(python, sdist, CUDA_HOME="/nonexistent")
    assert command(python, "-c", CALL.format(prefix=str(tmp_path))).splitlines() == ["native", "None"]
    recorded = command(python, "-c", "from m2po_kernels.compiled import load_library; print(load_library('cuda'))")
    assert "no nvcc was found (CUDA_HOME" in recorded


def test_install_without_a_compiler(sdist, tmp_path):
    python = fresh_python(tmp_path / "env")
    nothing = tmp_path / "empty"
    nothing.mkdir()
    no_compiler = {"PATH": str(nothing), "CC": "/nonexistent", "CXX": "/nonexistent"}
    install(python, sdist, **no_compiler)
    chosen, reason = command(python, "-c", CALL.format(prefix=str(tmp_path)), **no_compiler).splitlines()
    assert chosen == "eager"
    assert "compiler" in reason
