"""What differs between the vLLM releases that LOCKS runs on, 0.26 and 0.32. Nothing else depends on the release.

A difference is told by what the installed vLLM has, not by its number, so that the releases between and after these two
work wherever they look like one of them. vLLM itself is imported by what needs it only: `locks doctor` reads the list
of tested releases without it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from locks.formats import BLOCK_TOKENS

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf

# The releases that tools/check_versions.py tests whole, oldest first.
TESTED_VLLM = ("0.26.0", "0.32.0")

# What VLLM_KV_CACHE_LAYOUT may say where caches lie head-major: 0.26's name for it, which 0.32 takes too, and 0.32's.
HEAD_MAJOR_NAMES = ("HND", "LBHNC")


class HeadMajor:
    """Mixed into an attention backend whose caches lie layer by layer as [blocks, kv_heads, block_size, channels].

    0.26 asks for the one layout that a backend needs, 0.32 for all that it can read, best first.
    """

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout  # type: ignore[attr-defined]  # not in 0.26

        return (KVCacheLayout.LBHNC,)


class RecordCache(HeadMajor):
    """Mixed into the backend that holds records: the shape of its cache.

    0.26 asks the backend for shape and order of the dimensions. 0.32 has this shape for every cache, and names the
    cache for which it asks the block sizes.
    """

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(BLOCK_TOKENS)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)


def cpu_block_tokens() -> int:
    """What a cache block's tokens must be a multiple of in vLLM's backend on the CPU: 16 in 0.26, 32 in 0.32."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min(size.base for size in CPUAttentionBackend.get_supported_kernel_block_sizes())


def changed_step(common: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
    """The metadata of a step with other rows: what vLLM keeps in it of the old rows is dropped.

    That is every private field, of which each release has its own, and in 0.32 the rows' places in vLLM's tables.
    """
    names = {item.name for item in fields(common)}
    dropped = [name for name in names if name.startswith("_") or name == "req_idx"]
    return replace(common, **dict.fromkeys(dropped), **changes)


# Fields of FlashAttention's metadata without a default in 0.26; 0.32 knows no cascade attention.
_WITHOUT_CASCADE = {
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
}


def without_cascade(metadata_class: type) -> dict[str, Any]:
    """Arguments of FlashAttention's metadata, or a class derived from it, that say: no cascade attention."""
    names = {item.name for item in fields(metadata_class)}
    return {name: value for name, value in _WITHOUT_CASCADE.items() if name in names}
