"""One engine that answers the requests of all arms.

Requests are taken in chunks of a task, and each chunk is answered by every arm before the next: the prefix cache then
holds the chunk's prompts, which are computed once, and a run that is stopped has pairs of what it did.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from locks.commands.engine_child import Say
from locks.evaluation.arms import Arm
from locks.evaluation.requests import Answer, AnswerFile, Request

# Of LOCKS's own steps, every one of so many also measures what it retains, which reads the whole context.
MEASURE_EVERY = 16
_MEASURED_STEP = 3  # of each run of them: short answers have few decode steps


def engine_arguments(model: str, longest: int, batch: int, forced: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM. Steps run eagerly: graphs cannot hold an evaluation."""
    from vllm.platforms import current_platform

    cuda = current_platform.is_cuda()
    arguments: dict[str, Any] = {
        "model": model,
        "max_model_len": longest,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 8192 if cuda else 2048,
        # What is left is for the evaluation's own copies of keys and for records of other formats.
        "gpu_memory_utilization": 0.6,
        "disable_log_stats": True,
        "seed": 0,
    }
    if cuda:
        arguments["attention_backend"] = "CUSTOM"
    if forced:
        arguments["logits_processors"] = ["locks_vllm.forced_tokens:ForcedTokens"]
    arguments |= options
    further = arguments.get("additional_config") or {}
    locks = {"dense_tokens": 0, **further.get("locks", {}), "budget": "all"}
    return arguments | {
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,  # an arm begins and ends between steps
        "additional_config": {**further, "locks": locks},
        "worker_extension_cls": "locks_vllm.evaluation.LocksEvaluationExtension",
    }


def chunks(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Of one task each, a chunk of every task in turn: wherever a run stops, tasks have about as many answers."""
    by_task: dict[str, list[Request]] = {}
    for request in requests:
        by_task.setdefault(request.task, []).append(request)
    cut = [[some[begin : begin + size] for begin in range(0, len(some), size)] for some in by_task.values()]
    return [chunk for turn in zip_longest(*cut) for chunk in turn if chunk]


def answer_all(
    llm: Any,
    arms: Sequence[Arm],
    requests: Sequence[Request],
    answers: AnswerFile,
    batch: int,
    deadline: float | None,
    say: Say,
) -> bool:
    """Answers what is not answered yet; whether all is, when it ends or the deadline (time.monotonic) has come."""
    # By keys: what several tasks ask alike is answered once.
    missing = len({(arm.name, r.key) for arm in arms for r in requests if not answers.has(arm.name, r.key)})
    done = 0
    for chunk in chunks(requests, batch):
        for arm in arms:
            todo = {request.key: request for request in chunk if not answers.has(arm.name, request.key)}
            if not todo:
                continue
            for answer in answer_chunk(llm, arm, list(todo.values()), answers, deadline):
                answers.add(answer)
                done += 1
                say({"done": done, "of": missing, "text": f"{chunk[0].task} {arm.name}"})
            if deadline is not None and time.monotonic() >= deadline:
                return done == missing
    return True


def answer_chunk(
    llm: Any, arm: Arm, requests: Sequence[Request], answers: AnswerFile, deadline: float | None
) -> Iterator[Answer]:
    """Answers as they finish; then the arm's report is in the file."""
    engine = llm.llm_engine
    llm.collective_rpc("locks_arm_start", args=arm.call)
    for request in requests:
        engine.add_request(request.key, {"prompt_token_ids": request.prompt}, sampling(request))
    step = 0
    while engine.has_unfinished_requests():
        measured = arm.product and step % MEASURE_EVERY == _MEASURED_STEP
        if measured:
            llm.collective_rpc("locks_arm_measure", args=(True,))
        outputs = engine.step()
        if measured:
            llm.collective_rpc("locks_arm_measure", args=(False,))
        step += 1
        yield from (as_answer(arm, output) for output in outputs if output.finished)
        if deadline is not None and time.monotonic() >= deadline:
            engine.abort_request([request.key for request in requests])
            while engine.has_unfinished_requests():
                engine.step()
            break
    (report,) = llm.collective_rpc("locks_arm_stop")
    answers.add_report(arm.name, requests[0].task, {**report, "steps": step, "requests": len(requests)})


def sampling(request: Request) -> Any:
    from locks_vllm.forced_tokens import ARGUMENT
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed if request.temperature > 0 else None,
        stop=request.stop or None,
        ignore_eos=request.ignore_eos or request.forced is not None,
        logprobs=None if request.forced is None else 0,
        extra_args=None if request.forced is None else {ARGUMENT: request.forced},
    )


def as_answer(arm: Arm, output: Any) -> Answer:
    made = output.outputs[0]
    tokens = list(made.token_ids)
    logprobs = ranks = None
    if made.logprobs is not None:
        told = [of_token[token] for token, of_token in zip(tokens, made.logprobs, strict=True)]
        logprobs, ranks = [round(one.logprob, 5) for one in told], [one.rank for one in told]
    return Answer(arm.name, output.request_id, tokens, made.text, str(made.finish_reason), logprobs, ranks)
