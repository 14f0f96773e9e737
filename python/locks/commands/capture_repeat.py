"""How `locks capture --repeat-context` makes a model repeat its context: the passes of KVzip (Kim et al. 2025, arXiv
2505.23416), which tells by them what the context's tokens are worth to whatever is asked later."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from locks.commands.capture_prompt import PromptError

CHUNK_TOKENS = 2000  # of the context, in a pass, as in the published code
_LEAD_TOKENS = 8  # of the chunk before, by which a request says where to start
_WHOLE = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with "
# What stands between request and repetition, where no chat template says it, and the tokens in front of the context,
# which gather attention: as kvpress, which runs on models without a template, has them.
_PLAIN_SUFFIX = "\n"
_PLAIN_SINK = 4


@dataclass(frozen=True)
class Repetition:
    """The passes: each is computed behind the tokens 0 .. end - 1 of the prompt."""

    end: int  # of the context
    passes: list[list[int]]  # token ids
    chunks: list[tuple[int, int, int, int]]  # locks.trace.Repeat's

    @property
    def rows(self) -> int:
        return sum(map(len, self.passes))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.end + max(map(len, self.passes))


def repetition(tokens: list[int], steps: int, text: str, tokenizer: Any, chat: bool) -> Repetition:
    """Of a prompt's tokens, the context being all but the last `steps` and what stands in front of the text. Raises
    PromptError."""

    def ids(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    before, suffix = _template(text, tokenizer) if chat else ("", _PLAIN_SUFFIX)
    begin, end = len(ids(before)) if chat else _PLAIN_SINK, len(tokens) - steps
    if begin >= end:
        raise PromptError(
            f"--repeat-context: {len(tokens)} tokens, of which the last {steps} (--steps) and the first {begin} are not"
            " context; expected more text"
        )
    bounds = [*range(begin, end, CHUNK_TOKENS), end]
    passes: list[list[int]] = []
    chunks = []
    row = 0
    for first, last in pairwise(bounds):
        request = ids(_WHOLE) if first == begin else ids(_PART) + tokens[max(first - _LEAD_TOKENS, begin) : first]
        passes.append(request + ids(suffix) + tokens[first:last])
        chunks.append((first, last, row, row + len(passes[-1])))
        row += len(passes[-1])
    return Repetition(end, passes, chunks)


def _template(text: str, tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before a user's message and behind it."""
    message = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, found, behind = whole.partition(text)
    if not found:
        raise PromptError("--repeat-context: the model's chat template changes the text, expected it as it is")
    return before, behind
