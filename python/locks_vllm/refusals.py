"""What LOCKS does not serve in this version, refused by name when vLLM starts.

The two tables below are all there is; the documentation prints them. Each refusal names the setting, its value and
the way out. Nothing is refused while the option `locks` is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from locks.formats import BLOCK_TOKENS, HEAD_DIMS


@dataclass(frozen=True)
class Refusal:
    """One unsupported thing: `found` gives the offending value, or None where there is nothing to refuse."""

    what: str
    setting: str
    way_out: str
    found: Callable[[Any], Any]

    def message(self, value: Any) -> str:
        return f"LOCKS: {self.what}: {self.setting} = {value!r} is not supported; {self.way_out}"


def _above_one(value: int | None) -> int | None:
    return value if value is not None and value > 1 else None


def _model(config: Any, name: str) -> Any:
    return getattr(config.model_config, name, None) or None


WITHOUT_LOCKS = 'start vLLM without "locks" in --additional-config'
OR_DENSE = 'list the layer in "dense_layers"'

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
        "tensor parallelism on the CPU",
        "--tensor-parallel-size",
        "use 1",
        lambda c: _above_one(c.parallel_config.tensor_parallel_size),
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
        'use "auto"',
        lambda c: None if c.cache_config.cache_dtype == "auto" else c.cache_config.cache_dtype,
    ),
    Refusal(
        "cache blocks that do not hold whole blocks",
        "--block-size",
        f"use a multiple of {BLOCK_TOKENS}",
        lambda c: c.cache_config.block_size if c.cache_config.block_size % BLOCK_TOKENS else None,
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

NO_LAYER = (
    "LOCKS: no layer to serve: every attention layer has a sliding window or is listed in dense_layers; "
    + WITHOUT_LOCKS
)


def _refuse(refusals: tuple[Refusal, ...], subject: Any, where: str = "") -> None:
    for refusal in refusals:
        value = refusal.found(subject)
        if value is not None:
            raise NotImplementedError(refusal.message(value) + where)


def refuse_engine(vllm_config: Any) -> None:
    """Raises NotImplementedError for a vLLM configuration that LOCKS does not serve."""
    _refuse(ENGINE_REFUSALS, vllm_config)


def refuse_layer(layer: Any, prefix: str) -> None:
    """Raises NotImplementedError for an attention layer that LOCKS does not serve."""
    _refuse(LAYER_REFUSALS, layer, f" (layer {prefix})")


class NoGpuBackend:
    """Stands where a GPU backend would be registered."""

    def __init_subclass__(cls) -> None:
        raise TypeError("NoGpuBackend is not meant to be subclassed")

    @classmethod
    def validate_configuration(cls, *_args: Any, **_kwargs: Any) -> list[str]:
        """vLLM's question whether a backend can serve; each reason ends its start with that text."""
        return ["LOCKS has no GPU backend in this version; leave --attention-backend CUSTOM out, or run on the CPU"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"
