"""Keeps what `locks eval` found in a file of results/, from which docs/evaluation.md is made.

    tools/keep_evaluation.py FOLDER/results.json qwen2.5-coder-0.5b/ruler-8k --model Qwen2.5-Coder-0.5B-Instruct

Everything that is needed to repeat the run stays, and every document's score. Of paths only the last part stays, and
numbers are rounded to six digits.
"""

import argparse
import json
import sys
from pathlib import Path

from keep_comparison import each_leaf

ROOT = Path(__file__).resolve().parent.parent


def portable(leaf: object) -> object:
    """Without the folders of the machine that ran it."""
    if isinstance(leaf, float):
        return float(f"{leaf:.6g}")
    if isinstance(leaf, str) and leaf.startswith(("/", ".")) and "\n" not in leaf:
        return Path(leaf).name
    return leaf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, metavar="RESULT", help="results.json of the folder of a run")
    parser.add_argument("name", metavar="NAME", help="of the file in results/, as MODEL/TASKS")
    parser.add_argument("--model", required=True, help="name of the model, as its publisher gives it")
    parser.add_argument("--note", help="what readers must know of the model or its data")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    note = {"note": arguments.note} if arguments.note else {}
    kept = {"model": arguments.model} | note | each_leaf(result, portable)
    out = ROOT / "results" / f"{arguments.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    tasks = ",\n".join(f"  {json.dumps(name)}: {json.dumps(task)}" for name, task in kept.pop("tasks").items())
    about = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in kept.items())
    out.write_text(f'{{\n{about},\n "tasks": {{\n{tasks}\n }}\n}}\n')
    print(f"{out.relative_to(ROOT)}: {len(result['tasks'])} tasks, {out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
