"""Takes from a running engine what one request gives to an attention layer: the queries of its last positions, and all
of its keys and values, for some of the KV heads.

While a layer has a `Capture`, each of its forward calls shows it the step: queries as the model hands them to the
attention, after RoPE and whatever norms the model has, keys and values as they lie in the cache. It needs the request
to be alone in the engine, all of its prompt to be computed there (no prefix from a cache), and attention outside of
CUDA graphs.
"""

from __future__ import annotations

import base64
from typing import Any

import torch


class Capture:
    """Of some KV heads, keys and values 0 .. length - 1; of the query heads that share them, first_query ..
    length - 1."""

    def __init__(self, kv_heads: list[int], group: int, first_query: int, length: int) -> None:
        self.kv_heads = kv_heads
        self.first_query = first_query
        self.length = length
        self._heads = [head * group + member for head in kv_heads for member in range(group)]
        self._queries: list[torch.Tensor] = []  # [tokens, group, d] of each step
        self._next = first_query  # position whose query comes next
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._problem: str | None = None  # told when it is read: a step that fails would end the engine

    def take(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> None:
        """Sees a step of the layer. query: [tokens, heads, d]; keys, values: of the cache,
        [num_blocks, kv_heads, block_size, d]; metadata: vLLM's of the step."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        rows = [row for row in range(len(lengths)) if starts[row] < starts[row + 1]]
        if len(rows) != 1:
            self._problem = f"a step of {len(rows)} requests ran during the capture, expected one request alone"
            return
        (row,) = rows
        start, length = starts[row], lengths[row]
        context = length - (starts[row + 1] - start)
        begin, end = max(context, self._next), min(length, self.length)
        if begin < end:
            if begin > self._next:
                self._problem = f"positions {self._next} to {begin - 1} came from the prefix cache, without queries"
                return
            tokens = slice(start + begin - context, start + end - context)
            self._queries.append(query[tokens, self._heads].to("cpu", copy=True))
            self._next = end
        if context < self.length <= length:
            blocks = metadata.block_table[row, : -(-self.length // keys.shape[2])].long()
            self._keys, self._values = self._rows(keys, blocks), self._rows(values, blocks)

    def _rows(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """[kv_heads, length, d]"""
        rows = [cache[:, head].index_select(0, blocks).flatten(0, 1)[: self.length] for head in self.kv_heads]
        return torch.stack(rows).cpu()

    def read(self) -> dict[str, torch.Tensor]:
        """queries [kv_heads * group, steps, d], keys and values [kv_heads, length, d], on the CPU. Raises
        RuntimeError."""
        if self._problem is not None:
            raise RuntimeError(f"locks_capture_read: {self._problem}")
        if self._keys is None or self._values is None or self._next < self.length:
            raise RuntimeError(f"locks_capture_read: the request has not reached {self.length} tokens")
        return {"queries": torch.cat(self._queries).transpose(0, 1), "keys": self._keys, "values": self._values}


def as_plain(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as plain JSON values: answers may travel as JSON."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode(),
    }


def from_plain(value: dict[str, Any]) -> torch.Tensor:
    """The tensor that `as_plain` took apart."""
    data = bytearray(base64.b64decode(value["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, value["dtype"])).view(value["shape"])
