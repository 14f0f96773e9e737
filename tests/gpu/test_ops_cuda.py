"""The torch operators on CUDA tensors. Needs a GPU: `python -m pytest tests/gpu`."""

import pytest
import torch

from locks import ops
from locks.formats import Format

FORMATS = ("fine", "fine8", "compact", "wide", "paper")


def case(device: str, name: str, dtype: torch.dtype = torch.bfloat16):
    """Two sequences of 100 and 37 tokens in cache blocks of 32, head-major, with reference keys."""
    draw = torch.Generator().manual_seed(5)
    keys = torch.randn(8, 2, 32, 128, generator=draw).to(dtype)
    table = torch.tensor([[7, 2, 4, 1], [3, 5, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([100, 37], dtype=torch.int32)
    reference = torch.randn(2, 128, generator=draw)
    summary_format = Format.parse(name)
    records = torch.full((8, 2, 2, summary_format.record_bytes(128)), 0xA5, dtype=torch.uint8)
    counters = torch.zeros(len(ops.COUNTERS), dtype=torch.int64)
    moved = [tensor.to(device) for tensor in (keys, table, torch.zeros_like(lengths), lengths)]
    rest = [tensor.to(device) for tensor in (reference, table, records, counters)]
    return [*moved, summary_format.code, *rest]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_records_equal_the_cpu_byte_for_byte(name, dtype):
    on_cpu, on_gpu = case("cpu", name, dtype), case("cuda", name, dtype)
    ops.summarise_blocks(*on_cpu)
    ops.summarise_blocks(*on_gpu)
    assert torch.equal(on_cpu[7], on_gpu[7].cpu())
    assert on_gpu[8][-1].item() == on_cpu[8][-1].item() == 2 * (6 + 2)


def test_runs_on_torchs_current_stream_and_in_its_graphs():
    expected, arguments = case("cpu", "fine"), case("cuda", "fine")
    ops.summarise_blocks(*expected)
    arguments[8] = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.summarise_blocks(*arguments)
    arguments[7].fill_(0xA5)
    graph.replay()
    assert torch.equal(expected[7], arguments[7].cpu())


def test_a_tensor_on_another_device_is_named():
    arguments = case("cuda", "fine")
    arguments[0] = arguments[0].cpu()
    with pytest.raises(RuntimeError, match=r"keys: expected a tensor on cuda:0, got one on cpu"):
        ops.summarise_blocks(*arguments)


def test_an_operator_without_a_kernel_says_so():
    cache = torch.zeros(1, 1, 2, 16, 64, device="cuda")
    rows = torch.zeros(1, 1, 64, device="cuda")
    expected = "expected a CPU tensor .the operator has no CUDA kernel., got one on cuda:0"
    with pytest.raises(RuntimeError, match=expected):
        ops.write_cache(rows, rows, torch.zeros(1, dtype=torch.int64, device="cuda"), cache)


def test_verification_builds_what_does_not_match_and_nothing_else():
    expected, arguments = case("cpu", "fine"), case("cuda", "fine")
    ops.summarise_blocks(*expected)
    keys, table, _, lengths, code, reference, record_table, records, counters = arguments
    rows = torch.tensor([1, 0], dtype=torch.uint8, device="cuda")
    built = []
    for flags in (rows, rows, None, None):
        before = counters[-1].item()
        ops.verify_blocks(keys, table, lengths, flags, code, reference, record_table, records, counters)
        built.append(counters[-1].item() - before)
    assert built == [2 * 6, 0, 2 * 2, 0]
    headers = slice(-8, None)
    whole = expected[7][..., headers].any(-1)
    assert torch.equal(expected[7][whole], records.cpu()[whole])


def test_opcheck():
    torch.library.opcheck(torch.ops.locks.summarise_blocks.default, case("cuda", "fine"))
