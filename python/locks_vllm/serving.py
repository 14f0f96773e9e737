"""Which attention layers of a model LOCKS serves, and how it is attached to them: the same on every platform.

`ServesLocks` stands in front of vLLM's own implementation class. vLLM makes one object of it for each attention layer
and calls `process_weights_after_loading` when all layers exist and none has a cache yet, which is the moment to
register the cache layer of the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from locks.formats import BLOCK_TOKENS, Format
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from locks_vllm.auto_format import automatic_format
from locks_vllm.options import AUTO, LocksOptions
from locks_vllm.reference_keys import reference_key
from locks_vllm.refusals import NO_LAYER, refuse_engine, refuse_layer
from locks_vllm.room import slot_bytes_for
from locks_vllm.served_layer import ServedLayer
from locks_vllm.shard import shard_of
from locks_vllm.summary_cache import SUFFIX, LocksSummaryLayer

logger = init_logger("vllm.locks")


def locks_of(layer: Any) -> Any:
    """The LOCKS side of a vLLM layer, None if vLLM's own code serves it."""
    return getattr(getattr(layer, "impl", None), "locks", None)


def mixes_attention(layers: Iterable[Any]) -> bool:
    """Whether some cache layer of a model is not full attention."""
    return any(
        isinstance(layer, AttentionLayerBase)
        and not isinstance(layer, LocksSummaryLayer)
        and (type(layer) is not Attention or layer.sliding_window is not None)
        for layer in layers
    )


class ServesLocks:
    """Mixed into a vLLM implementation class, in front of it. `locks` is None in layers that LOCKS leaves to vLLM."""

    platform: ClassVar[str]  # as the refusals call it

    # Of vLLM's class, for this process's part of the heads.
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        refuse_engine(vllm_config, self.platform)
        options = self.options_from(vllm_config)
        options.check_layers(vllm_config.model_config.hf_text_config.num_hidden_layers)
        self.options = options
        self.vllm_config = vllm_config
        self.locks: Any = None  # the platform's ServedLayer

    @staticmethod
    def options_from(vllm_config: VllmConfig) -> LocksOptions:
        raise NotImplementedError

    def create_layer(self, **parts: Any) -> ServedLayer:
        """The platform's LOCKS side of this layer. parts: the arguments of ServedLayer, but for the device."""
        raise NotImplementedError

    def leaves_to_vllm(self, attn_metadata: Any, *output_scales: torch.Tensor | None) -> bool:
        """Whether a forward call is vLLM's own: of a layer that it serves, or in a profiling run, which has no metadata
        and computes nothing in any backend. Raises NotImplementedError for output scales in a call that is LOCKS's."""
        if self.locks is None or attn_metadata is None:
            return True
        if any(scale is not None for scale in output_scales):
            raise NotImplementedError("LOCKS: fused output quantisation is not supported")
        return False

    def show_capture(self, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any) -> None:
        """Shows a step of a LOCKS layer to its capture, if it has one."""
        if self.locks.capture is not None:
            self.locks.capture.take(query, self.locks.keys(kv_cache), self.locks.values(kv_cache), attn_metadata)

    def record_table(self) -> torch.Tensor:
        """The block table of this layer's records in the step that runs."""
        return get_forward_context().attn_metadata[self.locks.records.prefix].block_table

    def serves(self, layer: Any, prefix: str) -> bool:
        """Whether a layer of this model is LOCKS's. Subclasses of Attention are other kinds, such as chunked-local."""
        return (
            type(layer) is Attention
            and isinstance(layer.impl, type(self))
            and layer.sliding_window is None
            and extract_layer_index(prefix) not in self.options.dense_layers
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls it again when weights are reloaded."""
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        if self.locks is not None:
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        prefix, layer = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        served = [name for name, other in layers.items() if self.serves(other, name)]
        if not served:
            raise NotImplementedError(NO_LAYER)
        if prefix in served or layer.kv_sharing_target_layer_name in served or layer.attn_type != AttentionType.DECODER:
            refuse_layer(layer, prefix)
        if prefix not in served:
            return
        attention = sum(isinstance(other, Attention) for other in layers.values())
        logger.info_once(
            "LOCKS serves the decode steps of %d of %d attention layers: %s", len(served), attention, str(self.options)
        )
        self.locks = self._attach(layer, prefix, mixes_attention(layers.values()))
        layers[self.locks.records.prefix] = self.locks.records

    def _attach(self, layer: Attention, prefix: str, mixed: bool) -> ServedLayer:
        index = extract_layer_index(prefix)
        calibration = self.options.reference_keys
        shard = shard_of(self.vllm_config, self.num_heads, self.num_kv_heads)
        shape = (shard.all_kv_heads, self.head_size)
        name = self.options.format_of(index)
        if name == AUTO:
            name = automatic_format(self.vllm_config, index, shard.all_query_heads, shape, calibration)
        summary_format = Format.parse(name)
        record_bytes = summary_format.record_bytes(self.head_size)
        key_value_bytes = 2 * BLOCK_TOKENS * self.head_size * layer.kv_cache_torch_dtype.itemsize
        slot_bytes = slot_bytes_for(record_bytes, key_value_bytes, mixed)
        records = LocksSummaryLayer(prefix + SUFFIX, self.num_kv_heads, record_bytes, slot_bytes)
        reference = reference_key(
            self.vllm_config, index, shard.all_query_heads, shape, calibration, improved=summary_format.improved
        )
        return self.create_layer(
            records=records,
            num_query_heads=self.num_heads,
            head_dim=self.head_size,
            scale=self.scale,
            summary_format=summary_format,
            reference_keys=None if reference is None else shard.cut(reference),
        )
