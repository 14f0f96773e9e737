"""A connector that fills the cache behind the plug-in's back: records are rebuilt from the keys that it brought."""

import pytest
from engine_harness import assert_records_match_keys, counters, greedy, reset_counters
from gpu_harness import KV_HEADS, gpu_engine, python_decodes

LENGTHS = (2048, 700, 87, 300, 16, 17)
BUDGET, MAX_TOKENS = 128, 10


@pytest.mark.parametrize("runner", [2])
def test_records_of_loaded_keys_are_built_on_the_first_step(smollm2, runner):
    # vLLM's own benchmark connector: all but the last prompt token count as loaded, and every cache layer of these
    # tokens, that of the records included, is filled with noise.
    connector = {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
    }
    with gpu_engine(
        smollm2,
        runner=runner,
        locks={"budget": BUDGET, "dense_tokens": 0},
        max_num_seqs=8,
        enable_prefix_caching=False,
        kv_transfer_config=connector,
    ) as llm:
        llm.collective_rpc("watch_python_decodes")
        reset_counters(llm)
        greedy(llm, [[7] * length for length in LENGTHS], MAX_TOKENS)
        sparse = sum(length > BUDGET for length in LENGTHS)
        for layer in counters(llm).values():
            assert layer["prefill_tokens"] == len(LENGTHS)
            assert layer["records_built"] == KV_HEADS * sum((length + MAX_TOKENS - 1) // 16 for length in LENGTHS)
            assert layer["sparse_rows"] == sparse * (MAX_TOKENS - 1)
            assert layer["invalid_records"] == 0
        assert python_decodes(llm) == 0, "vLLM runs these first steps in graphs too"
        assert_records_match_keys(llm)
