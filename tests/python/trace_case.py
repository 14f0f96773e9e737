"""Traces for the tests: a real one, and a small random one that tests may spoil."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SLICE = Path(__file__).parents[1] / "data" / "smollm2_slice.safetensors"


def write_real_trace(path: Path) -> Path:
    """Layer 9 of SmolLM2 from tests/data, in the layout of a trace."""
    with safe_open(str(SLICE), framework="pt") as stored:
        tensors = {f"layer9.{name}": stored.get_tensor(name) for name in ("q", "k", "v", "pos")}
        scale = stored.metadata()["scale"]
    save_file(tensors, path, metadata={"layers": "9", "scale": scale})
    return path


def small_tensors() -> dict[str, torch.Tensor]:
    """Two layers of 640 tokens, 2 heads, 3 steps."""
    draw = torch.Generator().manual_seed(11)
    tensors = {}
    for layer in (0, 4):
        tensors[f"layer{layer}.q"] = torch.randn(2, 3, 64, generator=draw).half()
        tensors[f"layer{layer}.k"] = torch.randn(640, 64, generator=draw).half()
        tensors[f"layer{layer}.v"] = torch.randn(640, 64, generator=draw).half()
        tensors[f"layer{layer}.pos"] = torch.tensor([500, 600, 639], dtype=torch.int32)
    return tensors


METADATA = {"layers": "0,4", "scale": "0.125"}


def write_small_trace(
    path: Path, changed: dict[str, torch.Tensor | None] | None = None, metadata: dict[str, str] | None = None
) -> Path:
    """The small trace, with some tensors replaced, or left out where the new one is None."""
    tensors = {**small_tensors(), **(changed or {})}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata=METADATA if metadata is None else metadata)
    return path
