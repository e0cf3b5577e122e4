"""`m2po doctor`: each backend with the reason why not, what a call would get, and the record of the build."""

from __future__ import annotations

import json

import pytest
import torch
from cli_helpers import CPU, invoke

from m2po_kernels import dispatch
from m2po_kernels.cli import doctor as doctor_command


def test_doctor_names_every_backend_and_the_choice() -> None:
    report = json.loads(invoke("doctor", "--json").stdout)
    assert set(report["backends"]) == set(dispatch.BACKENDS)
    assert report["backends"]["eager"]["cpu"] is None
    assert report["chosen"]["cpu"]["backend"] == dispatch.choose(CPU)
    text = invoke("doctor").stdout
    assert all(name in text for name in (*dispatch.BACKENDS, torch.__version__, "M2PO_BACKEND"))


def test_doctor_answers_with_a_backend_that_does_not_load(monkeypatch) -> None:
    load = dispatch.load

    def broken(name):
        if name == "native":
            raise RuntimeError("libfoo.so: undefined symbol\nmore lines")
        return load(name)

    monkeypatch.setattr(dispatch, "load", broken)
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    reason = "its module does not load: RuntimeError: libfoo.so: undefined symbol"
    assert report["backends"]["native"]["cpu"] == reason
    # A call on a CPU tensor would meet the same error; doctor says so instead of naming a backend.
    assert report["chosen"]["cpu"] == {
        "backend": None,
        "order": list(dispatch.candidates(CPU)),
        "why": "a call raises RuntimeError: libfoo.so: undefined symbol",
    }
    assert "undefined symbol" in invoke("doctor").stdout


@pytest.mark.parametrize(("forced", "gets", "why"), [("eager", "eager", "M2PO_BACKEND forces it"), ("nope", None, "'nope'")])
def test_doctor_reports_a_forced_backend(forced, gets, why, monkeypatch) -> None:
    monkeypatch.setenv("M2PO_BACKEND", forced)
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    chosen = json.loads(result.stdout)["chosen"]["cpu"]
    assert chosen["backend"] == gets
    assert why in chosen["why"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "never built"),
        ("{", "cannot read"),
        ("[]", "does not hold a JSON object"),
        ('{"native": false, "why": "no C++ compiler"}', "not built: no C++ compiler"),
        ('{"native": true, "compiler": "g++ 12.2", "torch": "2.13.0", "isas": ["sse2", "avx2"]}', "built by g++ 12.2 against"),
    ],
)
def test_doctor_reads_the_build_record(content, says, monkeypatch, tmp_path) -> None:
    record = tmp_path / "b.json"
    if content is not None:
        record.write_text(content)
    monkeypatch.setattr(doctor_command, "BUILD_RECORD", record)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert says in result.stdout
