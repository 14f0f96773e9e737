"""vLLM's first model runner, in a cache too small for its requests, with formats of their own for some layers."""

import pytest
from engine_harness import MAX_TOKENS, assert_records_match_keys, counters, greedy, metric, only, reset_counters
from gpu_harness import assert_close, environment_of, gpu_engine, python_decodes

FORMATS = {"default": "fine", "0": "fine8", "1": "wide", "2": "compact", "3": "paper", "4": "b8r2m8v4c4"}
DENSE_LAYERS = [6, 29]
NUM_BLOCKS = 205  # of 16 tokens, one of them never used


# Asks for plain_vllm, whose engine must have ended before one in this process begins: both would share vLLM's groups of
# processes.
@pytest.fixture(scope="module")
def llm(smollm2, plain_vllm):
    options = {"budget": "all", "dense_tokens": 0, "formats": FORMATS, "dense_layers": DENSE_LAYERS}
    # vLLM's own profiling of memory and graphs: LOCKS's layers are built twice there.
    changes = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3, "num_gpu_blocks_override": NUM_BLOCKS}
    limits = {"max_model_len": 3100, "max_num_batched_tokens": 1024}
    # In one process, so that all requests are there before the first step: as many as may run meet in the cache.
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with environment_of(alone), gpu_engine(smollm2, runner=1, locks=options, **limits, **changes) as engine:
        engine.collective_rpc("watch_python_decodes")
        yield engine


def test_the_first_runner_serves(llm):
    assert "gpu_model_runner" in only(llm.collective_rpc("runner_class"))
    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == NUM_BLOCKS


def test_requests_equal_flash_attention(llm, prompts, plain_vllm):
    assert_close(greedy(llm, prompts, MAX_TOKENS), plain_vllm)
    assert_records_match_keys(llm)


def test_preempted_requests_equal_those_that_are_not(llm, prompts):
    # As many as may run at once: their prompts nearly fill the cache, and each grows by half of its own.
    crowd = [prompts[-1][start : start + 300] for start in range(0, 2701, 180)]
    alone = [one for prompt in crowd for one in greedy(llm, [prompt], 160)]
    before = metric(llm, "num_preemptions")
    assert_close(greedy(llm, crowd, 160), alone)
    cache = llm.llm_engine.vllm_config.cache_config
    assert metric(llm, "num_preemptions") > before, (
        f"none of {len(crowd)} requests was preempted in {cache.num_gpu_blocks} blocks of {cache.block_size} tokens:"
        " the cache is too large for this test"
    )
    assert_records_match_keys(llm)
    assert metric(llm, "kv_cache_usage_perc") == 0


def test_layers_have_the_formats_they_were_given(llm):
    described = {int(name.split(".")[2]): layer for name, layer in only(llm.collective_rpc("locks_describe")).items()}
    assert set(described) == set(range(30)) - set(DENSE_LAYERS)
    for layer, about in described.items():
        assert about["format"] == FORMATS.get(str(layer), FORMATS["default"])


def test_a_sparse_budget_serves_every_format_in_graphs(llm, prompts):
    llm.collective_rpc("locks_set_budget", args=(128,))
    prompt = prompts[-1]
    greedy(llm, [prompt], 1)
    reset_counters(llm)
    llm.collective_rpc("watch_python_decodes")
    greedy(llm, [prompt], 8)
    assert python_decodes(llm) == 0
    for layer in counters(llm).values():
        assert layer["sparse_rows"] == layer["steps"] == 7
        assert layer["invalid_records"] == layer["nonfinite_pages"] == 0
        assert layer["bytes_read"] < 0.3 * layer["bytes_dense"]
    assert_records_match_keys(llm)
