"""What a selector keeps of a captured attention trace: retained mass and output error.

A trace is a .safetensors file. Of each layer L, one KV head and the query heads that share it:
`layerL.q` [heads, steps, d], `layerL.k` and `layerL.v` [n, d] as float16, bfloat16 or float32, `layerL.pos` int32
[steps]. Queries and keys are post-RoPE, queries unscaled; step t sits at position pos[t] and attends to keys
0 .. pos[t]. Metadata: "layers", the numbers of the layers with commas between, and "scale", the softmax scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locks import ops
from locks.budget import budget_tokens
from locks.formats import HEAD_DIMS, Format

_FLOATS = ("F16", "BF16", "F32")


class TraceError(ValueError):
    """A file that is no trace; the message names the part, what it holds and what was expected."""


@dataclass(frozen=True)
class LayerTrace:
    """Captured attention of one layer and one KV head, as float32."""

    layer: int
    queries: Tensor  # [heads, steps, d]
    keys: Tensor  # [n, d]
    values: Tensor  # [n, d]
    positions: Tensor  # int32 [steps]
    scale: float


@dataclass(frozen=True)
class Row:
    """The quality of one selector on one layer: means over steps and heads."""

    layer: int
    selector: str
    format: str
    budget_tokens: int  # tokens that the budget allows on this trace
    retained_oracle: float  # attention mass in the pages of the exact log-sum-exp, in [0, 1]
    retained: float  # the same for the selector
    output_error: float  # |o - o_dense| / |o_dense|
    bytes_per_record: int  # for 16 tokens

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


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


def measure(trace: LayerTrace, selector: str, summary_format: Format, budget: float) -> Row:
    """Runs a selector on one layer. `budget` is as locks.budget.parse_budget returns it.

    Raises RuntimeError for an unknown selector. Its threads are torch's.
    """
    result = torch.empty(4, dtype=torch.float64)
    ops.measure_quality(
        trace.queries, trace.keys, trace.values, trace.positions, trace.scale, selector, summary_format.code, budget,
        result,
    )
    retained_oracle, retained, output_error, bytes_per_record = result.tolist()
    return Row(
        layer=trace.layer,
        selector=selector,
        format=summary_format.name,
        budget_tokens=budget_tokens(budget, trace.keys.shape[0], summary_format.page_tokens),
        retained_oracle=retained_oracle,
        retained=retained,
        output_error=output_error,
        bytes_per_record=int(bytes_per_record),
    )


def evaluate(trace: Trace, selector: str, summary_format: Format, budget: float) -> Iterator[Row]:
    """The quality on each layer of the trace, in its order."""
    for layer in trace.layers:
        yield measure(trace.read(layer), selector, summary_format, budget)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
