"""The summary format `auto`: `fine`, and `fine8` for the layers where 4 bits lose much.

A layer takes `fine8` if its calibration file says that `fine` keeps over two points less attention mass than the exact
oracle (`layerN.gap`, in points), or, where the file does not say, if its keys have a large bias.
"""

from __future__ import annotations

from pathlib import Path

from vllm.config import VllmConfig

from locks_vllm.calibration import read_calibration
from locks_vllm.key_bias import key_bias

LARGEST_GAP = 2.0  # points of retained mass
# Root mean square over the channels of a KV head. Qwen2.5-Coder-0.5B has two such layers to tell apart: keys of its
# layer 0 have a mean of 34, and 4 bits lose 17 points there; those of layer 3 a mean of 2.5, and they lose little.
LARGEST_BIAS = 10.0


def automatic_format(
    vllm_config: VllmConfig, layer: int, num_query_heads: int, shape: tuple[int, int], calibration: Path | None
) -> str:
    """The name of the format of a layer with `shape` [kv_heads, d] of keys."""
    gap = None if calibration is None else _calibrated_gap(calibration, layer)
    if gap is not None:
        return "fine8" if gap > LARGEST_GAP else "fine"
    bias = key_bias(vllm_config, layer, num_query_heads, shape)
    large = bias is not None and bool(bias.pow(2).mean(1).sqrt().max() > LARGEST_BIAS)
    return "fine8" if large else "fine"


def _calibrated_gap(path: Path, layer: int) -> float | None:
    name = f"layer{layer}.gap"
    gap = read_calibration(path, name)
    if gap is not None and gap.numel() != 1:
        raise ValueError(f"locks.reference_keys: {path}: {name} has {gap.numel()} values, expected one number")
    return None if gap is None else float(gap)
