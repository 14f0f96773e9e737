"""The tasks by name, as lm-evaluation-harness runs them: its own configurations, over local data if there is any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locks.evaluation import passkey, ruler
from locks.evaluation.data import Data, DataError, online
from locks.evaluation.measures import LONG_GENERATION, PERPLEXITY

# LongBench is asked without a chat template where its authors do so.
_PLAIN_LONGBENCH = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
LONGBENCH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa", "musique", "dureader"),
    *("gov_report", "qmsum", "multi_news", "vcsum", "trec", "triviaqa", "samsum", "lsht"),
    *("passage_count", "passage_retrieval_en", "passage_retrieval_zh", "lcc", "repobench-p"),
)
_BOXED = "{{problem}}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
# Answers of some length: as long as instruct models of a few billion parameters need.
_REASONING_TOKENS = {"math500": 2048, "aime26": 16384}

GROUPS = {
    "ruler": tuple(f"ruler_{name}" for name in ruler.TASKS),
    "longbench": tuple(f"longbench_{name}" for name in LONGBENCH),
}


@dataclass
class Task:
    """One task of the harness, ready to make requests."""

    name: str
    harness: Any  # lm_eval's Task
    metric: str  # the one that arms are compared by
    chat: bool
    max_tokens: int | None = None  # of an answer; None for what the task itself says
    whole: bool = False  # its documents are made to order: all of them are asked


@dataclass(frozen=True)
class Choice:
    """What of the tasks is wanted."""

    lengths: tuple[int, ...]  # of prompts that are made: RULER, passkey, perplexity
    count: int  # documents a task and length
    chat: bool
    max_tokens: int | None = None


def expand(names: str) -> list[str]:
    """The tasks of a list with commas, groups replaced by what is in them."""
    wanted: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        wanted.extend(GROUPS.get(name, (name,)))
    return list(dict.fromkeys(wanted))


def is_own(name: str) -> bool:
    """Whether a task is a measure of ours, which the harness does not know."""
    return name in (PERPLEXITY, LONG_GENERATION)


def build(name: str, choice: Choice, tokenizer: Any, data: Data) -> list[Task]:
    """The tasks that a name stands for, one for each length where there are some. Raises DataError, and ValueError for
    a name that neither this table nor the harness has."""
    if name.startswith("ruler_") and name.removeprefix("ruler_") in ruler.TASKS:
        kind = name.removeprefix("ruler_")
        answer = ruler.ANSWER_TOKENS[kind]
        made = {length: ruler.documents(kind, length, choice.count, tokenizer, data) for length in choice.lengths}
        return [_generated(name, kind, length, some, answer, ruler.score, choice) for length, some in made.items()]
    if name == "passkey":
        answer = passkey.ANSWER_TOKENS
        made = {length: passkey.documents(length, choice.count, tokenizer, data) for length in choice.lengths}
        return [_generated(name, name, length, some, answer, passkey.score, choice) for length, some in made.items()]
    if name.startswith("longbench_") and name.removeprefix("longbench_") in LONGBENCH:
        return [_longbench(name, choice, data)]
    if name in ("math500", "aime26"):
        return [_reasoning(name, choice, data)]
    return [_other(name, choice)]


def _generated(
    name: str,
    kind: str,
    length: int,
    documents: list[dict[str, Any]],
    answer_tokens: int,
    score: Callable[..., dict[str, float]],
    choice: Choice,
) -> Task:
    config = {
        "task": f"{name}_{length}",
        "output_type": "generate_until",
        "custom_dataset": _dataset([{**document, "task": kind} for document in documents]),
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": " ",
        "process_results": score,
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": answer_tokens},
    }
    return Task(f"{name}_{length}", _configured(config), "score", choice.chat, whole=True)


def _longbench(name: str, choice: Choice, data: Data) -> Task:
    kind = name.removeprefix("longbench_")
    chat = choice.chat and kind not in _PLAIN_LONGBENCH
    overrides: dict[str, Any] = {}
    if data.has("longbench"):
        rows = [row for row in data.rows("longbench", name) if row["dataset"] == kind][: choice.count]
        if not rows:
            raise DataError(f"{name}: the file of --data has no sample of {kind!r}")
        overrides = {"custom_dataset": _dataset(rows), "doc_to_text": "{{prompt}}"}
    elif not online():
        data.text("longbench", name)  # says what is missing
    return Task(name, _from_harness(f"longbench/{kind}.yaml", overrides), "score", chat)


def _reasoning(name: str, choice: Choice, data: Data) -> Task:
    base = {"math500": "minerva_math/minerva_math500.yaml", "aime26": "aime/aime25.yaml"}[name]
    overrides: dict[str, Any] = {}
    if data.has(name) or name == "aime26" or not online():
        rows = [{**row, "answer": str(row["answer"])} for row in data.rows(name, name)[: choice.count]]
        overrides["custom_dataset"] = _dataset(rows)
    if choice.chat:  # without a template, the harness's own prompt and, for MATH, its four examples
        overrides |= {"doc_to_text": _BOXED, "num_fewshot": 0}
    metric = "math_verify" if name == "math500" else "exact_match"
    return Task(name, _from_harness(base, overrides), metric, choice.chat, _REASONING_TOKENS[name])


def _other(name: str, choice: Choice) -> Task:
    """Any task of the harness that generates."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_subtasks:
        names = ", ".join([*GROUPS, "passkey", "math500", "aime26", PERPLEXITY, LONG_GENERATION])
        raise ValueError(f"task {name!r}, expected {names}, a task of theirs, or one of lm-evaluation-harness")
    (task,) = manager.load([name])["tasks"].values()
    if task.OUTPUT_TYPE != "generate_until":
        raise ValueError(f"task {name!r} is of kind {task.OUTPUT_TYPE}, which decodes nothing; expected generate_until")
    metric = next(iter(task.aggregation()))
    return Task(name, task, metric, choice.chat, choice.max_tokens)


class Documents(list[dict[str, Any]]):
    """Rows as the harness reads a split of a data set. Not a table, which wants one type a column: LongBench has none
    or a list of classes."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(name for row in self for name in row)

    def map(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Documents:
        return Documents({**row, **change(row)} for row in self)


def _dataset(rows: list[dict[str, Any]]) -> Callable[..., dict[str, Documents]]:
    """As the harness takes a data set that is made."""
    return lambda **_: {"test": Documents(rows)}


def _configured(config: dict[str, Any]) -> Any:
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(config={**config, "metadata": {"version": 1}})


def _from_harness(file: str, overrides: dict[str, Any]) -> Any:
    """A task of the harness's own tables, with something of it replaced; its data set too if that is."""
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.tasks.__file__).parent / file)
    config.pop("tag", None)
    if "custom_dataset" in overrides:
        for field_name in ("dataset_path", "dataset_name", "training_split", "fewshot_split"):
            config.pop(field_name, None)
    return ConfigurableTask(config={**config, **overrides})
