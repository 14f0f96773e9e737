"""Heads split over two GPUs: the same outputs as on one. Needs two GPUs."""

import random
from pathlib import Path

import pytest
import torch
from engine_harness import greedy
from gpu_harness import assert_close, gpu_engine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LAYERS, KV_HEADS, MAX_TOKENS = 4, 4, 16


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A random Qwen2, whose keys have a bias: each process needs its own heads' reference keys."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        vocab_size=512,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0)
    model.bfloat16().save_pretrained(folder)
    return folder


def test_two_gpus_give_what_one_gives(tiny_model):
    draw = random.Random(5)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in (3, 33, 500, 2000)]
    outputs, read = {}, {}
    for size in (1, 2):
        # NCCL alone: vLLM's own all-reduce needs peer access, which not every machine of two GPUs grants.
        split = {"tensor_parallel_size": size, "disable_custom_all_reduce": True}
        with gpu_engine(tiny_model, locks={"budget": "all", "dense_tokens": 0}, **split) as llm:
            outputs[size] = greedy(llm, prompts, MAX_TOKENS)
            llm.collective_rpc("locks_set_budget", args=(256,))
            greedy(llm, prompts[-1:], 1)
            llm.collective_rpc("locks_reset_counters")
            greedy(llm, prompts[-1:], MAX_TOKENS)
            workers = llm.collective_rpc("locks_counters")
            assert len(workers) == size
            assert all(layer["sparse_rows"] == MAX_TOKENS - 1 for worker in workers for layer in worker.values())
            read[size] = sum(layer["bytes_read"] for worker in workers for layer in worker.values())
            for answer in llm.collective_rpc("locks_verify_records"):
                assert answer["mismatched"] == 0 and answer["checked"] > 0
    assert_close(outputs[2], outputs[1], least_share=0.3)
    assert read[1] == read[2], "the heads of both GPUs together read what those of one GPU read"
