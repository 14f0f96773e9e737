"""A connector that fills the cache behind the plug-in's back: records are rebuilt from the keys that it brought."""

from engine_harness import assert_records_match_keys, counters, engine, greedy

LENGTHS = (700, 87, 300)
MAX_TOKENS = 10


def test_records_of_loaded_keys_are_built_on_the_first_step(tiny_model):
    from vllm.config import KVTransferConfig

    # vLLM's own benchmark connector: all but the last prompt token count as loaded, and every cache layer of these
    # tokens, that of the records included, is filled with noise.
    connector = KVTransferConfig(
        kv_connector="DecodeBenchConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"fill_mean": 0.0, "fill_std": 0.5},
    )
    with engine(
        tiny_model,
        locks={"budget": 128},
        max_model_len=1024,
        block_size=32,
        max_num_seqs=8,
        enable_prefix_caching=False,
        num_gpu_blocks_override=200,
        kv_transfer_config=connector,
    ) as llm:
        greedy(llm, [[7] * length for length in LENGTHS], MAX_TOKENS)
        for layer in counters(llm).values():
            assert layer["prefill_tokens"] == len(LENGTHS)
            assert layer["records_built"] == 2 * sum((length + MAX_TOKENS - 1) // 16 for length in LENGTHS)
            assert layer["sparse_rows"] == 2 * (MAX_TOKENS - 1)
            assert layer["invalid_records"] == 0
        assert_records_match_keys(llm)
