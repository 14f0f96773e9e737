"""The stage with an engine: answers what is not answered yet. It needs neither data nor lm-evaluation-harness."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locks.commands.engine_child import Refused, Say, model_hash
from locks.evaluation.arms import parse_arms
from locks.evaluation.engine import answer_all, engine_arguments
from locks.evaluation.job import (
    PROMPTS,
    EvalJob,
    check_written,
    read_model,
    read_prepared,
    tokenizer_identity,
    versions,
    write_json,
)
from locks.evaluation.requests import AnswerFile, Request, read_requests


def generate(job: EvalJob, say: Say) -> bool:
    """The engine's stage; whether every request of this shard is answered. Raises Refused."""
    from vllm import LLM

    prepared = read_prepared(job)
    config, tokenizer = read_model(job)
    if tokenizer_identity(tokenizer) != prepared["identity"]:
        raise Refused(f"--model = {job.model!r} has another tokenizer than {job.out!r} was prepared with")
    requests = shard_of(read_requests(job.folder / PROMPTS), *job.shard)
    arms = parse_arms(job.selectors, job.budgets)
    longest = prepared["longest"]
    if longest > config.max_model_len:
        raise Refused(f"--model = {job.model!r} takes {config.max_model_len} tokens, and prompts need {longest}")
    say({"doing": {"text": "hashing the model"}})
    folder = Path(job.model)
    identity = {
        "model_sha256": model_hash(folder) if folder.is_dir() else None,
        "model_commit": str(getattr(config.hf_config, "_commit_hash", None)),
        "dtype": str(config.dtype),
    }
    run_file = job.answer_path().with_suffix(".run.json")
    check_written(run_file, identity, "answered")
    answers = AnswerFile(job.answer_path())
    if all(answers.has(arm.name, request.key) for arm in arms for request in requests):
        return True
    deadline = None if job.minutes is None else time.monotonic() + 60 * job.minutes
    forced = any(request.forced for request in requests)
    arguments = engine_arguments(job.model, longest, job.batch, forced, job.engine)
    say({"doing": {"text": "starting the engine"}})
    began = time.monotonic()
    llm = LLM(**arguments)
    (described,) = llm.collective_rpc("locks_describe")
    told = {"engine": _plain(arguments), "versions": versions(), "device": _device(), "layers": described}
    write_json(run_file, {"model": job.model, **identity, **told, "engine_start_s": round(time.monotonic() - began, 1)})
    return answer_all(llm, arms, requests, answers, job.batch, deadline, lambda doing: say({"doing": doing}))


def shard_of(requests: Sequence[Request], number: int, of: int) -> Sequence[Request]:
    """Part `number`, from 1, of `of` equal parts. Neighbours stay together: requests of one task share their steps."""
    return requests[len(requests) * (number - 1) // of : len(requests) * number // of]


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(arguments, default=str))


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
