"""Reads rollouts: the bundled ones, and a user's as safetensors, parquet or JSON lines, padded to one tensor each.

A parquet file keeps its column types. JSON has one kind of number: read as fp32, which is what trainers hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import FLOAT_DTYPES
from .shared import CliError, need, one_line

BUNDLED = Path(__file__).resolve().parents[1] / "data" / "smollm2_rollouts.safetensors"
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Columns:
    """The names that a file uses for the four inputs of the loss."""

    log_probs: str = "log_probs"
    behavior_log_probs: str = "behavior_log_probs"
    advantages: str = "advantages"
    mask: str = "mask"


class Rollouts(NamedTuple):
    """The inputs of `select` and `m2po_loss`, on the CPU; a star passes them on."""

    log_probs: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


class _Ragged(NamedTuple):
    """One list per row, end to end; lengths is None for a column of one number per row."""

    values: Tensor
    lengths: Tensor | None


def bundled(column: str) -> Rollouts:
    """The package's SmolLM2 rollouts with the current log-probs of `column`, e.g. "log_probs_step4"."""
    return read_rollouts(BUNDLED, Columns(log_probs=column))


def read_rollouts(path: Path, columns: Columns, advance: Callable[[float], None] = lambda fraction: None) -> Rollouts:
    """The rollouts of a file. Raises CliError, in one line, for all that can be wrong with it.

    path: .safetensors with tensors [B, T] or packed [N] (advantages also [B]); .parquet or .jsonl with one sequence per row,
    a list for each column (advantages: a list or one number; the mask may be absent: every listed token is then valid).
    advance: called with the fraction of the file that has been read.
    """
    if not path.exists():
        raise CliError(f"{path}: no such file")
    if not path.is_file():
        raise CliError(f"{path} is not a file")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return _read_safetensors(path, columns)
    if suffix == ".parquet":
        return _pad(path, columns, _read_parquet(path, columns, advance))
    if suffix in _JSON_SUFFIXES:
        return _pad(path, columns, _read_json_lines(path, columns, advance))
    kinds = ", ".join((".safetensors", ".parquet", *_JSON_SUFFIXES))
    raise CliError(f"{path}: expected a file named {kinds}; got {suffix or 'no suffix'}")


def _missing(path: Path, columns: Columns, field: str, present: list[str]) -> CliError:
    name, option = getattr(columns, field), "--" + field.replace("_", "-")
    return CliError(f"{path} has no column {name!r} ({option} names another); it has: {', '.join(present) or 'none'}")


def _check_dtype(path: Path, column: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CliError(f"{path}: column {column!r} holds {kind}; expected float32, bfloat16, float16 or float64")


def _read_safetensors(path: Path, columns: Columns) -> Rollouts:
    safetensors = need("safetensors")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            present = sorted(file.keys())
            for field in fields(columns):
                if getattr(columns, field.name) not in present:
                    raise _missing(path, columns, field.name, present)
            rollouts = Rollouts(*(file.get_tensor(getattr(columns, field.name)) for field in fields(columns)))
    except (OSError, safetensors.SafetensorError) as error:
        raise CliError(f"{path} cannot be read as safetensors: {one_line(error)}") from error
    for field, tensor in zip(fields(columns)[:3], rollouts[:3], strict=True):
        _check_dtype(path, getattr(columns, field.name), tensor)
    for field, tensor in zip(fields(columns), rollouts, strict=True):
        per_sequence = field.name == "advantages" and tensor.dim() and tensor.shape[0] == (rollouts.log_probs.shape or (0,))[0]
        if tensor.shape != rollouts.log_probs.shape and not per_sequence:
            raise CliError(
                f"{path}: column {getattr(columns, field.name)!r} has shape {list(tensor.shape)}; "
                f"{columns.log_probs!r} has {list(rollouts.log_probs.shape)}"
            )
    return rollouts


def _read_parquet(path: Path, columns: Columns, advance: Callable[[float], None]) -> dict[str, _Ragged]:
    pa, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        present = file.schema_arrow.names
        wanted = [f.name for f in fields(columns) if f.name != "mask" or columns.mask in present]
        for field in wanted:
            if getattr(columns, field) not in present:
                raise _missing(path, columns, field, present)
        names = [getattr(columns, field) for field in wanted]
        groups = []
        for index in range(file.num_row_groups):
            groups.append(file.read_row_group(index, columns=names))
            advance((index + 1) / file.num_row_groups)
        table = pa.concat_tables(groups) if groups else file.read(columns=names)
    except (OSError, pa.ArrowException) as error:
        raise CliError(f"{path} cannot be read as parquet: {one_line(error)}") from error
    return {field: _from_arrow(path, pa, name, table[name]) for field, name in zip(wanted, names, strict=True)}


def _from_arrow(path: Path, pa: Any, name: str, column: Any) -> _Ragged:
    array = column.combine_chunks()
    types = pa.types
    kind = array.type
    lengths = None
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    flat = array.flatten() if listed else array
    if array.null_count or flat.null_count:
        raise CliError(f"{path}: column {name!r} holds null; expected numbers only")
    if not (types.is_floating(flat.type) or types.is_integer(flat.type) or types.is_boolean(flat.type)):
        raise CliError(f"{path}: column {name!r} holds {kind}; expected lists of numbers")
    if listed:
        lengths = torch.tensor(pa.compute.list_value_length(array).to_pylist(), dtype=torch.int64)
    # A copy: torch wants writable memory, Arrow's is not.
    return _Ragged(torch.from_numpy(flat.to_numpy(zero_copy_only=False).copy()), lengths)


def _read_json_lines(path: Path, columns: Columns, advance: Callable[[float], None]) -> dict[str, _Ragged]:
    lists: dict[str, list[list[Any]]] = {}
    scalar: dict[str, bool] = {}
    size, done = max(path.stat().st_size, 1), 0
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                done += len(line)
                if not line.strip():
                    continue
                where = f"{path}, line {line_number}"
                row = _json_object(where, line)
                if not lists:
                    wanted = [f.name for f in fields(columns) if f.name != "mask" or columns.mask in row]
                    lists = {field: [] for field in wanted}
                for field, values in lists.items():
                    name = getattr(columns, field)
                    if name not in row:
                        raise _missing(Path(where), columns, field, sorted(row))
                    value = row[name]
                    alone = not isinstance(value, list)
                    if scalar.setdefault(field, alone) != alone:
                        raise CliError(f"{where}: {name!r} is a list in some rows and one number in others")
                    items = [value] if alone else value
                    wrong = next((item for item in items if not isinstance(item, int | float)), 0)
                    if not isinstance(wrong, int | float):
                        raise CliError(f"{where}: {name!r} holds {json.dumps(wrong)[:40]}; expected numbers")
                    values.append(items)
                advance(done / size)
    except OSError as error:
        raise CliError(f"{path} cannot be read: {one_line(error)}") from error
    if not lists:
        raise CliError(f"{path} holds no rows")
    return {
        field: _Ragged(
            torch.tensor([item for items in rows for item in items], dtype=torch.float32),
            None if scalar[field] else torch.tensor([len(items) for items in rows], dtype=torch.int64),
        )
        for field, rows in lists.items()
    }


def _json_object(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CliError(f"{where}: not JSON ({one_line(error)})") from error
    if not isinstance(row, dict):
        raise CliError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
    return row


def _pad(path: Path, columns: Columns, read: dict[str, _Ragged]) -> Rollouts:
    """One [B, T] tensor for each column of lists, zero and not valid where a row is shorter than the longest."""
    lengths = read["log_probs"].lengths
    for field, column in read.items():
        name = getattr(columns, field)
        if column.lengths is None:
            if field == "advantages":
                continue
            raise CliError(f"{path}: column {name!r} holds one number per row; expected a list, one number per token")
        assert lengths is not None  # log_probs comes first, and its lengths were just checked
        differs = (column.lengths != lengths).nonzero().flatten()
        if differs.numel():
            row = int(differs[0])
            here, expected = int(column.lengths[row]), int(lengths[row])
            raise CliError(f"{path}, row {row + 1}: {name!r} has {here} tokens, {columns.log_probs!r} has {expected}")
    assert lengths is not None
    width = int(lengths.max()) if lengths.numel() else 0
    listed = torch.arange(width) < lengths[:, None]

    def padded(values: Tensor) -> Tensor:
        return torch.zeros(listed.shape, dtype=values.dtype).masked_scatter_(listed, values)

    for field in ("log_probs", "behavior_log_probs", "advantages"):
        _check_dtype(path, getattr(columns, field), read[field].values)
    advantages = read["advantages"]
    return Rollouts(
        padded(read["log_probs"].values),
        padded(read["behavior_log_probs"].values),
        advantages.values if advantages.lengths is None else padded(advantages.values),
        padded(read["mask"].values) != 0 if "mask" in read else listed,
    )
