"""A model that mixes sliding windows and full attention: LOCKS serves the latter, through a block table of its own."""

import random
from pathlib import Path

import pytest
import torch
from engine_checks import FULL_LAYERS, save_mixed_model
from engine_harness import assert_same, counters, engine, greedy, metric, only

ARGUMENTS = {"max_model_len": 1024, "block_size": 32, "num_gpu_blocks_override": 500}


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory) -> Path:
    return save_mixed_model(tmp_path_factory.mktemp("models") / "mixed", torch.float32)


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
