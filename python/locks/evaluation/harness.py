"""lm-evaluation-harness asks and scores; what it asks is written down, and answered from what was answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from locks.evaluation.requests import Answer, Request
from locks.evaluation.tasks import Task

_DEFAULT_ANSWER_TOKENS = 256  # the harness's own, where a task says nothing


class WrittenModel(LM):
    """The harness's model: a tokenizer, and answers by document. It computes nothing."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.answers: Sequence[str] = ()  # of the requests of one task, in their order

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        if len(requests) != len(self.answers):
            raise RuntimeError(f"the harness asks {len(requests)} requests, and {len(self.answers)} are answered")
        return list(self.answers)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError("locks eval runs tasks that generate")

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        raise NotImplementedError("locks eval runs tasks that generate")


def ask(task: Task, model: WrittenModel, count: int, longest: int, max_tokens: int | None) -> list[Request]:
    """Requests of a task's first `count` documents, for a model of `longest` tokens; `max_tokens` bounds answers."""
    harness = task.harness
    harness.build_all_requests(
        limit=None if task.whole else count,
        rank=0,
        world_size=1,
        apply_chat_template=task.chat,
        fewshot_as_multiturn=True,
        chat_template=model.apply_chat_template if task.chat else None,
        tokenizer_name=model.tokenizer_name,
    )
    requests = []
    for instance in harness.instances:
        text, options = instance.args
        tokens = model.tokenizer(text, add_special_tokens=not task.chat)["input_ids"]
        limit = task.max_tokens or int(options.get("max_gen_toks", _DEFAULT_ANSWER_TOKENS))
        limit = min(limit, max_tokens or limit, longest // 2)
        prompt, cut = fitted(tokens, longest - limit)
        sampled = bool(options.get("do_sample")) and float(options.get("temperature") or 0) > 0
        for repeat in range(instance.repeats):
            requests.append(
                Request(
                    task=task.name,
                    doc=int(instance.doc_id),
                    prompt=prompt,
                    max_tokens=limit,
                    stop=_texts(options.get("until")),
                    temperature=float(options["temperature"]) if sampled else 0.0,
                    top_p=float(options.get("top_p", 1.0)) if sampled else 1.0,
                    seed=repeat,
                    cut=cut,
                    repeat=repeat,
                )
            )
    return requests


def _texts(until: Any) -> list[str]:
    if until is None:
        return []
    return [until] if isinstance(until, str) else [text for text in until if text]


def fitted(tokens: list[int], room: int) -> tuple[list[int], int]:
    """A prompt of at most `room` tokens, and how many were taken out of its middle, as LongBench does it."""
    cut = max(0, len(tokens) - room)
    if not cut:
        return tokens, 0
    head = room // 2
    return tokens[:head] + tokens[len(tokens) - (room - head) :], cut


def scores(
    task: Task, model: WrittenModel, requests: Sequence[Request], answers: Mapping[str, Answer], docs: Sequence[int]
) -> dict[int, float]:
    """The harness's score of each of these documents, whose requests are all answered. answers: of one arm, by key."""
    chosen = sorted(docs)
    wanted = set(chosen)
    model.answers = [answers[request.key].text for request in requests if request.doc in wanted]
    results = evaluate(
        lm=model,
        task_dict={"tasks": {task.name: task.harness}, "groups": {}, "group_map": {}},
        samples={task.name: chosen},
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=task.chat,
        fewshot_as_multiturn=True,
    )
    assert results is not None
    return {int(sample["doc_id"]): float(sample[task.metric]) for sample in results["samples"][task.name]}
