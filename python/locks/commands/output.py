"""What commands write: tables, files, and the option --json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from locks.commands import usage_error

if TYPE_CHECKING:
    from rich.table import Table

STDOUT = "-"
_COLUMNS_OF_FILES = 120
# The option as every command has it.
JsonFile = Annotated[
    Optional[str],
    typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - for only JSON, on stdout."),
]


def show_table(table: Table) -> None:
    """As wide as the terminal or COLUMNS; in a file or a pipe, which has no width, wide enough that no cell is cut."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if has_width else _COLUMNS_OF_FILES).print(table)


def check_target(command: str, option: str, file: str | None, *, or_stdout: bool = False) -> None:
    """Refuses before the work what could not be written after it. Raises CommandError."""
    if file is None or (or_stdout and file == STDOUT):
        return
    target = Path(file)
    try:
        is_folder, is_place = target.is_dir(), target.parent.is_dir()
        is_open = os.access(target, os.W_OK) if target.exists() else can_write(target.parent)
    except OSError:  # such as a name that is too long
        is_folder = is_place = is_open = False
    if is_folder or not (is_place and is_open):
        found = " is a folder" * is_folder
        allowed = "a file that you may write" if is_place else "a file in a folder that exists"
        raise usage_error(command, f"{option} = {file!r}{found}, expected {allowed}{', or - for stdout' * or_stdout}")


def can_write(folder: str | Path) -> bool:
    """Whether a folder is there and takes new files."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def write_json(command: str, file: str, value: Any) -> None:
    """What --json asks for."""
    text = json.dumps(value, indent=2) + "\n"
    if file == STDOUT:
        print(text, end="")
    else:
        write_text(command, "--json", file, text)


def write_text(command: str, option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{option} = {file!r}: {error.strerror}, expected a file that you may write"
        raise usage_error(command, reason) from error
