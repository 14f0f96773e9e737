"""The plug-in's GPU code in a real engine without a GPU: vLLM's scheduler, tables and metadata; emulated kernels."""

import pytest
from engine_checks import blocks_built
from engine_harness import (
    MAX_TOKENS,
    assert_records_match_keys,
    assert_same,
    counters,
    engine,
    greedy,
    only,
    reset_counters,
)

KV_HEADS, BLOCK_SIZE, DENSE_LAYERS = 3, 16, [6, 29]


@pytest.fixture(scope="module")
def llm(smollm2):
    options = {"budget": "all", "dense_tokens": 0, "dense_layers": DENSE_LAYERS, "formats": {"0": "fine8", "1": "wide"}}
    with engine(
        smollm2,
        locks=options,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=197,
        max_num_seqs=16,
        worker_extension_cls="emulated_gpu.EmulatedWorker",
    ) as running:
        yield running


def test_the_gpu_code_serves(llm):
    described = only(llm.collective_rpc("locks_describe"))
    assert {layer["impl"] for layer in described.values()} == {"EmulatedImpl"}
    assert len(described) == 30 - len(DENSE_LAYERS)


def test_a_batch_in_chunks_and_its_prefix_hits_equal_vllm(llm, prompts, plain_vllm):
    reset_counters(llm)
    first = greedy(llm, prompts, MAX_TOKENS)
    assert_same(first, plain_vllm)
    for layer in counters(llm).values():
        assert layer["prefill_tokens"] == sum(map(len, prompts)) - sum(one.cached_tokens for one in first)
        assert 0 <= layer["dense_rows"] - len(prompts) * (MAX_TOKENS - 1) <= len(prompts)
    reset_counters(llm)
    again = greedy(llm, prompts, MAX_TOKENS)
    assert_same(again, plain_vllm)
    built = KV_HEADS * blocks_built(prompts, again, MAX_TOKENS)
    assert {layer["records_built"] for layer in counters(llm).values()} == {built}
    assert_records_match_keys(llm)


def test_a_sparse_budget_runs_sparse(llm, prompts):
    llm.collective_rpc("locks_set_budget", args=(96,))
    reset_counters(llm)
    greedy(llm, prompts[-1:], 8)
    for layer in counters(llm).values():
        assert layer["steps"] == layer["sparse_rows"] == 7
        assert layer["bytes_read"] < 0.5 * layer["bytes_dense"]
    assert_records_match_keys(llm)
