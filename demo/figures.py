"""The report's figures, as SVG text."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm

from demo.engine import Measurement
from locks.report.style import STYLE, svg

BLUE, AMBER, GREY, RED = "#2b6cb0", "#dd8a1f", "#cbd2d9", "#c53030"
READ = LinearSegmentedColormap.from_list("read", ["#ffffff", "#bcd9f2", "#4a90d9", "#1a4e8a", "#0b2545"])
MASS = LinearSegmentedColormap.from_list("mass", ["#7a1f1f", "#dd6b20", "#f6e05e", "#9ae6b4", "#22755a"])
BIN_TOKENS = 16  # one column of a map of the document


def pages_by_layer(sparse: list[Measurement], fact: tuple[int, int]) -> str:
    """Which parts of the document each layer read, over all steps: one panel a budget."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(sparse), 1, figsize=(9.6, 3.1 * len(sparse)), squeeze=False, sharex=True
        )
        for axis, row in zip(axes[:, 0], sparse, strict=True):
            density = row.trace.density(BIN_TOKENS)
            image = _map(axis, density, fact, PowerNorm(0.5, 0, 1))
            axis.set(title=f"budget {row.budget} tokens", ylabel="layer")
        axes[-1, 0].set_xlabel("position in the prompt, tokens")
        _share_bar(figure, image, axes, "share read, of steps and KV heads")
        return svg(figure)


def pages_by_step(
    sparse: list[Measurement], fact: tuple[int, int], labels: list[list[str]], layer: int
) -> str:
    """The same for one layer, a line a step."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(sparse), 1, figsize=(9.6, 3.4 * len(sparse)), squeeze=False, sharex=True
        )
        for axis, row, names in zip(axes[:, 0], sparse, labels, strict=True):
            reads = row.trace.steps_by_position(layer, BIN_TOKENS)[: len(names)]
            image = _map(axis, reads, fact, PowerNorm(0.5, 0, 1))
            axis.set_yticks(range(len(names)), names, fontsize=7, family="monospace")
            axis.set(title=f"layer {layer}, budget {row.budget} tokens", ylabel="token that the step writes")
        axes[-1, 0].set_xlabel("position in the prompt, tokens")
        _share_bar(figure, image, axes, "share read, of KV heads")
        return svg(figure)


def fact_by_layer(sparse: list[Measurement], fact: tuple[int, int], labels: list[list[str]]) -> str:
    """Where the planted fact was read: layers by steps of the answer."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(sparse), figsize=(9.6, 4.2), squeeze=False, sharey=True)
        for axis, row, names in zip(axes[0], sparse, labels, strict=True):
            share = row.trace.read_share(*fact)[: len(names)].T
            image = axis.imshow(share, cmap=READ, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            _steps_axis(axis, names)
            axis.set_title(f"budget {row.budget} tokens")
        axes[0, 0].set_ylabel("layer")
        _share_bar(figure, image, axes, "share of the fact's pages read")
        return svg(figure)


def mass_by_layer(sparse: list[Measurement], labels: list[list[str]]) -> str:
    """Exact retained attention mass, layers by steps of the answer."""
    lowest = min(float(row.trace.retained.min()) for row in sparse)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(sparse), figsize=(9.6, 4.2), squeeze=False, sharey=True)
        for axis, row, names in zip(axes[0], sparse, labels, strict=True):
            image = axis.imshow(
                row.trace.retained[: len(names)].T, cmap=MASS, vmin=np.floor(lowest * 10) / 10, vmax=1,
                aspect="auto", interpolation="nearest",
            )  # fmt: skip
            _steps_axis(axis, names)
            axis.set_title(f"budget {row.budget} tokens: mean {row.trace.retained.mean():.1%}")
        axes[0, 0].set_ylabel("layer")
        _share_bar(figure, image, axes, "attention mass in the pages read")
        return svg(figure)


def bytes_by_stage(rows: list[Measurement]) -> str:
    """Bytes that a step reads of the KV cache and the records."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(9.6, 0.62 * len(rows) + 0.9))
        names = ["dense" if row.budget is None else f"LOCKS, {row.budget} tokens" for row in rows]
        records = np.array([row.counts.record_bytes for row in rows]) / 1e6
        pages = np.array([row.counts.kv_bytes for row in rows]) / 1e6
        axis.barh(names, records, color=AMBER, height=0.55, label="records (score)")
        colours = [GREY if row.budget is None else BLUE for row in rows]
        bars = axis.barh(names, pages, left=records, color=colours, height=0.55)
        dense = rows[0].counts.dense_bytes / 1e6
        for bar, total in zip(bars, records + pages, strict=True):
            text = f" {total:.1f} MB" + ("" if total >= dense * 0.999 else f" ({total / dense:.0%} of dense)")
            axis.text(total, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=9)
        axis.barh([0], [0], color=BLUE, label="keys and values of the chosen pages (attend)")
        axis.barh([0], [0], color=GREY, label="all keys and values")
        axis.set_xlim(0, dense * 1.12)
        axis.set_xlabel("MB read a step, all layers")
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.legend(loc="lower right", frameon=False, fontsize=8)
        return svg(figure)


def _map(axis, values: np.ndarray, fact: tuple[int, int], norm):
    """Rows over positions of the document, with the fact marked."""
    width = values.shape[1] * BIN_TOKENS
    image = axis.imshow(
        values,
        cmap=READ,
        norm=norm,
        aspect="auto",
        interpolation="nearest",
        extent=(0, width, len(values) - 0.5, -0.5),
    )
    axis.axvspan(*fact, color=RED, alpha=0.25, linewidth=0)
    axis.annotate(
        "planted fact",
        (fact[0], 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        color=RED,
        fontsize=8,
        ha="center",
    )
    return image


def _steps_axis(axis, names: list[str]) -> None:
    axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7, family="monospace")
    axis.set_xlabel("token that the step writes")


def _share_bar(figure, image, axes, label: str) -> None:
    bar = figure.colorbar(
        image, ax=axes, pad=0.01, aspect=30, shrink=0.8, format=lambda value, _: f"{value:.0%}"
    )
    bar.set_label(label)
    bar.outline.set_visible(False)
