"""Tables of docs/evaluation.md and docs/evaluation_tasks.md, from results/ (`tools/update_tables.py` writes them)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tables import grid

RESULTS = Path(__file__).resolve().parents[2] / "results"
ARMS = {
    "locks@0.02": "`fine`, 2 %",
    "locks@512": "`fine`, 512 tokens",
    "locks:paper@0.02": "`paper`, 2 %",
    "quest@0.02": "Quest, 2 %",
    "quest@512": "Quest, 512 tokens",
    "mean_std@0.02": "mean+std, 2 %",
    "oracle@0.02": "oracle, 2 %",
}
# Scores between 0 and 1 are shown in points.
POINTS = 100


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together: those of a file whose names begin alike."""

    title: str
    file: str
    prefix: str
    unit: str = "points"

    def tasks(self) -> dict[str, dict]:
        path = RESULTS / f"{self.file}.json"
        if not path.exists():
            return {}
        found = json.loads(path.read_text())["tasks"]
        return {name: task for name, task in found.items() if name.startswith(self.prefix) and task["n"]}


_QWEN, _SMOLLM2 = "qwen2.5-coder-0.5b", "smollm2-135m"
SUITES = {
    "Qwen2.5-Coder-0.5B-Instruct": [
        Suite("RULER, 8,192", f"{_QWEN}/ruler-8k", "ruler_"),
        Suite("RULER, 8,192, `auto` for `fine`", f"{_QWEN}/ruler-8k-auto", "ruler_"),
        Suite("RULER, 8,192, six tasks", f"{_QWEN}/ruler-8k-oracle", "ruler_"),
        Suite("RULER, 32,768", f"{_QWEN}/ruler-32k", "ruler_"),
        Suite("passkey, 8,192", f"{_QWEN}/ruler-8k", "passkey_"),
        Suite("passkey, 32,768", f"{_QWEN}/ruler-32k", "passkey_"),
        Suite("LongBench v1", f"{_QWEN}/longbench", "longbench_"),
        Suite("MATH-500", f"{_QWEN}/math500", "math500"),
        Suite("AIME 2026", f"{_QWEN}/aime26", "aime26"),
        Suite("text, 8,192", f"{_QWEN}/perplexity", "perplexity_8192", "nats a token"),
        Suite("text, 32,768", f"{_QWEN}/perplexity", "perplexity_32768", "nats a token"),
    ],
    "SmolLM2-135M-Instruct": [
        Suite("RULER, 4,096", f"{_SMOLLM2}/ruler-4k", "ruler_"),
        Suite("passkey, 4,096", f"{_SMOLLM2}/ruler-4k", "passkey_"),
        Suite("loops in 4,096 tokens", f"{_SMOLLM2}/ruler-4k", "long_generation"),
        Suite("text, 4,096", f"{_SMOLLM2}/perplexity", "perplexity", "nats a token"),
    ],
}


def suites() -> Iterator[tuple[str, Suite, dict[str, dict]]]:
    """Those that have results: model, suite, its tasks."""
    for model, some in SUITES.items():
        for suite in some:
            if tasks := suite.tasks():
                yield model, suite, tasks


def over_tasks(tasks: dict[str, dict], arm: str) -> dict | None:
    """A suite's difference to dense in an arm, every task counting the same; None where the arm did not run."""
    from locks.evaluation.statistics import paired_over_tasks

    if not all(arm in task["scores"] for task in tasks.values()):
        return None
    arms, bases = ([task["scores"][name] for task in tasks.values()] for name in (arm, "dense"))
    return paired_over_tasks(arms, bases).as_dict()


def dense_score(tasks: dict[str, dict]) -> float:
    return sum(task["arms"]["dense"]["score"] for task in tasks.values()) / len(tasks)


def dense_text(tasks: dict[str, dict]) -> str:
    return f"{POINTS * dense_score(tasks):.1f}"


def _difference(told: dict | None, unit: str) -> str:
    if told is None:
        return ""
    scale, digits = (POINTS, 1) if unit == "points" else (1, 3)
    mean, low, high = (f"{scale * told[name]:+.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _score(value: float, unit: str) -> str:
    return f"{POINTS * value:.1f}" if unit == "points" else f"{value:.3f} {unit}"


def _by_model(header: list[str], rows_of: dict[str, list[list[str]]]) -> str:
    return "\n\n".join(f"**{model}**\n\n{grid(header, rows)}" for model, rows in rows_of.items())


def suites_table() -> str:
    """Each suite's dense score and what every arm differs by."""
    rows: dict[str, list[list[str]]] = {}
    for model, suite, tasks in suites():
        documents = sum(task["n"] for task in tasks.values())
        cells = [_difference(over_tasks(tasks, arm), suite.unit) for arm in ARMS]
        head = [suite.title, f"{len(tasks)}, {documents}", _score(dense_score(tasks), suite.unit)]
        rows.setdefault(model, []).append(head + cells)
    return _by_model(["", "tasks, documents", "dense", *ARMS.values()], rows)


def reading_table() -> str:
    """What the arms read, what mass they kept, and how their greedy answers part from dense's."""
    rows: dict[str, list[list[str]]] = {}
    for model, suite, tasks in suites():
        cells = []
        for arm in ARMS:
            told = [task["arms"][arm] for task in tasks.values() if arm in task["arms"]]
            cells.append(_reading(told) if len(told) == len(tasks) else "")
        rows.setdefault(model, []).append([suite.title, *cells])
    return _by_model(["", *ARMS.values()], rows)


def _reading(told: list[dict]) -> str:
    measured = [one for one in told if one["measured_rows"]]
    rows = sum(one["measured_rows"] for one in measured)
    mass = f"{sum(one['retained_mass'] * one['measured_rows'] for one in measured) / rows:.3f}" if rows else "none"
    agreed = [one["agreement"] for one in told if "agreement" in one]
    if not agreed:
        return mass
    same = sum(one["identical"] * one["n"] for one in agreed) / sum(one["n"] for one in agreed)
    return f"{mass}, {POINTS * same:.0f} %"


def tasks_table() -> str:
    """Every task by itself."""
    rows: dict[str, list[list[str]]] = {}
    for model, suite, tasks in suites():
        for name, task in tasks.items():
            dense = task["arms"]["dense"]
            cells = [
                _difference(task["arms"][arm].get("difference"), suite.unit) if arm in task["arms"] else ""
                for arm in ARMS
            ]
            head = [f"`{name}`", str(task["n"]), _score(dense["score"], suite.unit), str(dense["cut_off"])]
            rows.setdefault(model, []).append(head + cells)
    return _by_model(["", "n", "dense", "cut off", *ARMS.values()], rows)


def agreement_table() -> str:
    """Of every task's greedy answers: how many are dense's, and where the others part from it."""
    rows: dict[str, list[list[str]]] = {}
    for model, _, tasks in suites():
        for name, task in tasks.items():
            told = [task["arms"].get(arm, {}).get("agreement") for arm in ARMS]
            if any(told):
                rows.setdefault(model, []).append([f"`{name}`", *map(_agreement, told)])
    return _by_model(["", *ARMS.values()], rows)


def _agreement(told: dict | None) -> str:
    if told is None:
        return ""
    same, median = f"{POINTS * told['identical']:.0f} %", told["first_divergence_median"]
    return same if median is None else f"{same}, {median:.0f}"
