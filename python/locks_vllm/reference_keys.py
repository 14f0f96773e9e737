"""The reference key of a layer: one constant vector for each KV head, taken off every centroid.

It is fixed before the first token, since records are shared between requests through the prefix cache. In order of
preference: the calibration file, the mean of the rotated key bias, nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from locks import ops
from vllm.config import VllmConfig

from locks_vllm.calibration import read_calibration
from locks_vllm.key_bias import key_bias

# Positions over which the rotated key bias is averaged.
BIAS_POSITIONS = 4096


def _rotated(keys: torch.Tensor) -> torch.Tensor:
    rows = keys.float().contiguous().clone()
    ops.rotate(rows)
    return rows


def _from_calibration(path: Path, layer: int, shape: tuple[int, int]) -> torch.Tensor:
    name = f"layer{layer}.reference_key"
    key = read_calibration(path, name)
    if key is None:
        raise ValueError(f"locks.reference_keys: {path}: no tensor {name!r}, expected one for each LOCKS layer")
    if tuple(key.shape) != shape:
        raise ValueError(f"locks.reference_keys: {path}: {name} has shape {tuple(key.shape)}, expected {shape}")
    return key


def _mean_rotary(bias: torch.Tensor, vllm_config: VllmConfig) -> torch.Tensor:
    """The mean over positions of the bias under vLLM's rotary embedding."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = vllm_config.model_config.hf_text_config
    num_heads, head_dim = bias.shape
    rotary = get_rope(
        head_dim,
        max_position=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
        dtype=torch.float32,
    )
    count = min(BIAS_POSITIONS, config.max_position_embeddings)
    keys = bias.reshape(1, -1).repeat(count, 1)
    _, rotated = rotary.forward_native(torch.arange(count), keys.clone(), keys)
    return rotated.float().mean(0).reshape(num_heads, head_dim)


def reference_key(
    vllm_config: VllmConfig,
    layer: int,
    num_query_heads: int,
    shape: tuple[int, int],
    calibration: Path | None,
    improved: bool,
) -> torch.Tensor | None:
    """The reference key [kv_heads, d] of a layer in rotated channels, float32 on the CPU, or None for zero."""
    if not improved:
        return None
    with torch.device("cpu"):  # vLLM loads models with the GPU as the default device
        if calibration is not None:
            return _rotated(_from_calibration(calibration, layer, shape))
        bias = key_bias(vllm_config, layer, num_query_heads, shape)
        return None if bias is None else _rotated(_mean_rotary(bias, vllm_config))
