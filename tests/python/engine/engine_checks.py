"""What the engine tests of the CPU and of the GPU ask alike: counters against arithmetic, evaluation, a mixed model."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_harness import Generated, counters, greedy, only, reset_counters

FULL_LAYERS = (2, 5)  # of save_mixed_model


def save_mixed_model(folder: Path, dtype: Any) -> Path:
    """A random Gemma 3 of seven layers with a window of 64 tokens in all but FULL_LAYERS."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

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
    Gemma3ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def blocks_built(prompts: Sequence[Sequence[int]], generated: Sequence[Generated], max_tokens: int) -> int:
    """Blocks that a run completed behind the tokens that it found in the cache."""
    return sum(
        (len(prompt) + max_tokens - 1) // 16 - one.cached_tokens // 16
        for prompt, one in zip(prompts, generated, strict=True)
    )


def assert_sparse_reads(
    llm: Any, prompt_tokens: int, max_tokens: int, budget: float, num_layers: int, kv_heads: int, token_bytes: int
) -> None:
    """One request of `max_tokens` tokens under a budget, format `fine`: its counters are what arithmetic says.

    token_bytes: of a token's key and value, of one KV head.
    """
    lengths = [prompt_tokens + step for step in range(1, max_tokens)]
    pages = [(round(budget * length / 4) if budget < 1 else budget // 4) for length in lengths]
    about = only(llm.collective_rpc("locks_describe"))
    layers = counters(llm)
    assert len(layers) == num_layers
    for name, layer in layers.items():
        assert layer["steps"] == layer["sparse_rows"] == max_tokens - 1
        assert layer["dense_rows"] == layer["invalid_records"] == layer["nonfinite_pages"] == 0
        assert layer["records_read"] == kv_heads * sum(length // 16 for length in lengths)
        assert layer["pages_read"] == kv_heads * sum(pages)
        assert layer["bytes_dense"] == kv_heads * token_bytes * sum(lengths)
        record_bytes = about[name]["record_bytes"] * layer["records_read"]
        missing = kv_heads * sum(-length % 4 for length in lengths)  # the newest page is read as far as it is written
        assert layer["bytes_read"] == record_bytes + token_bytes * (4 * layer["pages_read"] - missing)
        assert layer["bytes_read"] < 0.5 * layer["bytes_dense"]


def measured_mass(llm: Any, prompt: Sequence[int], budget: int | str, kv_heads: int, tolerance: float) -> float:
    """The mean mass that a request keeps by its evaluation, which must agree with itself and with the counters."""
    llm.collective_rpc("locks_set_budget", args=(budget,))
    reset_counters(llm)
    greedy(llm, [prompt], 6)
    evaluation = only(llm.collective_rpc("locks_evaluation"))
    layers = counters(llm)
    for name, layer in evaluation.items():
        assert [step["lengths"] for step in layer["steps"]] == [[len(prompt) + step] for step in range(1, 6)]
        retained = np.array([step["retained"] for step in layer["steps"]])
        assert (retained > 0).all() and (retained < 1 + tolerance).all()
        pages = 0
        for step in layer["steps"]:
            count = -(-step["lengths"][0] // layer["page_tokens"])
            packed = np.frombuffer(base64.b64decode(step["pages"][0]), np.uint8)
            mask = np.unpackbits(packed, count=kv_heads * count).reshape(kv_heads, count)
            assert mask[:, :4].all() and mask[:, -16:].all()
            pages += int(mask.sum())
        assert pages == layers[name]["pages_read"]
    return float(np.mean([step["retained"] for layer in evaluation.values() for step in layer["steps"]]))
