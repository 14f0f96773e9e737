"""Which figures a comparison gives, and what they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from locks.report import figures

_PREFERRED_BUDGET = "512"


@dataclass(frozen=True)
class Section:
    title: str
    svg: str
    caption: str


def sections_of(result: dict[str, Any]) -> list[Section]:
    """Those that the comparison has data for."""
    budget = reference_budget(result["budgets"])
    rows = result["rows"]
    at_budget = [row for row in rows if row["budget"] == budget]
    of_models = [row for row in rows if row["scope"] == "model"]
    sections = [
        Section(
            "Retained mass against bytes",
            figures.pareto(of_models, {trace["model"]: trace["tokens"] for trace in result["traces"]}),
            "Each line is a selector with pages of one size, each point a budget. Bytes are what one KV head reads in "
            "a step: what the selector keeps for the whole context, and the keys and values of the tokens read. "
            "Ringed: the front, where no other point keeps more for less. The oracle reads every key to choose, which "
            "is not counted: it is a bound and not on the front. Right: the same budgets in tokens at a context of "
            "1,048,576 tokens. Its bytes are ARITHMETIC and its retained mass is that of the measured length: nothing "
            "was run there.",
        ),
        Section(
            f"Gap to the oracle by layer, budget {budget}",
            figures.gap_by_layer([row for row in at_budget if row["scope"] == "layer"]),
            "Points of retained mass below the exact log-sum-exp with pages of the same size, mean over traces, KV "
            "heads and steps.",
        ),
    ]
    answered = [row for row in of_models if row["carriers_read"] is not None]
    if answered:
        sections.append(Section(
            "Are the answer's pages read?", figures.carriers_by_budget(answered),
            "Left: the share of marked answers, steps, layers and KV heads in which every page that overlaps the "
            "answer is read; most heads do not look for the answer. Right: the same, of those heads and steps in which "
            "the oracle reads all of the answer.",
        ))
    depths = {trace["trace"]: trace["depth"] for trace in result["traces"] if trace["depth"] is not None}
    deep = [row for row in at_budget if row["scope"] == "trace" and row["trace"] in depths]
    if len(set(depths.values())) > 1:
        sections.append(Section(
            f"Retained mass by depth of the answer, budget {budget}", figures.by_depth(deep, depths),
            "A point is a trace, with its answer at that share of the context.",
        ))
    if "energy" in result:
        sections.append(Section(
            "How local the structure of keys is", figures.energy(result["energy"]),
            "The share of the energy of keys about their page's mean that a basis captures: one of each page's own, "
            "one for the sequence and KV head, one for the layer. Mean over KV heads, with the 5th and 95th "
            "percentile. The shared bases are fitted to the very keys on which they are judged. A page's own basis of "
            "rank r captures r of at most B - 1 directions, so part of its lead is that pages are small.",
        ))
    if "chain" in result:
        sections.append(Section(
            "The theory's chain, bound against truth", figures.chain(result["chain"]),
            "Samples of pages and steps of every KV head; no point may lie above its line. Residual: the worst key of "
            "a page by its own basis, unquantised, against the root of the spectral tail. Score error: the worst over "
            "steps and heads, of the records as stored, against |q| times the stored residual. Retained mass: 1 - R "
            "of the group beside what the bound exp(-4 delta) R_oracle allows; the bound takes the worst page and "
            "head of a step, and says nothing (1 - R up to 1) where delta is large. Output: mean |o - o_dense| "
            "against (1 - R) times a bound on the values' diameter.",
        ))
    return sections


def reference_budget(budgets: list[str]) -> str:
    """The one that figures of a single budget show: 512 tokens, or else the middle one."""
    return _PREFERRED_BUDGET if _PREFERRED_BUDGET in budgets else budgets[len(budgets) // 2]
