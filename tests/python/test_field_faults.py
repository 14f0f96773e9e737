"""Faults that users of other paged and sparse attention reported, and that no other test here would find: addresses
beyond 32 bits through the operators, and contexts beyond 131,072 tokens. tests/README.md has the list of all kinds."""

import math
import re
from pathlib import Path

import pytest
import torch
from locks import ops
from locks.formats import Format

ROOT = Path(__file__).parents[2]
HEAD_DIM = 64
FINE = Format.parse("fine")


def decode(query, cache, table, length, records, budget):
    """One sequence, one KV head: output and, for each page, whether it was read."""
    lengths = torch.tensor([length], dtype=torch.int32)
    heads = query.shape[1]
    output = torch.full_like(query, math.nan)
    selected = torch.zeros(1, 1, math.ceil(length / FINE.page_tokens), dtype=torch.uint8)
    size = ops.decode_workspace_bytes(lengths, heads, 1, HEAD_DIM, FINE.code)
    ops.decode(
        query=query, keys=cache[:, :, 0], values=cache[:, :, 1], block_table=table, lengths=lengths, records=records,
        record_table=table, format=FINE.code, reference_keys=None, scale=HEAD_DIM**-0.5, budget=budget,
        workspace=torch.empty(size, dtype=torch.uint8), output=output, lse=torch.empty(1, heads),
        counters=torch.zeros(len(ops.COUNTERS), dtype=torch.int64), selected=selected,
    )  # fmt: skip
    return output, selected[0, 0].bool()


def summarise(cache, table, length, records):
    first, lengths = torch.zeros(1, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    ops.summarise_blocks(cache[:, :, 0], table, first, lengths, FINE.code, None, table, records, None)


def attention(query, keys, values):
    """In double precision: keys and values [tokens, d] of one KV head."""
    weights = torch.softmax(query[0].double() @ keys.double().T * HEAD_DIM**-0.5, 1)
    return weights @ values.double()


def test_the_top_of_a_big_pool_is_written_summarised_and_read():
    # 2^31 elements and more, of which the system backs only what is written: a few blocks at the top.
    block_tokens = 16
    num_blocks = 2**31 // (2 * block_tokens * HEAD_DIM) + 32
    cache = torch.empty(num_blocks, 1, 2, block_tokens, HEAD_DIM, dtype=torch.float16)
    records = torch.zeros(num_blocks, 1, 1, FINE.record_bytes(HEAD_DIM), dtype=torch.uint8)
    assert cache.numel() > 2**31
    draw = torch.Generator().manual_seed(1)
    length = 330
    keys, values = (torch.randn(length, 1, HEAD_DIM, generator=draw).half() for _ in range(2))
    query = torch.randn(1, 2, HEAD_DIM, generator=draw).half()
    table = (num_blocks - 1 - torch.randperm(21, generator=draw))[None].to(torch.int32)
    tokens = torch.arange(length)
    slots = table[0, tokens // block_tokens].long() * block_tokens + tokens % block_tokens
    ops.write_cache(keys, values, slots, cache)
    summarise(cache, table, length, records)
    for budget in (math.inf, 120.0):
        output, selected = decode(query, cache, table, length, records, budget)
        read = selected.repeat_interleave(FINE.page_tokens)[:length]
        assert bool(read.all()) == math.isinf(budget)
        expected = attention(query, keys[read, 0], values[read, 0])
        torch.testing.assert_close(output[0].double(), expected, atol=2e-3, rtol=2e-3)  # of float16's 11 bits


@pytest.mark.parametrize("length", [131_072, 131_073, 200_003])
def test_contexts_beyond_131072_tokens_are_read_to_their_end(length):
    block_tokens = 256
    num_blocks = math.ceil(length / block_tokens)
    draw = torch.Generator().manual_seed(length)
    cache = torch.randn(num_blocks, 1, 2, block_tokens, HEAD_DIM, generator=draw)
    query = torch.randn(1, 3, HEAD_DIM, generator=draw)
    # One page far behind the rest of the mass, which a selection that stops early would miss.
    needle = length - 500
    block, row = divmod(needle, block_tokens)
    cache[block, 0, 0, row] = 8 * query[0].mean(0)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    records = torch.zeros(num_blocks, 1, block_tokens // 16, FINE.record_bytes(HEAD_DIM), dtype=torch.uint8)
    summarise(cache, table, length, records)
    keys, values = (cache[:, 0, part].reshape(-1, HEAD_DIM)[:length] for part in (0, 1))
    for budget in (math.inf, 2048.0):
        output, selected = decode(query, cache, table, length, records, budget)
        assert selected[needle // FINE.page_tokens] and selected[-1]
        read = selected.repeat_interleave(FINE.page_tokens)[:length]
        expected = attention(query, keys[read], values[read])
        torch.testing.assert_close(output[0].double(), expected, atol=1e-5, rtol=1e-4)  # sums of 200,000 floats


def test_the_list_of_kinds_names_tests_that_exist():
    text = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"`(\w+\.\w+|test_\w+)`", text)
    assert len(named) > 40
    sources = "\n".join(
        path.read_text() for folder in ("cpp", "python", "gpu") for path in sorted((ROOT / "tests" / folder).rglob("*"))
        if path.suffix in (".cpp", ".py")
    )  # fmt: skip
    for name in named:
        suite, _, case = name.rpartition(".")
        pattern = rf"TEST(_P|_F)?\({suite},\s*{case}\)" if suite else rf"def {name}\("
        assert re.search(pattern, sources), name
