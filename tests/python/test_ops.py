"""The torch operators against plain torch, and torch's own checks of them."""

import math

import pytest
import torch
from cache_case import POISON, CacheCase, counters_of
from locks import ops
from locks.formats import PRESETS

# One rounding of the output to its type, and float32 sums over up to 200 terms.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SPARSE = 120.0  # tokens: more than is always read, fewer than the longest sequence


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (1, 7)])
def test_decode_all_pages_is_scaled_dot_product_attention(dtype, kv_heads, group):
    case = CacheCase(dtype=dtype, kv_heads=kv_heads, group=group)
    result = case.decode(math.inf)
    for seq in range(len(case.lengths)):
        dense = torch.nn.functional.scaled_dot_product_attention(
            case.query[seq, :, None].double(),
            case.keys_of[seq].transpose(0, 1).double(),
            case.values_of[seq].transpose(0, 1).double(),
            enable_gqa=True,
        )[:, 0]
        assert_close(result["output"][seq], dense, dtype)
    counters = counters_of(result)
    assert counters["dense_rows"] == len(case.lengths)
    assert counters["sparse_rows"] == counters["records_read"] == 0
    assert counters["bytes_read"] == counters["bytes_dense"]


@pytest.mark.parametrize("format_name", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_decode_within_a_budget_attends_exactly_to_what_it_selected(format_name, head_dim):
    case = CacheCase(format_name=format_name, head_dim=head_dim)
    result = case.decode(SPARSE)
    selected = result["selected"]
    assert set(selected.unique().tolist()) <= {0, 1}
    for seq in range(len(case.lengths)):
        for head in range(case.kv_heads * case.group):
            output, lse = case.attention(seq, head, case.tokens_of(selected, seq, head // case.group))
            assert_close(result["output"][seq, head], output, torch.float32)
            assert_close(result["lse"][seq, head], lse, torch.float32)


def test_decode_counts_what_it_read():
    case = CacheCase()
    result = case.decode(SPARSE)
    counters = counters_of(result)
    read = [
        [len(case.tokens_of(result["selected"], seq, head)) for head in range(case.kv_heads)]
        for seq in range(len(case.lengths))
    ]
    token_bytes = 2 * case.head_dim * case.cache.element_size()
    assert read[0] == [120, 120]  # the budget, in whole pages: the last page of 200 tokens is full
    assert read[1] == [96, 96]
    assert read[2] == [37, 37]
    assert (counters["sparse_rows"], counters["dense_rows"]) == (1, 2)
    assert counters["pages_read"] == int(result["selected"].sum())
    assert counters["records_read"] == 200 // 16 * case.kv_heads
    assert counters["bytes_read"] == sum(map(sum, read)) * token_bytes + counters["records_read"] * 288
    assert counters["bytes_dense"] == sum(case.lengths) * case.kv_heads * token_bytes
    assert counters["raised_budgets"] == counters["invalid_records"] == counters["nonfinite_pages"] == 0


def test_decode_adds_to_the_counters_it_is_given():
    case = CacheCase()
    once = case.decode(SPARSE)
    arguments = case.decode_arguments(SPARSE)
    arguments["counters"].fill_(1000)
    ops.decode(**arguments)
    assert torch.equal(arguments["counters"], once["counters"] + 1000)


def test_decode_finds_the_page_that_holds_the_attention_mass():
    case = CacheCase(lengths=(400,), group=1)
    needle = slice(240, 244)
    for head in range(case.kv_heads):
        query = case.query[0, head]
        case.keys_of[0][needle, head] = query * (40 / (query.norm() ** 2 * case.scale))  # a logit of 40
    ops.write_cache(case.keys_of[0], case.values_of[0], case.slots(0), case.cache)
    case.summarise()
    result = case.decode(100.0)
    assert result["selected"][0, :, 240 // 4].tolist() == [1, 1]
    output, _ = case.attention(0, 0, torch.arange(400))
    assert_close(result["output"][0, 0], output, torch.bfloat16)  # what it left out weighs e^-40 a token


def test_decode_padded_row_is_zero():
    case = CacheCase()
    arguments = case.decode_arguments(SPARSE)
    arguments["lengths"] = torch.tensor([200, 0, 37], dtype=torch.int32)
    ops.decode(**arguments)
    assert torch.equal(arguments["output"][1], torch.zeros_like(arguments["output"][1]))
    assert torch.equal(arguments["lse"][1], torch.full_like(arguments["lse"][1], -math.inf))
    assert not arguments["selected"][1].any()


def test_decode_empty_batch_does_nothing():
    case = CacheCase()
    arguments = case.decode_arguments()
    for name in ("query", "block_table", "lengths", "record_table", "output", "lse", "selected"):
        arguments[name] = arguments[name][:0]
    ops.decode(**arguments)
    assert not arguments["counters"].any()


def test_decode_takes_strided_views():
    case = CacheCase()
    dense = case.decode(SPARSE)
    arguments = case.decode_arguments(SPARSE)
    seqs, heads, head_dim = case.query.shape
    wide = torch.full((seqs, heads + 5, head_dim), math.nan)
    wide[:, 2 : heads + 2] = case.query
    arguments["query"] = wide[:, 2 : heads + 2]
    arguments["output"] = torch.full((heads, seqs, head_dim), math.nan).transpose(0, 1)
    token_major = case.cache.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4)
    arguments["keys"], arguments["values"] = token_major[:, :, 0], token_major[:, :, 1]
    ops.decode(**arguments)
    assert torch.equal(arguments["output"], dense["output"])
    assert torch.equal(arguments["selected"], dense["selected"])


def test_decode_invalid_record_is_read_and_counted():
    case = CacheCase(lengths=(200,))
    block = int(case.table[0, 3])
    case.records[block, 0, 0, -8:] = 0
    result = case.decode(SPARSE)
    assert counters_of(result)["invalid_records"] == 1
    assert result["selected"][0, 0, 24:28].tolist() == [1, 1, 1, 1]  # tokens 96 to 111


def test_summarise_builds_each_complete_block_once():
    case = CacheCase()
    complete = sum(length // 16 for length in case.lengths) * case.kv_heads
    assert {name: count for name, count in zip(ops.COUNTERS, case.counters.tolist(), strict=True) if count} == {
        "records_built": complete
    }
    whole = case.records.clone()

    case.records.fill_(POISON)
    middle = torch.tensor([100, 16, 0], dtype=torch.int32)
    zero = torch.zeros_like(middle)
    arguments = case.summarise_arguments()
    ops.summarise_blocks(**{**arguments, "begin_tokens": zero, "lengths": middle})
    ops.summarise_blocks(**{**arguments, "begin_tokens": middle})
    for seq, length in enumerate(case.lengths):
        for block in range(length // 16):
            place = int(case.table[seq, block // 2]), slice(None), block % 2
            assert torch.equal(case.records[place], whole[place])
    assert int(case.counters[ops.COUNTERS.index("records_built")]) == 2 * complete


def test_summarise_without_counters():
    case = CacheCase()
    ops.summarise_blocks(**{**case.summarise_arguments(), "counters": None})


def test_reference_keys_change_the_records_and_not_the_exact_part():
    case = CacheCase()
    reference = torch.randn(case.kv_heads, case.head_dim, generator=torch.Generator().manual_seed(3))
    before = case.records.clone()
    ops.summarise_blocks(**{**case.summarise_arguments(), "reference_keys": reference})
    assert not torch.equal(case.records, before)
    arguments = case.decode_arguments(SPARSE)
    arguments["reference_keys"] = reference
    ops.decode(**arguments)
    _, lse = case.attention(0, 0, case.tokens_of(arguments["selected"], 0, 0))
    assert_close(arguments["lse"][0, 0], lse, torch.float32)


def test_write_cache_skips_and_keeps_the_later_token():
    cache = torch.zeros(2, 1, 2, 16, 64)
    key = torch.arange(4.0)[:, None, None].repeat(1, 1, 64)
    ops.write_cache(key, key + 10, torch.tensor([17, -1, 3, 17]), cache)
    assert cache[1, 0, :, 1, 0].tolist() == [3, 13]
    assert cache[0, 0, :, 3, 0].tolist() == [2, 12]
    assert int((cache != 0).any(-1).sum()) == 4


def test_results_do_not_depend_on_threads(threads):
    results = []
    for count in (1, 2):
        threads(count)
        case = CacheCase(lengths=(600, 96, 37))
        results.append((case.records, case.decode(SPARSE)))
    (records, first), (other_records, second) = results
    assert torch.equal(records, other_records)
    for name in ("output", "lse", "counters", "selected"):
        assert torch.equal(first[name], second[name]), name


def test_records_do_not_depend_on_the_cpu_level():
    best = ops.cpu_level()
    levels = ("baseline", "avx2", "avx512")
    try:
        for level in levels[: levels.index(best) + 1]:
            ops.set_cpu_level(level)
            assert ops.cpu_level() == level
            case = CacheCase()
            if level == "baseline":
                expected = case.records
            assert torch.equal(case.records, expected)
    finally:
        ops.set_cpu_level(best)


def quality_arguments(selector="locks", window=0):
    """Two budgets and one span, over a trace of two heads and three steps."""
    draw = torch.Generator().manual_seed(5)
    return {
        "queries": torch.randn(2, 3, 64, generator=draw),
        "keys": torch.randn(320, 64, generator=draw),
        "values": torch.randn(320, 64, generator=draw),
        "positions": torch.tensor([250, 300, 319], dtype=torch.int32),
        "scale": 0.125,
        "window": window,
        "selector": selector,
        "format": ops.parse_format("fine"),
        "budgets": torch.tensor([120.0, math.inf], dtype=torch.float64),
        "spans": torch.tensor([[100, 110]], dtype=torch.int32),
        "rows": torch.zeros(2, 3 - window, 2, 3, dtype=torch.float64),
        "steps": torch.zeros(2, 3 - window, 6, dtype=torch.float64),
    }


def test_measure_quality_of_the_oracle_has_no_gap():
    arguments = quality_arguments("oracle", window=1)
    ops.measure_quality(**arguments)
    sparse, full = arguments["rows"]
    assert torch.equal(sparse[..., 0], sparse[..., 1]) and 0 < sparse[..., 1].mean() < 1 and (sparse[..., 2] > 0).all()
    assert torch.allclose(full, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), atol=1e-6)
    assert arguments["steps"][:, :, :2].tolist() == [[[1, 117], [1, 120]], [[1, 301], [1, 320]]]
    assert arguments["steps"][1, :, 2:].tolist() == [[301 * 256, 301 * 256, 1, 1], [320 * 256, 320 * 256, 1, 1]]
    assert ops.needs_window("snapkv") and not ops.needs_window("locks")
    assert (ops.selector_bytes("oracle", 0, 64), ops.selector_bytes("quest", 0, 64)) == (0, 1024)


def test_select_tokens_reads_as_many_as_it_may():
    arguments = list(quality_arguments().values())[:5]
    read = torch.full((2, 320), 7, dtype=torch.uint8)
    ops.select_tokens(*arguments, 1, "snapkv", 4, 160.0, read)
    assert read.max() == 1 and read.sum(1).tolist() == [157, 160]
    assert read[0, 250:301].all() and not read[0, 301:].any()
    with pytest.raises(RuntimeError, match="select_tokens: selector = quest: it ranks pages"):
        ops.select_tokens(*arguments, 1, "quest", 4, 160.0, read)
    with pytest.raises(RuntimeError, match=r"select_tokens: read: expected \[2, 320\] u8, got \[3, 320\] u8"):
        ops.select_tokens(*arguments, 1, "snapkv", 4, 160.0, torch.zeros(3, 320, dtype=torch.uint8))


def op_calls():
    case = CacheCase()
    fine = case.form.code
    return {
        "parse_format": ("fine",),
        "format_name": (fine,),
        "record_bytes": (fine, 64),
        "cpu_level": (),
        "set_cpu_level": (ops.cpu_level(),),
        "rotate": (torch.ones(3, 96),),
        "write_cache": (case.keys_of[0], case.values_of[0], case.slots(0), case.cache),
        "summarise_blocks": tuple(case.summarise_arguments().values()),
        "decode_workspace_bytes": (case.lens, 6, 2, 64, fine),
        "decode": tuple(case.decode_arguments(SPARSE).values()),
        "score_pages": (
            case.query, case.lens, case.records, case.table, 2, fine, 0.1,
            torch.zeros(sum(math.ceil(n / 4) for n in case.lengths) * 6),
        ),
        "read_words": (torch.arange(64),),
        "selector_bytes": ("quest", fine, 64),
        "select_tokens": (
            *list(quality_arguments().values())[:5], 1, "snapkv", 4, 120.0, torch.zeros(2, 320, dtype=torch.uint8)
        ),
        "needs_window": ("snapkv",),
        "measure_quality": tuple(quality_arguments().values()),
    }


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# opcheck compares the results of a traced and an untraced call, which it cannot do for text; and a number that
# depends on the contents of a tensor has no value under fake tensors.
CHECKS = {
    "format_name": ALL_CHECKS[:3],
    "cpu_level": ALL_CHECKS[:3],
    "decode_workspace_bytes": ALL_CHECKS[:2],
    "read_words": ALL_CHECKS[:2],
}


@pytest.mark.parametrize("name", op_calls())
def test_opcheck(name):
    operator = getattr(torch.ops.locks, name).default
    torch.library.opcheck(operator, op_calls()[name], test_utils=CHECKS.get(name, ALL_CHECKS))


def test_operators_compile_as_one_graph():
    def step(summarise, decode, cache, new):
        torch.ops.locks.write_cache(new[0], new[1], new[2], cache)
        torch.ops.locks.summarise_blocks(**summarise)
        torch.ops.locks.decode(**decode)
        return decode["output"] * 2

    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        case = CacheCase()
        case.records.fill_(POISON)
        new = (case.keys_of[0] + 1, case.values_of[0] + 1, case.slots(0))
        decode = case.decode_arguments(SPARSE)
        results.append((run(case.summarise_arguments(), decode, case.cache, new), decode, case))
    (eager, eager_decode, eager_case), (compiled, compiled_decode, compiled_case) = results
    assert torch.equal(eager, compiled)
    assert torch.equal(eager_case.records, compiled_case.records)
    assert torch.equal(eager_case.counters, compiled_case.counters)
    for name in ("output", "lse", "counters", "selected"):
        assert torch.equal(eager_decode[name], compiled_decode[name]), name


def test_workspace_size_says_that_it_cannot_be_traced():
    with pytest.raises(Exception, match="call it outside of torch.compile"):
        torch.compile(ops.decode_workspace_bytes, fullgraph=True, backend="eager")(CacheCase().lens, 6, 2, 64, 1)


def test_cuda_tensors_come_to_our_own_message():
    # What a CUDA tensor would meet, seen without one: a kernel of ours, which names the tensor it cannot take.
    for name in ("write_cache", "summarise_blocks", "decode", "decode_workspace_bytes", "measure_quality"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"locks::{name}", "CUDA")
