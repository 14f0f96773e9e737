"""The parts of `locks eval` that need neither an engine nor lm-evaluation-harness."""

import gzip
import json
import math
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from locks.commands import eval as eval_command
from locks.commands.engine_child import Refused
from locks.evaluation import engine, passkey, report
from locks.evaluation.arms import parse_arms
from locks.evaluation.data import SOURCES, Data, DataError
from locks.evaluation.generate import shard_of
from locks.evaluation.job import check_written, read_prepared
from locks.evaluation.measures import perplexity_requests
from locks.evaluation.requests import Answer, AnswerFile, Request, read_requests, write_requests
from locks.evaluation.statistics import (
    agreement,
    distinct_share,
    first_divergence,
    loop_period,
    paired,
    paired_over_tasks,
    sign_test,
)


def request(doc, task="t", **changes):
    return Request(task, doc, [1, 2, doc], 4, **changes)


def test_arms_are_selectors_times_budgets_or_named_one_by_one():
    arms = parse_arms("dense,locks,oracle:16,locks:paper@0.05", "0.02,512")
    assert [arm.name for arm in arms] == [
        "dense", "locks@0.02", "locks@512", "oracle:16@0.02", "oracle:16@512", "locks:paper@0.05",
    ]  # fmt: skip
    assert [arm.call for arm in arms[:2]] == [("dense", None, None, "all"), ("locks", None, None, "0.02")]
    assert arms[3].call == ("oracle", None, 16, "0.02") and arms[5].call == ("locks", "paper", None, "0.05")
    assert [arm.product for arm in arms] == [False, True, True, False, False, False]


@pytest.mark.parametrize(
    ("selectors", "budgets", "reason"),
    [
        ("best", "512", "selector = 'best', expected one of dense, locks, oracle, quest, mean_std, centroid, int3"),
        ("dense:16", "512", "expected dense alone"),
        ("dense@512", "512", "expected dense alone, which has no budget"),
        ("quest:12", "512", "expected quest with pages of 4, 8, 16 tokens"),
        ("locks:b3", "512", "b3"),
        ("locks", "1.0", "budget = '1.0'"),
        ("locks@0", "512", "budget = '0'"),
    ],
)
def test_arms_are_refused_by_name(selectors, budgets, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        parse_arms(selectors, budgets)


def test_requests_come_back_as_they_were_written(tmp_path):
    requests = [request(0), request(1, forced=[7, 8, 9, 10], stop=["\n"], cut=3), request(2, temperature=0.7, seed=5)]
    write_requests(tmp_path / "prompts.jsonl.xz", requests)
    assert read_requests(tmp_path / "prompts.jsonl.xz") == requests


def test_a_key_tells_what_is_asked_and_nothing_else():
    first = request(0)
    assert replace(first, task="u", doc=9, cut=1).key == first.key
    for change in ({"prompt": [1]}, {"max_tokens": 5}, {"stop": ["x"]}, {"seed": 1}, {"forced": [1, 2, 3, 4]}):
        assert replace(first, **change).key != first.key


@pytest.mark.parametrize("torn", [b"", b'{"arm":"dense","key":"b","tok', b"x" * 200_000])
def test_a_run_goes_on_behind_the_last_whole_line(tmp_path, torn):
    path = tmp_path / "answers.jsonl"
    answers = AnswerFile(path)
    answers.add(Answer("dense", "a", [1, 2], "one", "stop"))
    answers.add_report("dense", "t", {"counters": {"steps": 2}, "measured": {"rows": 0}})
    with path.open("ab") as file:
        file.write(torn)
    written = path.read_bytes()
    again = AnswerFile(path)
    assert again.answers == answers.answers and again.reports == answers.reports
    assert path.read_bytes() == written  # reading leaves it to a run that may be writing the line
    again.add(Answer("dense", "b", [3], "two", "length", [-0.5], [1]))
    assert AnswerFile(path).answers == again.answers
    assert all(json.loads(line) for line in path.read_text().splitlines())


class FakeEngine:
    """Answers a token each step and request, and dies at a step, as a killed run does."""

    def __init__(self, dies_at=None):
        self.running, self.calls, self.steps, self.asked, self.dies_at = {}, [], 0, 0, dies_at
        self.llm_engine = self

    def collective_rpc(self, name, args=()):
        self.calls.append((name, *args))
        return [{"counters": {"steps": 1}, "measured": {"rows": 1, "pages": 4, "pages_read": 2, "retained": 0.5}}]

    def add_request(self, key, prompt, params):
        self.running[key] = prompt["prompt_token_ids"]
        self.asked += 1

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, keys):
        self.running.clear()

    def step(self):
        self.steps += 1
        if self.steps == self.dies_at:
            raise KeyboardInterrupt
        key, prompt = self.running.popitem()
        made = SimpleNamespace(token_ids=prompt[-1:], text=str(prompt[-1]), finish_reason="stop", logprobs=None)
        return [SimpleNamespace(finished=True, request_id=key, outputs=[made])]


@pytest.fixture
def plain_sampling(monkeypatch):
    monkeypatch.setattr(engine, "sampling", lambda request: None)


def test_a_killed_run_goes_on_and_asks_nothing_twice(tmp_path, plain_sampling):
    requests = [request(doc, task) for task in ("t", "u") for doc in range(10 if task == "t" else 3)]
    requests = [replace(r, prompt=[len(r.task), ord(r.task), r.doc]) for r in requests]
    arms = parse_arms("dense,locks", "512")
    first = FakeEngine(dies_at=8)
    with pytest.raises(KeyboardInterrupt):
        engine.answer_all(first, arms, requests, AnswerFile(tmp_path / "a"), 4, None, lambda doing: None)
    second, answers = FakeEngine(), AnswerFile(tmp_path / "a")
    assert engine.answer_all(second, arms, requests, answers, 4, None, lambda doing: None)
    assert len(answers.answers) == 26 and second.asked == 26 - 7
    third = FakeEngine()
    assert engine.answer_all(third, arms, requests, answers, 4, None, lambda doing: None) and third.asked == 0
    alike = [replace(one, task="v") for one in requests[:2]]  # the same questions in another task
    fourth, told = FakeEngine(), []
    same = AnswerFile(tmp_path / "c")
    assert engine.answer_all(fourth, arms, requests[:2] + alike, same, 4, None, told.append)
    assert fourth.asked == 4 and [doing["of"] for doing in told] == [4] * 4 and told[-1]["done"] == 4
    late = AnswerFile(tmp_path / "b")
    assert not engine.answer_all(FakeEngine(), arms, requests, late, 4, 0.0, lambda doing: None)


def test_chunks_take_tasks_in_turn():
    requests = [request(doc, task) for task, count in (("t", 5), ("u", 2)) for doc in range(count)]
    assert [[(r.task, r.doc) for r in chunk] for chunk in engine.chunks(requests, 2)] == [
        [("t", 0), ("t", 1)], [("u", 0), ("u", 1)], [("t", 2), ("t", 3)], [("t", 4)],
    ]  # fmt: skip


@pytest.mark.parametrize("of", [1, 2, 7, 30])
def test_shards_are_all_requests_once_and_neighbours_together(of):
    requests = [request(doc, task) for task in ("a", "b", "c") for doc in range(7)]
    parts = [list(shard_of(requests, number, of)) for number in range(1, of + 1)]
    assert [one for part in parts for one in part] == requests
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_pairs_against_a_plain_computation():
    draw = np.random.default_rng(5)
    base, arm = draw.random(60), draw.random(60) + 0.1
    found = paired(arm, base)
    differences = arm - base
    assert found.mean == pytest.approx(differences.mean()) and found.n == 60 and found.method == "bootstrap"
    error = differences.std(ddof=1) / math.sqrt(60)  # the normal interval, which the bootstrap nears
    assert found.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.1 * error + 0.01)
    assert found.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.1 * error + 0.01)
    assert (found.better, found.worse) == ((differences > 0).sum(), (differences < 0).sum())
    assert paired(arm, base) == found


def test_a_small_bootstrap_is_that_of_all_resamples():
    arm, base = [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    means = sorted(sum(chosen) / 4 for chosen in product([1.0, 0.0, 0.0, -1.0], repeat=4))
    found = paired(arm, base)
    assert found.low == pytest.approx(np.quantile(means, 0.025), abs=0.26)  # means are quarters
    assert found.high == pytest.approx(np.quantile(means, 0.975), abs=0.26)
    assert found.sign_p == 1.0


def test_a_suite_weighs_its_tasks_the_same():
    arm, base = [[0.0, 0.0, 1.0, 1.0], [1.0]], [[1.0, 1.0, 1.0, 1.0], [1.0]]
    suite = paired_over_tasks(arm, base)
    assert (suite.n, suite.mean, suite.better, suite.worse) == (5, -0.25, 0, 2)
    # The first task's resamples are binomial of 4 with one half; the second has one document, which is equal.
    assert (suite.low, suite.high) == (-0.5, 0.0)
    one_task = paired_over_tasks(arm[:1], base[:1])
    assert (one_task.mean, one_task.n) == (paired(arm[0], base[0]).mean, 4)
    assert paired_over_tasks(base, base) == paired(base[0] + base[1], base[0] + base[1])


def test_equal_pairs_bound_what_may_differ():
    found = paired([1.0] * 20, [1.0] * 20)
    assert (found.mean, found.method) == (0.0, "exact")
    assert (1 - found.high) ** 20 == pytest.approx(0.05) and found.low == -found.high
    with pytest.raises(ValueError, match="expected pairs"):
        paired([1.0], [1.0, 2.0])


def test_sign_test():
    assert sign_test(0, 5) == pytest.approx(2 / 32) and sign_test(3, 3) == 1.0


def test_divergence_and_agreement():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1 and first_divergence([1, 2], [1, 2, 3]) == 2
    told = agreement([[1, 2], [1, 2], [9]], [[1, 2], [1, 3], [8]])
    assert told == {"n": 3, "identical": 1 / 3, "first_divergence_median": 0.5, "first_divergence_least": 0}


def test_loops_are_found_and_prose_is_none():
    draw = np.random.default_rng(1)
    prose = draw.integers(0, 1000, 2000).tolist()
    assert loop_period(prose) is None and distinct_share(prose) > 0.99
    assert loop_period(prose + [5, 6, 7] * 300) == 3
    counted = [token for number in range(200) for token in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, number)]
    assert loop_period(prose + counted) == 12
    assert distinct_share([5] * 600) < 0.01


def test_a_report_pairs_documents_that_all_arms_have_answered(tmp_path):
    requests = [request(doc) for doc in range(4)]
    answers = AnswerFile(tmp_path / "a")
    for arm, texts in (("dense", "yyyy"), ("locks@512", "ynyn")):
        for one, text in zip(requests, texts, strict=True):
            if (arm, one.doc) != ("locks@512", 3):
                answers.add(Answer(arm, one.key, [ord(text)], text, "stop"))
        measured = {"rows": 2, "pages": 8, "pages_read": 4, "retained": 1.8}
        answers.add_report(arm, "t", {"counters": {"sparse_rows": 2}, "measured": measured})

    def scores(asked, own, docs):
        return {one.doc: float(own[one.key].text == "y") for one in asked}

    told = report.task_report(requests, answers, ["dense", "locks@512"], "score", scores)
    assert (told["n"], told["of"], told["docs"]) == (3, 4, [0, 1, 2])
    locks = told["arms"]["locks@512"]
    assert locks["score"] == pytest.approx(2 / 3) and locks["difference"]["mean"] == pytest.approx(-1 / 3)
    assert (locks["retained_mass"], locks["pages_read_share"]) == (0.9, 0.5) and locks["counters"] == {"sparse_rows": 2}
    assert locks["agreement"]["identical"] == pytest.approx(2 / 3)
    assert "difference" not in told["arms"]["dense"]


def test_answers_that_are_cut_off_in_a_loop_are_counted(tmp_path):
    requests = [request(doc) for doc in range(3)]
    answers = AnswerFile(tmp_path / "a")
    ends = ([1, 2, 3] * 200, "length"), (list(range(600)), "length"), ([1, 2, 3] * 200, "stop")
    for one, (tokens, finish) in zip(requests, ends, strict=True):
        answers.add(Answer("dense", one.key, tokens, "", finish))
    told = report.task_report(requests, answers, ["dense"], "score", lambda asked, own, docs: dict.fromkeys(docs, 1.0))
    assert (told["arms"]["dense"]["cut_off"], told["arms"]["dense"]["cut_off_in_loops"]) == (2, 1)


def test_perplexity_leaves_out_the_token_that_the_prompt_predicts(tmp_path):
    asked = [request(0, forced=[4, 5, 6, 7])]
    answers = AnswerFile(tmp_path / "a")
    answers.add(Answer("dense", asked[0].key, [4, 5, 6, 7], "", "length", [-9.0, -1.0, -2.0, -3.0], [9, 1, 2, 1]))
    told = report.task_report(asked, answers, ["dense"], "nats a token", report.forced_scores)
    report.add_perplexity(told, asked, answers)
    assert told["arms"]["dense"]["perplexity"] == pytest.approx(math.exp(2.0))
    assert told["arms"]["dense"]["likeliest_share"] == pytest.approx(2 / 3)


def test_the_table_names_every_task_whole(tmp_path, monkeypatch, capsys):
    told = {
        "score": 1.0, "retained_mass": 0.9, "agreement": {"identical": 1.0},
        "difference": {"mean": 0.0, "low": -0.1391, "high": 0.1391},
    }  # fmt: skip
    tasks = {f"ruler_niah_multi{kind}_131072": {"n": 20, "arms": {"mean_std:16@0.005": told}} for kind in "abc"}
    (tmp_path / "results.json").write_text(json.dumps({"tasks": tasks}))
    monkeypatch.setenv("COLUMNS", "60")
    eval_command._tell({"results": str(tmp_path / "results.json")})
    assert "…" not in capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")
    eval_command._tell({"results": str(tmp_path / "results.json")})
    lines = capsys.readouterr().out.splitlines()
    for name in tasks:
        assert sum(name in line and "mean_std:16@0.005" in line and "+0.1391]" in line for line in lines) == 1


def test_missing_data_is_named(tmp_path):
    with pytest.raises(DataError, match=r"passkey needs a file \*.txt\* .*give its folder with --data"):
        Data(None).text("haystack", "passkey")
    with pytest.raises(DataError, match=r"ruler_qa_1 needs a file squad\*.json\* .* has none"):
        Data(tmp_path).text("squad", "ruler_qa_1")
    (tmp_path / "book.txt").write_text("words")
    data = Data(tmp_path)
    assert data.text("haystack", "passkey") == "words"
    assert data.used["haystack"]["file"] == "book.txt" and data.notes


def test_data_that_cannot_be_read_is_named(tmp_path):
    lines = '{"problem": "a\u2028b\x85c", "answer": 1}\n\n{"problem": 2, "answer": 3, "more": 4}\n'
    (tmp_path / "aime26.jsonl").write_text(lines, encoding="utf-8")
    assert Data(tmp_path).rows("aime26", "aime26") == [
        {"problem": "a\u2028b\x85c", "answer": 1}, {"problem": 2, "answer": 3, "more": 4},
    ]  # fmt: skip
    (tmp_path / "math500.jsonl").write_text('{"problem": 1, "solution": 2, "answer": 3}\n{"prob\n')
    with pytest.raises(DataError, match=r"math500: line 2 of math500\.jsonl: .*expected JSON"):
        Data(tmp_path).rows("math500", "math500")
    (tmp_path / "math500.jsonl").unlink()
    for content in (b"no gzip", gzip.compress(b"text")[:-5], gzip.compress(b"\xff")):
        (tmp_path / "math500.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"math500: .*math500\.jsonl\.gz: .*expected UTF-8 text, gzip or not"):
            Data(tmp_path).text("math500", "math500")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"problem": "x"}', "no answer, expected a JSON object with problem, answer"),
        ("3", "no object, expected a JSON object with problem, answer"),
        ("null", "no object, expected"),
        ("[" * 100_000, "expected JSON"),
    ],
)
def test_a_line_of_data_that_is_no_document_is_named(tmp_path, line, reason):
    (tmp_path / "aime26.jsonl").write_text('{"problem": "x", "answer": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"aime26: line 2 of aime26\.jsonl: .*{reason}"):
        Data(tmp_path).rows("aime26", "aime26")


def test_what_a_kind_of_data_holds_is_what_its_lines_need():
    assert {kind: source.keys for kind, source in SOURCES.items() if source.keys} == {
        "longbench": ("dataset", "prompt", "answers", "all_classes"),
        "math500": ("problem", "solution", "answer"),
        "aime26": ("problem", "answer"),
    }
    assert SOURCES["longbench"].what == "LongBench prompts: dataset, prompt, answers, all_classes"


class LetterTokenizer:
    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}


def test_a_text_too_short_for_a_length_is_refused(tmp_path):
    (tmp_path / "book.txt").write_text("words " * 100)
    data = Data(tmp_path)
    with pytest.raises(ValueError, match="passkey: the text has 588 tokens, expected at least 880 for length 1024"):
        passkey.documents(1024, 1, LetterTokenizer(), data)
    with pytest.raises(ValueError, match="perplexity: the text has 588 tokens, expected at least 1024"):
        perplexity_requests(1024, 1, LetterTokenizer(), data)
    with pytest.raises(ValueError, match="perplexity: length 256, expected more than the 256 forced tokens"):
        perplexity_requests(256, 1, LetterTokenizer(), data)
    (window,) = perplexity_requests(257, 1, LetterTokenizer(), data)
    assert len(window.prompt) == 1 and len(window.forced) == 256


def test_a_folder_of_something_else_is_refused(tmp_path):
    path = tmp_path / "prepared.json"
    path.write_text(json.dumps({"tasks": "ruler"}))
    check_written(path, {"tasks": "ruler"}, "prepared")
    with pytest.raises(Exception, match='prepared with tasks = "ruler", now "passkey"; give another folder with --out'):
        check_written(path, {"tasks": "passkey"}, "prepared")


@pytest.mark.parametrize("content", [b"[1", b"", b"3", b"\xff", b"[" * 100_000])
def test_a_torn_file_of_the_folder_is_named(tmp_path, content):
    (tmp_path / "prepared.json").write_bytes(content)
    reason = r"prepared\.json: .*expected (a )?JSON.*; give another folder with --out"
    with pytest.raises(Refused, match=reason):
        check_written(tmp_path / "prepared.json", {"tasks": "ruler"}, "prepared")
    with pytest.raises(Refused, match=reason):
        read_prepared(SimpleNamespace(folder=tmp_path, out=str(tmp_path)))


@pytest.mark.parametrize("content", ["{}", '{"identity": 3, "longest": 4}', '{"identity": {}, "longest": "4"}'])
def test_what_a_stage_takes_from_the_folder_is_there(tmp_path, content):
    (tmp_path / "prepared.json").write_text(content)
    with pytest.raises(Refused, match=r"prepared\.json: no \"identity\" or no \"longest\""):
        read_prepared(SimpleNamespace(folder=tmp_path, out=str(tmp_path)))


def test_the_command_refuses_before_anything_is_loaded(call_locks, tmp_path):
    for arguments, reason in (
        (["--lengths", "12"], "--lengths = '12', expected numbers of tokens from 256 to 16777216"),
        (["--shard", "3/2"], "--shard = '3/2', expected I/N"),
        (["--shard", "1/" + "9" * 5000], "expected I/N"),
        (["--shard", "1/2"], "--shard is for --stage generate"),
        (["--stage", "run"], "--stage = 'run', expected prepare, generate, score or all"),
        (["--selectors", "best"], "selector = 'best'"),
        (["--data", tmp_path / "none"], "expected a folder that exists"),
        (["--engine", "[]"], "expected a JSON object"),
    ):
        done = call_locks("eval", "passkey", "--model", "m", "--out", tmp_path / "out", *arguments)
        assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not any(tmp_path.iterdir())


def test_a_missing_harness_is_named_with_the_way_to_it(call_locks, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = call_locks("eval", "passkey", "--model", "m", "--out", tmp_path / "out")
    assert done.returncode == 2 and "pip install 'locks-vllm[eval]'" in done.stderr, done.stderr
