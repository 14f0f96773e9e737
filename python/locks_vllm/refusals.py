"""What LOCKS does not serve in this version, refused by name when vLLM starts.

The two tables below, and models in which no layer is left, are all there is; the documentation prints them. Each
refusal of a table names the setting, its value and the way out. Nothing is refused where LOCKS is not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from locks.formats import BLOCK_TOKENS, HEAD_DIMS

from locks_vllm.compat import HEAD_MAJOR_NAMES, cpu_block_tokens


@dataclass(frozen=True)
class Refusal:
    """One unsupported thing: `found` gives the offending value, or None where there is nothing to refuse."""

    what: str
    setting: str
    way_out: str
    found: Callable[[Any], Any]
    platform: str | None = None  # "cpu" or "cuda"; None for both

    def message(self, value: Any) -> str:
        return f"LOCKS: {self.what}: {self.setting} = {value!r} is not supported; {self.way_out}"


def _above_one(value: int | None) -> int | None:
    return value if value is not None and value > 1 else None


def _model(config: Any, name: str) -> Any:
    return getattr(config.model_config, name, None) or None


def _float32(config: Any) -> str | None:
    dtype = str(_model(config, "dtype")).removeprefix("torch.")
    return dtype if dtype == "float32" else None


def _token_major_layout(_config: Any) -> str | None:
    """vLLM would let the layout that a backend needs win, silently."""
    layout = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    return layout if layout and layout not in HEAD_MAJOR_NAMES else None


def _connector_of_equal_tensors(config: Any) -> str | None:
    """vLLM 0.26's NIXL connector stops later, with an assertion that does not name the records."""
    name = getattr(config.kv_transfer_config, "kv_connector", None)
    return name if name == "NixlConnector" else None


WITHOUT_LOCKS = "start vLLM without LOCKS"
OR_DENSE = 'list such layers in "dense_layers"; where all are such, ' + WITHOUT_LOCKS

# Read from vLLM's configuration, before the model is loaded.
ENGINE_REFUSALS = (
    Refusal("multi-head latent attention", "model_config.use_mla", WITHOUT_LOCKS, lambda c: _model(c, "use_mla")),
    Refusal(
        "bidirectional prompt ranges",
        "model_config.is_mm_prefix_lm",
        WITHOUT_LOCKS,
        lambda c: _model(c, "is_mm_prefix_lm"),
    ),
    Refusal(
        "reference sliding windows",
        "model_config.rswa_window",
        WITHOUT_LOCKS,
        lambda c: _model(c, "rswa_window"),
    ),
    Refusal(
        "state-space layers beside attention on the GPU",
        "model_config.is_hybrid",
        WITHOUT_LOCKS,
        lambda c: _model(c, "is_hybrid"),
        platform="cuda",
    ),
    Refusal("float32 on the GPU", "--dtype", "use bfloat16 or float16", _float32, platform="cuda"),
    Refusal(
        "token-major cache layout on the GPU",
        "VLLM_KV_CACHE_LAYOUT",
        "leave it unset, or use HND",
        _token_major_layout,
        platform="cuda",
    ),
    Refusal(
        "tensor parallelism on the CPU",
        "--tensor-parallel-size",
        "use 1",
        lambda c: _above_one(c.parallel_config.tensor_parallel_size),
        platform="cpu",
    ),
    Refusal(
        "decode context parallelism",
        "--decode-context-parallel-size",
        "use 1",
        lambda c: _above_one(c.parallel_config.decode_context_parallel_size),
    ),
    Refusal(
        "prefill context parallelism",
        "--prefill-context-parallel-size",
        "use 1",
        lambda c: _above_one(c.parallel_config.prefill_context_parallel_size),
    ),
    Refusal(
        "dual-batch overlap",
        "--enable-dbo",
        "leave it off",
        lambda c: True if c.parallel_config.use_ubatching else None,
    ),
    Refusal(
        "speculative decoding",
        "--speculative-config",
        "leave it out",
        lambda c: None if c.speculative_config is None else c.speculative_config.method,
    ),
    Refusal(
        "quantised KV cache",
        "--kv-cache-dtype",
        "use auto",
        lambda c: None if c.cache_config.cache_dtype == "auto" else c.cache_config.cache_dtype,
    ),
    Refusal(
        "NixlConnector, which needs cache tensors of one size",
        "--kv-transfer-config",
        "use another connector",
        _connector_of_equal_tensors,
    ),
    Refusal(
        "cache blocks that do not hold whole blocks",
        "--block-size",
        f"use a multiple of {BLOCK_TOKENS}",
        lambda c: c.cache_config.block_size if c.cache_config.block_size % BLOCK_TOKENS else None,
    ),
    Refusal(
        "cache blocks too small for the CPU kernels of vLLM 0.32",
        "--block-size",
        "use a multiple of 32",
        lambda c: c.cache_config.block_size if c.cache_config.block_size % cpu_block_tokens() else None,
        platform="cpu",
    ),
)

# Read from each attention layer that would use LOCKS, once the model is built.
LAYER_REFUSALS = (
    Refusal(
        "encoder and cross attention",
        "attn_type",
        WITHOUT_LOCKS,
        lambda layer: None if layer.attn_type == "decoder" else layer.attn_type,
    ),
    Refusal(
        "KV sharing across layers",
        "kv_sharing_target_layer_name",
        WITHOUT_LOCKS,
        lambda layer: layer.kv_sharing_target_layer_name,
    ),
    Refusal("ALiBi", "alibi_slopes", OR_DENSE, lambda layer: None if layer.impl.alibi_slopes is None else "given"),
    Refusal("logits soft cap", "logits_soft_cap", OR_DENSE, lambda layer: layer.impl.logits_soft_cap or None),
    Refusal("attention sinks", "sinks", OR_DENSE, lambda layer: None if layer.impl.sinks is None else "given"),
    Refusal(
        "value heads of another size",
        "head_size_v",
        OR_DENSE,
        lambda layer: None if layer.head_size_v == layer.head_size else layer.head_size_v,
    ),
    Refusal(
        "head size",
        "head_size",
        f"{OR_DENSE}; supported are {', '.join(map(str, HEAD_DIMS))}",
        lambda layer: None if layer.head_size in HEAD_DIMS else layer.head_size,
    ),
)

# Told once it is known which layers are left; as a row of the documentation's table.
_NO_LAYER = (
    "no layer to serve: every attention layer has a sliding window or is listed", "dense_layers", WITHOUT_LOCKS
)
NO_LAYER = "LOCKS: {} in {}; {}".format(*_NO_LAYER)


def table_rows() -> list[tuple[str, str, str]]:
    """Of everything that is refused: what it is, the setting, the way out."""
    refusals = (*ENGINE_REFUSALS, *LAYER_REFUSALS)
    return [*((refusal.what, refusal.setting, refusal.way_out) for refusal in refusals), _NO_LAYER]


def engine_reasons(vllm_config: Any, platform: str) -> Iterator[str]:
    """What LOCKS does not serve of a vLLM configuration, a message each. platform: "cpu" or "cuda"."""
    for refusal in ENGINE_REFUSALS:
        if refusal.platform in (None, platform):
            value = refusal.found(vllm_config)
            if value is not None:
                yield refusal.message(value)


def refuse_engine(vllm_config: Any, platform: str) -> None:
    """Raises NotImplementedError for a vLLM configuration that LOCKS does not serve."""
    for reason in engine_reasons(vllm_config, platform):
        raise NotImplementedError(reason)


def refuse_layer(layer: Any, prefix: str) -> None:
    """Raises NotImplementedError for an attention layer that LOCKS does not serve."""
    for refusal in LAYER_REFUSALS:
        value = refusal.found(layer)
        if value is not None:
            raise NotImplementedError(f"{refusal.message(value)} (layer {prefix})")
