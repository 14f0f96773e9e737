"""A captured attention trace: the one definition of the file, for who reads it and who writes it.

A trace is a .safetensors file. Of each layer L, one KV head and the query heads that share it:
`layerL.q` [heads, steps, d], `layerL.k` and `layerL.v` [n, d] as float16, bfloat16 or float32, `layerL.pos` int32
[steps]. Queries and keys are post-RoPE, queries unscaled; step t sits at position pos[t] and attends to keys
0 .. pos[t]. Metadata: "layers", the numbers of the layers with commas between, and "scale", the softmax scale; where
it is known which tokens carry the answer, "answer_spans": begin:end of each run of them with commas between, the end
not included. Further metadata says where a trace comes from, and no reader depends on it.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from locks.formats import HEAD_DIMS

_FLOATS = ("F16", "BF16", "F32")

Span = tuple[int, int]  # tokens begin .. end - 1


class TraceError(ValueError):
    """A file that is no trace; the message names the part, what it holds and what was expected."""


@dataclass(frozen=True)
class LayerTrace:
    """Captured attention of one layer and one KV head. As it is read, in float32."""

    layer: int
    queries: Tensor  # [heads, steps, d]
    keys: Tensor  # [n, d]
    values: Tensor  # [n, d]
    positions: Tensor  # int32 [steps]
    scale: float


class Trace:
    """An open trace: its layers are checked and read one at a time."""

    def __init__(self, path: str | Path) -> None:
        """Raises TraceError for a file that cannot be read or whose metadata is wrong."""
        self.path = Path(path)
        try:
            if not self.path.is_file():
                raise TraceError(f"{self.path}: {'not a regular file' if self.path.exists() else 'no such file'}")
            self._file = safe_open(str(self.path), framework="pt")
            metadata = self._file.metadata() or {}
            self._names = frozenset(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise TraceError(f"{self.path}: not a readable .safetensors file: {_one_line(error)}") from None
        self.layers = self._read_layers(metadata)
        self.scale = self._read_scale(metadata)
        self.answer_spans = self._read_answer_spans(metadata)

    def read(self, layer: int) -> LayerTrace:
        """Raises TraceError for a tensor that is missing, has another shape or dtype, or holds NaN or infinity."""
        keys = self._floats(layer, "k", dims=2)
        num_tokens, head_dim = keys.shape
        if head_dim not in HEAD_DIMS:
            raise self._wrong(layer, "k", f"head size {head_dim}", f"one of {', '.join(map(str, HEAD_DIMS))}")
        values = self._floats(layer, "v", dims=2)
        if values.shape != keys.shape:
            raise self._wrong(layer, "v", f"shape {list(values.shape)}", f"that of k, {list(keys.shape)}")
        queries = self._floats(layer, "q", dims=3)
        if queries.shape[2] != head_dim:
            raise self._wrong(layer, "q", f"shape {list(queries.shape)}", f"[heads, steps, {head_dim}]")
        positions = self._tensor(layer, "pos", ("I32",), dims=1)
        if positions.shape[0] != queries.shape[1]:
            raise self._wrong(layer, "pos", f"shape {list(positions.shape)}", f"[{queries.shape[1]}], the steps of q")
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= num_tokens:
            raise self._wrong(layer, "pos", f"positions {low} to {high}", f"0 to {num_tokens - 1}")
        return LayerTrace(layer, queries, keys, values, positions, self.scale)

    def _read_layers(self, metadata: dict[str, str]) -> list[int]:
        text = self._metadata(metadata, "layers")
        parts = text.split(",")
        if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts) or len(set(parts)) != len(parts):
            raise TraceError(
                f"{self.path}: metadata \"layers\" = {text!r}, expected layer numbers such as \"3,9,18\""
            )
        return [int(part) for part in parts]

    def _read_scale(self, metadata: dict[str, str]) -> float:
        text = self._metadata(metadata, "scale")
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not (math.isfinite(scale) and scale > 0):
            raise TraceError(
                f"{self.path}: metadata \"scale\" = {text!r}, expected a positive number such as \"0.125\""
            )
        return scale

    def _read_answer_spans(self, metadata: dict[str, str]) -> list[Span]:
        text = metadata.get("answer_spans", "")
        parts = [re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", part) for part in text.split(",")] if text else []
        spans = [(int(part[1]), int(part[2])) for part in parts if part]
        if len(spans) != len(parts) or any(begin >= end for begin, end in spans):
            raise TraceError(
                f"{self.path}: metadata \"answer_spans\" = {text!r}, expected begin:end of tokens, such as"
                " \"17:23,40:44\""
            )
        return spans

    def _metadata(self, metadata: dict[str, str], name: str) -> str:
        if name not in metadata:
            raise TraceError(f"{self.path}: metadata \"{name}\" is missing, expected \"layers\" and \"scale\"")
        return metadata[name]

    def _floats(self, layer: int, part: str, dims: int) -> Tensor:
        tensor = self._tensor(layer, part, _FLOATS, dims).float().contiguous()
        bad = ~torch.isfinite(tensor)
        if bad.any():
            index = [int(i) for i in bad.nonzero()[0]]
            raise self._wrong(layer, part, f"{tensor[tuple(index)].item()} at {index}", "finite numbers")
        return tensor

    def _tensor(self, layer: int, part: str, dtypes: tuple[str, ...], dims: int) -> Tensor:
        name = f"layer{layer}.{part}"
        if name not in self._names:
            raise TraceError(f"{self.path}: {name} is missing, expected q, k, v and pos of each layer in \"layers\"")
        try:
            view = self._file.get_slice(name)
            dtype, shape = view.get_dtype(), view.get_shape()
            if dtype not in dtypes:
                raise self._wrong(layer, part, f"dtype {dtype}", " or ".join(dtypes))
            if len(shape) != dims or 0 in shape:
                raise self._wrong(layer, part, f"shape {list(shape)}", f"{dims} dimensions, none of them empty")
            return self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise TraceError(f"{self.path}: {name} cannot be read: {_one_line(error)}") from None

    def _wrong(self, layer: int, part: str, got: str, expected: str) -> TraceError:
        return TraceError(f"{self.path}: layer{layer}.{part} has {got}, expected {expected}")


def layer_bytes(heads: int, steps: int, tokens: int, head_dim: int, element_bytes: int) -> int:
    """What one layer takes in a trace."""
    return (2 * tokens + heads * steps) * head_dim * element_bytes + steps * torch.int32.itemsize


def write_trace(
    path: Path, layers: Sequence[LayerTrace], metadata: dict[str, str], answer_spans: Sequence[Span] = ()
) -> int:
    """Writes a new trace and returns its bytes. `metadata` says where it comes from.

    The file appears whole or not at all, and only if `Trace` reads it. Raises FileExistsError where one is already,
    TraceError for tensors that are no trace, OSError.
    """
    (scale,) = {layer.scale for layer in layers}
    tensors = {}
    for layer in layers:
        # Layers may have been given one tensor of positions; safetensors takes no tensor twice.
        parts = {"q": layer.queries, "k": layer.keys, "v": layer.values, "pos": layer.positions.clone()}
        tensors |= {f"layer{layer.layer}.{name}": part.contiguous() for name, part in parts.items()}
    own = {"layers": ",".join(str(layer.layer) for layer in layers), "scale": repr(scale)}
    if answer_spans:
        own["answer_spans"] = ",".join(f"{begin}:{end}" for begin, end in answer_spans)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name[:40]}.") as folder:
        new = Path(folder, path.name)
        save_file(tensors, new, metadata=metadata | own)
        written = Trace(new)
        for number in written.layers:
            written.read(number)
        num_bytes = new.stat().st_size
        if path.exists():
            raise FileExistsError(f"{path}: exists already")
        os.replace(new, path)
    return num_bytes


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
