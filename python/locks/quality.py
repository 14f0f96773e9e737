"""What a selector keeps of a captured attention trace: retained mass and output error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from locks import ops
from locks.budget import budget_tokens
from locks.formats import Format
from locks.trace import LayerTrace, Span, Trace


@dataclass(frozen=True)
class Row:
    """The quality of one selector on one layer and KV head: means over steps and heads."""

    layer: int
    kv_head: int
    selector: str
    format: str
    budget_tokens: int  # tokens that the budget allows on this trace
    judged_steps: int  # the last ones of the trace
    retained_oracle: float  # attention mass in the pages of the exact log-sum-exp, in [0, 1]
    retained: float  # the same for the selector
    output_error: float  # |o - o_dense| / |o_dense|
    bytes_per_record: int  # for 16 tokens

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class StepQuality:
    """The same and more, of each step that is judged."""

    retained_oracle: np.ndarray  # [steps, heads]
    retained: np.ndarray  # [steps, heads]
    output_error: np.ndarray  # [steps, heads]
    recall: np.ndarray  # [steps]: the share of the oracle's pages that are read, of those that need not be
    tokens_read: np.ndarray  # [steps]
    bytes_read: np.ndarray  # [steps]: what the selector keeps, and 16-bit keys and values of the tokens read
    resident_bytes: np.ndarray  # [steps]: what lies in memory: the same, of all tokens that are not evicted
    carriers_read: np.ndarray  # [steps, spans]: 1 where all of the span is read
    carriers_wanted: np.ndarray  # [steps, spans]: 1 where the oracle reads all of the span


def measure_steps(
    trace: LayerTrace,
    selector: str,
    summary_format: Format,
    budgets: Sequence[float],
    window: int = 0,
    spans: Sequence[Span] = (),
) -> list[StepQuality]:
    """Runs a selector on one layer and KV head, scoring once for all budgets; one result for each of them."""
    group, num_steps, _ = trace.queries.shape
    judged = max(num_steps - window, 0)
    rows = torch.empty(len(budgets), judged, group, len(ops.ROW_VALUES), dtype=torch.float64)
    steps = torch.empty(len(budgets), judged, len(ops.STEP_VALUES) + 2 * len(spans), dtype=torch.float64)
    ops.measure_quality(
        trace.queries, trace.keys, trace.values, trace.positions, trace.scale, window, selector, summary_format.code,
        torch.tensor(budgets, dtype=torch.float64), torch.tensor(spans, dtype=torch.int32).view(-1, 2), rows, steps,
        *((trace.repeat.queries, trace.repeat.keys, trace.repeat.chunks) if trace.repeat else ()),
    )
    named = steps[..., : len(ops.STEP_VALUES)]
    of_spans = steps[..., len(ops.STEP_VALUES) :]
    return [
        StepQuality(*row.permute(2, 0, 1).numpy(), *step.T.numpy(), *np.split(carriers.numpy(), 2, axis=1))
        for row, step, carriers in zip(rows, named, of_spans, strict=True)
    ]


def measure(trace: LayerTrace, selector: str, summary_format: Format, budget: float, window: int = 0) -> Row:
    """Runs a selector on one layer. `budget` is as locks.budget.parse_budget returns it; the first `window` steps are
    for selectors to look at, and only the others are judged.

    Raises RuntimeError for an unknown selector. Its threads are torch's.
    """
    quality = measure_steps(trace, selector, summary_format, [budget], window)[0]
    return Row(
        layer=trace.layer,
        kv_head=trace.kv_head,
        selector=selector,
        format=summary_format.name,
        budget_tokens=budget_tokens(budget, trace.keys.shape[0], summary_format.page_tokens),
        judged_steps=trace.positions.shape[0] - window,
        retained_oracle=float(quality.retained_oracle.mean()),
        retained=float(quality.retained.mean()),
        output_error=float(quality.output_error.mean()),
        bytes_per_record=ops.selector_bytes(selector, summary_format.code, trace.keys.shape[1]),
    )


def evaluate(
    trace: Trace, selector: str, summary_format: Format, budget: float, window: int = 0
) -> Iterator[Row]:
    """The quality on each KV head of each layer of the trace, in its order; `window` as in `measure`."""
    for layer in trace.layers:
        for head in trace.heads(layer):
            yield measure(head, selector, summary_format, budget, window)
