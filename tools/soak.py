"""Soaks a real server: `locks serve` on loopback under thousands of requests, many of which end badly.

    .venv/bin/python tools/soak.py --requests 2000 --json bench/results/soak.json

After `make setup`. Clients ask, stream, hang up, are killed and send what is no request, in a cache so small that
requests are preempted. Answers must be those of the same requests alone, memory must stay flat, no request may hang,
and each valid record must be that of the keys beside it. Exit status 1: something did not hold.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.provenance import provenance  # noqa: E402
from tools.soaking.load import PHASES  # noqa: E402
from tools.soaking.run import Soak, document_tokens, run_soak  # noqa: E402

console = Console(stderr=True)


class Ticks:
    """Progress bars, one for each part of the run."""

    def __init__(self, progress: Progress, totals: dict[str, int]) -> None:
        self._progress, self._totals = progress, totals
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=self._totals.get(name, self._totals["alone"]))
        self._progress.update(self._tasks[name], completed=done)


def main(
    requests: Annotated[int, typer.Option(min=60, help="Requests under load.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and what clients do.")] = 1,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the result here.")] = None,
    log: Annotated[Optional[Path], typer.Option(help="Keep the server's log here.")] = None,
) -> None:
    """Soak a real server, and tell whether everything held."""
    plan = Soak(requests=requests, seed=seed)
    totals = {phase.name: round(phase.share * requests) for phase in PHASES} | {"alone": plan.num_jobs}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        server_log, about = log or Path(folder, "server.log"), provenance()
        result = asyncio.run(run_soak(plan, *document_tokens(), server_log, Ticks(progress, totals)))
    result = about | result
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print_result(result)
    raise typer.Exit(1 if result["faults"] else 0)


def print_result(result: dict[str, Any]) -> None:
    """A line for each phase, memory, and what did not hold."""
    for row in result["phases"]:
        print(
            f"{row['phase']}: {sum(row['requests'].values())} requests in {row['seconds']} s, {row['preemptions']}"
            f" preemptions, {row['prefix_hit_tokens']} tokens found in the cache; {row['answers_compared']} answers"
            f" compared, {len(row['different'])} differ, {row['records']['checked']} records verified"
        )
    memory = result["memory"]
    early, late, tolerance = memory["early_mib"], memory["late_mib"], memory["tolerance"]
    print(f"memory: {early:.0f} MiB, then {late:.0f} MiB; tolerance {tolerance:.0%}")
    for fault in result["faults"]:
        print(f"FAULT: {fault}")
    print("everything held" if not result["faults"] else f"{len(result['faults'])} faults")


if __name__ == "__main__":
    typer.run(main)
