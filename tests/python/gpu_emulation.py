"""The GPU's operators of a decode step, emulated with the CPU's, so that the plug-in's GPU code runs without a GPU.

What is emulated is the contract of `plan_decode` and `decode_step` (locks.ops), not the kernels.
"""

from __future__ import annotations

import math

import torch

from locks.budget import ALWAYS_READ_TOKENS
from locks.formats import Format
from locks.ops import ROW_IS_EXACT, ROW_IS_REBUILT, TILE_TOKENS

OPERATORS = ("plan_decode", "decode_step", "decode_step_workspace_bytes", "verify_blocks")
LENGTH, FIRST_NEW_BLOCK, SCORED_BLOCKS, BUDGET_PAGES, FIRST_TILE = range(5)


def plan_decode(lengths, row_flags, budget, page_tokens, dense_tokens, max_tiles, plan) -> None:
    plan[: lengths.shape[0] + 1] = 0
    tiles = 0
    for row, length in enumerate(lengths.tolist()):
        flags = 0 if row_flags is None else int(row_flags[row])
        pages = -(-length // page_tokens)
        allowed = pages
        if math.isfinite(budget):
            asked = round(budget * length / page_tokens) if budget < 1 else int(budget) // page_tokens
            allowed = min(pages, max(asked, ALWAYS_READ_TOKENS // page_tokens + 1))
        whole = flags & ROW_IS_EXACT or length <= dense_tokens or allowed == pages
        wanted = 0 if whole else -(-(length // 16 * 16) // TILE_TOKENS)
        if tiles + wanted > max_tiles:
            whole, wanted = True, 0
        plan[row, LENGTH] = length
        plan[row, FIRST_NEW_BLOCK] = 0 if flags & ROW_IS_REBUILT else max(length - 1, 0) // 16
        plan[row, SCORED_BLOCKS] = 0 if whole else length // 16
        plan[row, BUDGET_PAGES] = allowed
        plan[row, FIRST_TILE] = tiles
        tiles += wanted
    plan[lengths.shape[0], FIRST_TILE] = tiles


def decode_step(
    query, keys, values, block_table, plan, records, record_table, format, reference_keys, scale, max_tiles,
    workspace, output, lse, counters, selected=None, new_keys=None, new_values=None, slots=None,
) -> None:  # fmt: skip
    count = query.shape[0]
    rows = plan[:count]
    if slots is not None:
        write_tokens(keys, values, block_table, rows, new_keys, new_values, slots)
    torch.ops.locks.summarise_blocks(
        keys, block_table, 16 * rows[:, FIRST_NEW_BLOCK].contiguous(), rows[:, LENGTH].contiguous(), format,
        reference_keys, record_table, records, counters,
    )  # fmt: skip
    page_tokens = Format(format).page_tokens
    for row in range(count):
        one = slice(row, row + 1)
        scored = int(rows[row, SCORED_BLOCKS]) > 0
        budget = float(rows[row, BUDGET_PAGES] * page_tokens) if scored else math.inf
        lengths = rows[one, LENGTH].contiguous()
        size = torch.ops.locks.decode_workspace_bytes(lengths, query.shape[1], keys.shape[1], query.shape[2], format)
        row_lse = torch.empty(1, query.shape[1]) if lse is None else lse[one]
        mask = None if selected is None else torch.zeros_like(selected[one])
        torch.ops.locks.decode(
            query[one].contiguous(), keys, values, block_table[one].contiguous(), lengths, records,
            record_table[one].contiguous(), format, reference_keys, scale, budget,
            torch.empty(size, dtype=torch.uint8), output[one], row_lse, counters, mask,
        )  # fmt: skip
        if mask is not None:
            selected[one] = mask


def write_tokens(keys, values, block_table, rows, new_keys, new_values, slots) -> None:
    """The step's new tokens. A slot is the place of its row's newest token, or the row has none."""
    block_tokens = keys.shape[2]
    assert new_keys.shape == new_values.shape == (slots.shape[0], keys.shape[1], keys.shape[3])
    for row, (slot, length) in enumerate(zip(slots.tolist(), rows[:, LENGTH].tolist(), strict=True)):
        if slot < 0:
            continue
        block, place = divmod(slot, block_tokens)
        assert block == int(block_table[row, (length - 1) // block_tokens]) and place == (length - 1) % block_tokens
        keys[block, :, place] = new_keys[row]
        values[block, :, place] = new_values[row]


def verify_blocks(
    keys, block_table, lengths, rows, format, reference_keys, record_table, records, counters
) -> None:  # fmt: skip
    """Builds all records of the rows: the result is that of building those which do not fit."""
    verified = lengths if rows is None else lengths * rows.to(torch.int32)
    torch.ops.locks.summarise_blocks(
        keys, block_table, torch.zeros_like(verified), verified, format, reference_keys, record_table, records, counters
    )


def decode_step_workspace_bytes(num_rows, num_query_heads, num_kv_heads, head_dim, format, max_tiles) -> int:
    return 64 + num_rows * num_query_heads * head_dim + max_tiles


def emulate(monkeypatch) -> None:
    """Puts the emulation in the operators' place, for one test."""
    for name in OPERATORS:
        monkeypatch.setattr(torch.ops.locks, name, globals()[name], raising=False)
