"""With budget "all", the engine generates what vLLM generates without the plug-in; and what its calls tell."""

import pytest
from engine_checks import assert_sparse_reads, blocks_built, measured_mass
from engine_harness import (
    MAX_TOKENS,
    assert_records_match_keys,
    assert_same,
    counters,
    engine,
    greedy,
    metric,
    only,
    reset_counters,
)

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 32
TOKEN_BYTES = 2 * HEAD_DIM * 4  # key and value of one KV head in float32


@pytest.fixture(scope="module")
def llm(smollm2):
    options = {"budget": "all"}
    with engine(
        smollm2, locks=options, max_model_len=1024, block_size=BLOCK_SIZE, max_num_batched_tokens=197, max_num_seqs=16
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _all(request):
    """Each test starts with the whole budget and with counters at zero."""
    running = request.getfixturevalue("llm")
    running.collective_rpc("locks_set_budget", args=("all",))
    reset_counters(running)


def test_a_batch_of_different_lengths_in_chunks_equals_vllm(llm, prompts, plain_vllm):
    got = greedy(llm, prompts, MAX_TOKENS)
    assert_same(got, plain_vllm)
    assert_records_match_keys(llm)
    layers = counters(llm)
    assert len(layers) == LAYERS
    for layer in layers.values():
        assert layer["sparse_rows"] == layer["records_read"] == 0
        assert layer["dense_rows"] == len(prompts) * (MAX_TOKENS - 1)
        assert layer["bytes_read"] == layer["bytes_dense"]
        assert layer["prefill_tokens"] == sum(map(len, prompts)) - sum(one.cached_tokens for one in got)


def test_a_prefix_hit_rebuilds_nothing_and_equals_vllm(llm, prompts, plain_vllm):
    first = greedy(llm, prompts, MAX_TOKENS)
    llm.collective_rpc("locks_reset_counters")
    again = greedy(llm, prompts, MAX_TOKENS)
    assert_same(again, plain_vllm)
    assert again[-1].cached_tokens == (len(prompts[-1]) - 1) // BLOCK_SIZE * BLOCK_SIZE > 800
    assert_records_match_keys(llm)
    built = KV_HEADS * blocks_built(prompts, again, MAX_TOKENS)
    for layer in counters(llm).values():
        assert layer["records_built"] == built
        assert layer["prefill_tokens"] == sum(map(len, prompts)) - sum(one.cached_tokens for one in again)
    assert [one.tokens for one in again][-1] == [one.tokens for one in first][-1]


def test_a_hit_on_whole_blocks_builds_no_record_at_all(llm, prompts):
    prompt = prompts[-1][: 25 * BLOCK_SIZE + 8]
    greedy(llm, [prompt], 1)
    reset_counters(llm)
    again = greedy(llm, [prompt], 1)
    assert again[0].cached_tokens == 25 * BLOCK_SIZE
    for layer in counters(llm).values():
        assert layer["records_built"] == 0
        assert layer["prefill_tokens"] == 8


@pytest.mark.parametrize("budget", [96, 256, 0.25])
def test_a_sparse_budget_runs_sparse_and_the_counters_say_so(llm, prompts, budget):
    llm.collective_rpc("locks_set_budget", args=(budget,))
    prompt = prompts[-1]
    greedy(llm, [prompt], MAX_TOKENS)
    assert_sparse_reads(llm, len(prompt), MAX_TOKENS, budget, LAYERS, KV_HEADS, TOKEN_BYTES)
    assert_records_match_keys(llm)


def test_short_contexts_run_dense_under_a_sparse_budget_and_equal_vllm(llm, prompts, plain_vllm):
    llm.collective_rpc("locks_set_budget", args=(512,))
    short = [index for index, prompt in enumerate(prompts) if len(prompt) + MAX_TOKENS <= 512]
    assert_same(greedy(llm, [prompts[i] for i in short], MAX_TOKENS), [plain_vllm[i] for i in short])
    for layer in counters(llm).values():
        assert layer["sparse_rows"] == layer["records_read"] == 0


def test_a_budget_below_what_is_always_read_is_raised_and_counted(llm, prompts):
    llm.collective_rpc("locks_set_budget", args=(1,))
    greedy(llm, [prompts[-1]], 4)
    for layer in counters(llm).values():
        assert layer["raised_budgets"] == layer["sparse_rows"] == 3


@pytest.mark.parametrize("budget", [0, -1, 1.0, 1.5, "half", None, True, [1]])
def test_a_bad_budget_is_refused_and_the_engine_goes_on(llm, prompts, plain_vllm, budget):
    with pytest.raises(Exception, match=r"budget = .*expected") as error:
        llm.collective_rpc("locks_set_budget", args=(budget,))
    assert repr(budget) in str(error.value)
    assert {layer["budget"] for layer in only(llm.collective_rpc("locks_describe")).values()} == {"all"}
    assert_same(greedy(llm, prompts[8:9], 8), [_cut(plain_vllm[8], 8)])


def test_evaluation_measures_the_mass_that_was_kept(llm, prompts):
    prompt = prompts[-1]
    llm.collective_rpc("locks_set_evaluation", args=(True,))
    try:
        means = {budget: measured_mass(llm, prompt, budget, KV_HEADS, 1e-5) for budget in ("all", 512, 96)}
        assert means["all"] == pytest.approx(1, abs=1e-5)
        assert 0.5 < means[96] < means[512] < 1
        assert only(llm.collective_rpc("locks_evaluation"))["model.layers.0.self_attn.attn"]["steps"] == []
    finally:
        llm.collective_rpc("locks_set_evaluation", args=(False,))


def test_all_cache_blocks_come_back(llm, prompts):
    greedy(llm, prompts, 4)
    assert metric(llm, "kv_cache_usage_perc") == 0


def _cut(generated, count):
    return type(generated)(
        generated.tokens[:count], generated.logprobs[:count], generated.gaps[:count], generated.cached_tokens
    )
