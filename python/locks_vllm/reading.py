"""Decode rows read by a selector other than the engine's own LOCKS, for evaluation.

A reader attends exactly over the pages that its selector chooses, and counts what it chose and kept. It stands in for a
layer's decode while an evaluation asks for it (`locks_vllm.evaluation`); the product's code does not know of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from locks import ops
from locks.formats import BLOCK_TOKENS, Format
from locks.ops import PLAN_FIELDS

from locks_vllm.gpu_layer import GpuLayer
from locks_vllm.selectors import SELECTORS, PagedKeys, budget_pages, choose_pages

# Bytes of keys, as float32, that are looked at together: a selector makes a few copies of them.
_BATCH_BYTES = 2**31


@dataclass
class DecodeRows:
    """The rows of a step that decode, a token each, and the cache of their layer."""

    query: torch.Tensor  # [rows, query_heads, d]
    keys: torch.Tensor  # [num_blocks, kv_heads, block_size, d]
    values: torch.Tensor
    block_table: torch.Tensor  # int32 [rows, max_blocks]
    lengths: torch.Tensor  # int32 [rows], the new token included
    host_lengths: list[int]

    def split(self) -> list[DecodeRows]:
        """In batches whose keys are not too much memory."""
        longest = max(self.host_lengths)
        row_bytes = 4 * longest * self.keys.shape[1] * self.keys.shape[3]
        count = max(1, _BATCH_BYTES // row_bytes)
        return [self.part(slice(begin, begin + count)) for begin in range(0, len(self.host_lengths), count)]

    def part(self, rows: slice | torch.Tensor) -> DecodeRows:
        chosen = self.host_lengths[rows] if isinstance(rows, slice) else [self.host_lengths[i] for i in rows.tolist()]
        return DecodeRows(
            self.query[rows], self.keys, self.values, self.block_table[rows], self.lengths[rows], chosen
        )


@dataclass
class ReadCounts:
    """Sums over the rows that were read, on the device until somebody asks."""

    rows: int = 0
    pages: int = 0  # there were, over KV heads
    pages_read: torch.Tensor | int = 0
    retained: torch.Tensor | float = 0.0  # attention mass of the pages read, mean over query heads

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "pages": self.pages,
            "pages_read": int(self.pages_read),
            "retained": float(self.retained),
        }


class SelectorReader:
    """One of SELECTORS: choice by its scores, exact attention over what it chose."""

    def __init__(self, selector: str, page_tokens: int, budget: float, scale: float) -> None:
        self.rule = SELECTORS[selector]
        self.page_tokens = page_tokens
        self.budget = budget
        self.scale = scale
        self.counts = ReadCounts()

    def read(self, rows: DecodeRows, output: torch.Tensor) -> None:
        """output: [rows, query_heads, d], changed."""
        begin = 0
        for some in rows.split():
            end = begin + len(some.host_lengths)
            output[begin:end] = self._read(some)
            begin = end

    def _read(self, rows: DecodeRows) -> torch.Tensor:
        count, num_heads, head_dim = rows.query.shape
        blocks = -(-max(rows.host_lengths) // rows.keys.shape[2])
        table = rows.block_table[:, :blocks].long()
        lengths = rows.lengths.long()
        keys = gathered(rows.keys, table, lengths)
        num_kv_heads = keys.shape[1]
        queries = rows.query.float().view(count, num_kv_heads, num_heads // num_kv_heads, head_dim) * self.scale
        paged = PagedKeys(keys.unflatten(2, (-1, self.page_tokens)), lengths)
        allowed = [budget_pages(self.budget, length, self.page_tokens) for length in rows.host_lengths]
        chosen = choose_pages(
            self.rule.score(paged, queries),
            lengths,
            torch.tensor(allowed, device=keys.device),
            self.page_tokens,
            self.rule.max_of_scores,
        )
        tokens = chosen.repeat_interleave(self.page_tokens, -1)
        logits = queries @ keys.transpose(-1, -2)
        present = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
        all_mass = logits.masked_fill(~present[:, None, None], -math.inf).logsumexp(-1)
        logits.masked_fill_(~(tokens & present[:, None])[:, :, None], -math.inf)
        self.counts.rows += count
        self.counts.pages += num_kv_heads * sum(-(-length // self.page_tokens) for length in rows.host_lengths)
        self.counts.pages_read += chosen.sum()
        self.counts.retained += (logits.logsumexp(-1) - all_mass).exp().flatten(1).mean(1).sum()
        values = gathered(rows.values, table, lengths)
        return (logits.softmax(-1) @ values).reshape(count, num_heads, head_dim).to(rows.query.dtype)


def gathered(cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows of the cache in token order, float32 [rows, kv_heads, tokens, d]; zero behind each sequence, where blocks
    hold what others left, NaN perhaps."""
    rows = cache[table].transpose(1, 2).flatten(2, 3).float()
    behind = torch.arange(rows.shape[2], device=rows.device) >= lengths[:, None]
    return rows.masked_fill_(behind[:, None, :, None], 0.0)


class FormatReader:
    """LOCKS in another format than the engine's, through the operators of the product; its records lie beside the
    engine's cache, and are built anew wherever they do not describe the keys."""

    def __init__(self, layer: Any, summary_format: Format, budget: float) -> None:
        self.layer = layer
        self._on_gpu = isinstance(layer, GpuLayer)
        self.format = summary_format
        self.budget = budget
        self.reference_keys = layer.reference_keys if summary_format.improved else None
        self.counts = ReadCounts()
        self._ignored = torch.zeros_like(layer.counters)
        self._records: torch.Tensor | None = None

    def begin(self, budget: float) -> None:
        """Reads from now on within this budget, and counts anew."""
        self.budget = budget
        self.counts = ReadCounts()

    def read(self, rows: DecodeRows, output: torch.Tensor) -> None:
        """output: [rows, query_heads, d], changed."""
        records = self._records_for(rows.keys)
        count, num_kv_heads = len(rows.host_lengths), rows.keys.shape[1]
        pages = -(-max(rows.host_lengths) // self.format.page_tokens)
        selected = torch.zeros(count, num_kv_heads, pages, dtype=torch.uint8, device=rows.query.device)
        lse, lse_all = torch.empty(2, count, rows.query.shape[1], device=rows.query.device)
        query, scratch = rows.query.contiguous(), torch.empty_like(rows.query)
        self._build(rows, records)
        self._decode(rows, records, query, self.budget, scratch, lse, selected)
        output.copy_(scratch)
        self._decode(rows, records, query, math.inf, scratch, lse_all, None)
        self.counts.rows += count
        size = self.format.page_tokens
        self.counts.pages += num_kv_heads * sum(-(-length // size) for length in rows.host_lengths)
        self.counts.pages_read += selected.sum()
        self.counts.retained += (lse - lse_all).exp().mean(1).sum()

    def _records_for(self, keys: torch.Tensor) -> torch.Tensor:
        num_blocks, num_kv_heads, block_tokens, head_dim = keys.shape
        shape = (num_blocks, num_kv_heads, block_tokens // BLOCK_TOKENS, self.format.record_bytes(head_dim))
        if self._records is None or self._records.shape != shape:
            self._records = torch.zeros(shape, dtype=torch.uint8, device=keys.device)
        return self._records

    def _build(self, rows: DecodeRows, records: torch.Tensor) -> None:
        """The keys' own block ids serve as those of the records."""
        more = (self.format.code, self.reference_keys, rows.block_table, records, None)
        if self._on_gpu:
            ops.verify_blocks(rows.keys, rows.block_table, rows.lengths, None, *more)
        else:
            begin = torch.zeros_like(rows.lengths)
            ops.summarise_blocks(rows.keys, rows.block_table, begin, rows.lengths, *more)

    def _decode(
        self,
        rows: DecodeRows,
        records: torch.Tensor,
        query: torch.Tensor,
        budget: float,
        output: torch.Tensor,
        lse: torch.Tensor,
        selected: torch.Tensor | None,
    ) -> None:
        heads = (query.shape[1], rows.keys.shape[1], query.shape[2], self.format.code)
        about = (records, rows.block_table, self.format.code, self.reference_keys, self.layer.scale)
        if self._on_gpu:
            state = self.layer.state
            plan = torch.zeros(query.shape[0] + 1, PLAN_FIELDS, dtype=torch.int32, device=query.device)
            ops.plan_decode(rows.lengths, None, budget, self.format.page_tokens, 0, state.max_tiles, plan)
            size = ops.decode_step_workspace_bytes(query.shape[0], *heads, state.max_tiles)
            workspace = torch.empty(size, dtype=torch.uint8, device=query.device)
            ops.decode_step(
                query, rows.keys, rows.values, rows.block_table, plan, *about, state.max_tiles, workspace,
                output, lse, self._ignored, selected,
            )  # fmt: skip
            return
        size = ops.decode_workspace_bytes(rows.lengths, *heads)
        workspace = torch.empty(size, dtype=torch.uint8)
        ops.decode(
            query, rows.keys, rows.values, rows.block_table, rows.lengths, *about, budget, workspace, output, lse,
            self._ignored, selected,
        )  # fmt: skip
