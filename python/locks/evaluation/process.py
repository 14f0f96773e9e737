"""`locks eval` at work, in a process of its own that is told what to do, and heard, by its parent.

Reads an `EvalJob` as JSON from stdin. Writes a JSON object a line to stdout: {"doing": {...}} as it goes on; then
{"done": {...}}, or {"refused": "why"}. Everything that vLLM and lm-evaluation-harness print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from locks.commands.capture_engine import Refused
from locks.evaluation.job import EvalJob, Say

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # one sampler on every machine, whether it has FlashInfer or not
}


def run(job: EvalJob, say: Say) -> dict[str, Any]:
    """The stages, one after the other. Raises Refused."""
    told: dict[str, Any] = {}
    made = None
    if "prepare" in job.stages:
        from locks.evaluation.made import prepare

        made = prepare(job, say)
        told["requests"] = len(made.requests)
    if "generate" in job.stages:
        from locks.evaluation.generate import generate

        told["complete"] = generate(job, say)
    if "score" in job.stages:
        from locks.evaluation.made import score

        told["results"] = score(job, say, made)
    return told


def main() -> None:
    os.environ.update(_ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        say({"done": run(EvalJob(**json.load(sys.stdin)), say)})
    except Refused as reason:
        say({"refused": str(reason)})
    os._exit(0)  # all is told, and tearing an engine down takes seconds


if __name__ == "__main__":
    main()
