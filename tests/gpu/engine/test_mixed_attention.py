"""A model that mixes sliding windows and full attention: `backend_per_kind` leaves the windows to FlashAttention."""

import random
from pathlib import Path

import pytest
from engine_harness import counters, greedy, metric, only, reset_counters
from gpu_harness import assert_close, gpu_engine

FULL_LAYERS = (2, 5)
PER_KIND = {"backend": "FLASH_ATTN", "backend_per_kind": {"full_attention": "CUSTOM"}}
ARGUMENTS = {"max_model_len": 1024, "backend": None}


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
    Gemma3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_full_attention_layers_are_served_and_windows_are_left_alone(mixed_model):
    draw = random.Random(5)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in (3, 31, 33, 200, 500, 900)]
    plain = {"backend": "FLASH_ATTN"}
    with gpu_engine(mixed_model, attention_config=plain, **ARGUMENTS) as llm:
        want = greedy(llm, prompts, 24)
    options = {"budget": "all", "dense_tokens": 0}
    with gpu_engine(
        mixed_model, locks=options, attention_config=PER_KIND, max_num_batched_tokens=77, **ARGUMENTS
    ) as llm:
        classes = only(llm.collective_rpc("attention_classes"))
        served = {int(name.split(".")[2]) for name, kind in classes.items() if kind == "LocksImpl"}
        assert served == set(FULL_LAYERS) == {int(name.split(".")[2]) for name in counters(llm)}
        assert set(classes.values()) == {"LocksImpl", "FlashAttentionImpl"}
        assert_close(greedy(llm, prompts, 24), want, least_share=0.3)
        again = greedy(llm, prompts, 24)
        assert again[-1].cached_tokens > 0
        assert_close(again, want, least_share=0.3)
        llm.collective_rpc("locks_set_budget", args=(128,))
        reset_counters(llm)
        greedy(llm, prompts[-1:], 8)
        for layer in counters(llm).values():
            assert layer["sparse_rows"] == layer["steps"] == 7
            assert layer["invalid_records"] == 0
        assert metric(llm, "kv_cache_usage_perc") == 0
