"""What `locks bench` prints: progress, a line a result, and the table at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from locks.commands.bench_engine import AS_SET, SPARSE, WHOLE
from locks.commands.output import show_table

_HEADINGS = (
    "context x\nsequences",
    "backend",
    "ms, median\n(p10 to p90)",
    "tokens/s",
    "MB of cache\nread a step",
    "times\nless",
    "times as\nfast",
)


def _of(row: dict[str, Any]) -> str:
    """The backend, and how it read where that is not as its options say."""
    reads = row.get("reads", AS_SET)
    return row["backend"] if reads == AS_SET else f"{row['backend']}, {reads}"


def line(row: dict[str, Any]) -> str:
    """A result in one line."""
    low, high = row["p10_us"] / 1e3, row["p90_us"] / 1e3
    return (
        f"{row['name']} {_of(row)} {row['context']} x {row['batch']}: {row['median_us'] / 1e3:.3f} ms"
        f" ({low:.3f} to {high:.3f})"
    )


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """All results; cells of what a row does not tell stay empty."""
    shown = Table(title=title)
    for heading in _HEADINGS:
        shown.add_column(heading, justify="left" if heading == "backend" else "right", no_wrap=True)
    for row in rows:
        median, low, high = (row[name] / 1e3 for name in ("median_us", "p10_us", "p90_us"))
        shown.add_row(
            f"{row['context']} x {row['batch']}",
            _of(row),
            f"{median:.3f} ({low:.3f} to {high:.3f})",
            _number(row.get("tokens_per_second"), ".1f"),
            _number(row["bytes"], ".1f", 1e-6),
            _number(row["bytes_dense"] / row["bytes"] if row.get("bytes_dense") and row["bytes"] else None, ".1f"),
            _number(row["speedup"], ".2f"),
        )
    show_table(shown)


def print_cpu_table(result: dict[str, Any]) -> None:
    """What `locks bench cpu` found."""
    shown = Table(title=f"{result['machine']}, read peak {result['read_peak_gb_per_s']:.1f} GB/s")
    headings = ("stage", "context", "ms, median\n(p10 to p90)", "MB moved", "of read\npeak", "times as fast\nas vLLM")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for row in result["rows"]:
        middle, low, high = (row[name] / 1e3 for name in ("median_us", "p10_us", "p90_us"))
        shown.add_row(
            row["name"].split(":")[0],
            f"{row['context']:,}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            _number(row["bytes"], ".1f", 1e-6),
            f"{row['percent_of_peak']:.0f} %",
            _number(row["speedup"], ".1f"),
        )
    show_table(shown)
    for row in result["rows"]:
        if "key_mb_per_second_and_thread" in row:
            print(f"summarise: {row['key_mb_per_second_and_thread']:.0f} MB of keys a second and thread")
    for stage, fit in result["lines"].items():
        print(
            f"{stage}: {fit['at_zero_us']:.0f} us + {fit['per_1000_tokens_us']:.2f} us per 1,000 tokens, no context"
            f" further off than {100 * fit['largest_deviation']:.1f} %"
        )


def crossovers(rows: list[dict[str, Any]]) -> dict[int, int | None]:
    """By sequences: the least context of those timed from which on LOCKS is as fast by its records as reading whole."""
    times = {(row["batch"], row["context"], row["reads"]): row["median_us"] for row in rows if "reads" in row}
    found: dict[int, int | None] = {}
    for batch in sorted({batch for batch, _, reads in times if reads == SPARSE}):
        found[batch] = None
        for context in sorted(
            (context for of, context, reads in times if (of, reads) == (batch, SPARSE)), reverse=True
        ):
            if times[batch, context, SPARSE] > times.get((batch, context, WHOLE), 0):
                break
            found[batch] = context
    return found


def _number(value: float | None, spelling: str, scale: float = 1) -> str:
    return "" if value is None else format(value * scale, spelling)


@contextlib.contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Tells on stderr what is being done and what has been: as a bar if that is a terminal, else a line a result."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda text: None), (lambda line: print(line, file=sys.stderr, flush=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield (
            lambda text: bar.update(task, description=text),
            lambda line: bar.advance(task),
        )
