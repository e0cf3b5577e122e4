"""The command line: answers, exit codes, one-line errors, and that `check` sees a backend that is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from m2po_kernels import __version__, dispatch, reference
from m2po_kernels.backends import eager
from m2po_kernels.cli import bench as bench_command
from m2po_kernels.cli import check as check_command
from m2po_kernels.cli import doctor as doctor_command
from m2po_kernels.cli.app import app
from m2po_kernels.cli.batches import Case, all_cases, random_batch
from m2po_kernels.cli.cases import ROLLOUT_FIGURES, WORKED_CASES
from m2po_kernels.cli.demo import SORT_BASED, sort_based_loss, sort_based_mask
from m2po_kernels.cli.oracle import Expected, compare
from m2po_kernels.cli.rollouts import BUNDLED, Columns, bundled, read_rollouts
from m2po_kernels.cli.staleness import measure

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def fails(*args: object) -> str:
    """Runs a command that must fail the way users see it: exit code 2, one line on stderr, nothing on stdout."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("m2po: error: ")
    return lines[0]


def run(*args: object, code: str | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A real process: `python -m m2po_kernels ARGS`, or `python -c CODE`."""
    command = [sys.executable, *(["-c", code] if code is not None else ["-m", "m2po_kernels", *map(str, args)])]
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=whole, check=False, timeout=300)


# The application


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"m2po-kernels {__version__}\n"
    for args in ((), ("--help",)):
        result = invoke(*args)
        assert result.exit_code == 0
        assert all(name in result.stdout for name in ("doctor", "check", "inspect", "demo", "bench"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("doctor", "--nonsense"), "--nonsense"),
        (("inspect",), "Missing argument"),
        (("inspect", BUNDLED, "--m2-threshold", "abc"), "'--m2-threshold': expected a number, got 'abc'"),
        (("inspect", BUNDLED, "--m2-threshold", "-1"), "m2_threshold must be >= 0"),
        (("inspect", BUNDLED, "--m2-threshold", "nan"), "m2_threshold must be >= 0"),
        (("inspect", BUNDLED, "--plot", "x.png", "--no-plot"), "exclude each other"),
        (("check", "--backend", "nonsense"), "--backend must be one of eager"),
        (("check", "--device", "nonsense"), "--device 'nonsense' cannot be used"),
        (("bench", "--bench-dir", "/nonexistent"), "--bench-dir: /nonexistent is not a folder"),
    ],
)
def test_bad_options_are_one_line(args, says) -> None:
    assert says in fails(*args)


@pytest.mark.parametrize(
    "code",
    [
        "import m2po_kernels",
        "import m2po_kernels, m2po_kernels.cli",
    ],
)
def test_import_loads_no_library_of_the_cli(code) -> None:
    result = run(
        code=f"import sys, torch; before = set(sys.modules); {code}\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(new & {'typer', 'rich', 'matplotlib', 'pyarrow', 'safetensors', 'triton'})"
    )
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing) -> None:
    result = run(code=f"import sys; sys.modules[{missing!r}] = None; from m2po_kernels.cli import main; main()")
    assert result.returncode == 2
    assert result.stderr == f"m2po: {missing} not installed; run: pip install 'm2po-kernels[cli]'\n"


@pytest.mark.parametrize(("module", "file"), [("matplotlib", BUNDLED), ("safetensors", BUNDLED), ("pyarrow", "x.parquet")])
def test_without_one_library_of_the_extra(module, file, monkeypatch, tmp_path) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    message = fails("inspect", file, "--log-probs", "log_probs_step4")
    assert message == f"m2po: error: {module} is not installed; run: pip install 'm2po-kernels[cli]'"


def test_as_a_process(tmp_path) -> None:
    answer = run("doctor", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["versions"]["m2po-kernels"] == __version__
    wrong = run("inspect", tmp_path / "missing.parquet")
    assert wrong.returncode == 2
    assert wrong.stderr == f"m2po: error: {tmp_path / 'missing.parquet'}: no such file\n"
    # JSON on stdout stays clean although work is shown on stderr.
    right = run("inspect", BUNDLED, "--log-probs", "log_probs_step1", "--json", "--plot", tmp_path / "p.png")
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["metrics"]["dropped_tokens"] == 1


# doctor


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


# The data of check


@pytest.mark.parametrize("case", WORKED_CASES, ids=lambda case: case.name)
def test_worked_cases_against_the_literal_loop(case) -> None:
    right = reference.m2po_oracle(*case.tensors(), m2_threshold=case.m2_threshold, select=reference.select_literal)
    assert right.keep.tolist() == (torch.tensor(case.keep) != 0).tolist()
    assert float(right.loss) == pytest.approx(case.loss, rel=1e-7, abs=5e-8)
    assert right.grad.flatten().tolist() == pytest.approx(
        torch.tensor(case.grad, dtype=torch.float64).flatten().tolist(), rel=1e-7, abs=5e-8
    )
    assert right.metrics["m2_before"] == pytest.approx(case.m2_before, rel=1e-6)
    assert right.metrics["m2_after"] == pytest.approx(case.m2_after, rel=1e-6)


def test_worked_cases_are_all_there() -> None:
    assert [case.name for case in WORKED_CASES] == [f"T{i}" for i in range(1, 13)]


@pytest.mark.parametrize("figures", ROLLOUT_FIGURES, ids=lambda figures: figures.column)
def test_published_figures_of_the_rollouts(figures) -> None:
    staleness = measure(bundled(figures.column), 0.04)
    assert (staleness.trust_region, staleness.candidates) == (figures.trust_region, figures.candidates)
    assert staleness.metrics["dropped_tokens"] == figures.dropped
    assert staleness.metrics["m2_before"] == pytest.approx(figures.m2_before, abs=6e-9)
    assert staleness.metrics["m2_after"] == pytest.approx(figures.m2_after, abs=6e-9)
    assert staleness.loss == pytest.approx(figures.loss, abs=2e-8)
    at = next(row for row in staleness.rows if row.m2_threshold == 0.04)
    assert at.dropped == figures.dropped
    n_clipped = staleness.clipped_up + staleness.clipped_down
    assert n_clipped / staleness.metrics["valid_tokens"] == pytest.approx(staleness.clipped_share)


@pytest.mark.parametrize("staleness", ["healthy", "stale", "very stale", "all candidates", "ties"])
def test_random_batches_are_what_they_say(staleness) -> None:
    log_probs, behavior, advantages, mask = random_batch(0, staleness)
    d, v = reference.log_ratio(log_probs, behavior)
    region = reference.trust_region(d, advantages[:, None], mask)
    share = float((v[region] > 0.04).double().mean())
    low, high = {
        "healthy": (0, 0.02),
        "stale": (0.2, 0.6),
        "very stale": (0.7, 0.95),
        "all candidates": (1, 1),
        "ties": (0.3, 1),
    }[staleness]
    assert low <= share <= high
    if staleness == "ties":
        assert v[region].unique().numel() < region.sum() / 10
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(random_batch(0, staleness, dtype)[3], mask)


# check


def test_check_passes_on_every_backend() -> None:
    result = invoke("check", "--device", "cpu", "--json")
    report = json.loads(result.stdout)
    assert report["failures"] == []
    assert result.exit_code == 0
    available = {name for name in dispatch.BACKENDS if dispatch.why_not(name, CPU) is None}
    assert {row["backend"] for row in report["rows"]} == available
    assert set(report["not_run"]) == set(dispatch.BACKENDS) - available
    groups = {case.group for case in _cases()}
    assert len(report["rows"]) == len(available) * len(groups)
    assert all(row["cases"] and row["masks_equal"] == row["masks_compared"] for row in report["rows"])


@functools.cache
def _cases() -> list[Case]:
    return list(all_cases())


def _first_rows(monkeypatch, *groups: str) -> None:
    cases = [case for case in _cases() if case.group in groups]
    monkeypatch.setattr(check_command, "all_cases", lambda: iter(cases))


def _mutate(monkeypatch, name: str, change) -> None:
    original = getattr(eager, name)
    monkeypatch.setattr(eager, name, lambda *args: change(original, *args))


def _scaled_gradient(factor):
    def backward(original, *args):
        original(*args)
        args[-1].mul_(factor)

    return "policy_loss_backward", backward


def _dropped_gets_gradient(original, *args):
    original(*args)
    out = args[-1]
    out[out == 0] = 1e-30


def _flipped(original, *args):
    keep, counts, floats = original(*args)
    if keep.numel():
        keep.view(-1)[0].logical_not_()
    return keep, counts, floats


def _loss_off(original, *args):
    loss, *rest = original(*args)
    return loss * (1 + 4e-6), *rest


def _count_off(original, *args):
    *rest, counts, floats = original(*args)
    return *rest, counts + torch.tensor([0, 0, 0, 1, 0, 0, 0]), floats


def _raises(original, *args):
    raise RuntimeError("kernel crashed")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (*_scaled_gradient(1 + 2e-6), "gradient error"),
        (*_scaled_gradient(math.nan), "gradient error nan"),
        ("policy_loss_backward", _dropped_gets_gradient, "gradient error inf"),
        ("select", _flipped, "mask differs at 1 tokens"),
        ("policy_loss", _loss_off, "loss error"),
        ("policy_loss", _count_off, "dropped_tokens is"),
        ("policy_loss", _raises, "raised RuntimeError: kernel crashed"),
    ],
    ids=["gradient", "NaN", "not zero", "mask", "loss", "metrics", "crash"],
)
def test_check_sees_a_wrong_backend(name, change, says, monkeypatch) -> None:
    _first_rows(monkeypatch, "random fp32", "rollouts step4")
    _mutate(monkeypatch, name, change)
    result = invoke("check", "--backend", "eager", "--device", "cpu", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert any(says in failure for failure in report["failures"]), report["failures"][:3]
    assert any(failure.startswith("eager, ") for failure in report["failures"])
    table = invoke("check", "--backend", "eager", "--device", "cpu")
    assert table.exit_code == 1
    assert "FAILED" in table.stdout


@pytest.mark.parametrize(("dtype", "code"), [(torch.float64, 0), (torch.float32, 1)], ids=["fp64", "fp32"])
def test_check_lets_a_backend_decline_fp64_alone(dtype, code, monkeypatch) -> None:
    def declines(original, batch, rule):
        if batch.log_probs.dtype == dtype:
            raise dispatch.BackendUnavailable(f"no {dtype} here")
        return original(batch, rule)

    _first_rows(monkeypatch, "random fp32", "random fp64")
    _mutate(monkeypatch, "policy_loss", declines)
    result = invoke("check", "--backend", "eager", "--device", "cpu")
    assert result.exit_code == code
    assert f"no {dtype} here" in result.stdout
    assert "declined" in result.stdout


def test_check_refuses_a_backend_that_cannot_run(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "why_not", lambda name, device: "no compiler" if name == "native" else None)
    assert fails("check", "--backend", "native") == "m2po: error: --backend native cannot run on cpu: no compiler"


@pytest.mark.parametrize("group", ["worked T1-T12", "rollouts step4"])
def test_check_compares_with_the_published_figures(group) -> None:
    case = next(case for case in _cases() if case.group == group and case.published)
    right = compare(case, Expected.of(case), "eager", CPU)
    assert right.problems == ()
    other = dataclasses.replace(case, published=dataclasses.replace(case.published, loss=case.published.loss * 1.001))
    assert any("published" in problem for problem in compare(other, Expected.of(other), "eager", CPU).problems)


def test_gradient_below_the_smallest_normal_may_be_flushed() -> None:
    log_probs = torch.tensor([[-95.0, 0.1]])
    case = Case("tiny", "tiny", (log_probs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)))
    expected = Expected.of(case)
    assert 0 < -float(expected.result.grad[0, 0]) < torch.finfo(torch.float32).smallest_normal
    assert compare(case, expected, "eager", CPU).problems == ()


# inspect


ROWS = [
    {"log_probs": [-1.0, -2.0, -0.5], "behavior_log_probs": [-1.5, -2.0, -0.25], "advantages": 1.0, "mask": [1, 1, 0]},
    {"log_probs": [-3.0], "behavior_log_probs": [-1.0], "advantages": -2.0, "mask": [1]},
]
PADDED = (
    [[-1.0, -2.0, -0.5], [-3.0, 0, 0]],
    [[-1.5, -2.0, -0.25], [-1.0, 0, 0]],
    [1.0, -2.0],
    [[True, True, False], [True, False, False]],
)


def _json_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def _parquet(path: Path, rows: list) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    return path


def _safetensors(path: Path, **tensors: torch.Tensor) -> Path:
    import safetensors.torch

    safetensors.torch.save_file(tensors, path)
    return path


WRITERS = [(_json_lines, "jsonl"), (_parquet, "parquet")]


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_reads_rows_of_lists(write, suffix, tmp_path) -> None:
    read = read_rollouts(write(tmp_path / f"r.{suffix}", ROWS), Columns())
    assert tuple(tensor.tolist() for tensor in read) == PADDED
    without = [{key: value for key, value in row.items() if key != "mask"} for row in ROWS]
    read = read_rollouts(write(tmp_path / f"m.{suffix}", without), Columns())
    assert read.mask.tolist() == [[True, True, True], [True, False, False]]
    per_token = [{**row, "advantages": [row["advantages"]] * len(row["mask"])} for row in ROWS]
    read = read_rollouts(write(tmp_path / f"a.{suffix}", per_token), Columns())
    assert read.advantages.tolist() == [[1, 1, 1], [-2, 0, 0]]


def test_number_types(tmp_path) -> None:
    import pyarrow
    import pyarrow.parquet

    assert read_rollouts(_json_lines(tmp_path / "r.jsonl", ROWS), Columns()).log_probs.dtype == torch.float32
    for arrow, dtype in [(pyarrow.float32(), torch.float32), (pyarrow.float16(), torch.float16)]:
        columns = {
            name: pyarrow.array([row[name] for row in ROWS], pyarrow.list_(arrow)) for name in ("log_probs", "behavior_log_probs")
        }
        columns["advantages"] = pyarrow.array([1.0, 2.0], pyarrow.float32())
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "r.parquet")
        assert read_rollouts(tmp_path / "r.parquet", Columns()).log_probs.dtype == dtype


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_inspect_maps_columns(write, suffix, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"log_probs": "lp", "behavior_log_probs": "old", "advantages": "adv", "mask": "m"}
    path = write(tmp_path / f"r.{suffix}", [{names[key]: value for key, value in row.items()} for row in ROWS])
    options = [item for key, name in names.items() for item in (f"--{key.replace('_', '-')}", name)]
    result = invoke("inspect", path, *options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["metrics"]["valid_tokens"] == 3
    assert report["trust_region_tokens"] == 2  # d = 0.5 at A > 0, d = -2 at A < 0
    assert report["metrics"]["m2_before"] == (0.25 + 4.0) / 2
    assert [row["m2_threshold"] for row in report["thresholds"]] == [0.01, 0.02, 0.04, 0.1, 0.2, 0.5, 1.0]
    assert report["ppo_clip"]["clipped_positive_advantage"] == report["ppo_clip"]["clipped_negative_advantage"] == 1
    assert report["plot"] == "r.png"
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)


def test_inspect_prints_tables(tmp_path) -> None:
    picture = tmp_path / "deep" / "p.png"
    result = invoke("inspect", BUNDLED, "--log-probs", "log_probs_step4", "--m2-threshold", "0.06", "--plot", picture)
    assert result.exit_code == 0, result.output
    for text in ("0.452508", "0.06", "5,470", "1,809", "PPO clip 0.2"):
        assert text in result.stdout
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("tau", ["0", "inf", "0.04"])
@pytest.mark.parametrize("kind", ["empty", "no advantage", "not finite", "one token"])
def test_inspect_of_odd_batches(kind, tau, tmp_path) -> None:
    row = {"log_probs": [-1.0], "behavior_log_probs": [-2.0], "advantages": 1.0}
    if kind == "empty":
        row |= {"log_probs": [], "behavior_log_probs": []}
    elif kind == "no advantage":
        row["advantages"] = 0.0
    elif kind == "not finite":
        row |= {"log_probs": [-1.0, math.nan, math.inf], "behavior_log_probs": [-1.1, -1.0, -1.0]}
    path = _json_lines(tmp_path / "r.jsonl", [row])
    for form in ([], ["--json"]):
        result = invoke("inspect", path, "--m2-threshold", tau, "--plot", tmp_path / "p.png", *form)
        assert result.exit_code == 0, result.output
        assert (tmp_path / "p.png").read_bytes().startswith(PNG)
    if kind == "not finite":
        assert json.loads(result.stdout)["metrics"]["nonfinite_tokens"] == 2


def test_inspect_takes_packed_and_fp64(tmp_path) -> None:
    lp = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    path = _safetensors(tmp_path / "p.safetensors", log_probs=lp, behavior_log_probs=lp - 0.3, advantages=lp + 3, mask=lp != 0)
    result = invoke("inspect", path, "--no-plot", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["m2_before"] == pytest.approx(0.09, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("r.txt", "", "expected a file named .safetensors, .parquet, .jsonl"),
        ("rollouts", "", "got no suffix"),
        ("r.safetensors", "nonsense", "cannot be read as safetensors"),
        ("r.parquet", "nonsense", "cannot be read as parquet"),
        ("r.jsonl", "", "holds no rows"),
        ("r.jsonl", "{nonsense", "line 1: not JSON"),
        ("r.jsonl", "[1]", "line 1: expected one JSON object a line, got list"),
        ("r.jsonl", {"a": [1]}, "has no column 'log_probs' (--log-probs names another); it has: a"),
        ("r.jsonl", [ROWS[0], {"log_probs": [1.0]}], "line 2 has no column 'behavior_log_probs'"),
        ("r.jsonl", {**ROWS[0], "mask": [1, 1]}, "row 1: 'mask' has 2 tokens, 'log_probs' has 3"),
        ("r.jsonl", [ROWS[1], {**ROWS[0], "advantages": [1.0]}], "'advantages' is a list in some rows and one number in others"),
        ("r.jsonl", {**ROWS[0], "log_probs": [-1.0, None, -1.0]}, "'log_probs' holds null; expected numbers"),
        ("r.jsonl", {**ROWS[0], "log_probs": ["-1.0"]}, "'log_probs' holds \"-1.0\"; expected numbers"),
        ("r.jsonl", {**ROWS[0], "log_probs": -1.0}, "'log_probs' holds one number per row; expected a list"),
    ],
)
def test_bad_files_are_one_line(name, content, says, tmp_path) -> None:
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    else:
        _json_lines(path, content if isinstance(content, list) else [content])
    message = fails("inspect", path)
    assert str(path) in message
    assert says in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"log_probs": ["x"]}, "column 'log_probs' holds list<"),
        ({"log_probs": [-1.0, None, -1.0]}, "column 'log_probs' holds null"),
        ({"log_probs": [1, 2, 3]}, "column 'log_probs' holds int64; expected float32"),
        ({"behavior_log_probs": [1.0]}, "row 1: 'behavior_log_probs' has 1 tokens, 'log_probs' has 3"),
        ({"mask": 1}, "'mask' holds one number per row"),
        ({"advantages": "high"}, "column 'advantages' holds string"),
    ],
)
def test_bad_parquet_is_one_line(change, says, tmp_path) -> None:
    assert says in fails("inspect", _parquet(tmp_path / "r.parquet", [{**ROWS[0], **change}]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"log_probs": torch.zeros(2, 3, dtype=torch.int32)}, "column 'log_probs' holds int32; expected float32"),
        ({"mask": torch.ones(2, 4)}, "column 'mask' has shape [2, 4]; 'log_probs' has [2, 3]"),
        ({"advantages": torch.ones(3)}, "column 'advantages' has shape [3]"),
        ({"advantages": torch.tensor(1.0)}, "column 'advantages' has shape []"),
        ({"mask": None}, "has no column 'mask' (--mask names another); it has: advantages, behavior_log_probs, log_probs"),
    ],
)
def test_bad_safetensors_are_one_line(change, says, tmp_path) -> None:
    good = {
        "log_probs": torch.zeros(2, 3),
        "behavior_log_probs": torch.ones(2, 3),
        "advantages": torch.ones(2),
        "mask": torch.ones(2, 3),
    }
    tensors = {key: value for key, value in {**good, **change}.items() if value is not None}
    assert says in fails("inspect", _safetensors(tmp_path / "r.safetensors", **tensors))


def test_bundled_file_lists_its_columns() -> None:
    assert "it has: advantages, behavior_log_probs, log_probs_bf16_step0" in fails("inspect", BUNDLED)


def test_a_folder_and_an_unwritable_plot(tmp_path) -> None:
    assert "is not a file" in fails("inspect", tmp_path)
    (tmp_path / "file").touch()
    message = fails("inspect", BUNDLED, "--log-probs", "log_probs_step4", "--plot", tmp_path / "file" / "p.png")
    assert "cannot write the plot" in message


# demo and bench


def test_demo(tmp_path, monkeypatch) -> None:
    from m2po_kernels.cli import demo as demo_command

    # One long batch is timed by a user; here a short one shows the same lines.
    monkeypatch.setattr(demo_command, "N_SYNTHETIC", 1 << 14)
    monkeypatch.setattr(demo_command, "N_TIMED", 1)
    picture = tmp_path / "out" / "demo.png"
    result = invoke("demo", "--out", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(PNG)
    for figures in ROLLOUT_FIGURES:
        assert f"{figures.loss:.8f}" in result.stdout
    for name in dispatch.BACKENDS:
        assert name in result.stdout
    assert SORT_BASED in result.stdout


def test_demo_times_no_backend_that_is_wrong(tmp_path, monkeypatch) -> None:
    _mutate(monkeypatch, "select", _flipped)
    monkeypatch.setenv("M2PO_BACKEND", "eager")
    assert "eager on rollouts, step 4: its mask differs from the oracle's" in fails("demo", "--out", tmp_path / "p.png")


@pytest.mark.parametrize("figures", ROLLOUT_FIGURES, ids=lambda figures: figures.column)
def test_sort_based_way_on_the_rollouts(figures) -> None:
    batch = bundled(figures.column)
    right = reference.m2po_oracle(*batch)
    assert torch.equal(sort_based_mask(*batch), right.keep)
    assert float(sort_based_loss(*batch)) == pytest.approx(float(right.loss), abs=1e-7)


def test_bench_runs_pytest_in_the_folder(tmp_path) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "test_it.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    assert invoke("bench", "--bench-dir", folder, "--filter", "one").exit_code == 0
    assert invoke("bench", "--bench-dir", folder).exit_code == 1


def test_bench_outside_a_checkout(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench_command, "__file__", str(tmp_path / "site-packages" / "m2po_kernels" / "cli" / "bench.py"))
    assert "no bench/ beside the package" in fails("bench")
