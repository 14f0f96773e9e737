"""What `locks quality` writes, and its progress."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import platform
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from locks.commands import CommandError, usage_error

STDOUT = "-"
_SECONDS_BEFORE_PROGRESS = 2.0


def refusal(reason: object) -> CommandError:
    return usage_error("locks quality", reason)


def check_target(option: str, file: str | None, *, or_stdout: bool = False) -> None:
    """Refuses before the work what could not be written after it."""
    if file is None or (or_stdout and file == STDOUT):
        return
    target = Path(file)
    try:
        wrong = target.is_dir() or not target.parent.is_dir()
    except OSError:  # such as a name that is too long
        wrong = True
    if wrong:
        raise refusal(
            f"{option} = {file!r}, expected a file in a folder that exists{', or - for stdout' if or_stdout else ''}"
        )


def write_json(option: str, file: str, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    if file == STDOUT:
        print(text, end="")
    else:
        write_text(option, file, text)


def write_text(option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise refusal(f"{option} = {file!r}: {error.strerror}, expected a file that you may write") from error


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
