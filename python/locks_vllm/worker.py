"""Calls into a running engine, as a worker extension of vLLM:

    LLM(..., worker_extension_cls="locks_vllm.worker.LocksWorkerExtension")
    llm.collective_rpc("locks_set_budget", args=(512,))

Each call returns one answer for each worker. A call that fails raises in the caller, and the engine goes on serving.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from locks.budget import parse_budget
from locks.formats import BLOCK_TOKENS

from locks_vllm.capture import Capture, as_plain

if TYPE_CHECKING:
    from locks_vllm.gpu_layer import GpuLayer
    from locks_vllm.layer import LocksLayer

# Cache blocks that are rebuilt at a time when records are verified.
_VERIFY_BLOCKS = 4096
# The bytes of a record that are the same in all of its format; the hash of its keys follows (src/summary/README.md).
_MARK = slice(-8, -4)


def _plain(budget: float) -> int | float | str:
    """A budget as the option spells it: answers may travel as JSON, which has no infinity."""
    if math.isinf(budget):
        return "all"
    return budget if budget < 1 else int(budget)


class LocksWorkerExtension:
    """Mixed into vLLM's worker."""

    def _locks_layers(self) -> dict[str, LocksLayer | GpuLayer]:
        from locks_vllm.serving import locks_of

        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        found = {name: locks for name, layer in layers.items() if (locks := locks_of(layer)) is not None}
        if not found:
            raise RuntimeError(
                "LOCKS is not in use: start vLLM with --additional-config '{\"locks\": {}}', and on a GPU with"
                " --attention-backend CUSTOM"
            )
        return found

    def locks_set_budget(self, budget: int | float | str) -> int | float | str:
        """Sets the budget of all layers from the next step on; the values are those of the option `budget`."""
        layers, value = self._locks_layers(), parse_budget(budget)
        for layer in layers.values():
            layer.budget = value
        return _plain(value)

    def locks_counters(self) -> dict[str, dict[str, int]]:
        """What each layer has done since the start or the last reset."""
        return {name: layer.read_counters() for name, layer in self._locks_layers().items()}

    def locks_reset_counters(self) -> None:
        """Sets the counters of all layers to zero."""
        for layer in self._locks_layers().values():
            layer.reset_counters()

    def locks_describe(self) -> dict[str, dict[str, Any]]:
        """Format, budget and sizes of each layer, and the classes that serve it."""
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        return {
            name: {
                "impl": type(context[name].impl).__qualname__,
                "format": layer.format.name,
                "page_tokens": layer.format.page_tokens,
                "kv_heads": layer.num_kv_heads,
                "record_bytes": layer.records.record_bytes,
                "budget": _plain(layer.budget),
                "reference_key": layer.reference_keys is not None,
            }
            for name, layer in self._locks_layers().items()
        }

    def locks_set_evaluation(self, on: bool) -> None:
        """Whether decode steps also measure what they retain. Results gather until `locks_evaluation` fetches them."""
        if not isinstance(on, bool):
            raise ValueError(f"locks_set_evaluation: on = {on!r}, expected True or False")
        for layer in self._locks_layers().values():
            layer.evaluate = on

    def locks_evaluation(self) -> dict[str, dict[str, Any]]:
        """Fetches and clears what evaluation gathered: for each layer its page size and its last 1024 decode steps.

        A step holds for each of its rows the length, the retained mass (exact, mean over query heads) and the pages
        that were read, in base64: `np.unpackbits` of the bytes, cut to kv_heads * pages, is the mask [kv_heads, pages].
        """
        answer = {}
        for name, layer in self._locks_layers().items():
            steps = [evaluation.as_dict() for evaluation in layer.evaluations]
            layer.evaluations.clear()
            answer[name] = {
                "page_tokens": layer.format.page_tokens,
                "num_kv_heads": layer.num_kv_heads,
                "steps": steps,
            }
        return answer

    def locks_capture_start(
        self, layers: list[int], kv_heads: list[list[int]], first_query: int, length: int
    ) -> list[dict[str, Any]]:
        """From the next step on, each of these layers keeps its KV heads of one request, which must run alone: keys and
        values up to `length` tokens, and the queries from position `first_query` on. Tells for each layer its softmax
        scale and what `locks_capture_read` will answer: query heads of a KV head, head size, bytes of an element."""
        from locks_vllm.serving import locks_of
        from vllm.model_executor.models.utils import extract_layer_index

        if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():  # type: ignore[attr-defined]
            raise RuntimeError("locks_capture_start: steps run in CUDA graphs; start vLLM with --enforce-eager")
        if self.vllm_config.parallel_config.tensor_parallel_size != 1:  # type: ignore[attr-defined]
            raise RuntimeError("locks_capture_start: tensor parallelism is not supported; start vLLM on one device")
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        served = {extract_layer_index(name): name for name in self._locks_layers()}
        for number, heads in zip(layers, kv_heads, strict=True):
            if number not in served:
                names = ", ".join(map(str, sorted(served)))
                raise ValueError(f"locks_capture_start: layer {number} is not served by LOCKS; served are {names}")
            count = locks_of(context[served[number]]).num_kv_heads
            for head in heads:
                if not 0 <= head < count:
                    raise ValueError(
                        f"locks_capture_start: KV head {head} of layer {number}, expected 0 to {count - 1}"
                    )
        self.locks_capture_stop()
        about = []
        for number, heads in zip(layers, kv_heads, strict=True):
            attention = context[served[number]]
            layer = locks_of(attention)
            group = layer.num_query_heads // layer.num_kv_heads
            layer.capture = Capture(heads, group, first_query, length)
            element = attention.kv_cache_torch_dtype.itemsize
            about.append({"scale": layer.scale, "group": group, "head_dim": layer.head_dim, "element_bytes": element})
        return about

    def locks_capture_read(self, layer: int) -> dict[str, dict[str, Any]]:
        """Fetches and ends the capture of a layer: `locks_vllm.capture.from_plain` makes tensors of its parts."""
        from vllm.model_executor.models.utils import extract_layer_index

        for name, locks in self._locks_layers().items():
            if extract_layer_index(name) == layer and locks.capture is not None:
                parts = locks.capture.read()
                locks.capture = None
                return {part: as_plain(tensor) for part, tensor in parts.items()}
        raise RuntimeError(f"locks_capture_read: layer {layer} has no capture; call locks_capture_start first")

    def locks_capture_stop(self) -> None:
        """Drops the captures of all layers."""
        for layer in self._locks_layers().values():
            layer.capture = None

    def locks_verify_records(self) -> dict[str, int]:
        """Builds every record of the pool again from the keys beside it and compares bytes.

        The header of a record is cleared while its block is incomplete, so a record with a valid header, in any cache
        block, used or free, must equal a fresh build.
        """
        totals = {"checked": 0, "mismatched": 0}
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        for name, layer in self._locks_layers().items():
            checked, mismatched = verify_records(layer, context[name].kv_cache)
            totals["checked"] += checked
            totals["mismatched"] += mismatched
        return totals


def verify_records(layer: LocksLayer | GpuLayer, kv_cache: torch.Tensor) -> tuple[int, int]:
    """Records with a valid header in the pool, and how many of them differ from a fresh build."""
    keys, records = layer.keys(kv_cache), layer.records.records()
    if records.shape[0] != keys.shape[0] or records.shape[2] * BLOCK_TOKENS != keys.shape[2]:
        raise RuntimeError(
            "locks_verify_records: keys and records have block tables of their own in this model, which mixes kinds of"
            " attention; verification needs a model with full attention only"
        )
    mark = _fresh_records(layer, keys, torch.zeros(1, dtype=torch.int32, device=keys.device))[0, 0, 0, _MARK]
    valid = (records[..., _MARK] == mark).all(-1)
    blocks = valid.flatten(1).any(1).nonzero().flatten()
    checked = mismatched = 0
    for begin in range(0, blocks.shape[0], _VERIFY_BLOCKS):  # torch's split gives one empty part of nothing
        some = blocks[begin : begin + _VERIFY_BLOCKS]
        some_valid = valid[some]
        same = (_fresh_records(layer, keys, some.to(torch.int32)) == records[some]).all(-1)
        checked += int(some_valid.sum())
        mismatched += int((some_valid & ~same).sum())
    return checked, mismatched


def _fresh_records(layer: LocksLayer | GpuLayer, keys: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Records of some cache blocks, int32 [count], built from their keys: [count, kv_heads, records a block, bytes]."""
    count, block_tokens, device = blocks.shape[0], keys.shape[2], keys.device
    fresh = torch.zeros(count, *layer.records.records().shape[1:], dtype=torch.uint8, device=device)
    torch.ops.locks.summarise_blocks(
        keys,
        blocks[:, None],
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.full((count,), block_tokens, dtype=torch.int32, device=device),
        layer.format.code,
        layer.reference_keys,
        torch.arange(count, dtype=torch.int32, device=device)[:, None],
        fresh,
        None,
    )
    return fresh
