"""`locks eval` at work, in a process of its own that is told what to do, and heard, by its parent.

Its job is an `EvalJob`. It answers (locks.commands.engine_child) with {"doing": {...}} as it goes on; then {"done":
{...}}, or {"refused": "why"}.
"""

from __future__ import annotations

from typing import Any

from locks.commands.engine_child import Say, answer_parent
from locks.evaluation.job import EvalJob


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
    answer_parent(lambda told, say: say({"done": run(EvalJob(**told), say)}))


if __name__ == "__main__":
    main()
