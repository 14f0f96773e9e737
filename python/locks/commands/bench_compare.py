"""locks bench compare"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from locks.commands import NOT_JSON, usage_error
from locks.commands.output import STDOUT, JsonFile, check_target, show_table, write_json

COMMAND = "locks bench compare"
EXAMPLES = """Examples:

    locks bench compare bench/results/cpu.json new.json

    locks bench compare OLD.json NEW.json --tolerance 0.1 --json -
"""
_REGRESSIONS = 1  # exit code
# What tells a row from the others of its file; a file need not have all of them.
_IDENTITY = ("name", "backend", "format", "budget", "context", "batch", "padding", "reads")
_TIMES = ("median_us", "p10_us", "p90_us")
_ABOUT = ("machine", "driver", "cuda_driver", "versions", "settings", "shape", "budget")


@dataclass(frozen=True)
class Change:
    """A row of both files."""

    row: dict[str, Any]
    old: dict[str, float]
    new: dict[str, float]
    tolerance: float

    @property
    def ratio(self) -> float:
        """New time over old time."""
        return self.new["median_us"] / self.old["median_us"]

    @property
    def beyond_spread(self) -> bool:
        """The 10th to 90th percentiles do not meet."""
        return self.new["p10_us"] > self.old["p90_us"] or self.new["p90_us"] < self.old["p10_us"]

    @property
    def verdict(self) -> str:
        if not self.beyond_spread:
            return "within spread"
        if self.ratio > 1 + self.tolerance:
            return "regression"
        return "slower" if self.ratio > 1 else "faster"

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: self.row[name] for name in _IDENTITY if name in self.row},
            "old": self.old, "new": self.new, "ratio": self.ratio, "verdict": self.verdict,
        }


def compare(
    old: Annotated[Path, typer.Argument(help="A result of `locks bench` or kernel_bench (--json).")],
    new: Annotated[Path, typer.Argument(help="Another one, of the same cases.")],
    tolerance: Annotated[
        float, typer.Option(help="A row fails that takes longer by more than this share and beyond its spread.", min=0)
    ] = 0.05,
    json_file: JsonFile = None,
) -> None:
    """Set two results of the same benchmark side by side; exit code 1 if a row became slower.

    Rows are matched by name, backend, format, budget, context and sequences. A change is beyond the spread where the
    10th to 90th percentiles of the two do not meet."""
    check_target(COMMAND, "--json", json_file, or_stdout=True)
    was, now = _load(old), _load(new)
    earlier, later = _rows(old, was), _rows(new, now)
    changes = [
        Change(row, _times(earlier[key]), _times(row), tolerance) for key, row in later.items() if key in earlier
    ]
    if not changes:
        raise usage_error(COMMAND, f"{old} and {new} have no row in common, expected two results of the same cases")
    alone = {"only_old": [_title(earlier[key]) for key in earlier.keys() - later.keys()],
             "only_new": [_title(later[key]) for key in later.keys() - earlier.keys()]}
    about = {name: {"old": was.get(name), "new": now.get(name)} for name in _ABOUT if was.get(name) != now.get(name)}
    if json_file is not None:
        told = {"tolerance": tolerance, "differs": about, "rows": [change.as_json() for change in changes], **alone}
        write_json(COMMAND, json_file, told)
    if json_file != STDOUT:
        _print(changes, about, alone)
    if any(change.verdict == "regression" for change in changes):
        raise typer.Exit(_REGRESSIONS)


def _load(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise usage_error(COMMAND, f"{path}: {error}, expected a result of `locks bench --json`") from None
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise usage_error(COMMAND, f'{path}: no "rows", expected a result of `locks bench --json`')
    return result


def _rows(path: Path, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The timed rows by what tells them apart."""
    found: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        if not isinstance(row, dict):
            raise usage_error(COMMAND, f"{path}: row {json.dumps(row)[:60]}, expected objects")
        if not is_timed(row):
            told = ", ".join(f"{name} = {row.get(name)!r:.40}" for name in _TIMES)
            raise usage_error(COMMAND, f"{path}: {_title(row)}: {told}, expected 0 < p10_us <= median_us <= p90_us")
        key = json.dumps([row.get(name) for name in _IDENTITY])
        if key in found:
            raise usage_error(COMMAND, f"{path}: {_title(row)} is there twice, expected each case once")
        found[key] = row
    return found


def is_timed(row: dict[str, Any]) -> bool:
    """Whether a row has its times, as numbers in their order. Integers of JSON may be larger than any float."""
    median, low, high = (row.get(name) for name in _TIMES)
    numbers = all(type(time) in (int, float) for time in (median, low, high))
    return numbers and 0 < low <= median <= high <= sys.float_info.max


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in _TIMES}


def _title(row: dict[str, Any]) -> str:
    parts = (row.get(name) for name in ("name", "backend", "format", "reads"))
    return ", ".join(str(part) for part in parts if part is not None)


def _print(changes: list[Change], about: dict[str, Any], alone: dict[str, list[str]]) -> None:
    for name, sides in about.items():
        print(f"{name} differs: {sides['old']} | {sides['new']}")
    shown = Table()
    for heading in ("row", "context x\nsequences", "old, ms\n(p10 to p90)", "new, ms\n(p10 to p90)", "new / old", ""):
        shown.add_column(heading, justify="left" if heading in ("row", "") else "right")
    for change in changes:
        shown.add_row(
            escape(_title(change.row)), escape(f"{change.row.get('context', '')} x {change.row.get('batch', '')}"),
            _spread(change.old), _spread(change.new), f"{change.ratio:.3f}",
            "" if change.verdict == "within spread" else change.verdict,
        )
    show_table(shown)
    for side, titles in alone.items():
        if titles:
            print(f"{side.replace('_', ' ')}: {'; '.join(sorted(titles))}")


def _spread(times: dict[str, float]) -> str:
    middle, low, high = (times[name] / 1e3 for name in _TIMES)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
