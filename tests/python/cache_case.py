"""A paged cache with random contents, its records, and dense attention over it: what the operator tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from locks import ops
from locks.formats import Format

POISON = 0xA5


@dataclass
class CacheCase:
    """Sequences of the given lengths in one cache, cache blocks in random order."""

    lengths: tuple[int, ...] = (200, 96, 37)
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    block_tokens: int = 32
    dtype: torch.dtype = torch.float32
    format_name: str = "fine"
    seed: int = 7
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        draw = torch.Generator().manual_seed(self.seed)
        self.scale = self.head_dim**-0.5
        self.form = Format.parse(self.format_name)
        seqs, longest = len(self.lengths), max(self.lengths)
        self.keys_of = [self._random(draw, n, self.kv_heads, self.head_dim) for n in self.lengths]
        self.values_of = [self._random(draw, n, self.kv_heads, self.head_dim) for n in self.lengths]
        self.query = self._random(draw, seqs, self.kv_heads * self.group, self.head_dim)

        per_seq = math.ceil(longest / self.block_tokens)
        num_blocks = seqs * per_seq + 3
        order = torch.randperm(num_blocks, generator=draw)[: seqs * per_seq]
        self.table = order.to(torch.int32).reshape(seqs, per_seq)
        self.lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.cache = torch.full(
            (num_blocks, self.kv_heads, 2, self.block_tokens, self.head_dim), math.nan, dtype=self.dtype
        )
        for i in range(seqs):
            ops.write_cache(self.keys_of[i], self.values_of[i], self.slots(i), self.cache)
        self.records = torch.full(
            (num_blocks, self.kv_heads, self.block_tokens // 16, self.form.record_bytes(self.head_dim)),
            POISON, dtype=torch.uint8,
        )
        self.counters = torch.zeros(len(ops.COUNTERS), dtype=torch.int64)
        self.summarise()

    def _random(self, draw: torch.Generator, *shape: int) -> torch.Tensor:
        return (2 * torch.randn(shape, generator=draw)).to(self.dtype)

    def slots(self, seq: int) -> torch.Tensor:
        tokens = torch.arange(self.lengths[seq])
        return self.table[seq, tokens // self.block_tokens].long() * self.block_tokens + tokens % self.block_tokens

    @property
    def keys(self) -> torch.Tensor:
        return self.cache[:, :, 0]

    @property
    def values(self) -> torch.Tensor:
        return self.cache[:, :, 1]

    def summarise_arguments(self) -> dict[str, object]:
        return {
            "keys": self.keys,
            "block_table": self.table,
            "begin_tokens": torch.zeros_like(self.lens),
            "lengths": self.lens,
            "format": self.form.code,
            "reference_keys": None,
            "record_table": self.table,
            "records": self.records,
            "counters": self.counters,
        }

    def summarise(self) -> None:
        ops.summarise_blocks(**self.summarise_arguments())

    def decode_arguments(self, budget: float = math.inf) -> dict[str, object]:
        """Arguments of decode; outputs and workspace are poisoned, counters are new."""
        seqs, heads = self.query.shape[:2]
        size = ops.decode_workspace_bytes(self.lens, heads, self.kv_heads, self.head_dim, self.form.code)
        pages = math.ceil(max(self.lengths) / self.form.page_tokens)
        return {
            "query": self.query,
            "keys": self.keys,
            "values": self.values,
            "block_table": self.table,
            "lengths": self.lens,
            "records": self.records,
            "record_table": self.table,
            "format": self.form.code,
            "reference_keys": None,
            "scale": self.scale,
            "budget": budget,
            "workspace": torch.full((size,), POISON, dtype=torch.uint8),
            "output": torch.full_like(self.query, math.nan),
            "lse": torch.full((seqs, heads), math.nan),
            "counters": torch.zeros(len(ops.COUNTERS), dtype=torch.int64),
            "selected": torch.full((seqs, self.kv_heads, pages), POISON, dtype=torch.uint8),
        }

    def decode(self, budget: float) -> dict[str, object]:
        arguments = self.decode_arguments(budget)
        ops.decode(**arguments)
        return arguments

    def attention(self, seq: int, head: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse of one query head over the given tokens, in double precision."""
        kv_head = head // self.group
        keys = self.keys_of[seq][tokens, kv_head].double()
        values = self.values_of[seq][tokens, kv_head].double()
        logits = keys @ self.query[seq, head].double() * self.scale
        return torch.softmax(logits, 0) @ values, torch.logsumexp(logits, 0)

    def tokens_of(self, selected: torch.Tensor, seq: int, kv_head: int) -> torch.Tensor:
        """The tokens in the pages that a row of `selected` names."""
        pages = selected[seq, kv_head].nonzero().flatten()
        tokens = (pages[:, None] * self.form.page_tokens + torch.arange(self.form.page_tokens)).flatten()
        return tokens[tokens < self.lengths[seq]]


def counters_of(arguments: dict[str, object]) -> dict[str, int]:
    return dict(zip(ops.COUNTERS, arguments["counters"].tolist(), strict=True))
