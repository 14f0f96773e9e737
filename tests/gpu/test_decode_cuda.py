"""A decode step through the torch operators on the GPU: against the CPU, and on captured attention."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from locks import ops
from locks.formats import Format

ROOT = Path(__file__).parents[2]
SLICE = ROOT / "tests" / "data" / "smollm2_slice.safetensors"
MAX_TILES = 64
BLOCK = 16


class Sequence:
    """One KV head of one captured sequence in a GPU cache whose blocks lie in random order."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, name: str) -> None:
        tokens, self.head_dim = keys.shape
        blocks = math.ceil(tokens / BLOCK)
        draw = torch.Generator().manual_seed(3)
        order = torch.randperm(blocks + 5, generator=draw)[:blocks]
        cache = torch.full((blocks + 5, 1, BLOCK, 2 * self.head_dim), math.nan, dtype=keys.dtype)
        both = torch.nn.functional.pad(torch.cat([keys, values], 1), (0, 0, 0, blocks * BLOCK - tokens))
        cache[order, 0] = both.view(blocks, BLOCK, -1)
        self.cache = cache.cuda()
        self.table = order.to(torch.int32).cuda()[None]
        self.form = Format.parse(name)
        self.records = torch.full(
            (blocks + 5, 1, 1, self.form.record_bytes(self.head_dim)), 0xA5, dtype=torch.uint8, device="cuda"
        )
        # As `locks quality` takes it: the mean of the rotated keys 64 to 1087.
        rotated = keys[64:1088].float().contiguous()
        ops.rotate(rotated)
        self.reference = rotated.double().mean(0).float()[None].cuda() if self.form.improved else None
        self.counters = torch.zeros(len(ops.COUNTERS), dtype=torch.int64, device="cuda")

    def decode(
        self,
        query: torch.Tensor,
        length: int,
        scale: float,
        budget: float,
        flags: int = ops.ROW_IS_REBUILT,
        added: tuple[torch.Tensor, ...] = (),
    ):
        """query [group, d] -> output [group, d], the pages read. added: new_keys, new_values and slots."""
        group = query.shape[0]
        pages = math.ceil(length / self.form.page_tokens)
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        row_flags = torch.tensor([flags], dtype=torch.uint8, device="cuda")
        plan = torch.empty((2, ops.PLAN_FIELDS), dtype=torch.int32, device="cuda")
        ops.plan_decode(lengths, row_flags, budget, self.form.page_tokens, 0, MAX_TILES, plan)
        size = ops.decode_step_workspace_bytes(1, group, 1, self.head_dim, self.form.code, MAX_TILES)
        output = torch.full((1, group, self.head_dim), math.nan, dtype=query.dtype, device="cuda")
        selected = torch.full((1, 1, pages), 0xA5, dtype=torch.uint8, device="cuda")
        ops.decode_step(
            query[None].cuda(), self.cache[..., : self.head_dim], self.cache[..., self.head_dim :], self.table, plan,
            self.records, self.table, self.form.code, self.reference, scale, MAX_TILES,
            torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda"), output, None, self.counters, selected,
            *added,
        )
        return output[0].cpu(), selected[0, 0].cpu().bool()


def retained(query: torch.Tensor, keys: torch.Tensor, scale: float, tokens: torch.Tensor) -> torch.Tensor:
    """The share of attention mass, by head, on the tokens of a mask."""
    weights = torch.softmax(scale * query.double() @ keys.double().T, dim=-1)
    return weights[:, tokens].sum(-1)


def mean_retained(path: Path, prefix: str, name: str, budget: float) -> tuple[float, dict[str, int]]:
    with safe_open(str(path), framework="pt") as stored:
        q, k, v, positions = (stored.get_tensor(prefix + part) for part in ("q", "k", "v", "pos"))
        scale = float(stored.metadata()["scale"])
    sequence = Sequence(k, v, name)
    kept = []
    for step, position in enumerate(positions.tolist()):
        length = position + 1
        output, pages = sequence.decode(q[:, step], length, scale, budget)
        tokens = pages.repeat_interleave(sequence.form.page_tokens)[:length]
        kept.append(retained(q[:, step], k[:length], scale, tokens))
        logits = scale * q[:, step].double() @ k[:length].double().T
        exact = torch.softmax(logits + torch.where(tokens, 0.0, -math.inf), -1)
        error = (output.double() - exact @ v[:length].double()).norm() / output.double().norm()
        assert error < 4e-3, f"step {step}: attention over the pages read is off by {error:.1e}"
    counts = dict(zip(ops.COUNTERS, sequence.counters.tolist(), strict=True))
    return torch.stack(kept).mean().item(), counts


GOLDEN = [
    row
    for row in json.loads((ROOT / "bench" / "results" / "quality.json").read_text())["rows"]
    if row["selector"] == "locks"
]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['trace']}-{row['layer']}-{row['format']}")
def test_golden_rows_keep_what_the_cpu_keeps(row, request):
    traces = request.config.getoption("--traces")
    if traces is None:
        pytest.skip("needs --traces FOLDER with the captured attention of bench/results/quality.json")
    path = Path(traces) / f"{row['trace']}.safetensors"
    kept, counts = mean_retained(path, f"layer{row['layer']}.", row["format"], float(row["budget"]))
    assert counts["sparse_rows"] > 0 and counts["dense_rows"] == 0
    # Near-ties of 16-bit masses may fall the other way.
    assert kept == pytest.approx(row["retained"], abs=0.002)


@pytest.mark.parametrize("name", ["fine", "fine8", "compact", "wide", "paper"])
def test_the_committed_slice_keeps_most_of_the_mass(name):
    kept, counts = mean_retained(SLICE, "", name, 512)
    assert counts["sparse_rows"] > 0 and counts["dense_rows"] == 0
    assert counts["bytes_read"] < counts["bytes_dense"]
    assert kept > 0.85


def test_all_pages_give_dense_attention():
    with safe_open(str(SLICE), framework="pt") as stored:
        q, k, v = (stored.get_tensor(part) for part in ("q", "k", "v"))
        scale = float(stored.metadata()["scale"])
    sequence = Sequence(k, v, "fine")
    for length in (1, 15, 16, 17, 255, 1000, k.shape[0]):
        output, pages = sequence.decode(q[:, 0], length, scale, math.inf)
        assert pages.all()
        exact = torch.softmax(scale * q[:, 0].double() @ k[:length].double().T, -1) @ v[:length].double()
        assert (output.double() - exact).norm() / exact.norm() < 2e-3


def slot_of(sequence: Sequence, length: int) -> torch.Tensor:
    block = sequence.table[0, (length - 1) // BLOCK].long()
    return (block * BLOCK + (length - 1) % BLOCK)[None]


@pytest.mark.parametrize("length", [1, 16, 17, 999, 1008])
@pytest.mark.parametrize("budget", [256, math.inf])
def test_new_tokens_are_written_by_the_step(length, budget):
    torch.manual_seed(length)
    keys, values = torch.randn(2, length, 128, dtype=torch.bfloat16)
    query = torch.randn(7, 128, dtype=torch.bfloat16)
    held, given = (Sequence(keys, values, "fine") for _ in range(2))
    expected, pages = held.decode(query, length, 0.1, budget)
    slot = slot_of(given, length)
    projected = torch.randn(1, 3, 128, dtype=torch.bfloat16, device="cuda")  # query, key and value side by side
    projected[0, 1:] = torch.stack([keys[-1], values[-1]])
    given.cache[slot // BLOCK, :, slot % BLOCK] = math.nan
    added = projected[:, 1:2], projected[:, 2:], slot
    output, seen = given.decode(query, length, 0.1, budget, added=added)
    assert torch.equal(output, expected) and torch.equal(seen, pages)
    assert torch.equal(given.records, held.records)
    assert torch.equal(given.cache.view(torch.int16), held.cache.view(torch.int16))
    given.cache[slot // BLOCK, :, slot % BLOCK] = 0
    before = given.cache.clone()
    given.decode(query, length, 0.1, budget, added=(*added[:2], torch.full_like(slot, -1)))
    assert torch.equal(given.cache.view(torch.int16), before.view(torch.int16)), "a slot below 0 is nowhere"


def test_new_tokens_of_other_shapes_are_refused():
    sequence = Sequence(*torch.randn(2, 100, 128, dtype=torch.bfloat16), "fine")
    token, slot = torch.randn(1, 1, 128, dtype=torch.bfloat16, device="cuda"), slot_of(sequence, 100)
    wide = torch.randn(1, 1, 136, dtype=torch.bfloat16, device="cuda")
    refused = [
        ((token, None, None), "expected all of new_keys, new_values and slots, or none"),
        ((None, None, slot), "expected all of new_keys, new_values and slots, or none"),
        ((token.half(), token, slot), r"new_keys: expected \[1, 1, 128\] bf16, got \[1, 1, 128\] f16"),
        ((token, token[..., :64], slot), r"new_values: expected \[1, 1, 128\] bf16, got \[1, 1, 64\] bf16"),
        ((token, token, slot.int()), r"slots: expected \[1\] i64, got \[1\] i32"),
        ((token, token.cpu(), slot), "new_values: expected a tensor on cuda"),
        ((wide[..., 4:132], token, slot), "added: expected rows aligned to 16 bytes"),
    ]
    for added, message in refused:
        with pytest.raises(RuntimeError, match=message):
            sequence.decode(torch.randn(7, 128, dtype=torch.bfloat16), 100, 0.1, 64, added=added)


def test_a_float32_cache_is_refused():
    sequence = Sequence(torch.randn(1200, 64), torch.randn(1200, 64), "fine")
    with pytest.raises(RuntimeError, match="float32, expected bf16 or fp16"):
        sequence.decode(torch.randn(4, 64), 1200, 0.125, 512)
