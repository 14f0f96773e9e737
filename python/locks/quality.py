"""What a selector keeps of a captured attention trace: retained mass and output error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from locks import ops
from locks.budget import budget_tokens
from locks.formats import Format
from locks.trace import LayerTrace, Trace


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


def measure(trace: LayerTrace, selector: str, summary_format: Format, budget: float, window: int = 0) -> Row:
    """Runs a selector on one layer. `budget` is as locks.budget.parse_budget returns it; the first `window` steps are
    for selectors to look at, and only the others are judged.

    Raises RuntimeError for an unknown selector. Its threads are torch's.
    """
    result = torch.empty(4, dtype=torch.float64)
    ops.measure_quality(
        trace.queries, trace.keys, trace.values, trace.positions, trace.scale, selector, summary_format.code, budget,
        window, result,
    )
    retained_oracle, retained, output_error, bytes_per_record = result.tolist()
    return Row(
        layer=trace.layer,
        kv_head=trace.kv_head,
        selector=selector,
        format=summary_format.name,
        budget_tokens=budget_tokens(budget, trace.keys.shape[0], summary_format.page_tokens),
        judged_steps=trace.positions.shape[0] - window,
        retained_oracle=retained_oracle,
        retained=retained,
        output_error=output_error,
        bytes_per_record=int(bytes_per_record),
    )


def evaluate(
    trace: Trace, selector: str, summary_format: Format, budget: float, window: int = 0
) -> Iterator[Row]:
    """The quality on each KV head of each layer of the trace, in its order; `window` as in `measure`."""
    for layer in trace.layers:
        for head in trace.heads(layer):
            yield measure(head, selector, summary_format, budget, window)
