"""What an evaluation found, as one JSON object: every score with its pair in the dense arm of the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from locks.evaluation.arms import DENSE
from locks.evaluation.requests import Answer, AnswerFile, Request
from locks.evaluation.statistics import agreement, distinct_share, loop_period, paired

# Scores of a task's documents in one arm, given its requests and the arm's answers by key.
Scores = Callable[[Sequence[Request], Mapping[str, Answer], Sequence[int]], dict[int, float]]


def of_arm(answers: AnswerFile, arm: str) -> dict[str, Answer]:
    return {key: answer for (name, key), answer in answers.answers.items() if name == arm}


def complete_docs(requests: Sequence[Request], answers: AnswerFile, arms: Sequence[str]) -> list[int]:
    """Documents whose requests every arm has answered."""
    open_docs = {r.doc for r in requests if not all(answers.has(arm, r.key) for arm in arms)}
    return sorted({request.doc for request in requests} - open_docs)


def of_docs(requests: Sequence[Request], docs: Iterable[int]) -> list[Request]:
    wanted = set(docs)
    return [request for request in requests if request.doc in wanted]


def task_report(
    requests: Sequence[Request], answers: AnswerFile, arms: Sequence[str], metric: str, scores: Scores
) -> dict[str, Any]:
    """Of one task: each arm's score, and what it differs by from dense."""
    docs = complete_docs(requests, answers, arms)
    about = {
        "metric": metric,
        "n": len(docs),
        "of": len({request.doc for request in requests}),
        "prompt_tokens": _spread([len(request.prompt) for request in requests]),
        "prompts_cut": sum(request.cut > 0 for request in requests),
        "max_tokens": max(request.max_tokens for request in requests),
    }
    if not docs:
        return about | {"arms": {}}
    chosen = of_docs(requests, docs)
    found = {arm: scores(chosen, of_arm(answers, arm), docs) for arm in arms}
    return about | {
        "arms": {arm: _arm_report(arm, chosen, answers, docs, found) for arm in arms},
        "scores": {arm: [found[arm][doc] for doc in docs] for arm in arms},
        "docs": docs,
    }


def _arm_report(
    arm: str, requests: Sequence[Request], answers: AnswerFile, docs: Sequence[int], found: dict[str, dict[int, float]]
) -> dict[str, Any]:
    own = of_arm(answers, arm)
    mine = [own[request.key] for request in requests]
    report: dict[str, Any] = {
        "score": sum(found[arm].values()) / len(docs),
        "generated_tokens": _spread([len(answer.tokens) for answer in mine]),
        "cut_off": sum(answer.finish == "length" for answer in mine),
        "cut_off_in_loops": sum(a.finish == "length" and loop_period(a.tokens) is not None for a in mine),
        **work(answers, arm, requests[0].task),
    }
    if arm != DENSE and DENSE in found:
        dense = of_arm(answers, DENSE)
        theirs = [dense[request.key] for request in requests]
        pairs = [[found[name][doc] for doc in docs] for name in (arm, DENSE)]
        report["difference"] = paired(*pairs).as_dict()
        if all(request.temperature == 0 and request.forced is None for request in requests):
            report["agreement"] = agreement([a.tokens for a in mine], [a.tokens for a in theirs])
    return report


def work(answers: AnswerFile, arm: str, task: str) -> dict[str, Any]:
    """What the engine did for an arm in a task: counters of the product, and what was measured of the reading."""
    counters: dict[str, int] = {}
    measured: dict[str, float] = {}
    for told in answers.reports:
        if told["arm"] != arm or told["task"] != task:
            continue
        for name, value in told["report"]["counters"].items():
            counters[name] = counters.get(name, 0) + value
        for name, value in told["report"]["measured"].items():
            measured[name] = measured.get(name, 0) + value
    rows = measured.get("rows", 0)
    return {
        "retained_mass": measured["retained"] / rows if rows else None,
        "pages_read_share": measured["pages_read"] / measured["pages"] if rows else None,
        "measured_rows": rows,
        "counters": counters,
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"least": min(values), "mean": sum(values) / len(values), "most": max(values)}


def forced_scores(requests: Sequence[Request], answers: Mapping[str, Answer], docs: Sequence[int]) -> dict[int, float]:
    """Mean negative log probability of each window's forced tokens, but for the first: the prompt's step gives it."""
    means = {}
    for request in requests:
        logprobs = answers[request.key].logprobs or []
        means[request.doc] = -sum(logprobs[1:]) / len(logprobs[1:])
    return {doc: means[doc] for doc in docs}


def add_perplexity(report: dict[str, Any], requests: Sequence[Request], answers: AnswerFile) -> None:
    """Perplexities, and how often the forced token is the likeliest, beside the mean of the windows."""
    chosen = of_docs(requests, report.get("docs", ()))
    for arm, told in report["arms"].items():
        own = of_arm(answers, arm)
        told["perplexity"] = math.exp(told["score"])
        ranks = [rank for request in chosen for rank in (own[request.key].ranks or [])[1:]]
        told["likeliest_share"] = sum(rank == 1 for rank in ranks) / len(ranks)


def loop_scores(requests: Sequence[Request], answers: Mapping[str, Answer], docs: Sequence[int]) -> dict[int, float]:
    """1 where a generation ends in a loop."""
    return {request.doc: float(loop_period(answers[request.key].tokens) is not None) for request in requests}


def add_loops(report: dict[str, Any], requests: Sequence[Request], answers: AnswerFile) -> None:
    """Which generations loop where dense does not, and how varied their ends are."""
    chosen = of_docs(requests, report.get("docs", ()))
    looping = {
        arm: {request.doc for request in chosen if loop_period(of_arm(answers, arm)[request.key].tokens) is not None}
        for arm in report["arms"]
    }
    for arm, told in report["arms"].items():
        own = of_arm(answers, arm)
        told["looping"] = sorted(looping[arm])
        told["looping_where_dense_is_not"] = sorted(looping[arm] - looping.get(DENSE, set()))
        shares = [distinct_share(own[request.key].tokens) for request in chosen]
        told["distinct_4_grams"] = sum(shares) / len(shares)
