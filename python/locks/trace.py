"""A captured attention trace: the one definition of the file, for who reads it and who writes it.

A trace is a .safetensors file. Of each layer L, one KV head and the query heads that share it:
`layerL.q` [heads, steps, d], `layerL.k` and `layerL.v` [n, d] as float16, bfloat16 or float32, `layerL.pos` int32
[steps]. Of a layer with several KV heads, k and v are [KV heads, n, d], and q holds the heads of each in turn. Queries
and keys are post-RoPE, queries unscaled; step t sits at position pos[t] and attends to keys 0 .. pos[t].

Metadata: "layers", the numbers of the layers with commas between, and "scale", the softmax scale. Optional are
"repeat_chunks", which makes it a trace of a repeated context, as below; "kv_heads", which KV heads of the model each
layer has ("0,2" or "0+1+2,0+1+2"); "answer_spans", the tokens that carry the answer, begin:end of each run of them with
commas between, the end not included; "depth", where in the context the answer lies, in [0, 1]. Further metadata says
where a trace comes from, and no reader depends on it.

A trace of a repeated context also holds how the model attended while it was made to repeat the context, what lies
before the captured queries, a chunk at a time: each chunk in a pass of its own behind the whole context and a request
to repeat it. `layerL.repeat_q` [heads, rows, d] and `layerL.repeat_k` [rows, d] (of several KV heads, [KV heads, rows,
d]) are the queries and keys of those requests and repetitions, one pass after the other. Metadata "repeat_chunks":
begin:end:first:last of each chunk with commas between, the tokens begin .. end - 1 and the rows first .. last - 1.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
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
class Repeat:
    """How the model attended while it repeated its context: what an eviction by reconstruction looks at."""

    queries: Tensor  # [heads, rows, d]
    keys: Tensor  # [rows, d]
    chunks: Tensor  # int32 [chunks, 4]: tokens begin .. end - 1, and the rows first .. last - 1 that repeat them


@dataclass(frozen=True)
class LayerTrace:
    """Captured attention of one layer and one KV head. As it is read, in float32."""

    layer: int
    queries: Tensor  # [heads, steps, d]
    keys: Tensor  # [n, d]
    values: Tensor  # [n, d]
    positions: Tensor  # int32 [steps]
    scale: float
    kv_head: int = 0  # of the model, where the trace tells it
    repeat: Repeat | None = None


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
        self.depth = self._read_depth(metadata)
        self.repeat_chunks = self._read_repeat_chunks(metadata)
        self.metadata = metadata

    def read(self, layer: int) -> LayerTrace:
        """The KV head of a layer that has one. Raises TraceError, also if there are several."""
        heads = self.heads(layer)
        if len(heads) != 1:
            raise self._wrong(layer, "k", f"{len(heads)} KV heads", "one")
        return heads[0]

    def heads(self, layer: int) -> list[LayerTrace]:
        """The KV heads of a layer. Raises TraceError for a tensor that is missing, has another shape or dtype, or
        holds NaN or infinity, and for an answer that lies behind its keys."""
        keys = self._floats(layer, "k", dims=(2, 3))
        num_tokens, head_dim = keys.shape[-2:]
        if head_dim not in HEAD_DIMS:
            raise self._wrong(layer, "k", f"head size {head_dim}", f"one of {', '.join(map(str, HEAD_DIMS))}")
        self._check_answer_spans(layer, num_tokens)
        values = self._floats(layer, "v", dims=(2, 3))
        if values.shape != keys.shape:
            raise self._wrong(layer, "v", f"shape {list(values.shape)}", f"that of k, {list(keys.shape)}")
        count = keys.shape[0] if keys.dim() == 3 else 1
        queries = self._floats(layer, "q", dims=(3,))
        if queries.shape[2] != head_dim or queries.shape[0] % count != 0:
            several = f"a multiple of {count} " if count > 1 else ""
            raise self._wrong(layer, "q", f"shape {list(queries.shape)}", f"[{several}heads, steps, {head_dim}]")
        positions = self._tensor(layer, "pos", ("I32",), dims=(1,))
        if positions.shape[0] != queries.shape[1]:
            raise self._wrong(layer, "pos", f"shape {list(positions.shape)}", f"[{queries.shape[1]}], the steps of q")
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= num_tokens:
            raise self._wrong(layer, "pos", f"positions {low} to {high}", f"0 to {num_tokens - 1}")
        return [
            LayerTrace(layer, *parts, positions, self.scale, number, repeat)
            for number, repeat, *parts in zip(
                self._kv_heads(layer, count), self._repeats(layer, queries.shape[0], keys),
                queries.chunk(count), keys.view(count, num_tokens, head_dim), values.view(count, num_tokens, head_dim),
                strict=True,
            )
        ]

    def _repeats(self, layer: int, heads: int, keys: Tensor) -> list[Repeat | None]:
        """The repeated context of each KV head."""
        *several, num_tokens, head_dim = keys.shape
        count = several[0] if several else 1
        if not self.repeat_chunks:
            return [None] * count
        chunks = torch.tensor(self.repeat_chunks, dtype=torch.int32)
        rows, end = int(chunks[-1, 3]), int(chunks[-1, 1])
        if end > num_tokens:
            raise self._wrong(layer, "k", f"{num_tokens} tokens", f"{end}, the context of \"repeat_chunks\"")
        queries = self._floats(layer, "repeat_q", dims=(3,))
        repeat_keys = self._floats(layer, "repeat_k", dims=(len(keys.shape),))
        for name, tensor, shape in (
            ("repeat_q", queries, [heads, rows, head_dim]), ("repeat_k", repeat_keys, [*several, rows, head_dim])
        ):
            if list(tensor.shape) != shape:
                raise self._wrong(layer, name, f"shape {list(tensor.shape)}", f"{shape}")
        pairs = zip(queries.chunk(count), repeat_keys.view(count, rows, head_dim), strict=True)
        return [Repeat(*pair, chunks) for pair in pairs]

    def _kv_heads(self, layer: int, count: int) -> list[int]:
        text = self.metadata.get("kv_heads")
        if text is None:
            return list(range(count))
        parts = text.split(",")
        numbers = parts[self.layers.index(layer)].split("+") if len(parts) == len(self.layers) else []
        if len(numbers) != count or not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers):
            raise TraceError(
                f"{self.path}: metadata \"kv_heads\" = {text!r}, expected those of each layer, such as \"0,2\" or"
                f" \"0+1,0+1\", and {count} of layer {layer}"
            )
        return [int(number) for number in numbers]

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

    def _check_answer_spans(self, layer: int, num_tokens: int) -> None:
        """The metadata of a trace is read before its keys: only here is known how many tokens there are."""
        for begin, end in self.answer_spans:
            if end > num_tokens:
                raise TraceError(
                    f"{self.path}: metadata \"answer_spans\" has \"{begin}:{end}\", expected an end of at most"
                    f" {num_tokens}, the tokens of layer{layer}.k"
                )

    def _read_repeat_chunks(self, metadata: dict[str, str]) -> list[tuple[int, ...]]:
        text = metadata.get("repeat_chunks", "")
        parts = [part.split(":") for part in text.split(",")] if text else []
        number = re.compile("[0-9]{1,9}")
        chunks = [tuple(map(int, part)) for part in parts if len(part) == 4 and all(map(number.fullmatch, part))]
        token, row = chunks[0][0] if chunks else 0, 0
        for begin, end, first, last in chunks:
            if (begin, first) != (token, row) or begin >= end or first >= last:
                chunks = []
            token, row = end, last
        if len(chunks) != len(parts):
            raise TraceError(
                f"{self.path}: metadata \"repeat_chunks\" = {text!r}, expected begin:end:first:last of chunks that"
                " follow each other, rows from 0 on, such as \"4:2004:0:2011,2004:3000:2011:3030\""
            )
        return chunks

    def _read_depth(self, metadata: dict[str, str]) -> float | None:
        text = metadata.get("depth")
        if text is None:
            return None
        try:
            depth = float(text)
        except ValueError:
            depth = math.nan
        if not 0 <= depth <= 1:
            raise TraceError(f"{self.path}: metadata \"depth\" = {text!r}, expected a number in [0, 1]")
        return depth

    def _metadata(self, metadata: dict[str, str], name: str) -> str:
        if name not in metadata:
            raise TraceError(f"{self.path}: metadata \"{name}\" is missing, expected \"layers\" and \"scale\"")
        return metadata[name]

    def _floats(self, layer: int, part: str, dims: tuple[int, ...]) -> Tensor:
        tensor = self._tensor(layer, part, _FLOATS, dims).float().contiguous()
        bad = ~torch.isfinite(tensor)
        if bad.any():
            index = [int(i) for i in bad.nonzero()[0]]
            raise self._wrong(layer, part, f"{tensor[tuple(index)].item()} at {index}", "finite numbers")
        return tensor

    def _tensor(self, layer: int, part: str, dtypes: tuple[str, ...], dims: tuple[int, ...]) -> Tensor:
        name = f"layer{layer}.{part}"
        if name not in self._names:
            raise TraceError(f"{self.path}: {name} is missing, expected q, k, v and pos of each layer in \"layers\"")
        try:
            view = self._file.get_slice(name)
            dtype, shape = view.get_dtype(), view.get_shape()
            if dtype not in dtypes:
                raise self._wrong(layer, part, f"dtype {dtype}", " or ".join(dtypes))
            if len(shape) not in dims or 0 in shape:
                wanted = " or ".join(map(str, dims))
                raise self._wrong(layer, part, f"shape {list(shape)}", f"{wanted} dimensions, none of them empty")
            return self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise TraceError(f"{self.path}: {name} cannot be read: {_one_line(error)}") from None

    def _wrong(self, layer: int, part: str, got: str, expected: str) -> TraceError:
        return TraceError(f"{self.path}: layer{layer}.{part} has {got}, expected {expected}")


def layer_bytes(
    heads: int, steps: int, tokens: int, head_dim: int, element_bytes: int, num_kv_heads: int = 1, repeat_rows: int = 0
) -> int:
    """What one layer takes in a trace; `heads` query heads share each of its KV heads."""
    rows = num_kv_heads * (2 * tokens + heads * steps + (heads + 1) * repeat_rows)
    return rows * head_dim * element_bytes + steps * torch.int32.itemsize


def write_trace(
    path: Path, heads: Sequence[LayerTrace], metadata: dict[str, str], answer_spans: Sequence[Span] = ()
) -> int:
    """Writes a new trace and returns its bytes. KV heads of a layer stand side by side. `metadata` says where it
    comes from.

    The file appears whole or not at all, and only if `Trace` reads it. Raises FileExistsError where one is already,
    TraceError for tensors that are no trace, OSError.
    """
    (scale,) = {head.scale for head in heads}
    layers = {number: list(group) for number, group in groupby(heads, lambda head: head.layer)}
    tensors = {}
    for number, group in layers.items():
        keys, values = ([getattr(head, part) for head in group] for part in ("keys", "values"))
        parts = {
            "q": torch.cat([head.queries for head in group]),
            "k": torch.stack(keys) if len(group) > 1 else keys[0],
            "v": torch.stack(values) if len(group) > 1 else values[0],
            # Layers may have been given one tensor of positions; safetensors takes no tensor twice.
            "pos": group[0].positions.clone(),
        } | _repeat_parts(group)
        tensors |= {f"layer{number}.{name}": part.contiguous() for name, part in parts.items()}
    own = {
        "layers": ",".join(map(str, layers)),
        "scale": repr(scale),
        "kv_heads": ",".join("+".join(str(head.kv_head) for head in group) for group in layers.values()),
    }
    if heads[0].repeat is not None:
        own["repeat_chunks"] = ",".join(":".join(map(str, chunk)) for chunk in heads[0].repeat.chunks.tolist())
    if answer_spans:
        own["answer_spans"] = ",".join(f"{begin}:{end}" for begin, end in answer_spans)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name[:40]}.") as folder:
        new = Path(folder, path.name)
        save_file(tensors, new, metadata=metadata | own)
        written = Trace(new)
        for number in written.layers:
            written.heads(number)
        num_bytes = new.stat().st_size
        if path.exists():
            raise FileExistsError(f"{path}: exists already")
        os.replace(new, path)
    return num_bytes


def _repeat_parts(group: Sequence[LayerTrace]) -> dict[str, Tensor]:
    """The tensors of a layer's repeated context, if its KV heads have one."""
    repeats = [head.repeat for head in group if head.repeat is not None]
    if not repeats:
        return {}
    keys = [repeat.keys for repeat in repeats]
    return {
        "repeat_q": torch.cat([repeat.queries for repeat in repeats]),
        "repeat_k": torch.stack(keys) if len(keys) > 1 else keys[0],
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
