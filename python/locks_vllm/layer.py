"""What one LOCKS layer knows and does in a step, over the plain cache and the records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from locks.formats import Format
from locks.ops import COUNTERS

from locks_vllm.prefill import attend_prompt, gather
from locks_vllm.served_layer import ServedLayer
from locks_vllm.summary_cache import LocksSummaryLayer


def plain_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's cache tensor [num_blocks, kv_heads, block_size, 2 d] as [num_blocks, kv_heads, 2, block_size, d]."""
    num_blocks, num_heads, block_tokens, width = kv_cache.shape
    return kv_cache.view(num_blocks, num_heads, 2, block_tokens, width // 2)


class Workspace:
    """Scratch memory of the decode operator, shared by all layers of a process since they run one after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            # A context grows by a token a step: the headroom makes reallocation rare.
            self._memory = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
        return self._memory


WORKSPACE = Workspace()


@dataclass(frozen=True)
class Prompt:
    """A row that attends exactly: tokens [query_begin, query_end) of the batch end a sequence of `length` tokens."""

    row: int
    query_begin: int
    query_end: int
    length: int


@dataclass
class Step:
    """One step of the engine, the same for all layers; tables of a row per request."""

    block_table: torch.Tensor  # int32 [rows, max_blocks]
    lengths: torch.Tensor  # int32 [rows], this step's tokens included
    begin_tokens: torch.Tensor  # int32 [rows]: the tokens before are in the cache with their records
    prompts: list[Prompt]
    decode_rows: torch.Tensor | None  # int64, None if every row decodes
    decode_tokens: torch.Tensor | None  # their places in the batch of tokens, None if these are 0, 1, 2 ...
    decode_table: torch.Tensor
    decode_lengths: torch.Tensor
    num_decodes: int
    _workspace_bytes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def decode_record_table(self, record_table: torch.Tensor) -> torch.Tensor:
        if self.decode_rows is None:
            return record_table[: self.num_decodes]
        return record_table.index_select(0, self.decode_rows)

    def workspace(self, num_query_heads: int, num_kv_heads: int, head_dim: int, format_code: int) -> torch.Tensor:
        key = (num_query_heads, num_kv_heads, head_dim, format_code)
        if key not in self._workspace_bytes:
            self._workspace_bytes[key] = torch.ops.locks.decode_workspace_bytes(self.decode_lengths, *key)
        return WORKSPACE.at_least(self._workspace_bytes[key])


class LocksLayer(ServedLayer):
    """The LOCKS side of one attention layer. Budget and evaluation may change between steps."""

    def __init__(
        self,
        records: LocksSummaryLayer,
        num_query_heads: int,
        head_dim: int,
        scale: float,
        summary_format: Format,
        reference_keys: torch.Tensor | None,
        budget: float,
        evaluate: bool,
    ) -> None:
        counters = torch.zeros(len(COUNTERS), dtype=torch.int64)
        super().__init__(records, num_query_heads, head_dim, scale, summary_format, reference_keys, counters)
        self.budget = budget
        self.evaluate = evaluate

    def keys(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, d] of vLLM's cache tensor."""
        return plain_view(kv_cache)[:, :, 0]

    def values(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The same of the values."""
        return plain_view(kv_cache)[:, :, 1]

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Puts this step's keys and values into the cache."""
        count = slots.shape[0]
        torch.ops.locks.write_cache(key[:count], value[:count], slots, plain_view(kv_cache))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        step: Step,
        record_table: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Brings the records up to date with the cache, then attends: prompts exactly, decodes within the budget."""
        cache = plain_view(kv_cache)
        records = self.records.records()
        torch.ops.locks.summarise_blocks(
            cache[:, :, 0],
            step.block_table,
            step.begin_tokens,
            step.lengths,
            self.format.code,
            self.reference_keys,
            record_table,
            records,
            self.counters,
        )
        for prompt in step.prompts:
            self._attend_prompt(query, key, value, cache, step, prompt, output)
        if step.num_decodes:
            self.decode(query, cache, records, step, record_table, output)

    def _attend_prompt(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        step: Step,
        prompt: Prompt,
        output: torch.Tensor,
    ) -> None:
        tokens = slice(prompt.query_begin, prompt.query_end)
        count = prompt.query_end - prompt.query_begin
        if count == prompt.length:
            keys, values = key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
        else:
            keys, values = gather(cache, step.block_table[prompt.row], prompt.length)
        attend_prompt(query[tokens], keys, values, self.scale, output[tokens])
        self.counts.add(decoding=0, prompt_tokens=count)

    def decode(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        records: torch.Tensor,
        step: Step,
        record_table: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        count = step.num_decodes
        scattered = step.decode_tokens is not None
        rows = query.index_select(0, step.decode_tokens) if scattered else query[:count]
        result = torch.empty_like(rows) if scattered else output[:count]
        lse = torch.empty(count, self.num_query_heads)
        selected = self._selection(step) if self.evaluate else None
        arguments = (
            rows,
            cache[:, :, 0],
            cache[:, :, 1],
            step.decode_table,
            step.decode_lengths,
            records,
            step.decode_record_table(record_table),
            self.format.code,
            self.reference_keys,
            self.scale,
        )
        workspace = step.workspace(self.num_query_heads, self.num_kv_heads, self.head_dim, self.format.code)
        torch.ops.locks.decode(*arguments, self.budget, workspace, result, lse, self.counters, selected)
        self.counts.add(decoding=count, prompt_tokens=0)
        if selected is not None:
            lse_all = torch.empty_like(lse)
            scratch = torch.empty_like(rows)
            ignored = torch.zeros_like(self.counters)
            torch.ops.locks.decode(*arguments, math.inf, workspace, scratch, lse_all, ignored, None)
            self.keep_evaluation(
                range(count), step.decode_lengths.tolist(), (lse - lse_all).exp().mean(1), selected
            )
        if scattered:
            output.index_copy_(0, step.decode_tokens, result)

    def _selection(self, step: Step) -> torch.Tensor:
        pages = -(-int(step.decode_lengths.max()) // self.format.page_tokens)
        return torch.empty(step.num_decodes, self.num_kv_heads, pages, dtype=torch.uint8)
