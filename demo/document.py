"""The demo's document: chapters of Python's own language reference with one fact planted half-way.

The text is the one behind Python's `help()` (`pydoc_data.topics`), so it differs a little from one
Python version to the next: it is cut by its number of tokens, and its hash goes into the result.
"""

import hashlib
from dataclasses import dataclass

CHAPTERS = (
    "objects execmodel naming import assignment try with function class calls comparisons "
    "attribute-access customization"
).split()
TARGET_TOKENS = 7300  # of the whole prompt: SmolLM2's context is 8,192

FACT = "The special magic number for Lisbon is: {number}."
NUMBER = "48213"
QUESTION = "What is the special magic number for Lisbon?"
INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)


@dataclass(frozen=True)
class Document:
    """A prompt ready for the engine, and what the reader of a result needs to know about it."""

    token_ids: list[int]
    fact: str
    question: str
    expected: str
    fact_begin: int  # the fact's tokens are token_ids[fact_begin:fact_end]
    fact_end: int
    chapters: list[str]  # the last one may be cut
    sha256: str  # of the prompt's text

    def is_correct(self, answer: str) -> bool:
        return self.expected in answer.replace(",", "")


def build_document(tokenizer, target_tokens: int = TARGET_TOKENS) -> Document:
    """A chat prompt of `target_tokens` tokens, give or take a paragraph: these stay whole."""
    fact = FACT.format(number=NUMBER)
    frame = len(tokenizer(_prompt(tokenizer, fact)).input_ids)
    paragraphs, chapters = _take_paragraphs(tokenizer, target_tokens - frame)
    middle = _half_way([size for _, size in paragraphs])
    texts = [text for text, _ in paragraphs]
    texts.insert(middle, fact)

    prompt = _prompt(tokenizer, "\n\n".join(texts))
    encoded = tokenizer(prompt, return_offsets_mapping=True)
    begin = prompt.index(fact)
    inside = [
        index
        for index, (first, last) in enumerate(encoded["offset_mapping"])
        if last > begin and first < begin + len(fact)
    ]
    return Document(
        token_ids=list(encoded["input_ids"]),
        fact=fact,
        question=QUESTION,
        expected=NUMBER,
        fact_begin=inside[0],
        fact_end=inside[-1] + 1,
        chapters=chapters,
        sha256=hashlib.sha256(prompt.encode()).hexdigest(),
    )


def _prompt(tokenizer, text: str) -> str:
    message = {"role": "user", "content": f"{INSTRUCTION}\n\n{text}\n\n{QUESTION}"}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)


def _take_paragraphs(tokenizer, budget: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Paragraphs with their tokens, in the chapters' order, as many as fit; and the chapters used."""
    from pydoc_data.topics import topics

    taken, chapters = [], []
    for chapter in CHAPTERS:
        for paragraph in topics[chapter].strip().split("\n\n"):
            size = len(tokenizer(f"{paragraph}\n\n").input_ids)
            if size > budget:
                return taken, chapters
            budget -= size
            taken.append((paragraph, size))
            if chapter not in chapters:
                chapters.append(chapter)
    raise ValueError(f"document: chapters hold too few tokens, {budget} short of the target")


def _half_way(sizes: list[int]) -> int:
    """The paragraph boundary nearest to the middle."""
    total, before = sum(sizes), 0
    for index, size in enumerate(sizes):
        if 2 * before + size >= total:
            return index
        before += size
    return len(sizes)
