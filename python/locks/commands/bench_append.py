"""What `--append` keeps of the file that an earlier run of `locks bench serve` or `prefill` wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from locks.commands import NOT_JSON, CommandError, usage_error
from locks.commands.bench_compare import is_timed
from locks.commands.bench_machine import same_machine

_EXPECTED = "expected what an earlier run wrote: name another file"


def earlier_rows(
    command: str, file: str, machine: dict[str, Any], again: set[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and failures of a file, but for those of the backends that run again. Raises CommandError for a file that
    is none of this machine and these settings, or that no run wrote."""

    def refused(reason: str) -> CommandError:
        return usage_error(command, f"--append: {file!r}{reason}")

    try:
        told = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise refused(f": {error}, {_EXPECTED}") from None
    if not isinstance(told, dict) or not isinstance(told.get("versions", {}), dict):
        raise refused(f", {_EXPECTED}")
    rows, failures = told.get("rows"), told.get("not_measured")
    if not isinstance(rows, list) or not isinstance(failures, list):
        raise refused(f': no lists "rows" and "not_measured", {_EXPECTED}')
    if not same_machine(told, machine):
        raise refused(" is of another machine, version, commit or setting: name another file")
    for row in rows:
        if not _is_row(row):
            raise refused(f": row {json.dumps(row)[:60]}, {_EXPECTED}")
    for text in failures:
        if not isinstance(text, str):
            raise refused(f": not_measured has {json.dumps(text)[:60]}, {_EXPECTED}")
    return (
        [row for row in rows if row["backend"] not in again],
        [text for text in failures if text.split(":")[0] not in again],
    )


def _is_row(row: Any) -> bool:
    """Whether a row has all that the table and the comparison with dense attention take from it."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in ("name", "backend"))
        and all(type(row.get(name)) is int for name in ("context", "batch"))
        and is_timed(row)
        and "bytes" in row  # null for a prompt
        and all(_is_size(row.get(name)) for name in ("bytes", "bytes_dense", "tokens_per_second"))
        and isinstance(row.get("reads", ""), str)
    )


def _is_size(value: Any) -> bool:
    """Whether a number, if there is one, is at least 0 and none of those integers of JSON that no float holds."""
    return value is None or (type(value) in (int, float) and 0 <= value <= sys.float_info.max)
