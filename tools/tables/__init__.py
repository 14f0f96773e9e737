"""The tables of the documents, made of measured results: a module a kind of measurement."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def grid(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown: words in the first column, numbers in the others."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def markdown(header: list[str], rows: list[list[str]], caption: str) -> str:
    """A table with what was measured, and where, below it."""
    return grid(header, rows) + "\n\n" + caption


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def is_measured(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()
