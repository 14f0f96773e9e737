"""How figures look, here and in the demo's report, and their SVG text. Needs matplotlib."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "locks",  # the same bytes in every run
    "figure.constrained_layout.use": True,
}


def svg(figure: Any, dpi: float | str = "figure") -> str:
    """The figure as an <svg> element; closes it. dpi: of what is drawn as pixels."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, dpi=dpi)
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]
