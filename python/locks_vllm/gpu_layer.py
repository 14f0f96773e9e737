"""One LOCKS layer on a GPU: the calls of a step, its counters, and evaluation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from locks.formats import Format
from locks.ops import COUNTERS

from locks_vllm.gpu_state import GpuState
from locks_vllm.layer import MAX_EVALUATIONS, Evaluation
from locks_vllm.summary_cache import LocksSummaryLayer

if TYPE_CHECKING:
    from locks_vllm.gpu_metadata import LocksMetadata, Prompts


@dataclass
class StepCounts:
    """Counted on the host, the same for all layers of a cache group."""

    steps: int = 0
    prefill_tokens: int = 0

    def add(self, decoding: int, prompt_tokens: int) -> None:
        self.steps += decoding > 0
        self.prefill_tokens += prompt_tokens

    def reset(self) -> None:
        self.steps = self.prefill_tokens = 0


class GpuLayer:
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
        self.records = records
        self.num_query_heads = num_query_heads
        self.num_kv_heads = records.num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.format = summary_format
        self.reference_keys = None if reference_keys is None else reference_keys.to(state.device)
        self.state = state
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=state.device)
        self.counts = StepCounts()
        self.evaluations: deque[Evaluation] = deque(maxlen=MAX_EVALUATIONS)
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

    def reset_counters(self) -> None:
        """Sets the layer's counters to zero, and those that it shares with its cache group."""
        self.counts.reset()
        self.counters.zero_()  # in place: graphs know its address

    def read_counters(self) -> dict[str, int]:
        """What the layer has done since the last reset. Waits for the step in flight."""
        totals = dict(zip(COUNTERS, self.counters.tolist(), strict=True))
        return {"steps": self.counts.steps, "prefill_tokens": self.counts.prefill_tokens, **totals}

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
    ) -> None:
        """Attends with the decode rows, a token each, within the budget; builds the records they completed."""
        plan = self.state.plans[self.format.page_tokens]
        if not self._evaluate:
            self._step(query, kv_cache, metadata, plan, record_table, output, self.counters)
            return
        rows = metadata.num_decodes
        pages = -(-metadata.max_seq_len // self.format.page_tokens)
        lse, lse_all = torch.empty(2, rows, self.num_query_heads, device=query.device)
        selected = torch.zeros(rows, self.num_kv_heads, pages, dtype=torch.uint8, device=query.device)
        self._step(query, kv_cache, metadata, plan, record_table, output, self.counters, lse, selected)
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
    ) -> None:
        torch.ops.locks.decode_step(
            query,
            self.keys(kv_cache),
            kv_cache[..., self.head_dim :],
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
        )

    def _record_evaluation(self, metadata: LocksMetadata, selected: torch.Tensor, retained: torch.Tensor) -> None:
        """Of the rows that decode: prompts and padding keep everything, or nothing."""
        lengths = metadata.seq_lens[: metadata.num_decodes].tolist()
        decoding = [row for row, length in enumerate(lengths) if length and row not in metadata.exact_rows]
        if not decoding:
            return
        masks, kept = selected.cpu().numpy(), retained.tolist()
        pages = [
            np.packbits(masks[row, :, : -(-lengths[row] // self.format.page_tokens)]).tobytes() for row in decoding
        ]
        self.evaluations.append(Evaluation([lengths[row] for row in decoding], [kept[row] for row in decoding], pages))
