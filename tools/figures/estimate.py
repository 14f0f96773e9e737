"""Estimated against true attention mass of every page, on the captured attention that the tests use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from figures.drawing import Drawing

DATA = Path(__file__).parents[2] / "tests" / "data" / "smollm2_slice.safetensors"
HEAD, STEP, PAGE_TOKENS, SCALE = 0, 10, 4, 0.125
CHOSEN_TOKENS = 256
PANEL, LOW, HIGH = 300, -14.0, 1.0  # pixels; log10 of a page's share of the mass


class _Pages:
    """The pages of the captured keys, and their summaries before rounding."""

    def __init__(self) -> None:
        trace = load_file(DATA)
        self.queries, self.positions = SCALE * trace["q"].astype(float), trace["pos"]
        self.keys = trace["k"].astype(float).reshape(-1, PAGE_TOKENS, trace["k"].shape[1])
        self.centroids = self.keys.mean(axis=1)
        centred = self.keys - self.centroids[:, None]
        self.directions = np.linalg.svd(centred, full_matrices=False)[2][:, 0]
        self.coefficients = np.einsum("ptd,pd->pt", centred, self.directions)

    def log_sums(self, head: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Natural log of the mass of each page that is complete: exact, by its centroid, and by its summary."""
        pages = (int(self.positions[step]) + 1) // PAGE_TOKENS
        query = self.queries[head, step]
        by_centroid = self.centroids[:pages] @ query
        along = (self.directions[:pages] @ query)[:, None] * self.coefficients[:pages]
        exact = np.log(np.exp(self.keys[:pages] @ query).sum(axis=1))
        return exact, by_centroid + np.log(PAGE_TOKENS), by_centroid + np.log(np.exp(along).sum(axis=1))

    def mean_kept(self) -> np.ndarray:
        """Mass in the best pages by each of the three, in percent: mean over all queries."""
        heads, steps = self.queries.shape[:2]
        kept = [[_kept(sums[0], one) for one in sums]
                for sums in (self.log_sums(head, step) for head in range(heads) for step in range(steps))]
        return 100 * np.mean(kept, axis=0)


def _best(estimate: np.ndarray) -> np.ndarray:
    return np.argsort(-estimate, kind="stable")[: CHOSEN_TOKENS // PAGE_TOKENS]


def _kept(exact: np.ndarray, estimate: np.ndarray) -> float:
    """The share of the attention mass in the pages that an estimate ranks best."""
    masses = np.exp(exact - exact.max())
    return float(masses[_best(estimate)].sum() / masses.sum())


def draw() -> str:
    pages = _Pages()
    exact, by_centroid, summary = pages.log_sums(HEAD, STEP)
    mean = pages.mean_kept()
    drawing = Drawing(940, 490, "Two scatter plots of estimated against true mass of all pages of a context: by the "
                      "centroid alone, and by the log-sum-exp of the summary, which lies close to the diagonal.")
    drawing.text(24, 34, f"which {CHOSEN_TOKENS // PAGE_TOKENS} of {len(exact):,} pages hold the attention?", "title")
    drawing.text(24, 54, "a real query of SmolLM2-135M (layer 9), each dot a page of 4 tokens: "
                 "its true share of the attention mass to the right, the estimate upwards; green: chosen")
    _panel(drawing, 90, "by the centroid alone: q.mu + log 4", exact, by_centroid)
    _panel(drawing, 560, "by the summary: q.mu + log sum exp((V q).c)", exact, summary)
    drawing.text(24, 474, f"Mean over all {pages.queries.shape[0] * pages.queries.shape[1]} captured queries: the "
                 f"centroid {mean[1]:.1f} %, the summary {mean[2]:.1f} %, the true masses {mean[0]:.1f} %. "
                 "Summaries of rank 1, before they are rounded to 4 bits.")
    return drawing.svg()


def _panel(drawing: Drawing, x0: float, title: str, exact: np.ndarray, estimate: np.ndarray) -> None:
    y0 = 410
    unit = PANEL / (HIGH - LOW)
    log_total = np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    x, y = ((values - log_total) / np.log(10) for values in (exact, estimate))
    place = np.stack([x0 + unit * (x - LOW), y0 - unit * (y - LOW)], axis=1)
    chosen = np.zeros(len(exact), dtype=bool)
    chosen[_best(estimate)] = True
    drawing.text(x0, 92, title, "head")
    drawing.path(f"M{x0} {y0}H{x0 + PANEL}M{x0} {y0}V{y0 - PANEL}", "thin")
    drawing.path(f"M{x0} {y0}L{x0 + PANEL} {y0 - PANEL}", "dash")
    for exponent in range(-12, 1, 4):
        at = unit * (exponent - LOW)
        label = f"{100 * 10.0**exponent:g} %"
        drawing.text(x0 + at, y0 + 16, label, "small", "middle")
        drawing.text(x0 - 6, y0 - at + 4, label, "small", "end")
    drawing.dots(place[~chosen], "dots-dropped")
    drawing.dots(place[chosen], "dots-chosen")
    drawing.text(x0, y0 + 38, f"the chosen hold {100 * _kept(exact, estimate):.1f} % of the mass "
                 f"(the best {100 * _kept(exact, exact):.1f} %)")
