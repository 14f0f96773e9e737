"""One LOCKS layer on a GPU: the calls of a step, its counters, and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from locks.formats import Format

from locks_vllm.gpu_state import GpuState
from locks_vllm.served_layer import ServedLayer
from locks_vllm.summary_cache import LocksSummaryLayer

if TYPE_CHECKING:
    from locks_vllm.gpu_metadata import LocksMetadata, Prompts

NewTokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values and slots, as `decode_step` takes them


class GpuLayer(ServedLayer):
    """The LOCKS side of one attention layer."""

    def __init__(
        self,
        records: LocksSummaryLayer,
        num_query_heads: int,
        head_dim: int,
        scale: float,
        summary_format: Format,
        reference_keys: torch.Tensor | None,
        state: GpuState,
        evaluate: bool,
        captured: bool,
    ) -> None:
        """`captured` tells that decode steps run in CUDA graphs."""
        self.row = state.next_row()
        counters = state.counters[self.row]
        super().__init__(records, num_query_heads, head_dim, scale, summary_format, reference_keys, counters)
        self.state = state
        self._captured = captured
        self._evaluate = evaluate
        state.reserve(num_query_heads, self.num_kv_heads, head_dim, summary_format)

    @property
    def budget(self) -> float:
        return self.state.budget

    @budget.setter
    def budget(self, value: float) -> None:
        self.state.budget = value  # read when the next step is planned

    @property
    def evaluate(self) -> bool:
        return self._evaluate

    @evaluate.setter
    def evaluate(self, value: bool) -> None:
        if value and self._captured:
            raise RuntimeError(
                "locks_set_evaluation: decode steps run in CUDA graphs, which cannot tell what they kept; start vLLM"
                ' with "evaluate": true in the option "locks", or with --enforce-eager'
            )
        self._evaluate = value

    def keys(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, d] of vLLM's cache, where a token's key and value lie side by side."""
        return kv_cache[..., : self.head_dim]

    def values(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The same of the values."""
        return kv_cache[..., self.head_dim :]

    def summarise(self, kv_cache: torch.Tensor, prompts: Prompts, record_table: torch.Tensor) -> None:
        """Builds the records of the blocks that the prompts completed, and those that a connector left out."""
        keys = self.keys(kv_cache)
        record = (self.format.code, self.reference_keys, record_table, self.records.records(), self.counters)
        if prompts.verified is not None:
            torch.ops.locks.verify_blocks(keys, prompts.block_table, prompts.begin_tokens, prompts.verified, *record)
        torch.ops.locks.summarise_blocks(keys, prompts.block_table, prompts.begin_tokens, prompts.lengths, *record)

    def decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: LocksMetadata,
        record_table: torch.Tensor,
        output: torch.Tensor,
        added: NewTokens | None,
    ) -> None:
        """Attends with the decode rows, a token each, within the budget; builds the records they completed.

        added: the rows' tokens, which the step writes to the cache; None: they are there.
        """
        plan = self.state.plans[self.format.page_tokens]
        if not self._evaluate:
            self._step(query, kv_cache, metadata, plan, record_table, output, self.counters, added=added)
            return
        rows = metadata.num_decodes
        pages = -(-metadata.max_seq_len // self.format.page_tokens)
        lse, lse_all = torch.empty(2, rows, self.num_query_heads, device=query.device)
        selected = torch.zeros(rows, self.num_kv_heads, pages, dtype=torch.uint8, device=query.device)
        self._step(query, kv_cache, metadata, plan, record_table, output, self.counters, lse, selected, added)
        whole = self.state.plan_whole(metadata.seq_lens[:rows], self.format.page_tokens)
        ignored = torch.empty_like(output), torch.zeros_like(self.counters)
        self._step(query, kv_cache, metadata, whole, record_table, *ignored, lse_all)
        self._record_evaluation(metadata, selected, (lse - lse_all).exp().mean(1))

    def _step(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: LocksMetadata,
        plan: torch.Tensor,
        record_table: torch.Tensor,
        output: torch.Tensor,
        counters: torch.Tensor,
        lse: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
        added: NewTokens | None = None,
    ) -> None:
        torch.ops.locks.decode_step(
            query,
            self.keys(kv_cache),
            self.values(kv_cache),
            metadata.block_table[: metadata.num_decodes],
            plan,
            self.records.records(),
            record_table,
            self.format.code,
            self.reference_keys,
            self.scale,
            self.state.max_tiles,
            self.state.workspace,
            output,
            lse,
            counters,
            selected,
            *(added or (None, None, None)),
        )

    def _record_evaluation(self, metadata: LocksMetadata, selected: torch.Tensor, retained: torch.Tensor) -> None:
        """Of the rows that decode: prompts and padding keep everything, or nothing."""
        lengths = metadata.decode_lengths
        decoding = [row for row, length in enumerate(lengths) if length and row not in metadata.exact_rows]
        if decoding:
            self.keep_evaluation(decoding, lengths, retained, selected)
