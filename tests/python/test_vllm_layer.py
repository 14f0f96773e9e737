"""A LOCKS layer over caches made here: how steps are split, prompt attention, records. Without an engine."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from locks.formats import Format
from locks_vllm.cpu_backend import build_step
from locks_vllm.layer import LocksLayer, plain_view
from locks_vllm.prefill import attend_prompt
from locks_vllm.summary_cache import LocksSummaryBackend, LocksSummaryLayer
from locks_vllm.worker import verify_records

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 64, 32
SCALE = HEAD_DIM**-0.5


def common_metadata(rows, table=None):
    """vLLM's metadata for rows of (tokens in the cache before, tokens of this step, still in the prompt)."""
    starts = torch.tensor([0, *torch.tensor([row[1] for row in rows]).cumsum(0).tolist()], dtype=torch.int32)
    if table is None:
        table = torch.arange(1, 1 + 64 * len(rows), dtype=torch.int32).reshape(len(rows), 64)
    return SimpleNamespace(
        seq_lens=torch.tensor([row[0] + row[1] for row in rows], dtype=torch.int32),
        query_start_loc_cpu=starts,
        is_prefilling=torch.tensor([row[2] for row in rows]),
        block_table_tensor=table,
    )


def test_only_single_tokens_beyond_the_prompt_decode():
    rows = [(40, 1, False), (0, 7, True), (99, 1, True), (100, 1, False), (64, 5, False), (0, 1, True)]
    step = build_step(common_metadata(rows), rebuild_context=False)
    assert step.num_decodes == 2
    assert step.decode_rows.tolist() == [0, 3]
    assert step.decode_tokens.tolist() == [0, 9]
    assert step.decode_lengths.tolist() == [41, 101]
    assert [(prompt.row, prompt.query_begin, prompt.query_end, prompt.length) for prompt in step.prompts] == [
        (1, 1, 8, 7), (2, 8, 9, 100), (4, 10, 15, 69), (5, 15, 16, 1)
    ]  # fmt: skip
    assert step.begin_tokens.tolist() == [40, 0, 99, 100, 64, 0]


def test_a_step_of_decodes_copies_no_tables():
    common = common_metadata([(40, 1, False), (7, 1, False)])
    step = build_step(common, rebuild_context=False)
    assert step.decode_rows is None and step.decode_tokens is None and step.prompts == []
    assert step.decode_table is common.block_table_tensor


def test_padded_rows_are_nobodys_work():
    step = build_step(common_metadata([(40, 1, False), (0, 0, False)]), rebuild_context=False)
    assert step.num_decodes == 1 and step.prompts == []
    assert step.decode_lengths.tolist() == [41]


def test_with_a_connector_prompts_rebuild_the_context_that_it_may_have_loaded():
    step = build_step(common_metadata([(86, 1, True), (86, 1, False)]), rebuild_context=True)
    assert step.begin_tokens.tolist() == [0, 86]


def test_metadata_that_does_not_tell_prompts_is_refused():
    common = common_metadata([(4, 1, False)])
    common.is_prefilling = None
    with pytest.raises(NotImplementedError, match="is_prefilling"):
        build_step(common, rebuild_context=False)


def reference_attention(query, keys, values):
    """Causal attention in double: query [n, heads, d] ends a sequence with keys and values [kv_heads, length, d]."""
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.double().repeat_interleave(group, 0), values.double().repeat_interleave(group, 0)
    logits = torch.einsum("nhd,hld->hnl", query.double(), keys) * SCALE
    count, length = query.shape[0], keys.shape[1]
    mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hnl,hld->nhd", weights, values)


@pytest.mark.parametrize(
    ("context", "count"), [(0, 1), (0, 300), (1, 1), (17, 1), (500, 3), (129, 128), (40, 257), (3, 400)]
)
def test_prompt_attention_is_causal_for_any_context(context, count):
    torch.manual_seed(context + count)
    query = torch.randn(count, QUERY_HEADS, HEAD_DIM)
    keys, values = torch.randn(2, KV_HEADS, context + count, HEAD_DIM)
    output = torch.full_like(query, math.nan)
    attend_prompt(query, keys, values, SCALE, output)
    torch.testing.assert_close(output.double(), reference_attention(query, keys, values), atol=2e-6, rtol=2e-5)


class Cache:
    """The caches of one layer as vLLM would bind them, poisoned."""

    def __init__(self, num_blocks, budget=math.inf, name="fine", dtype=torch.float32, slot_bytes=None):
        summary_format = Format.parse(name)
        record_bytes = summary_format.record_bytes(HEAD_DIM)
        records = LocksSummaryLayer("layer.locks_summary", KV_HEADS, record_bytes, slot_bytes or record_bytes)
        spec = records.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK_TOKENS)))
        shape = LocksSummaryBackend.get_kv_cache_shape(num_blocks, BLOCK_TOKENS, KV_HEADS, spec.head_size)
        assert math.prod(shape) * 2 == num_blocks * spec.page_size_bytes
        records.kv_cache = torch.randint(0, 255, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8).view(torch.bfloat16)
        self.keys_values = torch.full((num_blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), math.nan, dtype=dtype)
        self.layer = LocksLayer(records, QUERY_HEADS, HEAD_DIM, SCALE, summary_format, None, budget, evaluate=False)

    def run(self, rows, table, qkv, record_table=None):
        """One step over rows as in common_metadata; qkv holds the tokens of the step, row after row."""
        common = common_metadata(rows, table)
        step = build_step(common, rebuild_context=False)
        query, key, value = qkv
        slots = []
        for row, (before, count, _) in enumerate(rows):
            slots += [
                int(table[row, position // BLOCK_TOKENS]) * BLOCK_TOKENS + position % BLOCK_TOKENS
                for position in range(before, before + count)
            ]
        self.layer.write(key, value, self.keys_values, torch.tensor(slots))
        output = torch.full_like(query, math.nan)
        record_table = table if record_table is None else record_table
        self.layer.forward(query, key, value, self.keys_values, step, record_table, output)
        return output


def sequence(length, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(length, QUERY_HEADS, HEAD_DIM, generator=generator).to(dtype)
    key, value = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    return query, key, value


def run_sequence(cache, table, qkv, prompt, cuts):
    """Feeds a sequence: the prompt in chunks cut at `cuts`, then token by token; returns the outputs of all tokens."""
    total = qkv[0].shape[0]
    bounds = [0, *cuts, prompt, *range(prompt + 1, total + 1)]
    outputs = []
    for begin, end in itertools.pairwise(bounds):
        chunk = [tensor[begin:end] for tensor in qkv]
        outputs.append(cache.run([(begin, end - begin, begin < prompt)], table, chunk))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_whole_budget_equals_dense_attention(dtype):
    qkv = sequence(220, 1, dtype)
    table = torch.tensor([[5, 2, 9, 7, 1, 3, 8]], dtype=torch.int32)
    cache = Cache(12, dtype=dtype)
    output = run_sequence(cache, table, qkv, prompt=200, cuts=[])
    want = reference_attention(qkv[0], qkv[1].transpose(0, 1), qkv[2].transpose(0, 1))
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(output.double(), want, atol=tolerance, rtol=tolerance)
    assert verify_records(cache.layer, cache.keys_values) == (KV_HEADS * 13, 0)


@pytest.mark.parametrize("cuts", [[1], [199], [16, 32], [7, 8, 9], [31, 33, 64, 65], list(range(1, 200))])
def test_chunks_change_neither_records_nor_what_decodes_read(cuts):
    qkv = sequence(212, 2)
    table = torch.tensor([[5, 2, 9, 7, 1, 3, 8]], dtype=torch.int32)
    whole, chunked = Cache(12, budget=96), Cache(12, budget=96)
    want = run_sequence(whole, table, qkv, prompt=200, cuts=[])
    got = run_sequence(chunked, table, qkv, prompt=200, cuts=cuts)
    torch.testing.assert_close(got[:200], want[:200], atol=2e-6, rtol=2e-5)
    assert torch.equal(got[200:], want[200:])
    blocks = table[0, : 212 // BLOCK_TOKENS].long()
    assert torch.equal(whole.layer.records.records()[blocks], chunked.layer.records.records()[blocks])
    assert verify_records(chunked.layer, chunked.keys_values) == (KV_HEADS * 13, 0)
    assert chunked.layer.read_counters()["sparse_rows"] == 12
    assert chunked.layer.read_counters()["prefill_tokens"] == 200


def test_rows_of_a_mixed_step_equal_each_alone():
    lengths = [150, 90, 33, 131]
    sequences = [sequence(length, seed) for seed, length in enumerate(lengths)]
    tables = [torch.tensor([[1 + 8 * row + block for block in range(8)]], dtype=torch.int32) for row in range(4)]
    alone = []
    for qkv, table, length in zip(sequences, tables, lengths, strict=True):
        alone.append(run_sequence(Cache(40, budget=96), table, qkv, prompt=length - 1, cuts=[]))
    together = Cache(40, budget=96)
    # Sequences 0 and 3 decode their last token; 1 and 2 come as prompts, one whole and one as a last single token.
    for row in (0, 3):
        run_sequence(together, tables[row], [t[:-1] for t in sequences[row]], prompt=lengths[row] - 1, cuts=[])
    run_sequence(together, tables[2], [t[:-1] for t in sequences[2]], prompt=32, cuts=[])
    rows = [(149, 1, False), (0, 90, True), (32, 1, True), (130, 1, False)]
    parts = [[t[begin:] for t in sequences[row]] for row, begin in enumerate((149, 0, 32, 130))]
    qkv = [torch.cat([part[index] for part in parts]) for index in range(3)]
    output = together.run(rows, torch.cat(tables), qkv)
    assert torch.equal(output[0], alone[0][-1])
    assert torch.equal(output[92], alone[3][-1])
    torch.testing.assert_close(output[1:90], alone[1][:89], atol=2e-6, rtol=2e-5)
    want = reference_attention(sequences[2][0][-1:], sequences[2][1].transpose(0, 1), sequences[2][2].transpose(0, 1))
    torch.testing.assert_close(output[91:92].double(), want, atol=2e-6, rtol=2e-5)
    assert verify_records(together.layer, together.keys_values)[1] == 0


def test_a_cache_block_of_another_sequence_leaves_no_record_behind():
    table = torch.tensor([[3]], dtype=torch.int32)
    cache = Cache(6, budget=96)
    run_sequence(cache, table, sequence(32, 1), prompt=32, cuts=[])
    assert verify_records(cache.layer, cache.keys_values) == (2 * KV_HEADS, 0)
    run_sequence(cache, table, sequence(9, 2), prompt=9, cuts=[])
    assert verify_records(cache.layer, cache.keys_values)[1] == 0


def test_a_pool_without_records_is_in_order():
    cache = Cache(6)
    assert verify_records(cache.layer, cache.keys_values) == (0, 0)


def test_a_changed_key_is_found():
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    cache = Cache(6)
    run_sequence(cache, table, sequence(64, 1), prompt=64, cuts=[])
    plain_view(cache.keys_values)[1, 1, 0, 17, 5] += 1
    assert verify_records(cache.layer, cache.keys_values) == (4 * KV_HEADS, 1)


def test_records_with_room_between_them_and_a_table_of_their_own():
    qkv = sequence(212, 2)
    table = torch.tensor([[5, 2, 9, 7, 1, 3, 8]], dtype=torch.int32)
    records = torch.tensor([[1, 11, 4, 6, 10, 2, 3]], dtype=torch.int32)
    plain, roomy = Cache(12, budget=96), Cache(12, budget=96, slot_bytes=512)
    assert roomy.layer.records.records().shape == plain.layer.records.records().shape
    want = plain.run([(0, 200, True)], table, [t[:200] for t in qkv])
    got = roomy.run([(0, 200, True)], table, [t[:200] for t in qkv], records)
    assert torch.equal(got, want)
    step = [t[200:201] for t in qkv]
    want, got = plain.run([(200, 1, False)], table, step), roomy.run([(200, 1, False)], table, step, records)
    assert torch.equal(got, want)
    assert roomy.layer.read_counters() == plain.layer.read_counters()
    assert roomy.layer.read_counters()["sparse_rows"] == 1


def test_evaluation_tells_the_exact_mass_of_the_pages_read():
    import numpy as np

    qkv = sequence(201, 4)
    table = torch.tensor([[5, 2, 9, 7, 1, 3, 8]], dtype=torch.int32)
    cache = Cache(12, budget=96)
    run_sequence(cache, table, [t[:200] for t in qkv], prompt=200, cuts=[])
    cache.layer.evaluate = True
    cache.run([(200, 1, False)], table, [t[200:] for t in qkv])
    (evaluation,) = cache.layer.evaluations
    assert evaluation.lengths == [201]
    mask = np.unpackbits(np.frombuffer(evaluation.pages[0], np.uint8), count=KV_HEADS * 51).reshape(KV_HEADS, 51)
    read = torch.from_numpy(mask).bool().repeat_interleave(4, 1)[:, :201].repeat_interleave(QUERY_HEADS // KV_HEADS, 0)
    keys = qkv[1].transpose(0, 1).double().repeat_interleave(QUERY_HEADS // KV_HEADS, 0)
    weights = (torch.einsum("hd,hld->hl", qkv[0][200].double(), keys) * SCALE).softmax(-1)
    assert evaluation.retained[0] == pytest.approx(float((weights * read).sum(-1).mean()), abs=1e-6)
    assert mask.sum() == cache.layer.read_counters()["pages_read"]
