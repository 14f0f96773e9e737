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


class DataError(ValueError):
    """Data that is not there or cannot be read; the message names the file and what is expected."""


@dataclass(frozen=True)
class Source:
    """A kind of file, and what stands for it where none is given."""

    pattern: str
    what: str
    note: str | None = None  # said in the results wherever it was used


SOURCES = {
    "haystack": Source("*.txt*", "a long text; the largest is taken", "haystack: a text of --data, not RULER's essays"),
    "squad": Source("squad*.json*", "SQuAD's format", "qa_1: questions of --data stand in for SQuAD's dev set"),
    "hotpotqa": Source("hotpotqa*.json*", "HotpotQA's format", "qa_2: questions of --data stand in for HotpotQA's"),
    "longbench": Source("*longbench*.jsonl*", "LongBench prompts: dataset, prompt, answers, all_classes"),
    "math500": Source("math500*.jsonl*", "problem, solution, answer"),
    "aime26": Source("aime26*.jsonl*", "problem, answer"),
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
        """Of a file with a JSON object a line. Raises DataError."""
        rows = []
        # Not splitlines(), which also cuts at U+2028 and U+0085: inside a JSON string these may stand as they are.
        for number, line in enumerate(self.text(kind, task).split("\n"), 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{task}: line {number} of {self.used[kind]['file']}: {error}, expected JSON") from None
        return rows

    def _find(self, kind: str) -> Path | None:
        if self.folder is None:
            return None
        found = sorted(self.folder.glob(SOURCES[kind].pattern))
        return max(found, key=lambda path: path.stat().st_size) if found else None


def online() -> bool:
    """Whether the hub may be asked for what --data lacks."""
    return not any(os.environ.get(name, "0") not in ("0", "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
