"""Runs the plug-in's GPU code in vLLM's CPU engine: operators emulated, FlashAttention replaced by exact attention.

Importing this module in a worker puts the emulation in place; the worker does so when it is named as its extension.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_emulation
from locks_vllm.gpu_backend import LocksBackend, LocksImpl
from locks_vllm.prefill import attend_prompt
from locks_vllm.worker import LocksWorkerExtension


def exact_attention(
    self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any, *_: Any
) -> torch.Tensor:
    if metadata is None:
        return output.fill_(0)
    starts, block_tokens = metadata.query_start_loc.tolist(), kv_cache.shape[2]
    for row, length in enumerate(metadata.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        blocks = metadata.block_table[row].long()[: -(-length // block_tokens)]
        both = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = both.split(self.head_size, -1)
        if tokens.start < tokens.stop:
            attend_prompt(query[tokens], keys, values, self.scale, output[tokens])
    return output


def write_cache(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    block_tokens, used = kv_cache.shape[2], slot_mapping >= 0
    block, place = slot_mapping[used] // block_tokens, slot_mapping[used] % block_tokens
    kv_cache[block, :, place] = torch.cat([key, value], -1)[: slot_mapping.shape[0]][used]


class EmulatedImpl(LocksImpl):
    platform = "emulated"  # what LOCKS refuses on one platform only does not concern it

    @staticmethod
    def device() -> torch.device:
        return torch.device("cpu")


class EmulatedBackend(LocksBackend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[EmulatedImpl]:
        return EmulatedImpl


class EmulatedWorker(LocksWorkerExtension):
    """The calls of the plug-in, in a worker where its GPU code runs."""


for _name in gpu_emulation.OPERATORS:
    setattr(torch.ops.locks, _name, getattr(gpu_emulation, _name))
FlashAttentionImpl.forward = exact_attention
FlashAttentionImpl.do_kv_cache_update = write_cache
register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.EmulatedBackend")
