"""Which heads of a layer this process holds, under tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig


@dataclass(frozen=True)
class Shard:
    """KV heads [first, first + count) of `all_kv_heads` are here."""

    all_query_heads: int
    all_kv_heads: int
    first: int
    count: int

    def cut(self, heads: torch.Tensor) -> torch.Tensor:
        """The rows of this process from a tensor of a row for each KV head."""
        return heads[self.first : self.first + self.count].contiguous()


def shard_of(vllm_config: VllmConfig, num_query_heads: int, num_kv_heads: int) -> Shard:
    """The shard of a layer that has these numbers of heads here."""
    size = vllm_config.parallel_config.tensor_parallel_size
    if size == 1:
        return Shard(num_query_heads, num_kv_heads, 0, num_kv_heads)
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    heads_of_model = vllm_config.model_config.get_total_num_kv_heads()
    if heads_of_model >= size:
        return Shard(size * num_query_heads, size * num_kv_heads, rank * num_kv_heads, num_kv_heads)
    # Fewer KV heads than processes: neighbours hold copies of one head.
    return Shard(size * num_query_heads, heads_of_model, rank * heads_of_model // size, num_kv_heads)
