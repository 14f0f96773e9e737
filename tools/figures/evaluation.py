"""What arms of an evaluation differ by from dense, suite by suite."""

from locks.report.style import GRID, INK, MUTED, STYLE, plt, svg
from tables import evaluation as tables

COLOURS = {
    "locks@0.02": "#0b6e99",
    "locks@512": "#5fb3d4",
    "locks:paper@0.02": "#7a5195",
    "quest@0.02": "#d1495b",
    "quest@512": "#f29ca8",
    "mean_std@0.02": "#edae49",
    "oracle@0.02": MUTED,
}
_SPREAD = 0.7  # of the room between two suites, over the arms


def draw() -> str:
    """A line a suite; each arm's mean difference and its 95 % interval, in points."""
    model = next(iter(tables.SUITES))
    shown = [(suite, tasks) for name, suite, tasks in tables.suites() if name == model and suite.unit == "points"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 0.62 * len(shown) + 1.1))
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, (arm, colour) in enumerate(COLOURS.items()):
            offset = _SPREAD * (place / (len(COLOURS) - 1) - 0.5)
            found = [(row, tables.over_tasks(tasks, arm)) for row, (_, tasks) in enumerate(shown)]
            points = [(row + offset, told) for row, told in found if told]
            if points:
                rows, differences = zip(*points, strict=True)
                means = [tables.POINTS * told["mean"] for told in differences]
                reach = [
                    [tables.POINTS * abs(told["mean"] - told[end]) for told in differences] for end in ("low", "high")
                ]
                axes.errorbar(means, rows, xerr=reach, fmt="o", color=colour, markersize=4, linewidth=1.2,
                              label=_plain(tables.ARMS[arm]))
        names = [f"{_plain(suite.title)}\ndense {tables.dense_text(tasks)}" for suite, tasks in shown]
        axes.set_yticks(range(len(shown)), names)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("points above or below dense attention, mean and 95 % interval over documents")
        axes.set_title(model)
        axes.grid(axis="x", color=GRID)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(frameon=False, loc="lower left", fontsize=8)
        return svg(figure)


def _plain(text: str) -> str:
    """Without Markdown's marks of code."""
    return text.replace("`", "")
