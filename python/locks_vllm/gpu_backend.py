"""The attention backend on NVIDIA GPUs: vLLM's FlashAttention for prompts, LOCKS for decodes.

`LocksBackend` is what `--attention-backend CUSTOM` names. Layers that LOCKS does not serve, because they have a sliding
window or are listed in `dense_layers`, are FlashAttention layers in every respect.

Keys and values lie as FlashAttention writes them, in vLLM's head-major layout:
`[num_blocks, kv_heads, block_size, 2 d]`, a token's key and value side by side, a page of one head one contiguous run.

A step of one layer that has prompts: vLLM's kernel writes all keys and values to the cache, the records of the blocks
that the prompts completed are built and the prompts attend through FlashAttention; then the decode rows do theirs in
three launches (`torch.ops.locks.decode_step`). In a step without prompts these three launches are all: the first of
them writes the keys and values too. A batch of decodes runs in a full CUDA graph: its launches have fixed shapes, and
lengths, tables, slots, plan and workspace lie at fixed addresses. Batches with prompts run attention outside of graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from locks_vllm.compat import HeadMajor
from locks_vllm.gpu_layer import GpuLayer
from locks_vllm.gpu_metadata import LocksBuilder, LocksMetadata, options_from
from locks_vllm.gpu_state import GpuState
from locks_vllm.options import LocksOptions
from locks_vllm.refusals import engine_reasons
from locks_vllm.serving import ServesLocks, locks_of


class LocksBackend(HeadMajor, FlashAttentionBackend):
    """FlashAttention, but for its implementation, metadata, layout, and who writes to the cache."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return LocksImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return LocksBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Whether the backend can serve; each reason ends vLLM's start with its text."""
        reasons = super().validate_configuration(*args, **kwargs)
        vllm_config = get_current_vllm_config_or_none()
        return reasons if vllm_config is None else [*reasons, *engine_reasons(vllm_config, LocksImpl.platform)]


class LocksImpl(ServesLocks, FlashAttentionImpl):
    """One attention layer."""

    platform = "cuda"
    can_return_lse_for_decode = False  # vLLM's own question before it splits contexts over GPUs

    @staticmethod
    def options_from(vllm_config: VllmConfig) -> LocksOptions:
        return options_from(vllm_config)

    def create_layer(self, **parts: Any) -> GpuLayer:
        return GpuLayer(
            **parts,
            state=self._shared_state(),
            evaluate=self.options.evaluate,
            captured=self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and not self.options.evaluate,
        )

    def _shared_state(self) -> GpuState:
        """That of the model's other LOCKS layers, made for the first one."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        others = (locks.state for layer in layers if (locks := locks_of(layer)) is not None)
        num_layers = sum(isinstance(layer, Attention) for layer in layers)
        return next(others, None) or GpuState(self.options, self.vllm_config, self.device(), num_layers)

    @staticmethod
    def device() -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.leaves_to_vllm(attn_metadata, output_scale, output_block_scale):
            if attn_metadata is not None:
                self._write_cache(layer, key, value, kv_cache, attn_metadata)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert isinstance(attn_metadata, LocksMetadata)
        count, prompts = attn_metadata.num_decodes, attn_metadata.prompts
        record_table = self.record_table()
        if prompts is not None:
            # All rows at once: a prompt may share a block that a decode row of this step completes.
            self._write_cache(layer, key, value, kv_cache, attn_metadata)
            self.locks.summarise(kv_cache, prompts, record_table[count:])
            super().forward(
                layer, query[count:], key[count:], value[count:], kv_cache, prompts.attention, output[count:]
            )
        if count:
            added = None if prompts is not None else (key[:count], value[:count], attn_metadata.slot_mapping[:count])
            self.locks.decode(query[:count], kv_cache, attn_metadata, record_table[:count], output[:count], added)
        self.show_capture(query, kv_cache, attn_metadata)
        return output

    def _write_cache(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
    ) -> None:
        """What vLLM does in front of a forward call that leaves it to vLLM: layers that share a cache write nothing."""
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
