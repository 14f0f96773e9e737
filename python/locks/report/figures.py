"""The report's figures, as SVG text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from locks.report import style

Row = dict[str, Any]
FAR_TOKENS = 2**20
_KEY_AND_VALUE_BYTES = 4  # of a channel, 16 bits each

STYLE = style.STYLE | {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": style.GRID,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_COLOURS = {
    "locks": "#2b6cb0", "oracle": "#7b8794", "quest": "#c53030", "mean_std": "#dd8a1f", "centroid": "#b7791f",
    "int3": "#2f855a", "shared_low_rank": "#805ad5", "shadowkv": "#d53f8c", "rocketkv": "#319795",
    "snapkv": "#718096", "kvzip": "#000000",
}
# Formats that share a page size, and so a line style.
_LOCKS_COLOURS = {"fine8": "#63b3ed", "paper": "#90cdf4"}
_DASHES = {4: "-", 8: "--", 16: ":"}
_MARKERS = {4: "o", 8: "s", 16: "^"}


def lines_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each selector and format, by what a legend calls it."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        of_format = row["selector"] in ("locks", "shared_low_rank")
        told = row["format"] if of_format else f"{row['page_tokens']}-token pages"
        lines.setdefault(f"{row['selector']}, {told}", []).append(row)
    return lines


def front_of(points: list[tuple[float, float]]) -> list[int]:
    """The points (cost, gain) that no other beats: more gain for no more cost. By rising cost."""
    front: list[int] = []
    best = -np.inf
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[place][1] > best:
            best = points[place][1]
            front.append(place)
    return front


def far_bytes(row: Row, tokens: int) -> float:
    """Bytes of a step at FAR_TOKENS, by arithmetic from one at `tokens`: what is kept of each page grows with the
    context, the tokens read do not, nor what is kept of a fixed number of tokens."""
    read = row["tokens_read"] * _KEY_AND_VALUE_BYTES * row["head_dim"]
    kept = row["bytes_per_step"] - read
    return read + kept * (FAR_TOKENS / tokens if row["bytes_per_page"] else 1)


def pareto(rows: list[Row], tokens: dict[str, int]) -> str:
    """Retained mass against bytes a step, as measured and at FAR_TOKENS: a line of panels a model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(models), 2, figsize=(10.4, 4.6 * len(models)), squeeze=False, sharey="row")
        for (near, far), model in zip(axes, models, strict=True):
            own = [row for row in rows if row["model"] == model]
            _pareto_panel(near, own, lambda row: row["bytes_per_step"] / 1024)
            near.set(title=f"{model}, {tokens[model]:,} tokens", ylabel="retained attention mass")
            fixed = [
                row for row in own
                if row["selector"] != "oracle" and row["budget"] != "all" and float(row["budget"]) >= 1
            ]
            _pareto_panel(far, fixed, lambda row, n=tokens[model]: far_bytes(row, n) / 1024)
            far.set_title(f"the same at {FAR_TOKENS:,} tokens, by arithmetic")
        _legend(figure, axes)
        return style.svg(figure, dpi=160)


def _legend(figure: Any, axes: np.ndarray) -> None:
    """One for all panels: a model may have formats that another lacks."""
    lines: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5)


def _pareto_panel(axis: Any, rows: list[Row], cost: Any) -> None:
    _lines(axis, rows, cost, lambda row: row["retained"])
    rivals = [row for row in rows if row["selector"] != "oracle"]
    points = [(cost(row), row["retained"]) for row in rivals]
    front = front_of(points)
    x, y = [points[i][0] for i in front], [points[i][1] for i in front]
    axis.plot(x, y, linestyle="", marker="o", markersize=9, markerfacecolor="none", markeredgecolor=style.INK)
    _log_ticks(axis, "x")
    axis.set_xlabel("KiB a step, one KV head")


def gap_by_layer(rows: list[Row]) -> str:
    return _by_model(rows, "layer", lambda row: row["layer"], lambda row: 100 * row["gap"], "gap, points", "oracle")


def carriers_by_budget(rows: list[Row]) -> str:
    """A line of two panels a model: answers read, and of those that the oracle reads."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(models), 2, figsize=(10.4, 3.6 * len(models)), squeeze=False)
        for line, model in zip(axes, models, strict=True):
            own = [row for row in rows if row["model"] == model]
            kept = [row for row in own if row["selector"] != "oracle" and row["carriers_kept"] is not None]
            for axis, shown, field in ((line[0], own, "carriers_read"), (line[1], kept, "carriers_kept")):
                _lines(axis, shown, lambda row: row["budget_tokens"], lambda row, field=field: row[field])
                _log_ticks(axis, "x")
                axis.set_xlabel("tokens that a step may read")
            line[0].set(title=model, ylabel="share of answers read")
            line[1].set(title="of those that the oracle reads", ylim=(0, 1.02))
        _legend(figure, axes)
        return style.svg(figure, dpi=160)


def by_depth(rows: list[Row], depths: dict[str, float]) -> str:
    return _by_model(
        rows, "depth of the answer, share of the context", lambda row: depths[row["trace"]],
        lambda row: row["retained"], "retained attention mass",
    )


def _by_model(rows: list[Row], x_label: str, x: Any, y: Any, y_label: str, without: str = "") -> str:
    """A panel a model, a line a selector and format."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(models), 1, figsize=(10.4, 3.6 * len(models)), squeeze=False)
        for axis, model in zip(axes[:, 0], models, strict=True):
            _lines(axis, [row for row in rows if row["model"] == model and row["selector"] != without], x, y)
            axis.set(title=model, xlabel=x_label, ylabel=y_label)
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return style.svg(figure, dpi=160)


def _lines(axis: Any, rows: list[Row], x: Any, y: Any) -> None:
    for label, line in lines_of(rows).items():
        line = sorted(line, key=x)
        axis.plot([x(row) for row in line], [y(row) for row in line], label=label, **_look(line[0]))


def energy(rows: list[Row]) -> str:
    """A panel for each model and page size: the share of energy by rank, a line a basis."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    sizes = sorted({row["page_tokens"] for row in rows})
    bases = {"page_basis": _COLOURS["locks"], "sequence_basis": _COLOURS["mean_std"], "layer_basis": _COLOURS["quest"]}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(models), len(sizes), figsize=(10.4, 3 * len(models)), squeeze=False, sharey=True
        )
        for line, model in zip(axes, models, strict=True):
            for axis, page_tokens in zip(line, sizes, strict=True):
                own = [row for row in rows if (row["model"], row["page_tokens"]) == (model, page_tokens)]
                for basis, colour in bases.items():
                    _energy_line(axis, own, basis, colour)
                axis.set(title=f"{page_tokens}-token pages", xlabel="rank", ylim=(0, 1))
            line[0].set_ylabel(f"{model}\nshare of the energy captured")
        axes[0, 0].legend(loc="upper left", title="basis of the")
        return style.svg(figure, dpi=160)


def _energy_line(axis: Any, rows: list[Row], basis: str, colour: str) -> None:
    ranks = sorted({row["rank"] for row in rows})
    shares = [np.array([row[basis] for row in rows if row["rank"] == rank]) for rank in ranks]
    axis.plot(
        ranks, [share.mean() for share in shares], color=colour, marker="o", label=basis.removesuffix("_basis")
    )
    low, high = ([np.percentile(share, q) for share in shares] for q in (5, 95))
    axis.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_xticks(ranks)


def chain(rows: list[Row]) -> str:
    """Four panels of bound against truth."""
    page_panels = [
        ("tail", "ideal_residual", "root of the spectral tail", "residual of a page"),
        ("stored_score_bound", "stored_score_error", "bound on the score error, nats", "score error of a page"),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 4, figsize=(13, 3.6))
        for axis, (bound, truth, x_label, y_label) in zip(axes[:2], page_panels, strict=True):
            for form, x, y in _columns(rows, "pages", lambda data: (data[bound], data[truth])):
                _scatter(axis, x, y, form)
            axis.set(xlabel=x_label, ylabel=y_label)
        for form, x, y in _columns(rows, "steps", lambda data: (
            1 - np.array(data["retained_bound"]), 1 - np.array(data["stored_retained"])
        )):
            axes[2].scatter(x, y, s=3, alpha=0.4, linewidths=0, label=form, rasterized=True)
        axes[2].set(xlabel="1 - bound on the retained mass", ylabel="1 - retained mass of a step")
        for form, x, y in _columns(rows, "steps", lambda data: (data["output_bound"], data["output_error"])):
            _scatter(axes[3], x, y, form)
        axes[3].set(xlabel="bound on the output error", ylabel="output error of a step")
        axes[2].set(xlim=(0, 1.02), ylim=(0, 1.02))
        axes[2].plot([0, 1], [0, 1], color=style.INK, linewidth=0.8)
        for axis in (*axes[:2], axes[3]):
            low = max(min(axis.get_xlim()[0], axis.get_ylim()[0]), 1e-4)
            high = max(axis.get_xlim()[1], axis.get_ylim()[1])
            axis.plot([low, high], [low, high], color=style.INK, linewidth=0.8)
            if high > 500 * low:  # 1, 2 and 5 of each decade would run into each other
                axis.xaxis.set_major_locator(LogLocator())
                axis.yaxis.set_major_locator(LogLocator())
        axes[0].legend(loc="lower right")
        return style.svg(figure, dpi=160)


def _columns(rows: list[Row], part: str, pick: Any) -> Iterable[tuple[str, np.ndarray, np.ndarray]]:
    for form in dict.fromkeys(row["format"] for row in rows):
        pairs = [pick(row[part]) for row in rows if row["format"] == form]
        yield form, np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def _scatter(axis: Any, x: np.ndarray, y: np.ndarray, label: str) -> None:
    shown = (x > 0) & (y > 0)
    axis.scatter(x[shown], y[shown], s=3, alpha=0.4, linewidths=0, label=label, rasterized=True)
    _log_ticks(axis, "x")
    _log_ticks(axis, "y")


def _log_ticks(axis: Any, which: str) -> None:
    """A logarithmic axis with plain numbers, also where it spans less than a decade."""
    axis.set(**{f"{which}scale": "log"})
    ticks = getattr(axis, f"{which}axis")
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ticks.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ticks.set_minor_formatter(NullFormatter())


def _look(row: Row) -> dict[str, Any]:
    colour = _COLOURS.get(row["selector"], style.MUTED)
    return {
        "color": _LOCKS_COLOURS.get(row["format"], colour) if row["selector"] == "locks" else colour,
        "linestyle": _DASHES[row["page_tokens"]],
        "marker": _MARKERS[row["page_tokens"]],
        "markersize": 4,
        "linewidth": 1.2,
    }
