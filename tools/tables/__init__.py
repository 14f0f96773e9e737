"""The tables of the documents, made of measured results: a module a kind of measurement."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def markdown(header: list[str], rows: list[list[str]], caption: str) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n\n" + caption


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def is_measured(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()
