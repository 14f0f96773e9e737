"""What the LOCKS side of an attention layer holds on every platform: its parts, its counters, its evaluations."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from locks.formats import Format
from locks.ops import COUNTERS

from locks_vllm.capture import Capture
from locks_vllm.summary_cache import LocksSummaryLayer

# Steps whose evaluation a layer keeps until it is fetched; older ones are dropped.
MAX_EVALUATIONS = 1024


@dataclass
class StepCounts:
    """Counted on the host. Like the counters of a layer they only grow."""

    steps: int = 0
    prefill_tokens: int = 0

    def add(self, decoding: int, prompt_tokens: int) -> None:
        """A step in which `decoding` rows decode and `prompt_tokens` tokens attend exactly."""
        self.steps += decoding > 0
        self.prefill_tokens += prompt_tokens


@dataclass
class Evaluation:
    """What one decode step kept, exactly: for each row the mean over heads of the mass of the pages that were read."""

    lengths: list[int]
    retained: list[float]
    pages: list[bytes]  # of each row, np.packbits of the mask [kv_heads, pages]

    def as_dict(self) -> dict[str, Any]:
        pages = [base64.b64encode(mask).decode() for mask in self.pages]
        return {"lengths": self.lengths, "retained": self.retained, "pages": pages}


class ServedLayer:
    """The LOCKS side of one attention layer, but for what it does in a step."""

    def __init__(
        self,
        records: LocksSummaryLayer,
        num_query_heads: int,
        head_dim: int,
        scale: float,
        summary_format: Format,
        reference_keys: torch.Tensor | None,
        counters: torch.Tensor,
    ) -> None:
        """counters: int64 [len(COUNTERS)], zeros, on the device of the layer."""
        self.records = records
        self.num_query_heads = num_query_heads
        self.num_kv_heads = records.num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.format = summary_format
        self.reference_keys = None if reference_keys is None else reference_keys.to(counters.device)
        # These only grow: graphs know the address, and metrics.py exports the numbers. A reset notes where they stood.
        self.counters = counters
        self.counts = StepCounts()
        self._at_reset = StepCounts(), torch.zeros_like(counters)
        self.evaluations: deque[Evaluation] = deque(maxlen=MAX_EVALUATIONS)
        self.capture: Capture | None = None

    def keys(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, d] of vLLM's cache tensor."""
        raise NotImplementedError

    def values(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The same of the values."""
        raise NotImplementedError

    def reset_counters(self) -> None:
        """Makes `read_counters` count from here on."""
        self._at_reset = replace(self.counts), self.counters.clone()

    def read_counters(self) -> dict[str, int]:
        """What the layer has done since the last reset. On a GPU it waits for the step in flight."""
        counts, counters = self._at_reset
        totals = dict(zip(COUNTERS, (self.counters - counters).tolist(), strict=True))
        steps, prompt_tokens = self.counts.steps - counts.steps, self.counts.prefill_tokens - counts.prefill_tokens
        return {"steps": steps, "prefill_tokens": prompt_tokens, **totals}

    def keep_evaluation(
        self, rows: Sequence[int], lengths: Sequence[int], retained: torch.Tensor, selected: torch.Tensor
    ) -> None:
        """Keeps what `rows` of a step read. selected: uint8 [all rows, kv_heads, pages]; retained: [all rows]."""
        masks, kept = selected.cpu().numpy(), retained.tolist()
        pages = [np.packbits(masks[row, :, : -(-lengths[row] // self.format.page_tokens)]).tobytes() for row in rows]
        self.evaluations.append(Evaluation([lengths[row] for row in rows], [kept[row] for row in rows], pages))
