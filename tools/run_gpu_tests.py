"""Runs the C++ tests that need a GPU, then a part of them under compute-sanitizer, and writes what came out.

    python3 tools/run_gpu_tests.py build/kernels/tests/cpp --json bench/results/gpu_tests.json --commit HASH

FOLDER holds the test programs. Several run side by side (`--jobs`). The sanitizers slow a kernel down by tens to
thousands, so they get the cases that reach each kernel at least once; `--limit` seconds end a run, which is then noted
as one without a result. Rows of the file whose command is not run here are kept. Exit status 1: something failed.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = [
    "summary_cuda_test",
    "prepare_cuda_test",
    "score_cuda_test",
    "score_cuda_faults_test",
    "select_attend_cuda_test",
    "decode_cuda_test",
]
# Of each program the cases that reach every kernel: formats of each page size and rank, head sizes that are powers of
# two and not, odd groups, rows read whole, padded and sparse in one batch.
SANITIZED = {
    "summary_cuda_test":
        "*/format_fine:*/format_fine8:*/format_compact:*/format_wide:*/format_paper:*/head_dim_80_fine",
    "prepare_cuda_test": "*/format_fine:*/format_compact:*/format_wide:*/head_dim_80_fine:*/group_7",
    "score_cuda_test": "*/format_fine:*/format_compact:*/format_wide:*/format_paper:*/head_dim_80_fine:*/group_7",
    "score_cuda_faults_test": "*/fine:*/wide",
    "select_attend_cuda_test": "*MixedRows*:*WholeAndPaddedRows*",
    "decode_cuda_test": "PlanRows*:*/format_fine:*/head_dim_64_fine",
}
# racecheck follows every access to shared memory, thousands of times slower: what it gets of the largest kernel.
RACECHECKED = SANITIZED | {
    "select_attend_cuda_test": "*SmallRows*:*BlockIds*",
    "decode_cuda_test": "PlanRows*:DecodeCudaSmall*",
}
TOOLS = ["memcheck", "racecheck", "synccheck"]


def commands(sanitizers: list[str]) -> list[tuple[str, str, str]]:
    """What stands before a program, the program and its filter, the longest first."""
    sanitized = [
        (f"compute-sanitizer --tool {tool}", program, filter_)
        for tool in sanitizers
        for program, filter_ in reversed((RACECHECKED if tool == "racecheck" else SANITIZED).items())
    ]
    plain = [("", program, "") for program in reversed(PROGRAMS)]
    return plain + sanitized


def count(text: str, what: str) -> int:
    found = re.findall(rf"\[  {what} *\] (\d+) test", text)
    return int(found[0]) if found else 0


def read_outcome(text: str, status: int | None) -> dict:
    """gtest's counts; errors that the sanitizer reports fail the run as a whole, and so does a run of no test."""
    outcome = {"passed": count(text, "PASSED"), "failed": count(text, "FAILED"), "skipped": count(text, "SKIPPED")}
    if status is None:
        return outcome | {"failed": 1, "note": "no result: ended at the limit of time"}
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    if status != 0 and outcome["failed"] == 0:
        outcome["failed"] = 1
        lines = [line for line in text.splitlines() if line.strip()]
        outcome["note"] = summary[-1] if summary else lines[-1] if lines else f"exit status {status}"
    elif not any(outcome.values()):  # a filter that meets nothing, to which gtest says yes
        outcome |= {"failed": 1, "note": "no test ran"}
    return outcome


def run(folder: Path, prefix: str, program: str, filter_: str, limit: float) -> dict:
    options = ["--error-exitcode", "9", "--print-limit", "3"] if prefix else []
    line = [*prefix.split(), *options, str(folder / program), *([f"--gtest_filter={filter_}"] if filter_ else [])]
    shown = f"{prefix} {program}".strip() + (f" --gtest_filter='{filter_}'" if filter_ else "")
    begun = datetime.datetime.now()
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit, errors="replace")
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        text, status = (late.stdout or b"").decode(errors="replace"), None
    seconds = (datetime.datetime.now() - begun).total_seconds()
    row = {"command": shown, **read_outcome(text, status)}
    counts = f"{row['passed']:4d} passed {row['failed']:3d} failed"
    print(f"{seconds:6.1f} s  {counts}  {shown}", row.get("note", ""), flush=True)
    if row["failed"] and status is not None:
        print("\n".join(re.findall(r"^(?:=========.*|\[  FAILED  \].*|.*Failure.*)$", text, re.M)[:20]), flush=True)
    return row


def machine() -> dict:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
    return {"machine": name, "driver": driver}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the test programs")
    parser.add_argument("--json", type=Path, required=True, help="file of results, read first where it exists")
    parser.add_argument("--commit", required=True, help="commit the programs were built from")
    parser.add_argument("--jobs", type=int, default=4, help="programs side by side")
    parser.add_argument("--limit", type=float, default=300, help="seconds a program may take")
    parser.add_argument("--sanitizers", nargs="*", default=TOOLS, choices=TOOLS, help="none: the tests alone")
    arguments = parser.parse_args()
    missing = [program for program in PROGRAMS if not (arguments.folder / program).exists()]
    if missing:
        parser.error(f"{arguments.folder} lacks {', '.join(missing)}; build them with LOCKS_BUILD_TESTS=ON and nvcc")
    result = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"rows": []}
    result |= machine() | {"date": datetime.date.today().isoformat(), "commit": arguments.commit}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(
            pool.map(
                lambda command: run(arguments.folder, *command, arguments.limit), commands(arguments.sanitizers)
            )
        )
    again = {row["command"] for row in rows}
    kept = [row for row in result["rows"] if row["command"] not in again]
    result["rows"] = [row | {"commit": arguments.commit} for row in rows] + kept
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
