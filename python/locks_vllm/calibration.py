"""The calibration file: what was measured of a model beforehand, a tensor for each layer N.

    layerN.reference_key  [kv_heads, d]: the reference key, after the rotary embedding, in the channels of the cache
    layerN.gap            one number: points of attention mass that the format `fine` loses against the exact oracle
"""

from __future__ import annotations

from pathlib import Path

import torch

from safetensors import SafetensorError, safe_open


def read_calibration(path: Path, name: str) -> torch.Tensor | None:
    """The tensor as float32, None if the file has none of that name. Raises ValueError for a file that is none."""
    try:
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name).float() if name in set(file.keys()) else None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"locks.reference_keys: {path}: not a readable .safetensors file: {error}") from None
    if tensor is not None and not torch.isfinite(tensor).all():
        raise ValueError(f"locks.reference_keys: {path}: {name} holds NaN or infinity, expected finite numbers")
    return tensor
