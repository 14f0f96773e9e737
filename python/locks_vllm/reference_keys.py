"""The reference key of a layer: one constant vector for each KV head, taken off every centroid.

It is fixed before the first token, since records are shared between requests through the prefix cache. In order of
preference: the calibration file, the mean of the rotated key bias, nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from locks import ops
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

# Positions over which the rotated key bias is averaged.
BIAS_POSITIONS = 4096


def _rotated(keys: torch.Tensor) -> torch.Tensor:
    rows = keys.float().contiguous().clone()
    ops.rotate(rows)
    return rows


def _from_calibration(path: Path, layer: int, shape: tuple[int, int]) -> torch.Tensor:
    name = f"layer{layer}.reference_key"
    with safe_open(path, "pt") as file:
        if name not in set(file.keys()):
            raise ValueError(f"locks.reference_keys: {path}: no tensor {name!r}, expected one for each LOCKS layer")
        key = file.get_tensor(name).float()
    if tuple(key.shape) != shape:
        raise ValueError(f"locks.reference_keys: {path}: {name} has shape {tuple(key.shape)}, expected {shape}")
    if not torch.isfinite(key).all():
        raise ValueError(f"locks.reference_keys: {path}: {name} holds NaN or infinity, expected finite numbers")
    return key


def _checkpoint_folder(vllm_config: VllmConfig) -> Path:
    """Where the weights that vLLM has just loaded lie; a model named by its repository is in the local cache."""
    config = vllm_config.model_config
    if Path(config.model).is_dir():
        return Path(config.model)
    from huggingface_hub import snapshot_download

    cache = vllm_config.load_config.download_dir
    return Path(snapshot_download(config.model, revision=config.revision, cache_dir=cache, local_files_only=True))


def _tensor_of_checkpoint(folder: Path, suffixes: tuple[str, ...]) -> tuple[str, torch.Tensor] | None:
    """The first tensor of a local safetensors checkpoint whose name ends in one of `suffixes`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    else:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
    for suffix in suffixes:
        for name, path in files.items():
            if name.endswith(suffix):
                with safe_open(path, "pt") as file:
                    return suffix, file.get_tensor(name).float()
    return None


def _key_bias(folder: Path, layer: int, num_query_heads: int, shape: tuple[int, int]) -> torch.Tensor | None:
    """The key bias [kv_heads, d] of a layer, or None if the checkpoint has none."""
    prefix = f"layers.{layer}.self_attn."
    merged = tuple(f"{prefix}{name}.bias" for name in ("qkv_proj", "query_key_value"))
    found = _tensor_of_checkpoint(folder, (f"{prefix}k_proj.bias", *merged))
    if found is None:
        return None
    name, bias = found
    kv_size = shape[0] * shape[1]
    if name in merged:
        bias = bias[num_query_heads * shape[1] :][:kv_size]
    if bias.numel() != kv_size:
        raise ValueError(f"{name} has {bias.numel()} values, expected {kv_size}")
    return bias.reshape(shape)


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
    """The reference key [kv_heads, d] of a layer in rotated channels, float32, or None for zero."""
    if not improved:
        return None
    if calibration is not None:
        return _rotated(_from_calibration(calibration, layer, shape))
    if vllm_config.load_config.load_format == "dummy":
        return None
    model = vllm_config.model_config.model
    try:
        bias = _key_bias(_checkpoint_folder(vllm_config), layer, num_query_heads, shape)
        return None if bias is None else _rotated(_mean_rotary(bias, vllm_config))
    except Exception as error:
        # The reference key moves rounding only: without it records are coarser, and the engine still serves.
        logger.warning_once("LOCKS: the key bias of %s cannot be used, the reference key is zero: %s", model, error)
        return None
