"""SnapKV and KVzip beside NVIDIA's kvpress, another implementation of them, on the same tensors.

kvpress asks for transformers < 5.3 and vLLM for a later one, so that no environment of ours has it, and what it
imports is large. Into a folder of its own, for this test alone:

    pip install --no-deps --target FOLDER kvpress==0.5.5 datasets peft accelerate cachetools fire dill multiprocess \
        xxhash pyarrow pandas termcolor
    PYTHONPATH=FOLDER pytest tests/python/test_kvpress.py
"""

from types import SimpleNamespace

import pytest
import torch
from locks import ops
from locks.trace import Trace
from trace_case import write_real_trace

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed; this file says how")

WINDOW, PAGE, SINK = 32, 4, 4


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return Trace(write_real_trace(tmp_path_factory.mktemp("trace") / "real.safetensors")).read(9)


def attention_module(heads):
    """What a press asks of a model's attention, for queries that are what they will be: no projection, no RoPE."""
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=1)
    return SimpleNamespace(config=config, head_dim=64, layer_idx=0, q_proj=lambda states: states)


def without_rope(rows):
    return torch.ones(1, rows, 64), torch.zeros(1, rows, 64)


def as_states(queries):
    """[heads, rows, d] as hidden states [1, rows, heads * d]."""
    return queries.transpose(0, 1).flatten(1).unsqueeze(0)


def assert_ranked_alike(read, scores, free):
    """Of the tokens that may be left, those read are kvpress's best. `free`: their mask. The margin is the rounding of
    float32 sums, which run in another order."""
    read_scores, left_scores = scores[free & read], scores[free & ~read]
    assert len(read_scores) > 100 and len(left_scores) > 1000
    assert read_scores.min() >= left_scores.max() * (1 - 1e-5)
    best = torch.zeros_like(read)
    best[scores.masked_fill(~free, -1).topk(len(read_scores)).indices] = True
    assert (best ^ (read & free)).sum() <= 2  # ties


def always_read(length):
    tokens = torch.arange(length)
    return (tokens < 16) | (tokens >= length // PAGE * PAGE - 64)


@pytest.mark.parametrize("budget", [256, 512, 2048])
def test_snapkv_keeps_what_kvpress_keeps(real, budget):
    read = torch.empty(WINDOW, len(real.keys), dtype=torch.uint8)
    ops.select_tokens(
        real.queries, real.keys, real.values, real.positions, real.scale, WINDOW, "snapkv", PAGE, budget, read
    )
    end = int(real.positions[WINDOW - 1]) + 1
    press = kvpress.SnapKVPress(compression_ratio=0.5, window_size=WINDOW, kernel_size=5)
    heads = real.queries.shape[0]
    states = torch.zeros(1, end, heads * 64)
    states[:, -WINDOW:] = as_states(real.queries[:, :WINDOW])
    scores = press.score(
        attention_module(heads), states, real.keys[None, None, :end], None, None,
        {"position_embeddings": without_rope(end)},
    )[0, 0]
    for step in (0, WINDOW - 1):
        free = ~always_read(int(real.positions[WINDOW + step]) + 1)[:end]
        free[end - WINDOW :] = False
        assert_ranked_alike(read[step, :end].bool(), scores, free)


@pytest.mark.parametrize("budget", [256, 2048])
def test_kvzip_keeps_what_kvpress_keeps(real, budget):
    """The passes' queries resemble keys of the trace, as those of a repetition do."""
    heads, context = real.queries.shape[0], int(real.positions[0])
    draw = torch.Generator().manual_seed(2)
    bounds, rows = [SINK, 2004, 4004, context], [2011, 2019, context - 4004 + 19]
    like = torch.randint(context, (sum(rows),), generator=draw)
    noise = torch.randn(heads, sum(rows), 64, generator=draw)
    queries = (0.3 * real.keys[like] + noise * real.queries.std()).contiguous()
    keys = real.keys[torch.randint(context, (sum(rows),), generator=draw)].contiguous()
    press = kvpress.KVzipPress(compression_ratio=0.5, n_sink=SINK)
    press.context_length = context
    press.score_val = torch.zeros(1, 1, 1, context)
    chunks, first = [], 0
    for begin, end, count in zip(bounds, bounds[1:], rows):
        own = slice(first, first + count)
        press.start_idx, press.end_idx = begin, end
        behind = torch.cat([real.keys[:context], keys[own]])[None, None]
        press.score_kvzip(
            attention_module(heads), as_states(queries[:, own]), behind, behind, None,
            {"position_embeddings": without_rope(count)},
        )
        chunks.append([begin, end, first, first + count])
        first += count
    read = torch.empty(WINDOW, len(real.keys), dtype=torch.uint8)
    ops.select_tokens(
        real.queries, real.keys, real.values, real.positions, real.scale, WINDOW, "kvzip", PAGE, budget, read, queries,
        keys, torch.tensor(chunks, dtype=torch.int32),
    )
    free = ~always_read(int(real.positions[-1]) + 1)[:context]
    assert_ranked_alike(read[-1, :context].bool(), press.score_val[0, 0, 0], free)
