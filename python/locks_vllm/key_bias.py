"""The bias that a checkpoint adds to the keys of a layer, read from its files.

A large bias is common to all keys: the reference key takes it off, and the format `auto` reacts to it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch

from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.logger import init_logger

logger = init_logger("vllm.locks")


def key_bias(
    vllm_config: VllmConfig, layer: int, num_query_heads: int, shape: tuple[int, int]
) -> torch.Tensor | None:
    """The key bias [kv_heads, d] of a layer, before the rotary embedding; None if there is none or no real weights.

    A bias that cannot be read is told once and taken for none: it moves rounding only, and the engine still serves.
    """
    if vllm_config.load_config.load_format == "dummy":
        return None
    try:
        return _read_bias(_checkpoint_folder(vllm_config), layer, num_query_heads, shape)
    except Exception as error:
        model = vllm_config.model_config.model
        logger.warning_once("LOCKS: the key bias of %s cannot be used, it is taken for zero: %s", model, error)
        return None


def _checkpoint_folder(vllm_config: VllmConfig) -> Path:
    """Where the weights that vLLM has just loaded lie; a model named by its repository is in the local cache."""
    config = vllm_config.model_config
    if Path(config.model).is_dir():
        return Path(config.model)
    from huggingface_hub import snapshot_download

    cache = vllm_config.load_config.download_dir
    return Path(snapshot_download(config.model, revision=config.revision, cache_dir=cache, local_files_only=True))


@lru_cache(maxsize=1)  # every layer asks, and a large checkpoint has many files
def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Which file of a local safetensors checkpoint holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def _tensor_of_checkpoint(folder: Path, suffixes: tuple[str, ...]) -> tuple[str, torch.Tensor] | None:
    """The first tensor of a checkpoint whose name ends in one of `suffixes`."""
    files = _files_of_tensors(folder)
    for suffix in suffixes:
        for name, path in files.items():
            if name.endswith(suffix):
                with safe_open(path, "pt") as file:
                    return suffix, file.get_tensor(name).float()
    return None


def _read_bias(folder: Path, layer: int, num_query_heads: int, shape: tuple[int, int]) -> torch.Tensor | None:
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
