"""What all LOCKS layers of a GPU share: the plans of a step's rows, room to work in, the counters, the budget.

All of it lies at fixed addresses, which CUDA graphs of the decode step remember. It is allocated while the model is
loaded, so that vLLM finds less memory free for the cache.
"""

from __future__ import annotations

import itertools
import math

import torch
from locks.formats import Format
from locks.ops import COUNTERS, PLAN_FIELDS, TILE_TOKENS
from vllm.config import VllmConfig

from locks_vllm.options import LocksOptions


class GpuState:
    """One for each engine process. The layers run one after the other, so they can share the workspace."""

    def __init__(
        self, options: LocksOptions, vllm_config: VllmConfig, device: torch.device, num_layers: int
    ) -> None:
        """`num_layers`: at most so many will share it."""
        self.device = device
        self.budget = options.budget
        self.dense_tokens = options.dense_tokens
        self.max_rows = vllm_config.scheduler_config.max_num_seqs
        tiles_of_row = -(-vllm_config.model_config.max_model_len // TILE_TOKENS)
        self.max_tiles = min(tiles_of_row * self.max_rows, options.score_tokens // TILE_TOKENS)
        self.plans: dict[int, torch.Tensor] = {}  # by tokens of a page
        self.workspace = torch.empty(0, dtype=torch.uint8, device=device)
        # Side by side, so that one copy fetches those of all layers (metrics.py).
        self.counters = torch.zeros(num_layers, len(COUNTERS), dtype=torch.int64, device=device)
        self._rows = itertools.count()

    def next_row(self) -> int:
        """The row of a new layer's counters."""
        return next(self._rows)

    def reserve(self, num_query_heads: int, num_kv_heads: int, head_dim: int, summary_format: Format) -> None:
        """Makes room for layers of this shape; only before the first step."""
        if summary_format.page_tokens not in self.plans:
            self.plans[summary_format.page_tokens] = self._new_plan()
        size = torch.ops.locks.decode_step_workspace_bytes(
            self.max_rows, num_query_heads, num_kv_heads, head_dim, summary_format.code, self.max_tiles
        )
        if size > self.workspace.numel():
            self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def _new_plan(self) -> torch.Tensor:
        return torch.zeros(self.max_rows + 1, PLAN_FIELDS, dtype=torch.int32, device=self.device)

    def plan_rows(self, lengths: torch.Tensor, flags: torch.Tensor | None) -> None:
        """Plans the decode rows of a step for layers of every page size: a launch each, and nothing waits."""
        for page_tokens, plan in self.plans.items():
            torch.ops.locks.plan_decode(
                lengths, flags, self.budget, page_tokens, self.dense_tokens, self.max_tiles, plan
            )

    def plan_nothing(self) -> None:
        """Plans rows of no tokens, for steps that are run to be captured: they read nothing and count nothing."""
        for plan in self.plans.values():
            plan.zero_()

    def plan_whole(self, lengths: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """A plan of its own in which every row is read whole."""
        plan = self._new_plan()
        torch.ops.locks.plan_decode(lengths, None, math.inf, page_tokens, 0, 0, plan)
        return plan
