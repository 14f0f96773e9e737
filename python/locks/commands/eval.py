"""locks eval"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from locks.commands import CommandError, json_object, usage_error
from locks.commands.bench_process import Engine, EngineError
from locks.commands.output import show_table
from locks.commands.vllm_package import need_vllm
from locks.evaluation.job import STAGES, EvalJob

COMMAND = "locks eval"
EXAMPLES = """Examples:

    locks eval passkey --model MODEL --lengths 8192,32768 --data DIR --out FOLDER

    locks eval ruler --model MODEL --data DIR --out FOLDER --selectors dense,locks@512,locks:paper@0.02,oracle:16@512

    locks eval ruler --model MODEL --data DIR --out FOLDER --stage prepare
"""
_SELECTORS = "dense,locks,oracle,quest,mean_std"


def evaluate(
    tasks: Annotated[
        str,
        typer.Argument(
            help="With commas between: ruler (13 tasks) or ruler_vt and such, longbench or longbench_hotpotqa and such,"
            " math500, aime26, passkey, perplexity, long_generation, or a generating task of lm-evaluation-harness."
        ),
    ],
    model: Annotated[str, typer.Option(help="A model as vLLM takes it: a folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="The evaluation's folder: prompts, answers, results.")],
    budgets: Annotated[
        str, typer.Option(help="Budgets of all but dense, with commas between: tokens, or fractions of the length.")
    ] = "0.02,512,1024",
    selectors: Annotated[
        str,
        typer.Option(
            help="What chooses pages, with commas between: dense, locks, oracle, quest, mean_std, centroid or int3. "
            "A format of LOCKS or another's tokens a page may follow a colon, a budget of its own an @: locks:wide@512."
        ),
    ] = _SELECTORS,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the prompts that tasks make (RULER, passkey, ...), with commas between.")
    ] = "4096",
    count: Annotated[int, typer.Option(help="Documents a task and length; of passkey a depth.", min=1)] = 20,
    data: Annotated[
        Optional[Path],
        typer.Option(
            help="A folder with tasks' data, as docs/evaluation.md lists it. passkey, perplexity and aime26 need it; "
            "for other tasks the hub is asked for what it lacks."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts into the model's chat template where tasks allow it.")] = True,
    batch: Annotated[int, typer.Option(help="Requests that run together.", min=1)] = 16,
    max_tokens: Annotated[
        Optional[int], typer.Option(help="Tokens of the longest answer; what the task says if not given.", min=2)
    ] = None,
    long_tokens: Annotated[int, typer.Option(help="Tokens of each text of the task long_generation.", min=64)] = 8192,
    minutes: Annotated[
        Optional[float], typer.Option(help="Stop after so many minutes; the next run goes on.", min=0.1)
    ] = None,
    shard: Annotated[str, typer.Option(help="Answer one of N parts of the requests, such as 2/4.")] = "1/1",
    stage: Annotated[str, typer.Option(help="One part of the run, prepare, generate or score, or all.")] = "all",
    engine: Annotated[str, typer.Option(help="Further arguments of vLLM's LLM, as JSON.", metavar="JSON")] = "{}",
) -> None:
    """Measure task accuracy, sparse beside dense.

    Answers each document under dense attention and under every selector and budget, in one vLLM engine, and scores
    what each differs by. A run that was stopped goes on when the same command is given again. With --stage the parts
    run on different machines: only `generate` needs a GPU."""
    job = EvalJob(
        tasks=tasks,
        model=model,
        out=str(out),
        selectors=selectors,
        budgets=budgets,
        lengths=_lengths(lengths),
        count=count,
        chat=chat,
        data=None if data is None else str(data),
        batch=batch,
        max_tokens=max_tokens,
        long_tokens=long_tokens,
        minutes=minutes,
        shard=_shard(shard),
        stages=_stages(stage),
        engine=json_object(COMMAND, "--engine", engine),
    )
    _check(job)
    need_vllm(COMMAND)
    try:
        with _progress() as say, Engine("locks.evaluation.process") as process:
            for answer in process.measure(job, say):
                if "refused" in answer:
                    raise _refusal(answer["refused"])
                _tell(answer["done"])
    except EngineError as error:
        raise _refusal(error) from None


def _refusal(reason: object) -> CommandError:
    return usage_error(COMMAND, reason)


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,8}", part) and 256 <= int(part) <= 2**24 for part in parts):
        raise _refusal(f"--lengths = {text!r}, expected numbers of tokens from 256 to {2**24}, such as 4096,32768")
    return [int(part) for part in parts]


def _shard(text: str) -> list[int]:
    number, _, of = text.partition("/")
    if not (all(re.fullmatch("[0-9]{1,6}", part) for part in (number, of)) and 1 <= int(number) <= int(of)):
        raise _refusal(f"--shard = {text!r}, expected I/N with I from 1 to N")
    return [int(number), int(of)]


def _stages(text: str) -> list[str]:
    if text == "all":
        return list(STAGES)
    if text not in STAGES:
        raise _refusal(f"--stage = {text!r}, expected {', '.join(STAGES)} or all")
    return [text]


def _check(job: EvalJob) -> None:
    """Refuses what can be told before anything is loaded."""
    from locks.evaluation.arms import parse_arms

    try:
        parse_arms(job.selectors, job.budgets)
    except ValueError as error:
        raise _refusal(error) from None
    if job.data is not None and not Path(job.data).is_dir():
        raise _refusal(f"--data = {job.data!r}, expected a folder that exists")
    if job.shard[1] > 1 and len(job.stages) > 1:
        raise _refusal("--shard is for --stage generate: all parts are scored together")
    if job.folder.exists() and not job.folder.is_dir():
        raise _refusal(f"--out = {job.out!r}, expected a folder, or a name that is free")
    if set(job.stages) != {"generate"} and importlib.util.find_spec("lm_eval") is None:
        raise _refusal("tasks need lm-evaluation-harness, which is not installed: pip install 'locks-vllm[eval]'")


def _tell(done: dict[str, Any]) -> None:
    if "requests" in done:
        print(f"prepared {done['requests']} requests", flush=True)
    if "complete" in done:
        print("every request is answered" if done["complete"] else "stopped: run again to go on", flush=True)
    if "results" in done:
        results = json.loads(Path(done["results"]).read_text(encoding="utf-8"))
        show_table(_table(results))
        print(done["results"], flush=True)


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="scores, and differences to dense with 95 % intervals")
    for heading in ("task", "arm", "n", "score", "difference", "same\nanswers", "retained\nmass"):
        table.add_column(heading, justify="left" if heading in ("task", "arm") else "right", overflow="fold")
    for name, task in results["tasks"].items():
        for arm, told in task["arms"].items():
            difference, agreement = told.get("difference"), told.get("agreement")
            table.add_row(
                name,
                arm,
                str(task["n"]),
                f"{told['score']:.4f}",
                "" if difference is None else "{mean:+.4f} [{low:+.4f}, {high:+.4f}]".format(**difference),
                "" if agreement is None else f"{agreement['identical']:.2f}",
                "" if told["retained_mass"] is None else f"{told['retained_mass']:.4f}",
            )
    return table


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """What goes on, on stderr: a bar if that is a terminal, nothing if it is not."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda doing: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("loading", total=None)

        def say(doing: dict[str, Any]) -> None:
            progress.update(bar, description=doing["text"], completed=doing.get("done", 0), total=doing.get("of"))

        yield say
