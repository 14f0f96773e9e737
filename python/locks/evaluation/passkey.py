"""A number hidden at a depth of a long text, to be told at its end."""

from __future__ import annotations

import random
from typing import Any

from locks.evaluation.data import Data

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ANSWER_TOKENS = 16
ROOM_TOKENS = 128  # of the question, the hidden line, a chat template
_QUESTION = "What is the pass key that the text mentions? Answer with the number only."


def documents(length: int, count: int, tokenizer: Any, data: Data) -> list[dict[str, Any]]:
    """`count` documents at each of DEPTHS. Raises DataError, and ValueError for a text that is too short."""
    draw = random.Random(length)
    size = length - ROOM_TOKENS - ANSWER_TOKENS
    text = data.prose("passkey")
    tokens = tokenizer(text[: 8 * (length + 64 * count * len(DEPTHS))], add_special_tokens=False)["input_ids"]
    if len(tokens) < size:
        raise ValueError(f"passkey: the text has {len(tokens)} tokens, expected at least {size} for length {length}")
    documents = []
    for number in range(count):
        for depth in DEPTHS:
            begin = 64 * len(documents) % max(1, len(tokens) - size)
            place = begin + int(depth * size)
            answer = str(draw.randrange(10**6, 10**7))
            before, behind = tokenizer.decode(tokens[begin:place]), tokenizer.decode(tokens[place : begin + size])
            hidden = f"\nThe pass key is {answer}. Remember it: {answer} is the pass key.\n"
            documents.append(
                {
                    "index": number,
                    "depth": depth,
                    "max_length": length,
                    "input": f"{before}{hidden}{behind}\n\n{_QUESTION}",
                    "outputs": [answer],
                    "gen_prefix": "The pass key is",
                }
            )
    return documents


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"score": float(doc["outputs"][0] in results[0])}
