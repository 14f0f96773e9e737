"""What the torch operators refuse, in which words, and that a refusal leaves everything as it was."""

import math

import pytest
import torch
from cache_case import CacheCase
from locks import ops
from locks.formats import Format

SPARSE = 120.0  # tokens: more than is always read, fewer than the longest sequence


def case_name(value):
    return value if isinstance(value, str) and value.isidentifier() else ""


def half(tensor):
    return tensor.to(torch.float16)


DECODE_REFUSALS = [
    (
        "query",
        lambda t: t[..., :32].contiguous(),
        r"query: expected \[num_seqs, q_heads, 64\] f32\|bf16\|f16, got \[3, 6, 32\] f32",
    ),
    ("query", lambda t: t.double(), r"query: expected .* f32\|bf16\|f16, got \[3, 6, 64\] f64"),
    ("query", lambda t: t[0], r"query: expected \[num_seqs, q_heads, 64\] .*, got \[6, 64\] f32"),
    (
        "query",
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        r"query: expected a last dimension of stride 1, got strides \[384, 1, 6\]",
    ),
    ("query", lambda t: t[:, :5], r"output: expected \[3, 5, 64\] f32, got \[3, 6, 64\] f32"),
    (
        "keys",
        lambda t: t.double(),
        r"keys: expected \[num_blocks, kv_heads, block_tokens, head_dim\] f32\|bf16\|f16, got .* f64",
    ),
    ("keys", lambda t: t[:, :, :20], r"keys: block_tokens = 20, expected a positive multiple of 16"),
    ("keys", lambda t: t[..., :40], r"keys: head_dim = 40, expected 64, 80, 96, 128, 192 or 256"),
    ("values", half, r"values: expected \[\d+, 2, 32, 64\] f32, got \[\d+, 2, 32, 64\] f16"),
    ("values", lambda t: t[:-1], r"values: expected \[24, 2, 32, 64\] f32, got \[23, 2, 32, 64\] f32"),
    ("block_table", lambda t: t.long(), r"block_table: expected \[3, max_blocks\] i32, got \[3, 7\] i64"),
    ("block_table", lambda t: t[:2], r"block_table: expected \[3, max_blocks\] i32, got \[2, 7\] i32"),
    ("block_table", lambda t: t[:, :3], r"block table: sequence 0 needs 7 cache blocks, the table has 3"),
    (
        "block_table",
        lambda t: torch.full_like(t, 24),
        r"block table: sequence 0, entry 0 = 24, expected 0 to 23",
    ),
    (
        "block_table",
        lambda t: torch.full_like(t, -1),
        r"block table: sequence 0, entry 0 = -1, expected 0 to 23",
    ),
    ("lengths", lambda t: t.long(), r"lengths: expected \[3\] i32, got \[3\] i64"),
    ("lengths", lambda t: -t, r"lengths: expected >= 0, got -200 for sequence 0"),
    ("lengths", lambda t: t[::2], r"lengths: expected \[3\] i32, got \[2\] i32"),
    (
        "records",
        lambda t: t[..., :256].contiguous(),
        r"records: expected \[num_blocks, 2, block_tokens / 16, 288\] u8, got \[24, 2, 2, 256\] u8",
    ),
    ("records", lambda t: t.to(torch.int8), r"records: expected .* u8, got .* Char"),
    (
        "records",
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        r"records: expected the records of a block side by side \(stride 288\), got stride 576",
    ),
    (
        "record_table",
        lambda t: torch.full_like(t, 24),
        r"record block table: sequence 0, entry 0 = 24, expected 0 to 23",
    ),
    ("format", lambda code: 256, r"format: .*256"),
    ("format", lambda code: -1, r"format: expected 0 to 2147483647, got -1"),
    (
        "reference_keys",
        lambda none: torch.zeros(2, 32),
        r"reference_keys: expected \[2, 64\] f32, got \[2, 32\] f32",
    ),
    ("scale", lambda scale: 0.0, r"attention: scale = 0, expected"),
    ("scale", lambda scale: math.nan, r"attention: scale = nan, expected"),
    (
        "budget",
        lambda budget: 0.0,
        r"budget: expected a whole number of tokens >= 1, a fraction in \(0, 1\) or inf, got 0",
    ),
    ("budget", lambda budget: -1.0, r"budget: .* got -1"),
    ("budget", lambda budget: 1.5, r"budget: .* got 1.5"),
    ("budget", lambda budget: math.nan, r"budget: .* got nan"),
    ("budget", lambda budget: -math.inf, r"budget: .* got -inf"),
    ("workspace", lambda t: t[:-1], r"workspace_bytes = \d+, expected at least \d+"),
    ("workspace", lambda t: t[::2], r"workspace: expected a contiguous tensor, got strides \[2\]"),
    ("output", half, r"output: expected \[3, 6, 64\] f32, got \[3, 6, 64\] f16"),
    (
        "output",
        lambda t: t[:1].expand(3, -1, -1),
        r"output: expected elements that share no memory, got strides \[0, 64, 1\]",
    ),
    ("lse", half, r"lse: expected \[3, 6\] f32, got \[3, 6\] f16"),
    ("counters", lambda t: t[:9], r"counters: expected \[11\] i64, got \[9\] i64"),
    ("selected", lambda t: t.bool(), r"selected: expected \[3, 2, pages\] u8, got \[3, 2, 50\] Bool"),
    (
        "selected",
        lambda t: t[..., :49].contiguous(),
        r"selected: expected at least 50 pages for sequence 0, got 49",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), DECODE_REFUSALS, ids=case_name)
def test_decode_refuses(name, change, message):
    case = CacheCase()
    arguments = case.decode_arguments(SPARSE)
    outputs = {key: arguments[key].clone() for key in ("output", "lse", "counters", "selected")}
    changed = {**arguments, name: change(arguments[name])}
    with pytest.raises(RuntimeError, match="^decode: " + message):
        ops.decode(**changed)
    for key, before in outputs.items():
        assert torch.equal(arguments[key].nan_to_num(7), before.nan_to_num(7)), key


SUMMARISE_REFUSALS = [
    ("keys", lambda t: t[:, :, :24], r"keys: block_tokens = 24, expected a positive multiple of 16"),
    ("keys", lambda t: t.int(), r"keys: expected .* f32\|bf16\|f16, got .* i32"),
    (
        "block_table",
        lambda t: torch.full_like(t, 99),
        r"block table: sequence 0, entry 0 = 99, expected 0 to 23",
    ),
    ("begin_tokens", lambda t: t.long(), r"begin_tokens: expected \[3\] i32, got \[3\] i64"),
    ("begin_tokens", lambda t: t + 201, r"begin_tokens.*201"),
    ("begin_tokens", lambda t: t - 1, r"begin_tokens.*-1"),
    ("lengths", lambda t: t[:2], r"block_table: expected \[2, max_blocks\] i32, got \[3, 7\] i32"),
    (
        "format",
        lambda code: Format.parse("wide").code,
        r"records: expected \[num_blocks, 2, block_tokens / 16, 416\] u8",
    ),
    (
        "reference_keys",
        lambda none: torch.zeros(64),
        r"reference_keys: expected \[2, 64\] f32, got \[64\] f32",
    ),
    ("record_table", lambda t: t - 100, r"record block table: sequence 0, entry 0 = -\d+, expected 0 to 23"),
    ("records", lambda t: t[:1].expand(24, -1, -1, -1), r"records: expected elements that share no memory"),
    ("counters", lambda t: t.float(), r"counters: expected \[11\] i64, got \[11\] f32"),
]


@pytest.mark.parametrize(("name", "change", "message"), SUMMARISE_REFUSALS, ids=case_name)
def test_summarise_refuses(name, change, message):
    case = CacheCase()
    arguments = case.summarise_arguments()
    before = case.records.clone(), case.counters.clone()
    with pytest.raises(RuntimeError, match="^summarise_blocks: " + message):
        ops.summarise_blocks(**{**arguments, name: change(arguments[name])})
    assert torch.equal(case.records, before[0]) and torch.equal(case.counters, before[1])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("key", half, r"key: expected \[num_tokens, 2, 64\] f32, got \[200, 2, 64\] f16"),
        ("value", lambda t: t[:-1], r"value: expected \[200, 2, 64\] f32, got \[199, 2, 64\] f32"),
        ("slot_mapping", lambda t: t.int(), r"slot_mapping: expected \[200\] i64, got \[200\] i32"),
        (
            "slot_mapping",
            lambda t: torch.full_like(t, 768),
            r"slot_mapping: expected -1 \(skip\) to 767, got 768 for token 0",
        ),
        (
            "slot_mapping",
            lambda t: torch.full_like(t, -2),
            r"slot_mapping: expected -1 \(skip\) to 767, got -2 for token 0",
        ),
        (
            "cache",
            lambda t: t[:, :, :1],
            r"cache: expected \[num_blocks, kv_heads, 2, block_tokens, head_dim\] f32\|bf16\|f16, got",
        ),
        (
            "cache",
            lambda t: t[:1].expand(24, -1, -1, -1, -1),
            r"cache: expected elements that share no memory",
        ),
    ],
)
def test_write_cache_refuses(name, change, message):
    case = CacheCase()
    arguments = {
        "key": case.keys_of[0] + 1, "value": case.values_of[0], "slot_mapping": case.slots(0), "cache": case.cache
    }
    before = case.cache.nan_to_num(7)
    with pytest.raises(RuntimeError, match="^write_cache: " + message):
        ops.write_cache(**{**arguments, name: change(arguments[name])})
    assert torch.equal(case.cache.nan_to_num(7), before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "queries",
            torch.zeros(2, 3, 32),
            r"queries: expected \[group, steps, 64\] f32, got \[2, 3, 32\] f32",
        ),
        (
            "keys",
            torch.zeros(320, 64, dtype=torch.float16),
            r"keys: expected \[num_tokens, head_dim\] f32, got \[320, 64\] f16",
        ),
        ("values", torch.zeros(319, 64), r"values: expected \[320, 64\] f32, got \[319, 64\] f32"),
        (
            "positions",
            torch.tensor([0, 1, 320], dtype=torch.int32),
            r"trace: positions\[2\] = 320, expected 0 to 319",
        ),
        (
            "positions",
            torch.tensor([0, 1], dtype=torch.int32),
            r"positions: expected \[3\] i32, got \[2\] i32",
        ),
        ("scale", -1.0, r"trace: scale = -1"),
        ("selector", "best", r"selector = \"best\", expected locks, oracle, .*, snapkv or kvzip"),
        ("format", 999, r"format: .*999"),
        ("budgets", torch.tensor([9.0, 0.0], dtype=torch.float64), r"budget: .* got 0"),
        ("spans", torch.tensor([[5, 5]], dtype=torch.int32), r"span: 5 to 5, expected 0 <= begin < end <= 320"),
        ("spans", torch.tensor([[5, 321]], dtype=torch.int32), r"span: 5 to 321, expected"),
        ("window", 3, r"trace: window = 3, expected 0 to 2: what is left of num_steps = 3 is judged"),
        ("rows", torch.zeros(2, 3, 3, 3).double(), r"rows: expected \[2, 3, 2, 3\] f64, got \[2, 3, 3, 3\] f64"),
        ("steps", torch.zeros(2, 3, 3).double(), r"steps: expected \[2, 3, 6\] f64, got \[2, 3, 3\] f64"),
    ],
)
def test_measure_quality_refuses(name, value, message):
    arguments = {
        "queries": torch.zeros(2, 3, 64), "keys": torch.zeros(320, 64), "values": torch.zeros(320, 64),
        "positions": torch.tensor([250, 300, 319], dtype=torch.int32), "scale": 0.125, "selector": "locks",
        "format": ops.parse_format("fine"), "budgets": torch.tensor([120.0, 0.5], dtype=torch.float64), "window": 0,
        "spans": torch.tensor([[100, 110]], dtype=torch.int32),
        "rows": torch.zeros(2, 3, 2, 3, dtype=torch.float64), "steps": torch.zeros(2, 3, 6, dtype=torch.float64),
    }
    with pytest.raises(RuntimeError, match="^measure_quality: " + message):
        ops.measure_quality(**{**arguments, name: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.parse_format("best"), r"parse_format: .*'best', expected fine, fine8, compact, wide, paper"),
        (lambda: ops.parse_format("a\0b"), r"parse_format: .*'a\?b', expected fine, fine8, compact, wide, paper"),
        (lambda: ops.format_name(999), r"format_name: .*999"),
        (lambda: ops.record_bytes(1, 65), r"record_bytes: .*65, expected 64, 80, 96, 128, 192 or 256"),
        (lambda: ops.record_bytes(1, -64), r"record_bytes: head_dim: expected 0 to 2147483647, got -64"),
        (lambda: ops.set_cpu_level("sse9"), r"set_cpu_level: level: expected baseline, avx2 or avx512, got sse9"),
        (
            lambda: ops.decode_workspace_bytes(torch.tensor([-1], dtype=torch.int32), 6, 2, 64, 1),
            r"decode_workspace_bytes: lengths: expected >= 0, got -1 for sequence 0",
        ),
        (
            lambda: ops.decode_workspace_bytes(torch.tensor([1], dtype=torch.int32), 5, 2, 64, 1),
            r"decode_workspace_bytes: .*num_query_heads = 5",
        ),
    ],
)
def test_set_up_refuses(call, message):
    with pytest.raises(RuntimeError, match="^" + message):
        call()


def test_one_meta_tensor_is_refused_not_skipped():
    arguments = CacheCase().decode_arguments(SPARSE)
    arguments["query"] = arguments["query"].to("meta")
    with pytest.raises(RuntimeError, match="tensors on cpu and meta, expected one device"):
        ops.decode(**arguments)


def test_none_for_a_tensor_is_refused():
    arguments = CacheCase().decode_arguments(SPARSE) | {"query": None}
    with pytest.raises(RuntimeError, match="decode: query: expected a tensor, got None"):
        ops.decode(**arguments)


def test_refused_budget_is_printed_in_full():
    with pytest.raises(RuntimeError, match=r"budget: expected .*, got 1\.0000001$"):
        ops.decode(**CacheCase().decode_arguments(1.0000001))


def test_all_padded_rows_select_nothing():
    arguments = CacheCase().decode_arguments(SPARSE)
    arguments["lengths"] = torch.zeros_like(arguments["lengths"])
    arguments["selected"].fill_(7)
    ops.decode(**arguments)
    assert not arguments["selected"].any() and not arguments["output"].any()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.ones(64), r"rows: expected \[num_rows, head_dim\] f32, got \[64\] f32"),
        (torch.ones(1, 64, dtype=torch.float16), r"rows: expected \[num_rows, head_dim\] f32, got \[1, 64\] f16"),
        (torch.ones(64, 2).T, "rows: expected a contiguous tensor"),
        (torch.ones(1, 72), "attention: head_dim = 72, expected 64, 80, 96, 128, 192 or 256"),
    ],
)
def test_rotate_refuses(rows, message):
    with pytest.raises(RuntimeError, match="^rotate: " + message):
        ops.rotate(rows)
