"""Draws docs/images: pictures of the method, and measured ones from bench/results and tests/data.

`draw_figures.py` writes them; `draw_figures.py --check` draws nothing, and exits 1 with the names of those whose data
or drawing code has changed since. It needs the package `locks` and matplotlib. pipeline.svg is drawn by hand.
"""

import argparse
import hashlib
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "bench" / "results"
EVALUATED = ROOT / "results"
sys.path.insert(0, str(TOOLS))


def draw_mass() -> str:
    """Retained mass against bytes, as the report of `locks quality` draws it."""
    from locks.report import figures

    rows, tokens = [], {}
    for name in ("comparison", "comparison_qwen"):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        rows += [row for row in result["rows"] if row["scope"] == "model"]
        tokens |= {trace["model"]: trace["tokens"] for trace in result["traces"]}
    return figures.pareto(rows, tokens)


def draw_chain() -> str:
    """The theory's bounds beside the truths, as the report of `locks quality --chain` draws them."""
    from locks.report import figures

    return figures.chain(json.loads((RESULTS / "chain.json").read_text())["chain_samples"])


def draw_of(module: str) -> Callable[[], str]:
    def draw() -> str:
        return importlib.import_module(f"figures.{module}").draw()

    return draw


@dataclass(frozen=True)
class Figure:
    """One picture, and the files that it is made from."""

    draw: Callable[[], str]
    sources: tuple[Path, ...]

    def digest(self) -> str:
        return hashlib.sha256(b"".join(path.read_bytes() for path in self.sources)).hexdigest()


_DRAWN = TOOLS / "figures"
_REPORT = ROOT / "python" / "locks" / "report"
FIGURES = {
    "page": Figure(draw_of("page"), (_DRAWN / "drawing.py", _DRAWN / "page.py")),
    "record": Figure(draw_of("record"), (_DRAWN / "drawing.py", _DRAWN / "record.py")),
    "estimate": Figure(draw_of("estimate"), (
        _DRAWN / "drawing.py", _DRAWN / "estimate.py", ROOT / "tests" / "data" / "smollm2_slice.safetensors")),
    "timeline": Figure(draw_of("timeline"), (_DRAWN / "drawing.py", _DRAWN / "timeline.py", RESULTS / "kernels.json")),
    "mass": Figure(draw_mass, (
        _REPORT / "style.py", _REPORT / "figures.py", RESULTS / "comparison.json", RESULTS / "comparison_qwen.json")),
    "chain": Figure(draw_chain, (_REPORT / "style.py", _REPORT / "figures.py", RESULTS / "chain.json")),
    "evaluation": Figure(draw_of("evaluation"), (
        _REPORT / "style.py", _DRAWN / "evaluation.py", TOOLS / "tables" / "evaluation.py",
        *sorted(EVALUATED.rglob("*.json")))),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if a figure is out of date")
    check = parser.parse_args().check
    stale = False
    for name, figure in FIGURES.items():
        path = IMAGES / f"{name}.svg"
        mark = f"<!-- tools/draw_figures.py, {figure.digest()} -->\n"
        if path.exists() and mark in path.read_text():
            continue
        stale = True
        if check:
            print(f"{path.relative_to(ROOT)}: out of date, run tools/draw_figures.py")
        else:
            path.write_text(figure.draw().rstrip("\n") + "\n" + mark)
            print(f"{path.relative_to(ROOT)}: drawn")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
