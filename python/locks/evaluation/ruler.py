"""RULER's 13 tasks (Hsieh et al. 2024, arXiv 2404.06654) by lm-evaluation-harness's generators, over local data.

The harness fetches its haystack, its questions and a sentence splitter when it makes documents, always 500 of them, and
has no option for local ones: its generating functions are called here with what they would have fetched.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from locks.evaluation.data import Data, online

# Tokens that a prompt may grow by behind the generator's count: the answer's first words, a chat template.
ROOM_TOKENS = 128
# Below, some generators try for ever to make a document that fits.
LEAST_LENGTH = 2048
_SEED = 42

_NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_2": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_k": 4,
    },
    "niah_multikey_2": {"type_haystack": "needle", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_v": 4,
    },
    "niah_multiquery": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_q": 4,
    },
}
# Tokens that each task's answer may take, as in the harness.
ANSWER_TOKENS = {**dict.fromkeys(_NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
TASKS = tuple(ANSWER_TOKENS)


def documents(task: str, length: int, count: int, tokenizer: Any, data: Data) -> list[dict[str, Any]]:
    """`count` documents whose prompts take at most `length` tokens with their answers. The same in every run.

    Raises DataError, and ValueError for lengths that the generators cannot make."""
    import numpy as np

    if length < LEAST_LENGTH:
        raise ValueError(f"ruler_{task}: length {length}, expected at least {LEAST_LENGTH}")
    _load_generators()
    random.seed(_SEED)
    np.random.seed(_SEED)
    size = length - ROOM_TOKENS
    if task in _NIAH:
        return _needles(task, size, count, tokenizer, data)
    if task in ("qa_1", "qa_2"):
        return _questions(task, size, count, tokenizer, data)
    return _GENERATORS[task](size, count, tokenizer)


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the expected strings that the answer holds; for questions, whether it holds one."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all, string_match_part

    match = string_match_part if doc["task"] in ("qa_1", "qa_2") else string_match_all
    if doc["task"] in ("qa_1", "qa_2"):
        return {"score": max(match(postprocess_pred(results), [[answer]]) for answer in doc["outputs"])}
    return {"score": match(postprocess_pred(results), [doc["outputs"]])}


def split_sentences(text: str) -> list[str]:
    """Stands for nltk's punkt, which is fetched at run time: sentences end with a stop before a capital."""
    return re.split(r"(?<=[.!?])[\"'”’]*\s+(?=[\"'“‘]?[A-Z])", text)


@contextlib.contextmanager
def _without_punkt() -> Iterator[None]:
    """The generator looks for punkt when it is imported, and fetches it if it is not there."""
    import nltk

    find = nltk.data.find
    nltk.data.find = lambda *arguments, **options: None
    try:
        yield
    finally:
        nltk.data.find = find


def _load_generators() -> None:
    """Before the seed is set: what they import may draw a number when it is loaded (nltk's rich does), and documents
    must not hang on which task was made first."""
    with _without_punkt():
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, qa_utils, vt_utils  # noqa: F401


def _needles(task: str, size: int, count: int, tokenizer: Any, data: Data) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import prepare_niah
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    kind = _NIAH[task]["type_haystack"]
    if kind != "essay" or (not data.has("haystack") and online()):
        haystack = prepare_niah.get_haystack(kind)
    else:
        haystack = re.sub(r"\s+", " ", data.text("haystack", f"ruler_{task}")).split(" ")
    prepare_niah.sent_tokenize = split_sentences  # by name, where the generator's cached splitter looks it up
    return prepare_niah.generate_samples(
        haystack, tokenizer, max_seq_length=size, template=TEMPLATE, num_samples=count, **_NIAH[task]
    )


def _questions(task: str, size: int, count: int, tokenizer: Any, data: Data) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import qa_utils

    kind, read = ("squad", qa_utils.read_squad) if task == "qa_1" else ("hotpotqa", qa_utils.read_hotpotqa)
    if not data.has(kind) and online():
        questions, texts = read()
    else:
        told = json.loads(data.text(kind, f"ruler_{task}"))
        download, qa_utils.download_json = qa_utils.download_json, lambda url: told
        try:
            questions, texts = read.__wrapped__()  # not from its cache, which may hold another file's
        finally:
            qa_utils.download_json = download
    return qa_utils.generate_samples(
        tokenizer, texts, questions, max_seq_length=size, num_samples=min(count, len(questions))
    )


def _variable_tracking(size: int, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as generate

    (example,) = generate(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    return generate(tokenizer=tokenizer, num_samples=count, max_seq_length=size, icl_example=example)


def _common_words(size: int, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import cwe_utils

    cwe_utils.RNG.seed(_SEED)  # shared by all calls: documents must not hang on what was made before
    return cwe_utils.sys_word_pair_random(num_samples=count, max_seq_length=size, tokenizer=tokenizer)


def _frequent_words(size: int, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext

    return sys_kwext(tokenizer=tokenizer, max_seq_length=size, num_samples=count)


_GENERATORS: dict[str, Callable[[int, int, Any], list[dict[str, Any]]]] = {
    "vt": _variable_tracking,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
