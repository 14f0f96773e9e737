"""The attention backend on the CPU.

`LocksCpuBackend` takes the place of vLLM's `CPU_ATTN`. A layer without LOCKS, because the option is absent, the layer
has a sliding window or is listed in `dense_layers`, is served by the inherited code, in vLLM's own cache layout.

A LOCKS layer uses vLLM's cache tensor `[num_blocks, kv_heads, block_size, 2 d]` as
`[num_blocks, kv_heads, 2, block_size, d]`: for each block and head the rows of the keys, then those of the values, in
plain order. vLLM's kernels pack keys in an order that differs between instruction sets (amx, vec, vec16, neon) and
versions, and a token's channels are scattered in it. In the plain order a page is one contiguous run for each head,
which is what scoring and reading pages costs memory traffic for. The tensor, its size and its accounting are vLLM's.

In each step, and for each layer: vLLM calls `do_kv_cache_update`, then `forward`, which first builds the records of the
blocks that the step completed and then attends. Tokens of prompts attend exactly, also when a prompt comes in chunks
or its last chunk is a single token; so do tokens that vLLM computes again, several at once, after a preemption.
Generated tokens attend to the pages that the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from locks_vllm.layer import LocksLayer, Prompt, Step
from locks_vllm.metrics import export
from locks_vllm.options import LocksOptions, options_of
from locks_vllm.serving import ServesLocks, locks_of


def current_options() -> LocksOptions | None:
    return options_of(get_current_vllm_config().additional_config)


class LocksCpuBackend(CPUAttentionBackend):
    """vLLM's own backend, but for its implementation and metadata if the option `locks` is given."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl if current_options() is None else LocksCpuImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return LocksCpuMetadataBuilder


@dataclass
class LocksCpuMetadata(CPUAttentionMetadata):
    step: Step | None = None


class LocksCpuMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds to vLLM's metadata what LOCKS layers need of a step, computed once for all of them."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._serves_locks = any(locks_of(layers[name]) is not None for name in layer_names if name in layers)
        # A connector may load keys without their records: then a prompt's records are rebuilt from its first token on.
        self._rebuild_context = vllm_config.kv_transfer_config is not None
        if self._serves_locks:
            export(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._serves_locks:
            return metadata
        if metadata.causal is not True:
            raise NotImplementedError("LOCKS: attention that is not causal is not supported; start vLLM without LOCKS")
        values = {item.name: getattr(metadata, item.name) for item in fields(CPUAttentionMetadata)}
        return LocksCpuMetadata(**values, step=build_step(common_attn_metadata, self._rebuild_context))


def build_step(common: CommonAttentionMetadata, rebuild_context: bool) -> Step:
    """Splits the rows of a step into prompts and decodes. A row decodes if its one token lies beyond the prompt."""
    lengths = common.seq_lens.to(torch.int32)
    starts = common.query_start_loc_cpu.to(torch.int32)
    query_lengths = starts[1:] - starts[:-1]
    prefilling = common.is_prefilling
    if prefilling is None:
        raise NotImplementedError("LOCKS: this vLLM does not tell prompts from generated tokens (is_prefilling)")
    decodes = (query_lengths == 1) & ~prefilling
    begin_tokens = lengths - query_lengths
    if rebuild_context:
        begin_tokens = torch.where(prefilling, torch.zeros_like(begin_tokens), begin_tokens)
    table = common.block_table_tensor
    starts_list, lengths_list = starts.tolist(), lengths.tolist()
    prompts = [
        Prompt(row, starts_list[row], starts_list[row + 1], lengths_list[row])
        for row in (~decodes & (query_lengths > 0)).nonzero().flatten().tolist()
    ]
    num_decodes = int(decodes.sum())
    all_decode = num_decodes == decodes.shape[0]
    rows = None if all_decode else decodes.nonzero().flatten()
    return Step(
        block_table=table,
        lengths=lengths,
        begin_tokens=begin_tokens,
        prompts=prompts,
        decode_rows=rows,
        decode_tokens=None if rows is None else starts[rows].long(),
        decode_table=table if rows is None else table.index_select(0, rows),
        decode_lengths=lengths if rows is None else lengths.index_select(0, rows),
        num_decodes=num_decodes,
    )


class LocksCpuImpl(ServesLocks, CPUAttentionBackendImpl):
    """One attention layer while the option `locks` is given."""

    platform = "cpu"

    @staticmethod
    def options_from(vllm_config: VllmConfig) -> LocksOptions:
        options = options_of(vllm_config.additional_config)
        assert options is not None
        return options

    def create_layer(self, **parts: Any) -> LocksLayer:
        return LocksLayer(
            **parts,
            budget=self.options.budget,
            evaluate=self.options.evaluate,
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.locks is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            self.locks.write(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.leaves_to_vllm(attn_metadata, output_scale, output_block_scale):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert isinstance(attn_metadata, LocksCpuMetadata) and attn_metadata.step is not None
        self.show_capture(query, kv_cache, attn_metadata)
        self.locks.forward(query, key, value, kv_cache, attn_metadata.step, self.record_table(), output)
        return output
