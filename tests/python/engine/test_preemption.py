"""Budget "all" in a cache too small for its requests, with formats of their own for some layers and others dense."""

import pytest
from engine_harness import MAX_TOKENS, assert_records_match_keys, assert_same, counters, engine, greedy, metric, only

from locks_vllm.compat import cpu_block_tokens

FORMATS = {"default": "fine", "0": "fine8", "1": "wide", "2": "compact", "3": "paper", "4": "b8r2m8v4c4"}
DENSE_LAYERS = [6, 29]
CACHE_TOKENS = 1088


@pytest.fixture(scope="module")
def llm(smollm2):
    options = {"budget": "all", "formats": FORMATS, "dense_layers": DENSE_LAYERS}
    with engine(
        smollm2,
        locks=options,
        max_model_len=1024,
        block_size=cpu_block_tokens(),
        max_num_batched_tokens=53,
        max_num_seqs=16,
        num_gpu_blocks_override=CACHE_TOKENS // cpu_block_tokens(),
    ) as running:
        yield running


def test_preempted_requests_equal_vllm(llm, prompts, plain_vllm):
    before = metric(llm, "num_preemptions")
    # The longest first: 880 tokens take most of the cache, and the next prompt, of 400, starts in the rest while the
    # first still generates, runs out of blocks half-way and has to give them back.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    got = greedy(llm, [prompts[i] for i in order], MAX_TOKENS)
    assert_same(got, [plain_vllm[i] for i in order])
    assert metric(llm, "num_preemptions") > before, "no request was preempted: the cache is too large for this test"
    assert_records_match_keys(llm)
    assert metric(llm, "kv_cache_usage_perc") == 0


def test_a_long_prompt_in_small_chunks_equals_vllm(llm, prompts, plain_vllm):
    assert_same(greedy(llm, prompts[-1:], MAX_TOKENS), plain_vllm[-1:])
    assert_records_match_keys(llm)


def test_layers_have_the_formats_they_were_given(llm):
    described = {int(name.split(".")[2]): layer for name, layer in only(llm.collective_rpc("locks_describe")).items()}
    assert set(described) == set(range(30)) - set(DENSE_LAYERS)
    for layer, about in described.items():
        assert about["format"] == FORMATS.get(str(layer), FORMATS["default"])
    assert [described[layer]["page_tokens"] for layer in (0, 1, 2, 3, 4, 5)] == [4, 16, 8, 16, 8, 4]
    assert len({described[layer]["record_bytes"] for layer in (0, 1, 2, 3, 5)}) == 5


def test_a_sparse_budget_serves_every_format(llm, prompts):
    llm.collective_rpc("locks_set_budget", args=(128,))
    llm.collective_rpc("locks_reset_counters")
    got = greedy(llm, prompts[-1:], 8)
    assert len(got[0].tokens) == 8
    for layer in counters(llm).values():
        assert layer["sparse_rows"] == layer["steps"] == 7
        assert layer["invalid_records"] == layer["nonfinite_pages"] == 0
    assert_records_match_keys(llm)
