"""Keeps what `locks quality ... --json RESULT` found in a file of bench/results, from which docs/quality.md is made.

    tools/keep_comparison.py RESULT NAME

Rows of single KV heads, which are most of the file, and those of layers and traces at other budgets than 512 tokens
are left out; of the energy and the chain, means, medians and largest values stay, and of the chain the samples of one
KV head a layer. Numbers are rounded to five digits.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET_OF_PARTS = "512"
SHOWN_OF_PAGES = ("tail", "ideal_residual", "stored_score_bound", "stored_score_error")
SHOWN_OF_STEPS = ("retained_bound", "stored_retained", "output_bound", "output_error")
BASES = ("page_basis", "sequence_basis", "layer_basis")


def energy_by_layer(rows: list[dict]) -> list[dict]:
    """Shares of energy, mean over the KV heads of a layer and their traces."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["layer"], row["page_tokens"], row["rank"]].append(row)
    return [
        dict(zip(("model", "layer", "page_tokens", "rank"), key, strict=True))
        | {basis: statistics.mean(row[basis] for row in group) for basis in BASES}
        for key, group in groups.items()
    ]


def chain_by_format(rows: list[dict]) -> list[dict]:
    """How near the truths of all KV heads come to their bounds: the median of medians, and the largest."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["format"], row["budget"]].append(row["ratios"])
    return [
        dict(zip(("model", "format", "budget"), key, strict=True))
        | {"num_heads": len(group)}
        | {name: {"median": statistics.median(ratios[name]["median"] for ratios in group),
                  "max": max(ratios[name]["max"] for ratios in group)} for name in group[0]}
        for key, group in groups.items()
    ]


def chain_samples(rows: list[dict]) -> list[dict]:
    """Of one KV head a layer, what the figure shows."""
    return [
        {"model": row["model"], "layer": row["layer"], "format": row["format"]}
        | {"pages": {name: row["pages"][name] for name in SHOWN_OF_PAGES}}
        | {"steps": {name: row["steps"][name] for name in SHOWN_OF_STEPS}}
        for row in rows
        if row["kv_head"] == 0
    ]


def each_leaf(value: object, change: Callable[[object], object]) -> object:
    """The value with every number and text in it changed."""
    if isinstance(value, dict):
        return {key: each_leaf(part, change) for key, part in value.items()}
    return [each_leaf(part, change) for part in value] if isinstance(value, list) else change(value)


def rounded(leaf: object) -> object:
    return float(f"{leaf:.5g}") if isinstance(leaf, float) else leaf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, metavar="RESULT", help="what `locks quality --json` wrote")
    parser.add_argument("name", metavar="NAME", help="of the file in bench/results, without .json")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    result["models"] = list(dict.fromkeys(trace["model"] for trace in result["traces"]))
    result["rows"] = [
        {key: value for key, value in row.items() if value is not None}
        for row in result["rows"]
        if row["scope"] == "model" or (row["scope"] in ("layer", "trace") and row["budget"] == BUDGET_OF_PARTS)
    ]
    if "energy" in result:
        result["energy"] = energy_by_layer(result["energy"])
    if "chain" in result:
        result["chain_samples"] = chain_samples(result["chain"])
        result["chain"] = chain_by_format(result["chain"])
    parts = []
    for key, value in each_leaf(result, rounded).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):  # a line a row
            lines = ",\n".join("  " + json.dumps(row) for row in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    out = ROOT / "bench" / "results" / f"{arguments.name}.json"
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{out.relative_to(ROOT)}: {len(result['rows'])} rows, {out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
