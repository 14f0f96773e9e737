"""A model that mixes sliding windows and full attention: LOCKS serves the latter, through a block table of its own."""

import random
from pathlib import Path

import pytest
from engine_harness import assert_same, counters, engine, greedy, metric, only

FULL_LAYERS = (2, 5)
ARGUMENTS = {"max_model_len": 1024, "block_size": 32, "num_gpu_blocks_override": 500}


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory) -> Path:
    """A random Gemma 3 of seven layers with a window of 64 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("models") / "mixed"
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=7,
        layer_types=["full_attention" if layer in FULL_LAYERS else "sliding_attention" for layer in range(7)],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        vocab_size=512,
        max_position_embeddings=2048,
        sliding_window=64,
        initializer_range=0.2,
    )
    Gemma3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def test_full_attention_layers_are_served_and_windows_are_left_alone(mixed_model):
    draw = random.Random(5)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in (3, 31, 33, 200, 500, 900)]
    with engine(mixed_model, plugin=False, max_num_batched_tokens=1024, **ARGUMENTS) as llm:
        want = greedy(llm, prompts, 24)
    with engine(mixed_model, locks={"budget": "all"}, max_num_batched_tokens=77, **ARGUMENTS) as llm:
        assert_same(greedy(llm, prompts, 24), want)
        served = {int(name.split(".")[2]) for name in only(llm.collective_rpc("locks_describe"))}
        assert served == set(FULL_LAYERS)
        again = greedy(llm, prompts, 24)
        assert again[-1].cached_tokens > 0, "the records have larger cache blocks here, but 900 tokens fill one"
        assert_same(again, want)
        llm.collective_rpc("locks_set_budget", args=(128,))
        llm.collective_rpc("locks_reset_counters")
        greedy(llm, prompts[-1:], 8)
        for layer in counters(llm).values():
            assert layer["sparse_rows"] == layer["steps"] == 7
            assert layer["invalid_records"] == 0
        with pytest.raises(Exception, match="verification needs a model with full attention only"):
            llm.collective_rpc("locks_verify_records")
        assert metric(llm, "kv_cache_usage_perc") == 0
