"""Arms of an evaluation on a GPU: with the whole budget each is dense, with a tight one each keeps what it should."""

import pytest
from engine_harness import greedy, only
from gpu_harness import LAYERS, assert_close, gpu_engine

from locks.evaluation.arms import Arm
from locks.evaluation.engine import answer_chunk
from locks.evaluation.requests import AnswerFile, Request

NEW_TOKENS = 16
WHOLE = [Arm("locks", "paper"), *(Arm(name) for name in ("oracle", "quest", "mean_std", "centroid", "int3"))]
TIGHT = [Arm("locks"), Arm("locks", "paper"), Arm("oracle"), Arm("oracle", "16"), Arm("quest"), Arm("mean_std")]


@pytest.fixture(scope="module", params=[2, 1], ids=["second-runner", "first-runner"])
def llm(request, smollm2):
    forced = {"logits_processors": ["locks_vllm.forced_tokens:ForcedTokens"]} if request.param == 1 else {}
    with gpu_engine(
        smollm2,
        runner=request.param,
        locks={"budget": "all", "dense_tokens": 0},
        enforce_eager=True,
        async_scheduling=False,
        worker_extension_cls="locks_vllm.evaluation.LocksEvaluationExtension",
        **forced,
    ) as running:
        yield running


def run(llm, arm, prompts):
    llm.collective_rpc("locks_arm_start", args=arm.call)
    llm.collective_rpc("locks_arm_measure", args=(True,))
    generated = greedy(llm, prompts, NEW_TOKENS)
    return generated, only(llm.collective_rpc("locks_arm_stop"))


def test_with_the_whole_budget_every_arm_is_dense(llm, prompts):
    dense, _ = run(llm, Arm("dense"), prompts)
    for arm in WHOLE:
        print(arm.name)
        generated, report = run(llm, arm, prompts)
        assert_close(generated, dense)
        measured = report["measured"]
        assert measured["rows"] == LAYERS * len(prompts) * (NEW_TOKENS - 1)
        assert measured["pages_read"] == measured["pages"]
        assert measured["retained"] / measured["rows"] == pytest.approx(1, abs=1e-3)


def test_a_tight_budget_keeps_most_with_the_oracle(llm, prompts):
    kept = {}
    for arm in TIGHT:
        limited = Arm(arm.selector, arm.variant, "256")
        _, report = run(llm, limited, prompts[-1:])
        measured, counters = report["measured"], report["counters"]
        assert measured["rows"] == LAYERS * (NEW_TOKENS - 1), arm
        assert measured["pages_read"] / measured["pages"] == pytest.approx(256 / 3008, abs=0.01), arm
        assert counters["sparse_rows"] == (measured["rows"] if limited.product else 0)
        assert counters["invalid_records"] == 0
        kept[arm.name.removesuffix("@all")] = measured["retained"] / measured["rows"]
    print(kept)
    assert kept["oracle"] >= kept["locks"] - 0.005 and kept["oracle:16"] >= kept["locks:paper"] - 0.005
    assert kept["locks"] > kept["quest"] and kept["oracle"] > kept["oracle:16"]


def test_forced_tokens_are_the_answer(llm, prompts, tmp_path):
    if llm.llm_engine.vllm_config.model_config.logits_processors is None:
        pytest.skip("the second runner takes no logits processors")
    forced = prompts[5][:8]
    asked = [Request("t", 0, prompts[-1], len(forced), forced=forced)]
    answers = AnswerFile(tmp_path / "answers")
    told = {arm.name: next(answer_chunk(llm, arm, asked, answers, None)) for arm in (Arm("dense"), Arm("quest"))}
    for answer in told.values():
        assert answer.tokens == forced and len(answer.logprobs) == len(forced) and max(answer.logprobs) <= 0
    assert told["dense"].logprobs == pytest.approx(told["quest@all"].logprobs, abs=0.5)
