"""The tasks of `locks eval`, made and scored by lm-evaluation-harness over small local data."""

import gzip
import json
import random

import pytest

pytest.importorskip("lm_eval", reason="the extra locks-vllm[eval] is not installed")

from locks.evaluation import passkey, ruler
from locks.evaluation.data import Data, DataError
from locks.evaluation.harness import WrittenModel, ask, fitted, scores
from locks.evaluation.requests import Answer
from locks.evaluation.tasks import Choice, build, expand

LENGTH, COUNT = 2048, 2


class WordTokenizer:
    """A token for each run of letters, each digit and each sign, with the space before it."""

    name_or_path = "words"
    chat_template = "yes"

    def __init__(self):
        self.ids, self.texts = {}, []

    def __call__(self, text, add_special_tokens=True):
        import re

        tokens = []
        for piece in re.findall(r"\s*[^\W\d]+|\s*\d|\s*\S|\s+", text):
            if piece not in self.ids:
                self.ids[piece] = len(self.texts)
                self.texts.append(piece)
            tokens.append(self.ids[piece])

        class Encoding(dict):
            input_ids = tokens

        return Encoding(input_ids=tokens)

    def decode(self, tokens):
        return "".join(self.texts[token] for token in tokens)

    def apply_chat_template(self, turns, tokenize=False, add_generation_prompt=True, continue_final_message=False):
        text = "".join(f"[{turn['role']}]{turn['content']}" for turn in turns)
        return text + ("[assistant]" if add_generation_prompt else "")


@pytest.fixture(scope="module")
def tokenizer():
    return WordTokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One small file of each kind."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(3)
    words = ["harbour", "lantern", "winter", "morning", "quarrel", "bridge", "silver", "garden"]
    prose = " ".join(f"The {draw.choice(words)} met a {draw.choice(words)}." for _ in range(3000))
    (folder / "book.txt.gz").write_bytes(gzip.compress(prose.encode()))
    paragraphs = [
        {
            "context": f"{draw.choice(words)} {number} lies in town {number}.",
            "qas": [
                {"question": f"Where lies {number}?", "answers": [{"text": f"town {number}"}], "is_impossible": False}
            ],
        }
        for number in range(40)
    ]
    (folder / "squad_small.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"Who is {n}?", "answer": f"person {n}", "context": [[f"Page {n}", [f"{n} is person {n}."]]]}
        for n in range(40)
    ]
    (folder / "hotpotqa_small.json").write_text(json.dumps(hotpot))
    samples = [
        {"dataset": "hotpotqa", "prompt": "Who? Answer:", "answers": ["Bob Dylan"], "all_classes": None},
        {"dataset": "trec", "prompt": "What kind?", "answers": ["City"], "all_classes": ["City", "Person"]},
    ]
    (folder / "longbench.jsonl").write_text("\n".join(map(json.dumps, samples)))
    problem = {"problem": "One and one?", "solution": "It is $\\boxed{2}$.", "answer": "2"}
    (folder / "math500.jsonl").write_text(json.dumps(problem))
    (folder / "aime26.jsonl").write_text(json.dumps({"problem": "Half of 554?", "answer": 277}))
    return Data(folder)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_ruler_documents_fit_and_hold_their_answers(task, tokenizer, data):
    length = 4096 if task == "cwe" else LENGTH  # below, its lists are short
    documents = ruler.documents(task, length, COUNT, tokenizer, data)
    assert len(documents) == COUNT and documents == ruler.documents(task, length, COUNT, tokenizer, data)
    assert documents[0]["input"] != documents[1]["input"]
    for document in documents:
        tokens = len(tokenizer(document["input"] + " " + document["gen_prefix"])["input_ids"])
        assert tokens + ruler.ANSWER_TOKENS[task] <= length
        assert tokens > 0.2 * length, "most of the prompt is haystack"
        assert document["outputs"] and all(answer in document["input"] for answer in document["outputs"])
        named = {**document, "task": task}
        assert ruler.score(named, [" and ".join(document["outputs"])])["score"] == 1.0
        assert ruler.score(named, ["no such thing"])["score"] == 0.0


def test_ruler_needs_room(tokenizer, data):
    with pytest.raises(ValueError, match="ruler_vt: length 1024, expected at least 2048"):
        ruler.documents("vt", 1024, 1, tokenizer, data)


def test_passkeys_lie_at_their_depths(tokenizer, data):
    documents = passkey.documents(LENGTH, COUNT, tokenizer, data)
    assert documents == passkey.documents(LENGTH, COUNT, tokenizer, data)
    assert [document["depth"] for document in documents] == COUNT * list(passkey.DEPTHS)
    for document in documents:
        assert len(tokenizer(document["input"])["input_ids"]) <= LENGTH - passkey.ANSWER_TOKENS
        place = document["input"].index(document["outputs"][0]) / len(document["input"])
        assert place == pytest.approx(document["depth"], abs=0.1)
    assert passkey.score(documents[0], [f"It is {documents[0]['outputs'][0]}."]) == {"score": 1.0}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "max_tokens"),
    [
        ("longbench_hotpotqa", "Bob Dylan", "nobody", 32),
        ("longbench_trec", "City", "Person", 64),
        ("math500", "So it is $\\boxed{2}$.", "So it is $\\boxed{3}$.", 500),
        ("aime26", "So it is $\\boxed{277}$.", "So it is $\\boxed{276}$.", 500),
    ],
)
def test_the_harness_asks_and_scores_over_local_data(name, right, wrong, max_tokens, tokenizer, data):
    (task,) = build(name, Choice((LENGTH,), COUNT, chat=True), tokenizer, data)
    model = WrittenModel(tokenizer)
    (request,) = ask(task, model, COUNT, longest=1000, max_tokens=500)
    asked = tokenizer.decode(request.prompt)
    assert ("[user]" in asked) == (name != "longbench_trec")
    assert (request.max_tokens, request.temperature, request.cut) == (max_tokens, 0.0, 0)
    for text, score in ((right, 1.0), (wrong, 0.0)):
        answers = {request.key: Answer("dense", request.key, [1], text, "stop")}
        assert scores(task, model, [request], answers, [0]) == {0: score}


def test_some_documents_are_scored_as_themselves(tokenizer, data):
    (task,) = build("passkey", Choice((LENGTH,), 1, chat=False), tokenizer, data)
    model = WrittenModel(tokenizer)
    requests = ask(task, model, 1, LENGTH, None)
    assert len(requests) == len(passkey.DEPTHS)
    documents = passkey.documents(LENGTH, 1, tokenizer, data)
    texts = [documents[doc]["outputs"][0] if doc in (1, 4) else "no" for doc in range(5)]
    answers = {one.key: Answer("dense", one.key, [], text, "stop") for one, text in zip(requests, texts, strict=True)}
    assert scores(task, model, requests, answers, [1, 3, 4]) == {1: 1.0, 3: 0.0, 4: 1.0}


def test_long_prompts_lose_their_middle():
    assert fitted(list(range(10)), 10) == (list(range(10)), 0)
    assert fitted(list(range(10)), 5) == ([0, 1, 7, 8, 9], 5)


def test_names(tokenizer, data, monkeypatch):
    assert len(expand("ruler")) == 13 and len(expand("longbench")) == 21
    assert expand("passkey,ruler_vt,passkey") == ["passkey", "ruler_vt"]
    with pytest.raises(ValueError, match="task 'nosuch', expected ruler, longbench, passkey"):
        build("nosuch", Choice((LENGTH,), 1, chat=False), tokenizer, data)
    with pytest.raises(DataError, match="longbench_lcc: the file of --data has no sample of 'lcc'"):
        build("longbench_lcc", Choice((LENGTH,), 1, chat=False), tokenizer, data)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"math500 needs a file math500\*.jsonl\*"):
        build("math500", Choice((LENGTH,), 1, chat=False), tokenizer, Data(None))
