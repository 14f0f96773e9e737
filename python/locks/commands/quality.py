"""locks quality"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from locks.commands import CommandError, usage_error

if TYPE_CHECKING:
    from locks.quality import Row

_SECONDS_BEFORE_PROGRESS = 2.0
_STDOUT = "-"
_MOST_THREADS = 256  # more than any machine helps with; far fewer than make thread creation fail


def _thread_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_THREADS):
        raise typer.BadParameter(f"{text!r}, expected 1 to {_MOST_THREADS}")
    return int(text)


def quality(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A captured attention trace (.safetensors); docs/quality.md tells its format.", show_default=False
        ),
    ],
    selector: Annotated[
        str,
        typer.Option(
            help="What ranks the pages: locks, oracle, quest, mean_std, centroid, int3 (keys of 3 bits about their "
            "page's mean) or shared_low_rank (one basis for the whole sequence, the format's bytes)."
        ),
    ] = "locks",
    budget: Annotated[
        str, typer.Option(help="Tokens that a step may read, a fraction of the length such as 0.02, or all.")
    ] = "512",
    format: Annotated[str, typer.Option(help="Summary format; `locks formats` lists them.")] = "fine",
    json_file: Annotated[
        Optional[str],
        typer.Option("--json", metavar="FILE", help="Also write the rows as JSON; - for only JSON, on stdout."),
    ] = None,
    threads: Annotated[
        Optional[int], typer.Option(metavar="N", parser=_thread_count, help="Threads; torch's number if not given.")
    ] = None,
) -> None:
    """Measure how much attention a selector keeps on a captured trace, layer by layer."""
    if json_file is not None:
        _check_target(json_file)

    import torch

    from locks.budget import parse_budget
    from locks.formats import Format
    from locks.quality import evaluate
    from locks.trace import Trace

    if threads is not None:
        torch.set_num_threads(threads)
    # RuntimeError: an operator's refusal of a value, such as an unknown selector.
    try:
        summary_format = Format.parse(format)
        allowed = parse_budget(budget)
        opened = Trace(trace)
        with _progress(len(opened.layers)) as advance:
            rows = []
            for row in evaluate(opened, selector, summary_format, allowed):
                rows.append(row)
                advance()
    except (ValueError, RuntimeError) as error:
        raise _refusal(error) from error

    if json_file is not None:
        _write_json(rows, json_file)
    if json_file != _STDOUT:
        Console().print(_table(rows, trace.name, budget))


def _refusal(reason: object) -> CommandError:
    return usage_error("locks quality", reason)


def _check_target(json_file: str) -> None:
    """Refuses before the work what could not be written after it."""
    target = Path(json_file)
    try:
        wrong = json_file != _STDOUT and (target.is_dir() or not target.parent.is_dir())
    except OSError:  # such as a name that is too long
        wrong = True
    if wrong:
        raise _refusal(f"--json = {json_file!r}, expected a file in a folder that exists, or - for stdout")


def _write_json(rows: list[Row], json_file: str) -> None:
    text = json.dumps([row.as_dict() for row in rows], indent=2) + "\n"
    if json_file == _STDOUT:
        print(text, end="")
        return
    try:
        Path(json_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(f"--json = {json_file!r}: {error.strerror}, expected a file that you may write") from error


def _table(rows: list[Row], trace_name: str, budget: str) -> Table:
    first = rows[0]
    table = Table(title=f"{escape(trace_name)}: {first.selector}, format {first.format}, budget {budget}")
    headings = ("layer", "tokens\nallowed", "retained mass\nof the oracle", f"retained mass\nof {first.selector}",
                "gap\n(points)", "output\nerror", "bytes a\nrecord")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.layer),
            str(row.budget_tokens),
            f"{row.retained_oracle:.4f}",
            f"{row.retained:.4f}",
            f"{100 * (row.retained_oracle - row.retained):.2f}",
            f"{row.output_error:.4f}",
            str(row.bytes_per_record),
        )
    return table


@contextlib.contextmanager
def _progress(num_layers: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal, once the work takes longer than two seconds. Yields the call
    that counts a layer."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    progress = Progress(
        TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    task = progress.add_task("layers", total=num_layers)
    timer = threading.Timer(_SECONDS_BEFORE_PROGRESS, progress.start)
    timer.start()
    try:
        yield lambda: progress.advance(task)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
