"""Requests to a model and its answers, as the files of an evaluation hold them: one JSON object a line."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """One prompt and how it is answered. Two requests with the same `key` have the same answer in every run."""

    task: str
    doc: int
    prompt: list[int]
    max_tokens: int
    stop: list[str] = field(default_factory=list)
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    forced: list[int] | None = None  # teacher forcing: these are the answer, and their log probabilities what is asked
    cut: int = 0  # tokens taken out of the prompt's middle to fit
    repeat: int = 0

    @cached_property
    def key(self) -> str:
        told = asdict(self)
        for name in ("task", "doc", "cut"):
            del told[name]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]

    def as_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True)
class Answer:
    """What an arm answered."""

    arm: str
    key: str
    tokens: list[int]
    text: str
    finish: str  # stop, or length where it was cut off
    logprobs: list[float] | None = None  # of forced tokens, and
    ranks: list[int] | None = None  # their places among all tokens, 1 for the likeliest


def write_requests(path: Path, requests: Iterable[Request]) -> None:
    """Whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    with lzma.open(scratch, "wt", encoding="utf-8", preset=4) as file:
        for request in requests:
            file.write(request.as_json() + "\n")
    os.replace(scratch, path)


def read_requests(path: Path) -> list[Request]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [Request(**json.loads(line)) for line in file]


class AnswerFile:
    """Answers and the reports of arms, appended a line each as they come: a run that is stopped at any time goes on
    behind the last whole line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[tuple[str, str], Answer] = {}
        self.reports: list[dict[str, Any]] = []
        self._file = None
        if path.exists():
            for told in _lines(path):
                self._take(told)

    def _take(self, told: dict[str, Any]) -> None:
        if "report" in told:
            self.reports.append(told)
        else:
            answer = Answer(**told)
            self.answers[answer.arm, answer.key] = answer

    def has(self, arm: str, key: str) -> bool:
        return (arm, key) in self.answers

    def add(self, answer: Answer) -> None:
        told = {name: value for name, value in asdict(answer).items() if value is not None}
        self.answers[answer.arm, answer.key] = answer
        self._append(told)

    def add_report(self, arm: str, task: str, report: dict[str, Any]) -> None:
        told = {"arm": arm, "task": task, "report": report}
        self.reports.append(told)
        self._append(told)

    def _append(self, told: dict[str, Any]) -> None:
        if self._file is None:  # only who writes may cut the file: another may be reading while a run goes on
            if self.path.exists():
                _drop_torn_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(told, separators=(",", ":")) + "\n")
        self._file.flush()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines: behind the last newline may be one that is being written, or was when a run was killed."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _drop_torn_line(path: Path) -> None:
    """Cuts off what was being written when a run was killed: everything behind the last newline."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        while size > 0:
            begin = max(0, size - 2**16)
            file.seek(begin)
            newline = file.read(size - begin).rfind(b"\n")
            if newline >= 0:
                file.truncate(begin + newline + 1)
                return
            size = begin
        file.truncate(0)
