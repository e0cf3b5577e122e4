"""`m2po doctor`: what is installed, which backends can run here and why the others cannot. Always exits 0."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import __version__, dispatch
from .shared import one_line, print_json, stdout_console

BUILD_RECORD = Path(__file__).resolve().parents[1] / "_build.json"


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Say what is installed, which backends can run here, why the others cannot, and which one a call would get."""
    report = examine()
    if as_json:
        print_json(report)
    else:
        _print(report)


def examine() -> dict[str, Any]:
    """Everything `doctor` says, as plain data. Never raises over a broken backend: its reason is part of the answer."""
    devices = _devices()
    kinds = list(dict.fromkeys([str(device["device"]).split(":")[0] for device in devices]))
    return {
        "versions": {
            "m2po-kernels": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _installed_version("triton"),
            "platform": platform.platform(),
        },
        "build": _build_record(),
        "devices": devices,
        "backends": {
            # The CUDA library is of interest also where there is no GPU yet: whether it was built, and what it waits for.
            name: {kind: backend_reason(name, kind) for kind in dict.fromkeys([*kinds, *(["cuda"] if name == "cuda" else [])])}
            for name in dispatch.BACKENDS
        },
        "chosen": {kind: _chosen(kind) for kind in dict.fromkeys([*kinds, "cuda"])},
        "M2PO_BACKEND": os.environ.get("M2PO_BACKEND"),
    }


def backend_reason(name: str, device: torch.device | str) -> str | None:
    """dispatch.why_not, where a backend whose module raises on import, whatever it raises, becomes a reason as well."""
    try:
        return dispatch.why_not(name, device)
    except Exception as error:
        return f"its module does not load: {one_line(error)}"


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _build_record() -> dict[str, Any]:
    if not BUILD_RECORD.is_file():
        return {"native": False, "why": f"no build record at {BUILD_RECORD}: the compiled extension was never built here"}
    try:
        record = json.loads(BUILD_RECORD.read_text())
    except (OSError, ValueError) as error:
        return {"native": False, "why": f"cannot read {BUILD_RECORD}: {one_line(error)}"}
    if not isinstance(record, dict):
        return {"native": False, "why": f"{BUILD_RECORD} does not hold a JSON object"}
    return record


def _devices() -> list[dict[str, object]]:
    cpu: dict[str, object] = {
        "device": "cpu",
        "name": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    found = [cpu]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                {
                    "device": f"cuda:{index}",
                    "name": properties.name,
                    "capability": f"sm_{properties.major}{properties.minor}" if torch.version.cuda else properties.gcnArchName,
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
    elif torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found.extend({"device": f"{kind}:{index}", "name": str(kind)} for index in range(torch.accelerator.device_count()))
    return found


def _chosen(kind: str) -> dict[str, object]:
    """Which backend a tensor on a device of this kind would get, and why; also for a kind that is not here."""
    device = torch.device(kind)
    order = list(dispatch.candidates(device))
    present = kind != "cuda" or torch.cuda.is_available()
    if not present:
        return {"backend": None, "order": order, "why": "no such device here"}
    try:
        backend = dispatch.choose(device)
    except Exception as error:  # a forced backend that cannot serve, or a module that raises: calls would raise the same
        return {"backend": None, "order": order, "why": f"a call raises {one_line(error)}"}
    if os.environ.get("M2PO_BACKEND"):
        return {"backend": backend, "order": order, "why": "M2PO_BACKEND forces it"}
    return {"backend": backend, "order": order, "why": f"the first available of {', '.join(order)}"}


def _print(report: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = stdout_console()
    versions = Table("", "version", title="Versions", title_justify="left")
    for name, version in report["versions"].items():
        versions.add_row(name, version or "not installed")
    build = report["build"]
    if build.get("native"):
        isas = ", ".join(map(str, build.get("isas") or ["?"]))
        versions.add_row(
            "extension", escape(f"built by {build.get('compiler', '?')} against torch {build.get('torch', '?')}: {isas}")
        )
    else:
        versions.add_row("extension", escape(f"not built: {build.get('why', 'no reason recorded')}"))
    if build.get("cuda"):
        targets = ", ".join(map(str, build.get("architectures") or ["?"]))
        versions.add_row("CUDA library", escape(f"built by nvcc {build.get('nvcc', '?')}: {targets}"))
    else:
        why = build.get("why_cuda", build.get("why", "no reason recorded"))
        versions.add_row("CUDA library", escape(f"not built: {why}"))
    console.print(versions)

    devices = Table("device", "name", "details", title="Devices", title_justify="left")
    for device in report["devices"]:
        details = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("device", "name"))
        devices.add_row(str(device["device"]), escape(str(device["name"])), escape(details))
    console.print(devices)

    backends = Table("backend", "device", "runs", "why not", title="Backends", title_justify="left")
    for name, reasons in report["backends"].items():
        for kind, reason in reasons.items():
            backends.add_row(name, kind, "[red]no[/]" if reason else "[green]yes[/]", escape(reason or ""))
    console.print(backends)

    chosen = Table("a tensor on", "gets", "why", "order", title="Choice", title_justify="left")
    for kind, choice in report["chosen"].items():
        chosen.add_row(kind, choice["backend"] or "-", escape(choice["why"]), " > ".join(choice["order"]))
    console.print(chosen)
    forced = report["M2PO_BACKEND"]
    console.print(f"M2PO_BACKEND is {escape(repr(forced)) if forced else 'not set; it would force one backend'}")
