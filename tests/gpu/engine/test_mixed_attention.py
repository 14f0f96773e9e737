"""A model that mixes sliding windows and full attention: `backend_per_kind` leaves the windows to FlashAttention."""

import random
from pathlib import Path

import pytest
import torch
from engine_checks import FULL_LAYERS, save_mixed_model
from engine_harness import counters, greedy, metric, only, reset_counters
from gpu_harness import assert_close, gpu_engine

PER_KIND = {"backend": "FLASH_ATTN", "backend_per_kind": {"full_attention": "CUSTOM"}}
ARGUMENTS = {"max_model_len": 1024, "backend": None}


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory) -> Path:
    return save_mixed_model(tmp_path_factory.mktemp("models") / "mixed", torch.bfloat16)


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
