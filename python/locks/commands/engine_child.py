"""What the processes share that commands start for an engine (locks.commands.bench_process is the other side).

Such a process reads its job as JSON from stdin and writes answers to stdout, a JSON object a line: {"doing": ...} as it
goes on, its results, or {"refused": "why"}. Everything that vLLM prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

_MIB = 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # one sampler on every machine, whether it has FlashInfer or not
}

Say = Callable[[dict[str, Any]], None]


class Refused(Exception):
    """What a user can put right; the message names the option, its value and what is allowed."""


def answer_parent(
    run: Callable[[dict[str, Any], Say], None],
    environment: Mapping[str, str] = MappingProxyType({}),
    load: Callable[[], object] | None = None,
) -> None:
    """The `main` of such a process: run(job, say) does what the job asks, and may raise Refused. environment: further
    variables, for all that it imports. load: what can be done while the job is not told yet. Does not return."""
    os.environ.update(_ENVIRONMENT)
    os.environ.update(environment)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    if load is not None:
        load()
    try:
        run(json.load(sys.stdin), say)
    except Refused as reason:
        say({"refused": str(reason)})
    os._exit(0)  # all is told, and tearing an engine down takes seconds


def read_model(model: str, engine: dict[str, Any], name: str) -> tuple[Any, Any]:
    """vLLM's configuration of a model, and its tokenizer. engine: further arguments of vLLM's LLM; name: what the
    command calls the model. Raises Refused."""
    from transformers import AutoTokenizer
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(model=model, **engine).create_model_config()
        tokenizer = AutoTokenizer.from_pretrained(
            config.tokenizer, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code
        )
    except TypeError as error:  # an argument that EngineArgs does not have
        raise Refused(f"--engine = {json.dumps(engine)}: {error}") from None
    except (ValueError, OSError) as error:
        raise Refused(f"{name} = {model!r}: {error}") from None
    return config, tokenizer


def model_hash(folder: Path) -> str:
    """Of a model's configuration and weights, by name and content."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or path.suffix in _WEIGHTS:
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                while part := file.read(_MIB):
                    digest.update(part)
    return digest.hexdigest()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
