"""Arms of an evaluation in real engines: on the CPU, and through the plug-in's GPU code with emulated operators."""

import math

import pytest
import torch
from engine_harness import engine, greedy, only

from locks.evaluation.arms import Arm
from locks.evaluation.engine import answer_chunk, engine_arguments
from locks.evaluation.requests import AnswerFile, Request

WORKERS = ["locks_vllm.evaluation.LocksEvaluationExtension", "emulated_evaluation.EmulatedEvaluationWorker"]
WHOLE = [Arm("locks", "paper"), Arm("oracle"), Arm("quest"), Arm("mean_std", "4"), Arm("int3")]  # budget "all"
TIGHT = [Arm("locks", None, "96"), Arm("locks", "wide", "96"), Arm("oracle", "16", "96"), Arm("quest", None, "96")]
TOLERANCE = 2e-3  # nats: float32, in another order of summation
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=WORKERS, ids=["cpu", "gpu-code"])
def llm(request, tiny_model):
    options = engine_arguments(str(tiny_model), 512, 4, True, {"block_size": 32})
    for name in ("model", "seed", "enforce_eager", "disable_log_stats", "additional_config"):
        del options[name]
    options |= {"worker_extension_cls": request.param, "max_num_batched_tokens": 300}
    with engine(tiny_model, locks={"budget": "all", "dense_tokens": 0}, **options) as running:
        yield running


PROMPTS = [[(7 * place + 13 * row) % 509 for place in range(length)] for row, length in enumerate((400, 333, 40, 260))]


def run(llm, arm, action):
    llm.collective_rpc("locks_arm_start", args=arm.call)
    result = action()
    return result, only(llm.collective_rpc("locks_arm_stop"))


@pytest.fixture(scope="module")
def dense(llm):
    return run(llm, Arm("dense"), lambda: greedy(llm, PROMPTS, NEW_TOKENS))


@pytest.mark.parametrize("arm", WHOLE, ids=lambda arm: arm.name)
def test_with_the_whole_budget_every_arm_is_dense(llm, dense, arm):
    generated, report = run(llm, arm, lambda: greedy(llm, PROMPTS, NEW_TOKENS))
    for one, other in zip(generated, dense[0], strict=True):
        assert one.tokens == other.tokens
        assert all(math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(one.logprobs, other.logprobs, strict=True))
    measured = report["measured"]
    assert measured["rows"] == 2 * len(PROMPTS) * (NEW_TOKENS - 1)  # layers; the first tokens come with the prompts
    assert measured["pages_read"] == measured["pages"]
    assert measured["retained"] / measured["rows"] == pytest.approx(1.0, abs=1e-4)


def test_a_tight_budget_reads_little_and_the_oracle_keeps_most(llm, dense):
    kept = {}
    for arm in TIGHT:
        llm.collective_rpc("locks_arm_start", args=arm.call)
        llm.collective_rpc("locks_arm_measure", args=(True,))
        greedy(llm, PROMPTS[:1], NEW_TOKENS)
        report = only(llm.collective_rpc("locks_arm_stop"))
        measured, counters = report["measured"], report["counters"]
        assert measured["rows"] == 2 * (NEW_TOKENS - 1), arm
        assert measured["pages_read"] / measured["pages"] == pytest.approx(96 / 406, abs=0.02), arm
        assert len(report["retained_by_layer"]) == 2
        kept[arm.name] = measured["retained"] / measured["rows"]
        # The product reads its rows whole for every other selector.
        assert (counters["sparse_rows"], counters["dense_rows"]) == (
            (measured["rows"], 0) if arm.product else (0, measured["rows"])
        )
    assert all(0 < retained < 1 for retained in kept.values()), kept
    assert kept["oracle:16@96"] >= max(kept["locks:wide@96"], kept["quest@96"]) - 0.01, kept
    after = run(llm, Arm("dense"), lambda: greedy(llm, PROMPTS, NEW_TOKENS))
    assert [one.tokens for one in after[0]] == [one.tokens for one in dense[0]]
    assert only(llm.collective_rpc("locks_verify_records"))["mismatched"] == 0


def test_forced_tokens_come_with_the_models_log_probabilities(llm, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    forced = [3, 500, 77, 1, 250, 9]
    requests = [Request("t", doc, prompt, len(forced), forced=forced) for doc, prompt in enumerate(PROMPTS[:2])]
    told = list(answer_chunk(llm, Arm("dense"), requests, AnswerFile(tmp_path / "a"), None))
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for request in requests:
        (answer,) = (answer for answer in told if answer.key == request.key)
        assert answer.tokens == forced
        with torch.no_grad():
            logits = network(torch.tensor([request.prompt + forced])).logits[0, len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(forced)), forced]
        assert (torch.tensor(answer.logprobs) - expected).abs().max() < TOLERANCE
        assert answer.ranks == [int((row > row[token]).sum()) + 1 for row, token in zip(logits, forced, strict=True)]


def test_what_cannot_be_is_refused_and_the_engine_goes_on(llm, dense):
    for arguments, reason in (
        (("best", None, None, "all"), "selector = 'best', expected one of dense, locks, oracle, quest"),
        (("quest", None, 5, "all"), "page_tokens = 5, expected 4, 8 or 16"),
        (("quest", None, None, "1.0"), "budget = '1.0'"),
        (("locks", "b3", None, "all"), "b3"),
    ):
        with pytest.raises(Exception, match=reason):
            llm.collective_rpc("locks_arm_start", args=arguments)
    llm.collective_rpc("locks_arm_stop")
    generated, _ = run(llm, Arm("dense"), lambda: greedy(llm, PROMPTS, NEW_TOKENS))
    assert [one.tokens for one in generated] == [one.tokens for one in dense[0]]
