"""The evaluation's selectors in torch against the library's: choice, retained mass and output on the same tensors."""

import math

import pytest
import torch
from locks_vllm.reading import DecodeRows, SelectorReader
from locks_vllm.selectors import SELECTORS, budget_pages, choose_pages

from locks.formats import Format
from locks.quality import measure
from locks.trace import LayerTrace

GROUP, HEAD_DIM, TOKENS, BLOCK = 3, 64, 1024, 32
FORMATS = {4: "fine", 8: "compact", 16: "wide"}  # by page tokens


def attention_case(seed, kv_heads=2, rows=4):
    """A batch of sequences over one cache, their last tokens at ends of pages: the library's traces count unfinished
    pages with keys of their future."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [TOKENS, 512, 336, 800][:rows]
    blocks = sum(-(-length // BLOCK) for length in lengths)
    order = torch.randperm(blocks, generator=generator).int()
    table = torch.zeros(rows, TOKENS // BLOCK, dtype=torch.int32)
    begin = 0
    for row, length in enumerate(lengths):
        table[row, : length // BLOCK + (length % BLOCK > 0)] = order[begin : (begin := begin + -(-length // BLOCK))]
    shared = torch.randn(blocks, kv_heads, 1, HEAD_DIM, generator=generator)  # blocks differ, as topics do
    keys = shared + torch.randn(blocks, kv_heads, BLOCK, HEAD_DIM, generator=generator)
    values = torch.randn(blocks, kv_heads, BLOCK, HEAD_DIM, generator=generator)
    query = 1.5 * torch.randn(rows, kv_heads * GROUP, HEAD_DIM, generator=generator)
    return DecodeRows(query, keys, values, table, torch.tensor(lengths, dtype=torch.int32), lengths)


def library_quality(rows, selector, page_tokens, budget):
    """Retained mass of each row, mean over its heads, and the quality's output errors."""
    retained, errors = [], []
    for row, length in enumerate(rows.host_lengths):
        for head in range(rows.keys.shape[1]):
            blocks = rows.block_table[row, : -(-length // BLOCK)].long()
            caches = (rows.keys, rows.values)
            keys, values = (cache[blocks, head].flatten(0, 1)[:length].contiguous() for cache in caches)
            queries = rows.query[row, head * GROUP : (head + 1) * GROUP, None].contiguous()
            position = torch.tensor([length - 1], dtype=torch.int32)
            trace = LayerTrace(0, queries, keys, values, position, HEAD_DIM**-0.5)
            quality = measure(trace, selector, Format.parse(FORMATS[page_tokens]), budget)
            retained.append(quality.retained)
            errors.append(quality.output_error)
    return retained, errors


@pytest.mark.parametrize("budget", [128.0, 0.2])
@pytest.mark.parametrize("page_tokens", FORMATS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_reader_keeps_what_the_library_keeps(selector, page_tokens, budget):
    rows = attention_case(seed=page_tokens)
    reader = SelectorReader(selector, page_tokens, budget, HEAD_DIM**-0.5)
    output, dense = torch.empty(2, *rows.query.shape)
    reader.read(rows, output)
    retained, errors = library_quality(rows, selector, page_tokens, budget)
    counts = reader.counts.as_dict()
    assert counts["rows"] == len(rows.host_lengths)
    # Float sums in another order: where pages nearly tie, another may be taken.
    assert counts["retained"] / counts["rows"] == pytest.approx(sum(retained) / len(retained), abs=2e-4)
    SelectorReader(selector, page_tokens, math.inf, HEAD_DIM**-0.5).read(rows, dense)
    relative = (output - dense).norm(dim=-1) / dense.norm(dim=-1)
    assert relative.mean().item() == pytest.approx(sum(errors) / len(errors), abs=2e-3)
    sizes = [budget_pages(budget, length, page_tokens) for length in rows.host_lengths]
    assert counts["pages_read"] == 2 * sum(sizes)


def test_with_the_whole_budget_a_reader_is_dense_attention():
    rows = attention_case(seed=1)
    output = torch.empty_like(rows.query)
    SelectorReader("quest", 16, math.inf, HEAD_DIM**-0.5).read(rows, output)
    for row, length in enumerate(rows.host_lengths):
        blocks = rows.block_table[row, : -(-length // BLOCK)].long()
        keys, values = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (rows.keys, rows.values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            rows.query[row, None, :, None].double(), keys[None].double(), values[None].double(), enable_gqa=True
        )
        assert (output[row] - expected[0, :, 0]).abs().max() < 1e-5


def test_batches_of_rows_change_nothing(monkeypatch):
    rows = attention_case(seed=2)
    results = []
    for limit in (2**31, 1):
        monkeypatch.setattr("locks_vllm.reading._BATCH_BYTES", limit)
        output = torch.empty_like(rows.query)
        reader = SelectorReader("oracle", 4, 256.0, HEAD_DIM**-0.5)
        reader.read(rows, output)
        results.append((output, reader.counts.as_dict()))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-5
    assert results[0][1] == pytest.approx(results[1][1])


def test_rows_that_others_left_behind_a_sequence_are_not_seen():
    rows = attention_case(seed=3)
    clean, spoilt = torch.empty(2, *rows.query.shape)
    SelectorReader("mean_std", 16, 128.0, HEAD_DIM**-0.5).read(rows, clean)
    for row, length in enumerate(rows.host_lengths):
        block, place = rows.block_table[row, (length - 1) // BLOCK], (length - 1) % BLOCK + 1
        rows.keys[block, :, place:] = math.nan
        rows.values[block, :, place:] = math.inf
    SelectorReader("mean_std", 16, 128.0, HEAD_DIM**-0.5).read(rows, spoilt)
    assert torch.equal(clean, spoilt)


def test_pages_that_are_not_finite_are_read_and_counted_beside_the_budget():
    scores = torch.zeros(1, 1, 2, 64)
    scores[0, 0, 1, 20:40] = math.nan
    chosen = choose_pages(scores, torch.tensor([1024]), torch.tensor([6]), 16, max_of_scores=False)
    assert chosen[0, 0].nonzero().flatten().tolist() == [0, *range(20, 40), 60, 61, 62, 63]
    scores[:] = 0.0
    chosen = choose_pages(scores, torch.tensor([1024]), torch.tensor([7]), 16, max_of_scores=True)
    assert chosen[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 60, 61, 62, 63]  # of equal ones the lower


@pytest.mark.parametrize(
    ("budget", "length", "page_tokens", "pages"),
    [(512.0, 8192, 16, 32), (0.02, 8200, 4, 41), (1.0, 8192, 16, 6), (512.0, 100, 16, 7), (math.inf, 33, 16, 3)],
)
def test_budgets_in_pages(budget, length, page_tokens, pages):
    assert budget_pages(budget, length, page_tokens) == pages
