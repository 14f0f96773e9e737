"""locks bench compare: two results side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def row(name: str, median: float, spread: float = 1.0, **more: object) -> dict[str, object]:
    return {"name": name, "format": "fine", "context": 1024, "batch": 1, "median_us": median,
            "p10_us": median - spread, "p90_us": median + spread, **more}


def compare(tmp_path: Path, old: object, new: object, *options: str) -> subprocess.CompletedProcess[str]:
    for name, value in (("old.json", old), ("new.json", new)):
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    command = [sys.executable, "-m", "locks.cli", "bench", "compare", "old.json", "new.json", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)


OLD = {"machine": "one", "rows": [row("score", 100), row("chain", 50), row("dense", 200, 30)]}


def test_rows_beyond_spread_and_tolerance_fail(tmp_path: Path) -> None:
    new = {"machine": "other", "rows": [row("chain", 51.5), row("score", 110), row("dense", 225, 30), row("more", 9)]}
    result = compare(tmp_path, OLD, new, "--json", "-")
    assert result.returncode == 1, result.stderr
    told = json.loads(result.stdout)
    verdicts = {line["name"]: line["verdict"] for line in told["rows"]}
    assert verdicts == {"score": "regression", "chain": "within spread", "dense": "within spread"}
    assert {line["name"]: line["ratio"] for line in told["rows"]}["score"] == pytest.approx(1.1)
    assert told["only_new"] == ["more, fine"] and told["only_old"] == []
    assert told["differs"] == {"machine": {"old": "one", "new": "other"}}


def test_slower_within_tolerance_and_faster_pass(tmp_path: Path) -> None:
    new = {"machine": "one", "rows": [row("score", 110), row("chain", 40)]}
    result = compare(tmp_path, OLD, new, "--tolerance", "0.2")
    assert result.returncode == 0, result.stderr
    assert "slower" in result.stdout and "faster" in result.stdout
    assert "only old: dense, fine" in result.stdout


def test_rows_of_other_cases_are_not_matched(tmp_path: Path) -> None:
    new = {"rows": [row("score", 100, backend="locks"), row("score", 100, reads="whole")]}
    result = compare(tmp_path, OLD, new)
    assert result.returncode == 2
    assert "no row in common" in result.stderr


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", 'no "rows"'),
        ("[" * 100000, "maximum recursion depth"),
        ({"rows": [{"name": "score", "median_us": 0}]}, "score: median_us = 0, p10_us = None, p90_us = None, exp"),
        ({"rows": [row("score", 10, -1)]}, "p10_us = 11, p90_us = 9, expected 0 < p10_us <= median_us <= p90_us"),
        ({"rows": [row("score", 10) | {"p90_us": float("inf")}]}, "p90_us = inf, expected 0 <"),
        ({"rows": [row("score", 10) | {"median_us": float("nan")}]}, "median_us = nan, p10"),
        ({"rows": [row("score", 10) | {"p90_us": 10**400}]}, "p90_us = 1000000000"),
        ({"rows": [row("score", 1, 0) | {"median_us": True}]}, "median_us = True"),
        ({"rows": [row("score", 10), row("score", 20)]}, "is there twice"),
        ({"rows": [row("score", 10), 7]}, "row 7, expected objects"),
        ({"rows": [row("score", 10, budget={"a": [1]}), row("score", 20, budget={"a": [1]})]}, "is there twice"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, new: object, reason: str) -> None:
    result = compare(tmp_path, OLD, new)
    assert result.returncode == 2
    assert reason in result.stderr and "see `locks bench compare --help`" in result.stderr
