"""Writes the tables of README.md and docs/: measured numbers from the committed result files, refusals from the code.

`update_tables.py` rewrites them; `update_tables.py --check` exits 1 and names the file if one is out of date.
Each table stands between `<!-- table:NAME ... -->` and `<!-- /table -->`.
"""

import argparse
import re
import sys
from pathlib import Path

from tables import cpu, evaluation, gpu, quality

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def refusals_table() -> str:
    """What the plug-in refuses when vLLM starts."""
    from locks_vllm.refusals import table_rows

    rows = [[what, f"`{setting}`", way_out] for what, setting, way_out in table_rows()]
    lines = ["| what | setting | way out |", "| --- | --- | --- |", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


TABLES = {
    "demo": (DOCS / "benchmark.md", cpu.demo_table),
    "vllm_cpu": (DOCS / "benchmark.md", cpu.vllm_cpu_table),
    "versions": (DOCS / "versions.md", cpu.versions_table),
    "quality": (DOCS / "quality.md", quality.quality_table),
    "comparison": (DOCS / "quality.md", quality.comparison_table),
    "quality_window": (DOCS / "quality.md", quality.quality_window_table),
    "quality_repeated": (DOCS / "quality.md", quality.quality_repeated_table),
    "tuning_budgets": (DOCS / "tuning.md", quality.tuning_budgets_table),
    "tuning_formats": (DOCS / "tuning.md", quality.tuning_formats_table),
    "serve": (DOCS / "benchmark.md", gpu.serve_table),
    "serve_highlights": (ROOT / "README.md", gpu.serve_highlights_table),
    "crossover": (DOCS / "benchmark.md", gpu.crossover_table),
    "prefill": (DOCS / "benchmark.md", gpu.prefill_table),
    "kernels": (DOCS / "kernels.md", gpu.kernels_table),
    "cpu_stages": (DOCS / "cpu.md", cpu.cpu_stages_table),
    "evaluation": (DOCS / "evaluation.md", evaluation.suites_table),
    "evaluation_reading": (DOCS / "evaluation.md", evaluation.reading_table),
    "evaluation_tasks": (DOCS / "evaluation_tasks.md", evaluation.tasks_table),
    "evaluation_agreement": (DOCS / "evaluation_tasks.md", evaluation.agreement_table),
    "refusals": (DOCS / "limits.md", refusals_table),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale: dict[str, None] = {}  # pages, each once
    for name, (page, render) in TABLES.items():
        text = page.read_text()
        table = render()
        fresh, count = re.subn(rf"(<!-- table:{name}\b[^\n]*-->\n).*?(<!-- /table -->)",
                               lambda match: match[1] + table + "\n" + match[2], text, flags=re.S)
        if count != 1:
            sys.exit(f"{page.name}: expected one table named {name}, found {count}")
        if fresh != text:
            stale[page.name] = None
            if not check:
                page.write_text(fresh)
    for page in stale:
        print(f"{page}: {'out of date, run tools/update_tables.py' if check else 'updated'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
