"""`locks eval` from prompts to results, stage by stage: a real model on the CPU, over a text of its own."""

import json
import os
import random
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason="the extra locks-vllm[eval] is not installed")

ARMS = ["dense", "locks@112", "quest@112"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(5)
    words = ("harbour", "lantern", "winter", "morning", "quarrel", "bridge", "silver", "garden", "letter", "valley")
    sentences = (f"The {draw.choice(words)} was near the {draw.choice(words)}." for _ in range(4000))
    (folder / "book.txt").write_text(" ".join(sentences))
    return folder


def run_eval(model, data, out, *arguments):
    command = [sys.executable, "-m", "locks.cli", "eval", "passkey", "--model", model, "--data", data, "--out", out]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    more = ["--lengths", 512, "--count", 1, "--selectors", ",".join(ARMS), "--engine", '{"dtype": "float32"}']
    return subprocess.run(
        list(map(str, [*command, *more, *arguments])),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_from_prompts_to_results_of_what_every_arm_has_answered(smollm2, data, tmp_path):
    out = tmp_path / "run"
    made = run_eval(smollm2, data, out, "--stage", "prepare")
    assert made.returncode == 0, made.stderr
    assert made.stdout == "prepared 5 requests\n"
    other = run_eval(smollm2, data, out, "--stage", "prepare", "--count", 2)
    assert other.returncode == 2 and "prepared with count = 1, now 2" in other.stderr

    done = run_eval(smollm2, data, out, "--stage", "generate", "--batch", 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "every request is answered\n"
    lines = (out / "answers.jsonl").read_text().splitlines(keepends=True)
    # As a kill leaves it, in the middle of the last answer: that document is not scored.
    (out / "answers.jsonl").write_text("".join(lines[:-2]) + lines[-2][:30])

    scored = run_eval(smollm2, data, out, "--stage", "score")
    assert scored.returncode == 0, scored.stderr
    results = json.loads((out / "results.json").read_text())
    task = results["tasks"]["passkey_512"]
    assert (task["n"], task["of"]) == (4, 5) and list(task["arms"]) == ARMS
    for arm in ARMS:
        told = task["arms"][arm]
        assert 0 <= told["score"] <= 1 and told["generated_tokens"]["most"] <= 16
        assert ("difference" in told) == (arm != "dense")
    assert task["arms"]["dense"]["score"] == 1.0, "this model finds a pass key in 512 tokens"
    assert task["arms"]["locks@112"]["counters"]["sparse_rows"] > 0
    assert task["arms"]["quest@112"]["counters"]["sparse_rows"] == 0
    assert task["arms"]["quest@112"]["pages_read_share"] < 0.5
    assert results["prepared"]["notes"] == ["haystack: a text of --data, not RULER's essays"]
    assert len(results["runs"]["answers.run.json"]["model_sha256"]) == 64
