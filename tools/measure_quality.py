"""Measures the selectors on captured traces and writes bench/results/quality.json, from which docs/quality.md is made.

    tools/measure_quality.py FOLDER

FOLDER holds smollm2-135m, qwen2.5-coder-0.5b and gemma3-270m .safetensors traces (`locks quality` tells their format).
"""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

from locks.budget import parse_budget
from locks.commands.quality_output import about_run
from locks.formats import Format
from locks.quality import measure, measure_steps
from locks.trace import LayerTrace, Trace

ROOT = Path(__file__).resolve().parent.parent
CASES = [  # trace, layer, budget
    ("smollm2-135m", 9, "512"),
    ("smollm2-135m", 3, "512"),
    ("qwen2.5-coder-0.5b", 16, "0.02"),
    ("qwen2.5-coder-0.5b", 0, "512"),
    ("gemma3-270m", 5, "256"),
]
SELECTORS = [
    *(("locks", name) for name in ("fine", "fine8", "compact", "wide", "paper")),
    *((name, form) for form in ("fine", "wide")
      for name in ("quest", "mean_std", "centroid", "int3", "shared_low_rank")),
]
# With those that choose tokens, two of which look at a window of queries: all are judged on the steps behind it.
WINDOW = 32
WINDOWED = [("oracle", "fine"), ("locks", "fine"), ("locks", "fine8"), ("quest", "fine"), ("shadowkv", "fine"),
            ("rocketkv", "fine"), ("snapkv", "fine")]


def costs(captured: LayerTrace, selector: str, summary_format: str, budget: str) -> dict[str, int]:
    """Bytes of the KV head that a step reads, and that stay in memory: means over the judged steps."""
    (steps,) = measure_steps(captured, selector, Format.parse(summary_format), [parse_budget(budget)], WINDOW)
    return {"bytes_per_step": round(steps.bytes_read.mean()), "resident_bytes": round(steps.resident_bytes.mean())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with the traces")
    folder = parser.parse_args().folder
    rows, windowed = [], []
    for name, layer, budget in CASES:
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            sys.exit(f"{path}: no such trace; see `tools/measure_quality.py --help`")
        captured = Trace(path).read(layer)
        about = {"trace": name, "tokens": captured.keys.shape[0], "head_dim": captured.keys.shape[1], "budget": budget}
        for selector, summary_format in SELECTORS:
            row = measure(captured, selector, Format.parse(summary_format), parse_budget(budget)).as_dict()
            rows.append(about | row)
        for selector, summary_format in WINDOWED:
            row = measure(captured, selector, Format.parse(summary_format), parse_budget(budget), WINDOW).as_dict()
            windowed.append(about | row | costs(captured, selector, summary_format, budget))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    about = about_run()
    result = {
        "machine": about["machine"],
        "date": about["date"],
        "commit": commit.strip(),
        "versions": {"torch": about["torch"], "python": platform.python_version()},
        "rows": rows,
        "windowed": windowed,
    }
    out = ROOT / "bench" / "results" / "quality.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{out.relative_to(ROOT)}: {len(rows) + len(windowed)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
