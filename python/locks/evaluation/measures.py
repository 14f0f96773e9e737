"""Tasks of our own that no harness has: a long text decoded sparsely under teacher forcing, and long generations."""

from __future__ import annotations

import hashlib
from typing import Any

from locks.evaluation.data import Data
from locks.evaluation.requests import Request

PERPLEXITY, LONG_GENERATION = "perplexity", "long_generation"
FORCED_TOKENS = 256  # of each window's end
_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
_SUBJECTS = (
    "the history of a harbour town over three centuries",
    "a voyage to map an unknown coast",
    "how bread, glass, paper and steel are made",
    "the quarrel and reconciliation of two brothers",
    "a year in the life of an alpine village",
    "how cities get their water, from Rome until today",
    "a detective who never leaves the library",
    "the discovery of the chemical elements",
)


def perplexity_requests(length: int, count: int, tokenizer: Any, data: Data) -> list[Request]:
    """Windows of `length` tokens, evenly over the text: the last FORCED_TOKENS are forced, the others the prompt.
    Raises DataError, and ValueError for a length or a text that leaves no window."""
    if length <= FORCED_TOKENS:
        raise ValueError(f"{PERPLEXITY}: length {length}, expected more than the {FORCED_TOKENS} forced tokens")
    tokens = tokenizer(data.prose(PERPLEXITY), add_special_tokens=False)["input_ids"]
    windows = min(count, len(tokens) // length)
    if windows < 1:
        raise ValueError(f"{PERPLEXITY}: the text has {len(tokens)} tokens, expected at least {length}")
    stride = (len(tokens) - length) // max(1, windows - 1)
    split = length - FORCED_TOKENS
    requests = []
    for number in range(windows):
        window = tokens[number * stride : number * stride + length]
        requests.append(
            Request(f"{PERPLEXITY}_{length}", number, window[:split], FORCED_TOKENS, forced=window[split:])
        )
    return requests


def long_requests(length: int, count: int, tokenizer: Any, chat: bool, longest: int) -> list[Request]:
    """Texts of `length` tokens about anything, or as many as the model has room for. Sampled: greedy ones of small
    models loop without any sparsity."""
    requests = []
    for number in range(count):
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        text = f"Write a very long and detailed text about {subject}."
        if chat:
            turn = [{"role": "user", "content": text}]
            told = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(told, add_special_tokens=False)["input_ids"]
        else:
            prompt = tokenizer(text + "\n\n")["input_ids"]
        seed = int(hashlib.sha256(f"{number}".encode()).hexdigest()[:8], 16) // 2
        task = f"{LONG_GENERATION}_{length}"
        room = min(length, longest - len(prompt))
        requests.append(Request(task, number, prompt, room, ignore_eos=True, seed=seed, **_SAMPLING))
    return requests
