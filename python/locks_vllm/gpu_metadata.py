"""Splits a step on the GPU into decode rows, which LOCKS serves, and prompts, which vLLM's FlashAttention serves.

vLLM puts the rows with one new token first. Nearly all of them are decodes. A prompt's last token may be among them,
since vLLM chooses graphs by shape alone: it is flagged, and read whole by the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from locks.ops import ROW_IS_EXACT, ROW_IS_REBUILT
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

from locks_vllm.compat import changed_step, without_cascade
from locks_vllm.gpu_layer import GpuLayer
from locks_vllm.metrics import export
from locks_vllm.options import LocksOptions, options_of
from locks_vllm.serving import locks_of
from locks_vllm.summary_cache import cache_share

logger = init_logger("vllm.locks")


def options_from(vllm_config: VllmConfig) -> LocksOptions:
    """Who names the backend wants it: without options, the defaults hold."""
    return options_of(vllm_config.additional_config) or LocksOptions()


@dataclass(frozen=True)
class Rows:
    """What the host knows of the rows of a step."""

    num_decodes: int  # rows in front with at most one new token; one token each, padded rows included
    exact: np.ndarray  # bool [num_decodes]: the token is a prompt's
    rebuilt: np.ndarray  # bool [rows]: a prompt whose context may have come without records
    decoding: int  # tokens that attend within the budget
    prompt_tokens: int  # tokens that attend exactly

    @classmethod
    def of(cls, common: CommonAttentionMetadata, rebuild_context: bool) -> Rows:
        if common.is_prefilling is None:
            raise NotImplementedError("LOCKS: this vLLM does not tell prompts from generated tokens (is_prefilling)")
        starts = np.asarray(common.query_start_loc_cpu)
        new_tokens = starts[1:] - starts[:-1]
        prefilling = np.zeros(common.num_reqs, dtype=bool)
        known = np.asarray(common.is_prefilling)[: common.num_reqs]  # rows that pad a graph may be missing
        prefilling[: known.shape[0]] = known
        longer = new_tokens > 1
        num_decodes = int(longer.argmax()) if longer.any() else common.num_reqs
        exact = prefilling[:num_decodes]
        rebuilt = np.zeros_like(prefilling)
        if rebuild_context and prefilling.any():
            bound = common.seq_lens_cpu_upper_bound  # exact for prompts
            assert bound is not None
            rebuilt = prefilling & (np.asarray(bound)[: common.num_reqs] > new_tokens)
        decoding = int((new_tokens[:num_decodes] > 0).sum() - exact.sum())
        return cls(num_decodes, exact, rebuilt, decoding, int(new_tokens.sum()) - decoding)

    def flags(self, device: torch.device) -> torch.Tensor | None:
        """uint8 [num_decodes] for the plan, None where no row has a flag."""
        if not self.exact.any():
            return None
        flags = ROW_IS_EXACT * self.exact.astype(np.uint8)
        flags |= ROW_IS_REBUILT * self.rebuilt[: self.num_decodes].astype(np.uint8)
        # From pinned memory of its own, which torch keeps until the copy is done.
        return async_tensor_h2d(flags, device=device)


@dataclass
class Prompts:
    """The rows behind the decodes."""

    attention: FlashAttentionMetadata
    block_table: torch.Tensor
    begin_tokens: torch.Tensor  # int32 [rows], on the device: the tokens before are in the cache
    lengths: torch.Tensor  # int32 [rows], on the device
    verified: torch.Tensor | None  # uint8 [rows], on the device: 1 where the tokens before may lack their records


@dataclass
class LocksMetadata(FlashAttentionMetadata):
    """A step. As FlashAttention's metadata it describes all rows."""

    num_decodes: int = 0
    prompts: Prompts | None = None
    exact_rows: tuple[int, ...] = ()  # decode rows that are prompts

    @cached_property
    def decode_lengths(self) -> list[int]:
        """Of the decode rows, for an evaluation: waits for the device, once for all layers of a step."""
        return self.seq_lens[: self.num_decodes].tolist()


def behind(common: CommonAttentionMetadata, num_rows: int) -> CommonAttentionMetadata:
    """The same without its first rows, of one token each."""
    if num_rows == 0:
        return common
    return changed_step(
        common,
        query_start_loc=common.query_start_loc[num_rows:] - num_rows,
        query_start_loc_cpu=common.query_start_loc_cpu[num_rows:] - num_rows,
        seq_lens=common.seq_lens[num_rows:],
        seq_lens_cpu_upper_bound=None,
        num_reqs=common.num_reqs - num_rows,
        num_actual_tokens=common.num_actual_tokens - num_rows,
        block_table_tensor=common.block_table_tensor[num_rows:],
        slot_mapping=common.slot_mapping[num_rows:],
        positions=None,
        is_prefilling=None,
    )


class LocksBuilder(FlashAttentionMetadataBuilder):
    """Builds a step's metadata once for all layers of a cache group, and plans its decode rows on the device."""

    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        # Batches of decodes are captured whole. Evaluation fetches what each step did, which no graph can.
        evaluate = options_from(vllm_config).evaluate
        return AttentionCGSupport.NEVER if evaluate else AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names if name in context]
        self._layers: list[GpuLayer] = [locks for layer in layers if (locks := locks_of(layer)) is not None]
        self._serves_all = len(self._layers) == len(layers)
        # A connector may load keys without their records.
        self._rebuild_context = vllm_config.kv_transfer_config is not None
        if not self._layers:
            return
        self._state = self._layers[0].state
        self._counts = self._layers[0].counts
        for layer in self._layers:
            layer.counts = self._counts
        export(vllm_config)
        self._init_reorder_batch_threshold(1)
        if vllm_config.cache_config.num_gpu_blocks:
            logger.info_once("%s", cache_share(context.values(), vllm_config))

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        if not self._layers:
            return super().build(0, common, fast_build)
        if common.causal is not True:
            raise NotImplementedError("LOCKS: attention that is not causal is not supported; start vLLM without LOCKS")
        rows = Rows.of(common, self._rebuild_context)
        if rows.num_decodes:
            self._state.plan_rows(common.seq_lens[: rows.num_decodes], rows.flags(self.device))
        self._counts.add(rows.decoding, rows.prompt_tokens)
        return self._metadata(common, rows, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        common = common_attn_metadata
        if not self._layers:
            return super().build(0, common)
        self._state.plan_nothing()
        return self._metadata(common, Rows.of(common, rebuild_context=False), fast_build=False)

    def _metadata(self, common: CommonAttentionMetadata, rows: Rows, fast_build: bool) -> LocksMetadata:
        whole = None
        if rows.num_decodes == 0 or not self._serves_all:
            whole = super().build(0, common, fast_build)
        metadata = _described(common) if whole is None else LocksMetadata(**_values(whole))
        metadata.num_decodes = rows.num_decodes
        metadata.exact_rows = tuple(rows.exact.nonzero()[0].tolist())
        if rows.num_decodes < common.num_reqs:
            metadata.prompts = self._prompts(common, rows, whole)
        return metadata

    def _prompts(self, common: CommonAttentionMetadata, rows: Rows, whole: FlashAttentionMetadata | None) -> Prompts:
        rest = behind(common, rows.num_decodes)
        if rows.num_decodes == 0:
            assert whole is not None
            attention = whole
        else:
            # Scheduled within the call: the schedule made beforehand lies in one buffer, and may be `whole`'s.
            attention = super().build(0, rest, fast_build=True)
        rebuilt = rows.rebuilt[rows.num_decodes :]
        verified = async_tensor_h2d(rebuilt.astype(np.uint8), device=self.device) if rebuilt.any() else None
        begin_tokens = rest.compute_num_computed_tokens()
        return Prompts(attention, rest.block_table_tensor, begin_tokens, rest.seq_lens, verified)


def _values(metadata: FlashAttentionMetadata) -> dict[str, Any]:
    return {item.name: getattr(metadata, item.name) for item in fields(FlashAttentionMetadata)}


def _described(common: CommonAttentionMetadata) -> LocksMetadata:
    """The step without FlashAttention's schedule, which nobody uses here."""
    return LocksMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        **without_cascade(LocksMetadata),
    )
