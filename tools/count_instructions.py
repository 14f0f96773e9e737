"""Counts the instructions of each stage's hot loops under valgrind and holds them against the committed counts.

`count_instructions.py HOT_LOOPS` exits 1 where a count is off by more than the file's tolerance, and 77 where the
program was built by another compiler than that of the file; `--update` writes the file anew. Counts do not depend on
how busy a machine is, so they find what timings in CI cannot. AVX2 is the highest level that valgrind knows.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

COUNTS = Path(__file__).resolve().parent.parent / "bench" / "results" / "instructions.json"
LEVEL = "avx2"
STAGES = ("summarise_blocks", "score_pages", "select_pages", "attend_pages")
TOLERANCE = 0.02  # libc's own functions differ a little between machines
SKIPPED = 77


def count(program: Path, stage: str) -> int:
    """Instructions inside the stage's function, what it calls included."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
               f"--toggle-collect=locks::{stage}(*", str(program), LEVEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError:
        sys.exit("valgrind is not installed: apt-get install valgrind, or tools/setup test")
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or collected is None or int(collected[1]) == 0:
        sys.exit(f"{stage}: {' '.join(command)} stopped with code {done.returncode} and counted nothing:\n"
                 + done.stderr[-2000:])
    return int(collected[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="build/release/bench/hot_loops")
    parser.add_argument("--compiler", required=True, help="what built it, such as 'GNU 12.2.0'")
    parser.add_argument("--update", action="store_true", help="write the counts instead of comparing them")
    arguments = parser.parse_args()
    if not arguments.update:
        kept = json.loads(COUNTS.read_text())
        if kept["compiler"] != arguments.compiler:
            print(f"built by {arguments.compiler}; the counts are of {kept['compiler']}: not compared")
            return SKIPPED
    counts = {stage: count(arguments.program, stage) for stage in STAGES}
    if arguments.update:
        result = {"compiler": arguments.compiler, "level": LEVEL, "tolerance": TOLERANCE, "instructions": counts}
        COUNTS.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{COUNTS}: written")
        return 0
    return compare(counts, kept, arguments)


def compare(counts: dict[str, int], kept: dict, arguments: argparse.Namespace) -> int:
    worse = False
    for stage, instructions in counts.items():
        change = instructions / kept["instructions"][stage] - 1
        off = abs(change) > kept["tolerance"]
        worse |= off
        print(f"{stage}: {instructions:,} instructions, {100 * change:+.2f} %{'  <-- beyond' if off else ''}")
    if worse:
        print(f"more than {100 * kept['tolerance']:g} % off {COUNTS.name}. If that is meant:\n"
              f"    tools/count_instructions.py {arguments.program} --compiler '{arguments.compiler}' --update")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
