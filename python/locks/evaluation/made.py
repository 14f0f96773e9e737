"""The stages that need lm-evaluation-harness: making the requests, and scoring the answers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from locks.commands.engine_child import Refused, Say
from locks.evaluation import measures, report
from locks.evaluation.arms import parse_arms
from locks.evaluation.data import Data
from locks.evaluation.harness import WrittenModel, ask, scores
from locks.evaluation.job import (
    PROMPTS,
    EvalJob,
    check_written,
    read_json,
    read_model,
    read_prepared,
    tokenizer_identity,
    versions,
    write_json,
)
from locks.evaluation.requests import AnswerFile, Request, read_requests, write_requests
from locks.evaluation.tasks import Choice, Task, build, expand, is_own


class Made:
    """Tasks, ready to ask and to score."""

    def __init__(self, job: EvalJob, say: Say) -> None:
        """Raises Refused for what the model, the data or the names do not allow."""
        config, self.tokenizer = read_model(job)
        self.longest = config.max_model_len
        self.model = WrittenModel(self.tokenizer)
        self.data = Data(Path(job.data) if job.data else None)
        self.tasks: dict[str, Task | None] = {}  # None for a measure of ours
        self.requests: list[Request] = []
        chat = job.chat and getattr(self.tokenizer, "chat_template", None) is not None
        choice = Choice(tuple(job.lengths), job.count, chat, job.max_tokens)
        if max(job.lengths) > self.longest:
            raise Refused(f"--lengths: {max(job.lengths)}, expected at most {self.longest}, what the model takes")
        for name in expand(job.tasks):
            say({"doing": {"text": f"making {name}"}})
            try:
                self._add_own(name, choice, job) if is_own(name) else self._add(name, choice, job)
            except ValueError as error:
                raise Refused(str(error)) from None

    def _add(self, name: str, choice: Choice, job: EvalJob) -> None:
        for task in build(name, choice, self.tokenizer, self.data):
            self.tasks[task.name] = task
            self.requests.extend(ask(task, self.model, choice.count, self.longest, job.max_tokens))

    def _add_own(self, name: str, choice: Choice, job: EvalJob) -> None:
        if name == measures.LONG_GENERATION:
            made = measures.long_requests(job.long_tokens, choice.count, self.tokenizer, choice.chat, self.longest)
        else:
            made = [
                request
                for length in choice.lengths
                for request in measures.perplexity_requests(length, choice.count, self.tokenizer, self.data)
            ]
        self.tasks |= dict.fromkeys((request.task for request in made), None)
        self.requests.extend(made)


def prepare(job: EvalJob, say: Say) -> Made:
    """Makes every request and writes them. Raises Refused."""
    job.folder.mkdir(parents=True, exist_ok=True)
    made = Made(job, say)
    identity = tokenizer_identity(made.tokenizer)
    told = {
        "tasks": job.tasks,
        "lengths": job.lengths,
        "count": job.count,
        "chat": job.chat,
        "max_tokens": job.max_tokens,
        "long_tokens": job.long_tokens,
        "identity": identity,
    }
    path = job.folder / "prepared.json"
    check_written(path, told, "prepared")
    write_requests(job.folder / PROMPTS, made.requests)
    longest = max(len(request.prompt) + request.max_tokens for request in made.requests)
    about = {"longest": longest, "data": made.data.used, "notes": made.data.notes, "versions": versions()}
    write_json(path, {**told, **about})
    return made


def score(job: EvalJob, say: Say, made: Made | None) -> str:
    """Scores what is answered, in every arm of the job, and writes the results. Raises Refused."""
    prepared = read_prepared(job)
    made = made or Made(job, say)
    if [request.key for request in made.requests] != [r.key for r in read_requests(job.folder / PROMPTS)]:
        raise Refused(f"--out = {job.out!r} was prepared with other tasks, data or versions; give the same, or prepare")
    answers = gathered(job.folder)
    arms = [arm.name for arm in parse_arms(job.selectors, job.budgets)]
    tasks = {}
    for name, task in made.tasks.items():
        say({"doing": {"text": f"scoring {name}"}})
        asked = [request for request in made.requests if request.task == name]
        tasks[name] = _task_report(name, task, asked, answers, arms, made.model)
    runs = {path.name: read_json(path) for path in sorted(job.folder.glob("answers*.run.json"))}
    results = {"job": json.loads(job.as_json()), "prepared": prepared, "runs": runs, "arms": arms, "tasks": tasks}
    write_json(job.folder / "results.json", results)
    return str(job.folder / "results.json")


def _task_report(
    name: str, task: Task | None, asked: list[Request], answers: AnswerFile, arms: list[str], model: WrittenModel
) -> dict[str, Any]:
    if task is not None:
        return report.task_report(asked, answers, arms, task.metric, partial(scores, task, model))
    if name.startswith(measures.PERPLEXITY):
        told = report.task_report(asked, answers, arms, "nats a token", report.forced_scores)
        report.add_perplexity(told, asked, answers)
        return told
    told = report.task_report(asked, answers, arms, "ends in a loop", report.loop_scores)
    report.add_loops(told, asked, answers)
    return told


def gathered(folder: Path) -> AnswerFile:
    """The answers of all shards."""
    together = AnswerFile(folder / "answers.jsonl")
    for path in sorted(folder.glob("answers-*-of-*.jsonl")):
        shard = AnswerFile(path)
        together.answers |= shard.answers
        together.reports += shard.reports
    return together
