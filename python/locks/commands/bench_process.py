"""The engines of `locks bench` and `locks capture`: a process each, told what to do, heard a line at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_LINES_OF_LOG = 40


class EngineError(Exception):
    """An engine that did not give all of its answers."""


class Job(Protocol):
    """What a process is told on its stdin."""

    @property
    def num_answers(self) -> int: ...

    def as_json(self) -> str: ...


class Engine:
    """A process that loads vLLM when it is made, and starts an engine when it is told its job.

    As a context: the process is gone, and its memory free, when it ends.
    """

    def __init__(self, module: str = "locks.commands.bench_engine") -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def measure(self, job: Job, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Yields the answers as they come, such as {"row": ...} or {"skipped": ...}. Raises EngineError."""
        count = 0
        self._tell(job)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "doing" in answer:
                say(answer["doing"])
            else:
                count += 1
                yield answer
        code = self._process.wait()
        if code != 0 or count != job.num_answers:
            self._log.seek(0)
            raise EngineError(_reason(self._log.readlines(), code))

    def _tell(self, job: Job) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(job.as_json())
            self._process.stdin.close()
        except BrokenPipeError:  # it stopped already; its log says why
            pass


def _reason(lines: list[str], code: int) -> str:
    """What an engine that stopped last said; all of its last lines go to stderr."""
    sys.stderr.writelines(lines[-_LINES_OF_LOG:])
    errors = [line.strip() for line in lines if "Error" in line.split(" ", 1)[0] or "Error:" in line]
    last = errors[-1] if errors else (lines[-1].strip() if lines else "no output")
    return f"the engine stopped with code {code}: {last}"
