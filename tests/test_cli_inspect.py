"""`m2po inspect`: files of every kind, mapped columns, odd batches, plots; a bad file is one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from cli_helpers import PNG, fails, invoke

from m2po_kernels.cli.rollouts import BUNDLED, Columns, bundled, read_rollouts

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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"mask": lambda t: t["mask"] * 0}, "no token is valid: 'mask' is 0 everywhere"),
        ({"log_probs": lambda t: t["log_probs"].exp()}, "'log_probs' is above 0 at"),
        (
            {"behavior_log_probs": lambda t: t["log_probs"] * 0},
            "'behavior_log_probs' is 0 at every valid token: was it recorded?",
        ),
        ({"behavior_log_probs": lambda t: t["log_probs"]}, "are equal at every valid token"),
        ({"behavior_log_probs": lambda t: t["behavior_log_probs"].roll(1, -1)}, "'behavior_log_probs' far better one token away"),
        ({"log_probs": lambda t: t["log_probs"].roll(1, -1)}, "far better one token away"),
        ({"advantages": lambda t: t["advantages"] * 0}, "'advantages' is 0 at every valid token"),
    ],
)
def test_notes_on_what_looks_wrong(change, says, tmp_path) -> None:
    good = bundled("log_probs_step1")._asdict()
    path = _safetensors(
        tmp_path / "r.safetensors", **{name: change.get(name, lambda t, name=name: t[name])(good).clone() for name in good}
    )
    report = json.loads(invoke("inspect", path, "--no-plot", "--json").stdout)
    assert [says in note for note in report["notes"]] == ([] if says is None else [True])
    shown = invoke("inspect", path, "--no-plot").stdout
    assert ("note: " in shown) == (says is not None)
    if says is not None:
        assert report["notes"][0][:60] in shown  # the console wraps long lines


def test_bundled_file_lists_its_columns() -> None:
    assert "it has: advantages, behavior_log_probs, log_probs_bf16_step0" in fails("inspect", BUNDLED)


def test_a_folder_and_an_unwritable_plot(tmp_path) -> None:
    assert "is not a file" in fails("inspect", tmp_path)
    (tmp_path / "file").touch()
    message = fails("inspect", BUNDLED, "--log-probs", "log_probs_step4", "--plot", tmp_path / "file" / "p.png")
    assert "cannot write the plot" in message
