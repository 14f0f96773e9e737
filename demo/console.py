"""What the demo prints while it works: one line a step, with a spinner or a bar where there is a terminal.

Everything that vLLM and its processes write goes to a log file instead, and its end is shown on failure.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

Update = Callable[[float, str], None]


class Steps:
    """Titles and times of the demo's steps on `console`."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def step(self, title: str, measurable: bool = False) -> Iterator[Update]:
        """Shows `title` until the block ends. The block may report a share done and a note."""
        begin = time.monotonic()
        note = ""
        if self.console.is_terminal:
            columns = [SpinnerColumn(), TextColumn("{task.description}")]
            if measurable:
                columns += [BarColumn(bar_width=30), TaskProgressColumn()]
            with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as progress:
                task = progress.add_task(title, total=1.0 if measurable else None)

                def update(done: float, text: str = "") -> None:
                    nonlocal note
                    note = text
                    progress.update(task, completed=done, description=f"{title} [dim]{text}")

                yield update
        else:
            self.console.print(f"  … {title}")
            shown = 0.0

            def update(done: float, text: str = "") -> None:
                nonlocal note, shown
                note = text
                if measurable and done >= shown + 0.25:
                    shown = done
                    self.console.print(f"    {done:4.0%} {text}")

            yield update
        words = [title, f"[dim]{note}"] if note else [title]
        self.console.print(f"[green]✓[/] {' '.join(words)} [dim]({time.monotonic() - begin:.1f} s)")


@contextlib.contextmanager
def own_console(log: Path) -> Iterator[Console]:
    """A console on the real stdout, while 1 and 2 of this process and its children are the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 120)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield console
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def last_lines(log: Path, count: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
