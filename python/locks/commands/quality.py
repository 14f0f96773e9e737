"""locks quality"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from locks.commands.output import STDOUT, JsonFile, check_target, show_table, write_json, write_text
from locks.commands.quality_output import COMMAND, check_different_targets, counted, refusal

if TYPE_CHECKING:
    from locks.comparison import Plan
    from locks.quality import Row
    from locks.trace import Trace

_MOST_THREADS = 256  # more than any machine helps with; far fewer than make thread creation fail
EXAMPLES = """Examples:

    locks quality book.safetensors --budget 512

    locks quality *.safetensors --selector locks,oracle,quest --format fine,wide --budget 256,512,0.02

    locks quality *.safetensors --energy --chain --html report.html --json report.json
"""


def _thread_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_THREADS):
        raise typer.BadParameter(f"{text!r}, expected 1 to {_MOST_THREADS}")
    return int(text)


def quality(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Captured attention traces (.safetensors), as `locks capture` writes them.",
            show_default=False,
        ),
    ],
    selector: Annotated[
        str,
        typer.Option(
            help="Selectors, with commas between. Of pages: locks, oracle (the exact choice), quest, mean_std, "
            "centroid, int3 (keys of 3 bits about their page's mean), shared_low_rank (one basis for the whole "
            "sequence, the format's bytes). Of tokens: shadowkv, rocketkv, snapkv, kvzip (of a trace captured with "
            "--repeat-context); with rocketkv or snapkv all are judged on the steps behind the first 32."
        ),
    ] = "locks",
    budget: Annotated[
        str,
        typer.Option(
            help="Tokens that a step may read, a fraction of the length such as 0.02, or all; several with commas."
        ),
    ] = "512",
    format: Annotated[
        str, typer.Option(help="Summary formats, with commas between; `locks formats` lists them.")
    ] = "fine",
    energy: Annotated[
        bool,
        typer.Option("--energy", help="Also tell what a basis of the page, sequence or layer captures of the keys."),
    ] = False,
    chain: Annotated[
        bool,
        typer.Option(
            "--chain", help="Also tell each error bound of the theory beside the error that was measured."
        ),
    ] = False,
    json_file: JsonFile = None,
    csv_file: Annotated[
        Optional[str], typer.Option("--csv", metavar="FILE", help="Also write the rows as CSV.")
    ] = None,
    html_file: Annotated[
        Optional[str], typer.Option("--html", metavar="FILE", help="Also write a report with figures, one file.")
    ] = None,
    threads: Annotated[
        Optional[int],
        typer.Option(metavar="N", parser=_thread_count, help="CPU threads; as many as torch takes if not given."),
    ] = None,
) -> None:
    """Measure how much attention selectors keep.

    Runs them on traces of a model's attention, which `locks capture` writes, at a budget of tokens: retained attention
    mass, output error and bytes read, by layer and KV head, and, of several, by trace and model as well."""
    check_target(COMMAND, "--json", json_file, or_stdout=True)
    check_target(COMMAND, "--csv", csv_file)
    check_target(COMMAND, "--html", html_file)
    check_different_targets({"--json": json_file, "--csv": csv_file, "--html": html_file}, traces)
    if html_file is not None:
        from locks.report import check_packages

        check_packages()

    import torch

    from locks.comparison import Plan
    from locks.trace import Trace

    if threads is not None:
        torch.set_num_threads(threads)
    # RuntimeError: an operator's refusal of a value, such as an unknown selector.
    try:
        plan = Plan.parse(selector, format, budget, energy=energy, chain=chain)
        opened = [Trace(path) for path in traces]
        if len(opened) == 1 and plan.is_single() and csv_file is None and html_file is None:
            _measure_one(opened[0], plan, json_file)
        else:
            _compare(opened, plan, json_file, csv_file, html_file)
    except (ValueError, RuntimeError) as error:
        raise refusal(error) from error


def _measure_one(trace: Trace, plan: Plan, json_file: str | None) -> None:
    """One selector at one budget: a row for each layer and KV head."""
    from locks.quality import evaluate

    ((text, budget),) = plan.budgets.items()
    rows = []
    with counted("layers", len(trace.layers)) as advance:
        done = None
        for row in evaluate(trace, plan.selectors[0], plan.formats[0], budget, plan.window):
            if done not in (None, row.layer):
                advance()
            done = row.layer
            rows.append(row)
    if json_file is not None:
        write_json(COMMAND, json_file, [row.as_dict() for row in rows])
    if json_file != STDOUT:
        show_table(_table(rows, trace.path.name, text, plan.window))


def _compare(
    traces: list[Trace], plan: Plan, json_file: str | None, csv_file: str | None, html_file: str | None
) -> None:
    from locks.commands.quality_output import about_run, as_csv
    from locks.comparison import Comparison, check_distinct

    check_distinct(traces)
    comparison = Comparison(plan)
    with counted("layers", sum(len(trace.layers) for trace in traces)) as advance:
        for trace in traces:
            comparison.add(trace, advance)
    result = {"about": about_run()} | comparison.as_dict()
    if json_file is not None:
        write_json(COMMAND, json_file, result)
    if csv_file is not None:
        write_text(COMMAND, "--csv", csv_file, as_csv(result["rows"]))
    if html_file is not None:
        from locks.report import render

        write_text(COMMAND, "--html", html_file, render(result))
    if json_file != STDOUT:
        for table in _pooled_tables(plan, result):
            show_table(table)


def _table(rows: list[Row], trace_name: str, budget: str, window: int) -> Table:
    first = rows[0]
    judged = f", judged on the last {first.judged_steps} steps" if window else ""
    title = f"{escape(trace_name)}: {first.selector}, format {first.format}, budget {budget}{judged}"
    table = Table(title=title)
    several = len({(row.layer, row.kv_head) for row in rows}) > len({row.layer for row in rows})
    headings = ("tokens\nallowed", "retained mass\nof the oracle", f"retained mass\nof {first.selector}",
                "gap\n(points)", "output\nerror", "bytes a\nrecord")
    for heading in ("layer", *(["KV head"] if several else []), *headings):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.layer),
            *([str(row.kv_head)] if several else []),
            str(row.budget_tokens),
            f"{row.retained_oracle:.4f}",
            f"{row.retained:.4f}",
            f"{100 * (row.retained_oracle - row.retained):.2f}",
            f"{row.output_error:.4f}",
            str(row.bytes_per_record),
        )
    return table


def _pooled_tables(plan: Plan, result: dict) -> Iterator[Table]:
    """A table for each model; a line for each selector, format and budget."""
    rows: dict[str, list[dict]] = {}
    for row in result["rows"]:
        if row["scope"] == "model":
            rows.setdefault(row["model"], []).append(row)
    for model, of_model in rows.items():
        count = sum(trace["model"] == model for trace in result["traces"])
        judged = f", steps behind the first {plan.window}" if plan.window else ""
        table = Table(title=f"{escape(model)}: {count} traces{judged}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("selector", "format", "budget"):
            table.add_column(heading, no_wrap=True)
        numbers = ("KiB a\nstep", "mass\n(%)", "5th\n(%)", "gap\n(points)", "recall", "answers\nread")
        for heading in numbers:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in of_model:
            table.add_row(
                row["selector"], row["format"], row["budget"] + ("*" if row["raised"] else ""),
                f"{row['bytes_per_step'] / 1024:.0f}", f"{100 * row['retained']:.2f}",
                f"{100 * row['retained_p5']:.1f}", f"{100 * row['gap']:.2f}", f"{row['recall']:.3f}",
                "" if row["carriers_read"] is None else f"{row['carriers_read']:.3f}",
            )
        table.caption = "attention mass in the pages read: mean and 5th percentile"
        if any(row["raised"] for row in of_model):
            table.caption += "; * less than what is always read, and raised to it"
        yield table
