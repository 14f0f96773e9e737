"""The evaluation's data: files of one folder, found by name, gzip or not. What is missing is named."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locks.commands import NOT_JSON


class DataError(ValueError):
    """Data that is not there or cannot be read; the message names the file and what is expected."""


@dataclass(frozen=True)
class Source:
    """A kind of file, and what stands for it where none is given."""

    pattern: str
    what: str
    note: str | None = None  # said in the results wherever it was used
    keys: tuple[str, ...] = ()  # of each line, where a line is a JSON object


def _lines(pattern: str, *keys: str, of: str = "") -> Source:
    return Source(pattern, of + ", ".join(keys), keys=keys)


SOURCES = {
    "haystack": Source("*.txt*", "a long text; the largest is taken", "haystack: a text of --data, not RULER's essays"),
    "squad": Source("squad*.json*", "SQuAD's format", "qa_1: questions of --data stand in for SQuAD's dev set"),
    "hotpotqa": Source("hotpotqa*.json*", "HotpotQA's format", "qa_2: questions of --data stand in for HotpotQA's"),
    "longbench": _lines("*longbench*.jsonl*", "dataset", "prompt", "answers", "all_classes", of="LongBench prompts: "),
    "math500": _lines("math500*.jsonl*", "problem", "solution", "answer"),
    "aime26": _lines("aime26*.jsonl*", "problem", "answer"),
}


class Data:
    """A folder of data, or none."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used: dict[str, dict[str, str]] = {}  # of each kind, file and hash
        self.notes: list[str] = []

    def has(self, kind: str) -> bool:
        return self._find(kind) is not None

    def text(self, kind: str, task: str) -> str:
        """The content of the file of this kind. Raises DataError."""
        source, path = SOURCES[kind], self._find(kind)
        if path is None:
            where = "give its folder with --data" if self.folder is None else f"--data = {str(self.folder)!r} has none"
            raise DataError(f"{task} needs a file {source.pattern} ({source.what}); {where}")
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = content.decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{task}: {path}: {error}, expected UTF-8 text, gzip or not") from None
        self.used[kind] = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}
        if source.note and source.note not in self.notes:
            self.notes.append(source.note)
        return text

    def prose(self, task: str) -> str:
        """The haystack without its first pages, where a book has its lists of contents. Raises DataError."""
        text = self.text("haystack", task).replace("\r\n", "\n")
        return text[len(text) // 50 :]

    def rows(self, kind: str, task: str) -> list[dict[str, Any]]:
        """Of a file with a JSON object a line. Raises DataError, also for a line that lacks a key of its kind."""
        rows, keys = [], SOURCES[kind].keys
        # Not splitlines(), which also cuts at U+2028 and U+0085: inside a JSON string these may stand as they are.
        for number, line in enumerate(self.text(kind, task).split("\n"), 1):
            if not line.strip():
                continue
            place = f"{task}: line {number} of {self.used[kind]['file']}"
            try:
                row = json.loads(line)
            except NOT_JSON as error:
                raise DataError(f"{place}: {error}, expected JSON") from None
            lacking = [key for key in keys if key not in row] if isinstance(row, dict) else ["object"]
            if lacking:
                raise DataError(f"{place}: no {', '.join(lacking)}, expected a JSON object with {', '.join(keys)}")
            rows.append(row)
        return rows

    def _find(self, kind: str) -> Path | None:
        if self.folder is None:
            return None
        found = sorted(self.folder.glob(SOURCES[kind].pattern))
        return max(found, key=lambda path: path.stat().st_size) if found else None


def online() -> bool:
    """Whether the hub may be asked for what --data lacks, where it has a task's data."""
    return not any(os.environ.get(name, "0") not in ("0", "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
