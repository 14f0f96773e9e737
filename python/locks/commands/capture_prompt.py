"""The prompt of `locks capture`: a text, in which <<answer>>...<</answer>> marks what carries the answer."""

from __future__ import annotations

import re
from typing import Any

OPEN, CLOSE = "<<answer>>", "<</answer>>"
_MARK = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")

Span = tuple[int, int]  # begin .. end - 1


class PromptError(ValueError):
    """A prompt that cannot be captured; the message says why."""


def strip_marks(text: str) -> tuple[str, list[Span]]:
    """The text without its marks, and the runs of characters that they held. Raises PromptError."""
    plain, spans, opened, copied = "", [], None, 0
    for mark in _MARK.finditer(text):
        plain += text[copied : mark.start()]
        copied = mark.end()
        line = text.count("\n", 0, mark.start()) + 1
        if (mark[0] == OPEN) != (opened is None):
            raise PromptError(f"line {line}: {mark[0]!r}, expected {CLOSE if opened is not None else OPEN!r} before it")
        if opened is None:
            opened = len(plain)
            continue
        if opened == len(plain):
            raise PromptError(f"line {line}: nothing between {OPEN!r} and {CLOSE!r}")
        spans.append((opened, len(plain)))
        opened = None
    if opened is not None:
        raise PromptError(f"{OPEN!r} is not closed, expected {CLOSE!r} behind it")
    return plain + text[copied:], spans


def tokenise(text: str, tokenizer: Any, chat: bool) -> tuple[list[int], list[Span]]:
    """Token ids of a prompt with marks, and the tokens that overlap what they held. Raises PromptError.

    `chat` puts the text into the model's chat template, as a user's message that is to be answered.
    """
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError("--chat: the model's tokenizer has no chat template")
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    plain, marked = strip_marks(text)
    if marked and not tokenizer.is_fast:
        raise PromptError(f"{OPEN!r}: the model's tokenizer does not tell where tokens lie in the text")
    encoded = tokenizer(plain, add_special_tokens=not chat, return_offsets_mapping=bool(marked))
    places = encoded["offset_mapping"] if marked else []
    return list(encoded["input_ids"]), [_tokens_of(span, places) for span in marked]


def _tokens_of(span: Span, places: list[Span]) -> Span:
    """The tokens that overlap a run of characters. Special tokens lie nowhere: their run is empty."""
    inside = [token for token, (begin, end) in enumerate(places) if max(begin, span[0]) < min(end, span[1])]
    if not inside:
        raise PromptError(f"no token lies between {OPEN!r} and {CLOSE!r}")
    return inside[0], inside[-1] + 1
