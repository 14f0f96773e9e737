"""`make demo`: one question about a long document, put to one engine: dense, and with LOCKS.

Ends with a table; writes demo/result.json and demo/report.html. Every figure comes from this run.
"""

import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO, CACHE = ROOT / "demo", ROOT / ".cache"
LOG = CACHE / "demo-engine.log"

MODEL_NAME = "SmolLM2-135M-Instruct"
FORMAT = "fine"
BUDGETS = [None, 512, 256]  # tokens; None reads all
NUM_TOKENS = 48  # of each pass: the answer takes about 15
REPEATS = 3


def main() -> int:
    from demo.console import last_lines, own_console

    begin = time.monotonic()
    with own_console(LOG) as console:
        try:
            run(console)
        except KeyboardInterrupt:
            console.print("\nstopped")
            return 130
        except Exception as error:
            traceback.print_exc()  # into the log
            console.print(f"\n[red]The demo stopped: {type(error).__name__}: {error}", markup=True)
            console.print(f"The last lines of {LOG.relative_to(ROOT)}:\n", style="dim")
            console.print(last_lines(LOG), markup=False, style="dim")
            return 1
        console.print(
            f"[dim]{time.monotonic() - begin:.0f} s in all; vLLM's own output is in {LOG.relative_to(ROOT)}"
        )
    return 0


def run(console) -> None:
    from demo.console import Steps
    from demo.smollm2 import ensure_model

    steps = Steps(console)
    console.print(f"[bold]LOCKS[/]: {MODEL_NAME} in unmodified vLLM, one question, three budgets\n")
    with steps.step("Model", measurable=True) as update:
        folder = ensure_model(CACHE, lambda text, done: update(done, text))
    with steps.step("Document") as update:
        from transformers import AutoTokenizer

        from demo.document import build_document

        tokenizer = AutoTokenizer.from_pretrained(folder)
        document = build_document(tokenizer)
        size = len(document.token_ids)
        update(
            1,
            f"{size:,} tokens of Python's language reference, a fact planted at {document.fact_begin:,}",
        )
    console.print(f"  planted  [italic]{document.fact}[/]\n  asked    [italic]{document.question}[/]")

    with steps.step("Engine: vLLM with the LOCKS plug-in (about a minute)"):
        from demo.engine import CHUNK_TOKENS, Engine, measure_all

        engine = Engine(folder, FORMAT)
    with steps.step("Reading the document, once", measurable=True) as update:
        chunks = -(-size // CHUNK_TOKENS)
        engine.generate(
            document.token_ids,
            1,
            lambda step: update(step / chunks, f"{min(step * CHUNK_TOKENS, size):,} of {size:,} tokens"),
        )
    with steps.step("Answering: dense, and with LOCKS", measurable=True) as update:
        passes = len(BUDGETS) * (REPEATS + 1)
        rows = measure_all(
            engine,
            document.token_ids,
            BUDGETS,
            NUM_TOKENS,
            REPEATS,
            lambda done: update(done / passes, f"pass {done} of {passes}"),
        )
    with steps.step("Report") as update:
        from demo import report

        answers, labels = zip(*(_answer(tokenizer, row.generation.token_ids) for row in rows), strict=True)
        result = report.result_of(rows, list(answers), document, MODEL_NAME, FORMAT)
        report.write_result(result, DEMO / "result.json")
        report.write_report(result, rows, list(labels), document, DEMO / "report.html")
        update(1, "demo/result.json, demo/report.html")
    console.print()
    console.print(_table(result))


def _answer(tokenizer, token_ids: list[int]) -> tuple[str, list[str]]:
    """The text up to the end of the answer, and the tokens that the decode steps wrote of it."""
    end = tokenizer.eos_token_id
    stop = token_ids.index(end) if end in token_ids else len(token_ids)
    names = [repr(tokenizer.decode([token]).strip(" ") or " ")[1:-1] for token in token_ids[1:stop]]
    if stop < len(token_ids):
        names.append("(end)")
    return tokenizer.decode(token_ids[:stop]).strip(), names[:24]


def _table(result: dict):
    from rich.table import Table

    table = Table(title="One prompt, one engine; each figure measured in this run", title_justify="left")
    table.add_column("budget")
    table.add_column("answer", max_width=34)
    table.add_column("", justify="center")
    for name in ("records/step", "read/step", "of dense", "mass kept", "tokens/s"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(
            "dense" if row["budget_tokens"] is None else f"LOCKS {row['budget_tokens']}",
            row["answer"],
            "[green]right[/]" if row["correct"] else "[red]wrong[/]",
            f"{row['records_per_step']:,.0f}",
            f"{row['bytes_per_step'] / 1e6:.1f} MB",
            f"{row['bytes_per_step'] / row['dense_bytes_per_step']:.0%}",
            f"{row['retained_mass']:.1%}",
            f"{row['tokens_per_second']:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
