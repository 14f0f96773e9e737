"""What `locks quality` writes, and its progress."""

from __future__ import annotations

import contextlib
import csv
import io
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from locks.commands import CommandError, usage_error

COMMAND = "locks quality"
_SECONDS_BEFORE_PROGRESS = 2.0


def refusal(reason: object) -> CommandError:
    return usage_error(COMMAND, reason)


def check_different_targets(targets: Mapping[str, str | None], traces: Iterable[Path]) -> None:
    """Refuses two options with one file, of which the second would overwrite the first, and a file that is read.
    Raises CommandError."""
    given = [(option, file) for option, file in targets.items() if file is not None]
    read = {path.resolve() for path in traces}
    for option, file in given:
        if Path(file).resolve() in read:
            raise refusal(f"{option} = {file!r} is a trace that is to be read, expected another file")
    for (option, file), (other, other_file) in combinations(given, 2):
        if Path(file).resolve() == Path(other_file).resolve():
            raise refusal(f"{option} = {file!r} and {other} = {other_file!r} are one file, expected one for each")


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def about_run() -> dict[str, str]:
    """Machine, versions and date of a result."""
    import torch

    from locks import __version__, ops

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "machine": f"{name}, {torch.get_num_threads()} threads, {ops.cpu_level()} kernels",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "locks": __version__,
        "torch": torch.__version__,
    }


@contextlib.contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal, once the work takes longer than two seconds. Yields the call
    that counts one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    progress = Progress(
        TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    task = progress.add_task(what, total=total)
    timer = threading.Timer(_SECONDS_BEFORE_PROGRESS, progress.start)
    timer.start()
    try:
        yield lambda: progress.advance(task)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
