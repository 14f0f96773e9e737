"""Where the records live: a cache layer of vLLM's own beside each attention layer.

vLLM's cache manager walks every `AttentionLayerBase` in the static forward context. A `LocksSummaryLayer` registered
there, under `<attention layer>.locks_summary`, is counted, allocated, block-tabled, prefix-cached, preempted and copied
exactly like the keys and values that its records describe, and nothing of vLLM has to change.

A record of S bytes covers 16 tokens of one KV head. The layer declares S / 32 bfloat16 channels a token, which is the
same number of bytes, so that every part of vLLM that fills or moves caches by data type can handle them. The memory of
one cache block is `[kv_heads, block_size, S / 32]` bfloat16, read here as `[kv_heads, block_size / 16, S]` bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from locks_vllm.compat import RecordCache
from locks_vllm.room import BYTES_PER_CHANNEL

SUFFIX = ".locks_summary"


@dataclass
class LocksSummaryMetadata:
    """The block table of the records. In models with several kinds of attention it is not that of the keys."""

    block_table: torch.Tensor


class LocksSummaryMetadataBuilder(AttentionMetadataBuilder[LocksSummaryMetadata]):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LocksSummaryMetadata:
        return LocksSummaryMetadata(common_attn_metadata.block_table_tensor)


class LocksSummaryBackend(RecordCache, AttentionBackend):
    """Tells vLLM the shape of the records (in RecordCache). It attends to nothing and has no implementation class."""

    @staticmethod
    def get_name() -> str:
        return "LOCKS_SUMMARY"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("LOCKS_SUMMARY holds records and computes no attention")

    @staticmethod
    def get_builder_cls() -> type[LocksSummaryMetadataBuilder]:
        return LocksSummaryMetadataBuilder


class LocksSummaryLayer(nn.Module, AttentionLayerBase):
    """The records of one attention layer."""

    def __init__(self, prefix: str, num_kv_heads: int, record_bytes: int, slot_bytes: int) -> None:
        """`slot_bytes` >= `record_bytes` is the room for a record: more only where vLLM wants pages of equal size."""
        super().__init__()
        self.prefix = prefix
        self.num_kv_heads = num_kv_heads
        self.record_bytes = record_bytes
        self.slot_bytes = slot_bytes
        # vLLM binds the cache by assigning this attribute, more than once. It is read at each use and never kept.
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LocksSummaryBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.slot_bytes // BYTES_PER_CHANNEL,
            head_size_v=0,
            dtype=torch.bfloat16,
        )

    def records(self) -> torch.Tensor:
        """The cache as it is bound now, uint8 [num_blocks, kv_heads, block_size / 16, record_bytes]."""
        cache = self.kv_cache.view(torch.uint8).flatten(2)
        blocks = cache.shape[2] // self.slot_bytes
        return cache[:, :, : blocks * self.record_bytes].unflatten(2, (blocks, self.record_bytes))


def cache_share(layers: Iterable[Any], vllm_config: VllmConfig) -> str:
    """What the records take of the KV cache, once vLLM has decided on its size."""
    keys_values = records = 0.0  # bytes a token
    for layer in layers:
        spec = layer.get_kv_cache_spec(vllm_config) if isinstance(layer, AttentionLayerBase) else None
        if spec is None:
            continue
        if isinstance(layer, LocksSummaryLayer):
            records += spec.page_size_bytes / spec.block_size
        else:
            keys_values += spec.page_size_bytes / spec.block_size
    cache = vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    return (
        f"LOCKS: the records take {100 * records / (keys_values + records):.1f} % of the KV cache, which holds"
        f" {tokens} tokens; without them it would hold {int(tokens * records / keys_values)} more"
    )
