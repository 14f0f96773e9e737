"""What is sent: completions whose answer alone is known, and everything that clients do wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tools.soaking.server import MAX_MODEL_LEN

LONGEST_PROMPT = 240
_FAMILY_SHARE = 0.4  # of jobs that share the beginning of their prompt with others
# Jobs whose answers are longer than their prompts: together they outgrow a cache that held all of their prompts.
_GROWING_SHARE = 0.35


class Kind(str, Enum):
    """What a client does."""

    ANSWER = "answer"  # waits for all of it
    STREAM = "stream"  # reads it token by token
    ABORT = "abort"  # closes the connection before the end
    KILLED = "killed"  # its process is killed with several requests open
    BAD = "bad"  # sends what is no request


SHARES = {Kind.ANSWER: 0.44, Kind.STREAM: 0.22, Kind.ABORT: 0.18, Kind.KILLED: 0.04, Kind.BAD: 0.12}


@dataclass(frozen=True)
class Job:
    """One completion: a prompt of tokens, and how many are generated."""

    prompt: tuple[int, ...]
    max_tokens: int

    def body(self, model: str, *, stream: bool = False) -> dict[str, Any]:
        """The request, greedy, with token ids and log probabilities in the answer."""
        return {
            "model": model, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0,
            "ignore_eos": True, "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True,
            "stream": stream,
        }  # fmt: skip


def draw_jobs(draw: random.Random, text: Sequence[int], count: int) -> list[Job]:
    """Different completions of pieces of a text, many with a beginning in common."""
    starts = [draw.randrange(len(text) - LONGEST_PROMPT) for _ in range(max(1, count // 16))]
    jobs: set[Job] = set()
    while len(jobs) < count:
        family = draw.random() < _FAMILY_SHARE
        start = draw.choice(starts) if family else draw.randrange(len(text) - LONGEST_PROMPT)
        growing = draw.random() < _GROWING_SHARE
        length, tokens = (draw.randint(17, 48), draw.randint(48, 80)) if growing else (
            draw.randint(1, LONGEST_PROMPT), draw.randint(1, 32)
        )
        jobs.add(Job(tuple(text[start : start + length]), tokens))
    return draw.sample(sorted(jobs, key=lambda job: (job.prompt, job.max_tokens)), count)


@dataclass(frozen=True)
class BadBody:
    """What is no request, and the HTTP statuses that answer it."""

    name: str
    data: bytes | dict[str, Any]
    statuses: tuple[int, ...] = (400,)


def bad_bodies(model: str) -> list[BadBody]:
    """Broken JSON, wrong types, values out of range; and fields that nobody knows, which vLLM lets pass."""
    good = Job((1, 2, 3, 400, 500), 4).body(model)
    bad_values: dict[str, dict[str, Any]] = {
        "prompt is a number": {"prompt": 17.5},
        "prompt is an object": {"prompt": {"a": 1}},
        "no prompt": {"prompt": None},
        "empty prompt": {"prompt": []},
        "negative token": {"prompt": [-1]},
        "token beyond the vocabulary": {"prompt": [1000000]},
        "token beyond 64 bits": {"prompt": [2**63]},
        "prompt too long": {"prompt": [5] * (MAX_MODEL_LEN + 1)},
        "answer too long": {"prompt": [5] * (MAX_MODEL_LEN - 12), "max_tokens": 100},
        "max_tokens negative": {"max_tokens": -3},
        "max_tokens a word": {"max_tokens": "many"},
        "temperature a word": {"temperature": "hot"},
        "temperature negative": {"temperature": -1},
        "no choices": {"n": 0},
        "too many choices": {"n": 10**9},
        "too many logprobs": {"logprobs": 5000},
        "stop is a number": {"stop": 7},
        "top_p above 1": {"top_p": 2},
        "seed beyond 64 bits": {"seed": 2**70},
        "bias of no token": {"logit_bias": {"999999": 5}},
    }
    return [
        BadBody("broken JSON", b'{"model": '),
        BadBody("empty", b""),
        BadBody("null", b"null"),
        BadBody("a list", b"[]", (400, 500)),  # 500 is vLLM 0.26.0's own answer
        BadBody("20,000 brackets", b"[" * 20000 + b"]" * 20000),
        BadBody("no UTF-8", b'\xff\xfe{"a": 1}'),
        BadBody("unknown model", good | {"model": "other"}, (404,)),
        BadBody("unknown field", good | {"frobnicate": {"a": [1]}}, (200,)),
        BadBody("options of the plug-in", good | {"additional_config": {"locks": {"budget": -1}}}, (200,)),
        *(BadBody(name, good | change) for name, change in bad_values.items()),
    ]


@dataclass(frozen=True)
class Action:
    """What one client does, and with what."""

    kind: Kind
    jobs: tuple[Job, ...] = ()  # several for a client that is killed
    bad: BadBody | None = None
    patience: float = 0  # of ABORT, the share of its tokens that it waits for; of KILLED, seconds

    @property
    def requests(self) -> int:
        return max(1, len(self.jobs))


def draw_actions(draw: random.Random, jobs: Sequence[Job], bad: Sequence[BadBody], requests: int) -> list[Action]:
    """Actions of `requests` requests in all."""
    actions: list[Action] = []
    while (left := requests - sum(action.requests for action in actions)) > 0:
        kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
        if kind is Kind.BAD:
            actions.append(Action(kind, bad=draw.choice(bad)))
        elif kind is Kind.KILLED:
            actions.append(Action(kind, tuple(draw.choices(jobs, k=min(4, left))), patience=draw.uniform(0, 1.5)))
        else:
            actions.append(Action(kind, (draw.choice(jobs),), patience=draw.random()))
    return actions
