"""Several selectors, formats and budgets over one or many traces, by KV head, layer, trace and model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from locks import ops
from locks.budget import budget_tokens, is_raised, parse_budget
from locks.formats import BLOCK_TOKENS, HEAD_DIMS, Format
from locks.key_structure import HeadEnergy, energy_shares, ideal_keys
from locks.quality import StepQuality, measure_steps
from locks.trace import LayerTrace, Trace

# These are made with all of a format; the others only with its page size, whatever else the format says.
_USE_THE_FORMAT = ("locks", "shared_low_rank")
# Steps that selectors may look at, if one of a comparison does: all are then judged on the steps behind.
_WINDOW = 32
_SAMPLED_PAGES, _SAMPLED_STEPS = 16, 8  # of each KV head, in the chain's data

Advance = Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """What is compared. Budgets as locks.budget.parse_budget returns them, with the texts that they were given as."""

    selectors: Sequence[str]
    formats: Sequence[Format]
    budgets: dict[str, float]
    window: int = 0
    energy: bool = False
    chain: bool = False

    @classmethod
    def parse(cls, selectors: str, formats: str, budgets: str, *, energy: bool = False, chain: bool = False) -> Plan:
        """From lists with commas between. Raises ValueError or RuntimeError, naming the value, for what is none."""
        names = _parts("selector", selectors)
        for name in names:
            ops.selector_bytes(name, 0, HEAD_DIMS[0])  # refuses a name that it does not know
        window = _WINDOW if any(ops.needs_window(name) for name in names) else 0
        return cls(
            names,
            [Format.parse(name) for name in _parts("format", formats)],
            {text: parse_budget(text) for text in _parts("budget", budgets)},
            window=window,
            energy=energy,
            chain=chain,
        )

    def is_single(self) -> bool:
        """Whether it is one selector, format and budget, and nothing beside them."""
        counts = {len(self.selectors), len(self.formats), len(self.budgets)}
        return counts == {1} and not self.energy and not self.chain

    def cases(self) -> list[tuple[str, Format]]:
        """Selectors with formats: once a page size for those that take nothing else of a format."""
        found, seen = [], set()
        for selector in self.selectors:
            for form in self.formats:
                key = (selector, form.code if selector in _USE_THE_FORMAT else form.page_tokens)
                if key not in seen:
                    seen.add(key)
                    found.append((selector, form))
        return found

    def page_sizes(self) -> list[int]:
        return sorted({form.page_tokens for form in self.formats})


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) != len(parts):
        raise ValueError(f"{name} = {text!r}, expected one, or several different ones with commas between")
    return parts


@dataclass
class _Samples:
    """What rows are pooled from: one entry a KV head."""

    heads: list[StepQuality] = field(default_factory=list)
    answered: list[StepQuality] = field(default_factory=list)  # those of traces that tell their answer
    tokens_allowed: list[int] = field(default_factory=list)
    bytes_per_block: int = 0
    head_dim: int = 0
    raised: bool = False

    def row(self) -> dict[str, Any]:
        retained = np.concatenate([head.retained.ravel() for head in self.heads])
        oracle = np.concatenate([head.retained_oracle.ravel() for head in self.heads])
        return {
            "head_dim": self.head_dim,
            "budget_tokens": float(np.mean(self.tokens_allowed)),
            "raised": self.raised,
            "retained_oracle": float(oracle.mean()),
            "retained": float(retained.mean()),
            "retained_p5": float(np.percentile(retained, 5)),
            "retained_p1": float(np.percentile(retained, 1)),
            "retained_oracle_p5": float(np.percentile(oracle, 5)),
            "gap": float(oracle.mean() - retained.mean()),
            "recall": _mean(head.recall for head in self.heads),
            **self._carriers(),
            "output_error": _mean(head.output_error for head in self.heads),
            "tokens_read": _mean(head.tokens_read for head in self.heads),
            "bytes_per_step": _mean(head.bytes_read for head in self.heads),
            "resident_bytes": _mean(head.resident_bytes for head in self.heads),
            "num_heads": len(self.heads),
        }


    def _carriers(self) -> dict[str, float | None]:
        """Of steps and answers, the share whose pages are all read; the same of the oracle's pages; and of those that
        the oracle reads, the share that is read."""
        if not self.answered:
            return {"carriers_read": None, "carriers_wanted": None, "carriers_kept": None}
        read, wanted = (
            np.concatenate([getattr(head, name).ravel() for head in self.answered])
            for name in ("carriers_read", "carriers_wanted")
        )
        kept = float(read[wanted == 1].mean()) if wanted.any() else None
        return {"carriers_read": float(read.mean()), "carriers_wanted": float(wanted.mean()), "carriers_kept": kept}


def _mean(arrays: Iterable[np.ndarray]) -> float:
    return float(np.concatenate([array.ravel() for array in arrays]).mean())


# The fields that tell a row's scope apart: of one KV head of a trace, a layer of a model, a trace, a model.
SCOPES = {
    "head": ("model", "trace", "layer", "kv_head"),
    "layer": ("model", "layer"),
    "trace": ("model", "trace"),
    "model": ("model",),
}


def _identity(trace: Trace) -> tuple[str, str]:
    """The model and the name that rows tell a trace apart by."""
    return trace.metadata.get("model", "unknown model"), trace.path.name.removesuffix(".safetensors")


def check_distinct(traces: Iterable[Trace]) -> None:
    """Raises ValueError, naming both paths, for a file that is there twice, which would count twice, and for two traces
    that rows could not tell apart."""
    files: dict[Path, Path] = {}
    names: dict[tuple[str, str], Path] = {}
    for trace in traces:
        path, file, (model, name) = trace.path, trace.path.resolve(), _identity(trace)
        if file in files:
            raise ValueError(f"traces {str(files[file])!r} and {str(path)!r} are one file, expected each file once")
        if (model, name) in names:
            raise ValueError(
                f"traces {str(names[model, name])!r} and {str(path)!r} are both named {name!r} and of {model!r},"
                " expected names that differ within a model: rename one"
            )
        files[file] = names[model, name] = path


class Comparison:
    """Gathers the measurements of a plan trace by trace."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.traces: list[dict[str, Any]] = []
        self.chain: list[dict[str, Any]] = []
        self._samples: dict[str, dict[tuple[Any, ...], _Samples]] = {scope: defaultdict(_Samples) for scope in SCOPES}
        self._energy: dict[tuple[str, int, int], list[tuple[dict[str, Any], HeadEnergy]]] = defaultdict(list)

    def add(self, trace: Trace, advance: Advance) -> None:
        """Measures a trace; calls `advance` after each layer. Of several, `check_distinct` comes first."""
        model, name = _identity(trace)
        about: dict[str, Any] = {"trace": name, "model": model, "depth": trace.depth}
        for layer in trace.layers:
            for head in trace.heads(layer):
                place = {"model": model, "trace": name, "layer": layer, "kv_head": head.kv_head}
                self._measure_head(place, head, trace)
                about |= {"tokens": head.keys.shape[0], "head_dim": head.keys.shape[1]}
                about["judged_steps"] = head.positions.shape[0] - self.plan.window
            advance()
        about |= {"layers": len(trace.layers), "answer_spans": trace.answer_spans}
        told = ("context", "prompt_sha256", "model_sha256", "model_commit", "versions")
        self.traces.append(about | {key: trace.metadata[key] for key in told if key in trace.metadata})

    def _measure_head(self, place: dict[str, Any], head: LayerTrace, trace: Trace) -> None:
        tokens, head_dim = head.keys.shape
        budgets = list(self.plan.budgets.values())
        for selector, form in self.plan.cases():
            spans = [span for span in trace.answer_spans if span[1] <= tokens // form.page_tokens * form.page_tokens]
            qualities = measure_steps(head, selector, form, budgets, self.plan.window, spans)
            bytes_per_block = ops.selector_bytes(selector, form.code, head_dim)
            for (text, budget), quality in zip(self.plan.budgets.items(), qualities, strict=True):
                allowed = budget_tokens(budget, tokens, form.page_tokens)
                raised = is_raised(budget, tokens, form.page_tokens)
                for scope, fields in SCOPES.items():
                    key = (*(place[name] for name in fields), selector, form.name, text)
                    samples = self._samples[scope][key]
                    samples.heads.append(quality)
                    samples.tokens_allowed.append(allowed)
                    samples.raised |= raised
                    samples.bytes_per_block, samples.head_dim = bytes_per_block, head_dim
                    if spans:
                        samples.answered.append(quality)
        if self.plan.energy:
            for page_tokens in self.plan.page_sizes():
                key = (place["model"], place["layer"], page_tokens)
                self._energy[key].append((place, HeadEnergy.of(head.keys, page_tokens)))
        for form in self.plan.formats if self.plan.chain else ():
            text, budget = next(iter(self.plan.budgets.items()))
            data = chain_of(head, form, budget, self.plan.window)
            self.chain.append(place | {"format": form.name, "budget": text} | data)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each scope, selector, format and budget."""
        pages = {form.name: form.page_tokens for form in self.plan.formats}
        for scope, fields in SCOPES.items():
            for key, samples in self._samples[scope].items():
                selector, form, budget = key[len(fields) :]
                row = {"scope": scope, "model": None, "trace": None, "layer": None, "kv_head": None}
                row |= dict(zip(fields, key, strict=False))
                row |= {"selector": selector, "format": form, "page_tokens": pages[form], "budget": budget}
                row |= {"bytes_per_page": samples.bytes_per_block * pages[form] / BLOCK_TOKENS}
                yield row | samples.row()

    def energy(self) -> list[dict[str, Any]]:
        """For each KV head, page size and rank, the shares that the three bases capture."""
        rows = []
        for (_, _, page_tokens), heads in self._energy.items():
            shares = energy_shares([energy for _, energy in heads])
            for (place, _), head_rows in zip(heads, shares, strict=True):
                rows += [place | {"page_tokens": page_tokens} | row for row in head_rows]
        return rows

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "selectors": list(self.plan.selectors),
            "formats": [form.name for form in self.plan.formats],
            "budgets": list(self.plan.budgets),
            "window": self.plan.window,
            "traces": self.traces,
            "rows": list(self.rows()),
        }
        if self.plan.energy:
            result["energy"] = self.energy()
        if self.plan.chain:
            result["chain"] = self.chain
        return result


def chain_of(head: LayerTrace, form: Format, budget: float, window: int) -> dict[str, Any]:
    """The theory's chain on one KV head: samples of its pages and steps, and how near truths come to their bounds."""
    ideal, tail = ideal_keys(head.keys, form.page_tokens, form.rank)
    num_pages = head.keys.shape[0] // BLOCK_TOKENS * (BLOCK_TOKENS // form.page_tokens)
    pages = torch.empty(num_pages, len(ops.CHAIN_PAGE_VALUES), dtype=torch.float64)
    steps = torch.empty(head.positions.shape[0] - window, len(ops.CHAIN_STEP_VALUES), dtype=torch.float64)
    ops.measure_chain(
        head.queries, head.keys, head.values, head.positions, head.scale, window, form.code, budget, ideal, pages, steps
    )
    of_page = {"tail": tail[:num_pages].sqrt()} | dict(zip(ops.CHAIN_PAGE_VALUES, pages.T, strict=True))
    of_step = dict(zip(ops.CHAIN_STEP_VALUES, steps.T, strict=True))
    of_step["retained_bound"] = torch.exp(-4 * of_step["stored_delta"]) * of_step["oracle_retained"]
    ratios = {
        "residual_to_tail": of_page["ideal_residual"] / of_page["tail"],
        "ideal_score_error_to_bound": of_page["ideal_score_error"] / of_page["ideal_score_bound"],
        "stored_score_error_to_bound": of_page["stored_score_error"] / of_page["stored_score_bound"],
        "bound_to_retained": of_step["retained_bound"] / of_step["stored_retained"],
        "output_error_to_bound": of_step["output_error"] / of_step["output_bound"],
    }
    return {
        "ratios": {name: _spread(values) for name, values in ratios.items()},
        "pages": _sampled(of_page, _SAMPLED_PAGES),
        "steps": _sampled(of_step, _SAMPLED_STEPS),
    }


def _spread(values: torch.Tensor) -> dict[str, float]:
    values = values[torch.isfinite(values)]  # where the bound is zero, so is the truth
    if len(values) == 0:
        return {"median": 0.0, "max": 0.0}
    return {"median": float(values.median()), "max": float(values.max())}


def _sampled(columns: dict[str, torch.Tensor], count: int) -> dict[str, list[float]]:
    (length,) = {len(values) for values in columns.values()}
    places = torch.linspace(0, length - 1, min(count, length)).round().long()
    return {name: [float(f"{value:.4g}") for value in values[places]] for name, values in columns.items()}
