"""Calls into a running engine that let one engine serve every budget and selector of an evaluation, in turn:

    LLM(..., worker_extension_cls="locks_vllm.evaluation.LocksEvaluationExtension", enforce_eager=True)
    llm.collective_rpc("locks_arm_start", args=("quest", None, 16, 0.02))
    ... requests ...
    llm.collective_rpc("locks_arm_stop")

An arm is a selector with its page size or format and a budget. LOCKS in the engine's own format is the product as it
is: only its budget is set, and what it retains is measured in the steps between `locks_arm_measure(True)` and
`locks_arm_measure(False)`. Every other selector stands in for the layers' decode: the product reads its rows whole, and
so keeps its records current, and a reader (`locks_vllm.reading`) then writes what its own choice of pages gives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from locks.budget import parse_budget
from locks.formats import Format

from locks_vllm.gpu_layer import GpuLayer, NewTokens
from locks_vllm.reading import DecodeRows, FormatReader, SelectorReader
from locks_vllm.selectors import SELECTORS
from locks_vllm.served_layer import ServedLayer
from locks_vllm.worker import LocksWorkerExtension

Reader = SelectorReader | FormatReader

DENSE, LOCKS = "dense", "locks"


class LocksEvaluationExtension(LocksWorkerExtension):
    """Mixed into vLLM's worker."""

    def locks_arm_start(
        self, selector: str, summary_format: str | None, page_tokens: int | None, budget: float | str
    ) -> None:
        """From the next step on, all layers decode as this arm does. selector: dense, locks or one of SELECTORS;
        summary_format: of locks, None for each layer's own; page_tokens: of the others, None for the method's."""
        layers = self._locks_layers()
        if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():  # type: ignore[attr-defined]
            raise RuntimeError("locks_arm_start: steps run in CUDA graphs; start vLLM with --enforce-eager")
        self.locks_arm_stop()
        allowed = math.inf if selector == DENSE else parse_budget(budget)
        for layer in layers.values():
            reader = self._reader(layer, selector, summary_format, page_tokens, allowed)
            layer.budget = allowed if reader is None else math.inf
            if reader is not None:
                stand_in(layer, reader)

    def _reader(
        self, layer: ServedLayer, selector: str, summary_format: str | None, page_tokens: int | None, budget: float
    ) -> Reader | None:
        if selector in SELECTORS:
            size = page_tokens or SELECTORS[selector].page_tokens
            if size not in (4, 8, 16):
                raise ValueError(f"locks_arm_start: page_tokens = {page_tokens!r}, expected 4, 8 or 16")
            return SelectorReader(selector, size, budget, layer.scale)
        if selector not in (DENSE, LOCKS):
            names = ", ".join((DENSE, LOCKS, *SELECTORS))
            raise ValueError(f"locks_arm_start: selector = {selector!r}, expected one of {names}")
        if summary_format is None or selector == DENSE:
            return None
        known = self.__dict__.setdefault("_locks_format_readers", {})
        key = (id(layer), Format.parse(summary_format).code)
        if key not in known:  # kept, since it keeps records
            known[key] = FormatReader(layer, Format.parse(summary_format), budget)
        known[key].begin(budget)
        return known[key]

    def locks_arm_measure(self, on: bool) -> None:
        """Whether LOCKS's own steps also measure what they retain; a reader always does."""
        for layer in self._locks_layers().values():
            if "decode" not in vars(layer):
                layer.evaluate = on

    def locks_arm_stop(self) -> dict[str, Any]:
        """Puts the product back, and tells what the arm did: sums over its steps, rows and layers.

        counters: of the product (locks.ops.COUNTERS); measured: rows, the pages that their sequences had and that were
        read, over KV heads, and the retained mass of the rows, whose mean is retained / rows."""
        counters: dict[str, int] = {}
        measured = {"rows": 0, "pages": 0, "pages_read": 0, "retained": 0.0}
        by_layer = {}
        for name, layer in self._locks_layers().items():
            for field, value in layer.read_counters().items():
                counters[field] = counters.get(field, 0) + value
            layer.reset_counters()
            done = self._measured(layer)
            for field in measured:
                measured[field] += done[field]
            if done["rows"]:
                by_layer[name] = done["retained"] / done["rows"]
        return {"counters": counters, "measured": measured, "retained_by_layer": by_layer}

    def _measured(self, layer: ServedLayer) -> dict[str, Any]:
        """What a layer's arm measured; the layer decodes as the product again."""
        reader = vars(layer).pop("decode", None)
        if reader is not None:
            return reader.reader.counts.as_dict()
        layer.evaluate = False
        done = {"rows": 0, "pages": 0, "pages_read": 0, "retained": 0.0}
        for step in layer.evaluations:
            for length, retained, mask in zip(step.lengths, step.retained, step.pages, strict=True):
                done["rows"] += 1
                done["retained"] += retained
                done["pages"] += layer.num_kv_heads * -(-length // layer.format.page_tokens)
                done["pages_read"] += int.from_bytes(mask, "big").bit_count()
        layer.evaluations.clear()
        return done


def stand_in(layer: ServedLayer, reader: Reader) -> None:
    """From now on the layer's decode steps are the reader's. An attribute of the object in front of the method of its
    class: deleting it is all that brings the product back, and the product's code has no branch for evaluation."""
    product = type(layer).decode  # type: ignore[attr-defined]
    read = _read_on_gpu if isinstance(layer, GpuLayer) else _read_on_cpu

    def decode(*step: Any) -> None:
        product(layer, *step)
        read(layer, reader, *step)

    decode.reader = reader  # type: ignore[attr-defined]
    layer.decode = decode  # type: ignore[attr-defined]


def _read_on_gpu(
    layer: GpuLayer,
    reader: Reader,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    record_table: torch.Tensor,
    output: torch.Tensor,
    added: NewTokens | None,
) -> None:
    """The rows that decode; the others are prompts' last tokens and padding, which the product has read whole, as it
    has written the new tokens to the cache."""
    count = metadata.num_decodes
    lengths = metadata.decode_lengths
    chosen = [row for row, length in enumerate(lengths) if length and row not in metadata.exact_rows]
    if not chosen:
        return
    rows = DecodeRows(
        query,
        layer.keys(kv_cache),
        layer.values(kv_cache),
        metadata.block_table[:count],
        metadata.seq_lens[:count],
        lengths,
    )
    if len(chosen) == count:
        reader.read(rows, output)
        return
    index = torch.tensor(chosen, device=query.device)
    result = torch.empty_like(output[: len(chosen)])
    reader.read(rows.part(index), result)
    output[index] = result


def _read_on_cpu(
    layer: Any,
    reader: Reader,
    query: torch.Tensor,
    cache: torch.Tensor,
    records: torch.Tensor,
    step: Any,
    record_table: torch.Tensor,
    output: torch.Tensor,
) -> None:
    tokens = torch.arange(step.num_decodes) if step.decode_tokens is None else step.decode_tokens
    rows = DecodeRows(
        query[tokens],
        cache[:, :, 0],
        cache[:, :, 1],
        step.decode_table[: step.num_decodes],
        step.decode_lengths[: step.num_decodes],
        step.decode_lengths[: step.num_decodes].tolist(),
    )
    result = torch.empty_like(rows.query)
    reader.read(rows, result)
    output[tokens] = result
