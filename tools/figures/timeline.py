"""A decode step on a GPU and its launches, drawn to scale from bench/results/kernels.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from figures.drawing import Drawing

DATA = Path(__file__).parents[2] / "bench" / "results" / "kernels.json"
SHOWN = "131072x8"
COMPARED = {"131072x1": "131,072 x 1", "131072x8": "131,072 x 8", "1000000x1": "1,000,000 x 1"}
LAUNCHES = {"prepare": "coefficient", "score": "centroid", "select": "chosen"}
NAMES = {"prepare": "prepare", "score": "score", "select": "select_attend"}
X, WIDTH = 24, 890


def draw() -> str:
    result = json.loads(DATA.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    drawing = Drawing(940, 470, "A decode step: rows are planned once, then each layer runs three launches; how long "
                      "each takes, and the whole beside dense attention.")
    drawing.text(X, 34, "a decode step on the GPU", "title")
    _step(drawing, result["shape"]["layers"])
    _layer(drawing, rows)
    _beside_dense(drawing, rows)
    drawing.text(X, 452, f"kernel_bench on one {result['machine']}, {result['date']}: {result['shape']['query_heads']} "
                 f"query and {result['shape']['kv_heads']} KV heads of {result['shape']['head_dim']}, format fine, "
                 f"budget {result['budget']:,} tokens, microseconds a layer", "small")
    return drawing.svg()


def _step(drawing: Drawing, layers: int) -> None:
    drawing.box(X, 62, 76, 34, "scale")
    drawing.text(X + 38, 83, "plan_rows", "label", "middle")
    for number in range(4):
        x = X + 96 + 170 * number
        last = number == 3
        drawing.text(x, 57, f"layer {layers - 1 if last else number}", "small")
        for part, (launch, kind) in enumerate(LAUNCHES.items()):
            drawing.box(x + (0, 14, 46)[part], 62, (12, 30, 24)[part], 34, kind)
        drawing.box(x + 74, 62, 78, 34, "dropped")
        drawing.text(x + 113, 83, "vLLM's own", "label", "middle")
        if number == 2:
            drawing.text(x + 161, 84, "...", "head", "middle")
    drawing.text(X, 112, "once a step,", "small")
    drawing.text(X, 125, "outside of the graph", "small")
    drawing.text(X + 110, 112, "three launches of LOCKS a layer, all in one CUDA graph with the rest of the model; "
                 "lengths, tables and the plan stay on the device", "small")


def _layer(drawing: Drawing, rows: dict[str, Any]) -> None:
    y, chain = 172, rows[f"chain:{SHOWN}"]["median_us"]
    unit = WIDTH / chain
    drawing.text(X, y - 14, f"one layer, {COMPARED[SHOWN]} tokens: {chain:.1f} us", "head")
    x = float(X)
    words = {
        "prepare": "writes new keys and values, rotates the queries; builds records of complete blocks (none here)",
        "score": f"estimates every page's mass from its record: {rows[f'score:{SHOWN}']['bytes'] / 1e6:.1f} MB",
        "select": f"chooses pages, attends exactly: {rows[f'select:{SHOWN}']['bytes'] / 1e6:.1f} MB",
    }
    for launch, kind in LAUNCHES.items():
        row = rows[f"{launch}:{SHOWN}"]
        width = unit * row["median_us"]
        drawing.box(x, y, width - 1.5, 40, kind)
        told = f"{NAMES[launch]}, {row['median_us']:.1f} us"
        if launch == "prepare":  # too narrow for its words
            drawing.path(f"M{x + width / 2:.1f} {y + 36}V{y + 58}H{x + width}", "thin")
            drawing.text(x + width + 6, y + 62, f"{told}: {words[launch]}", "label")
        else:
            drawing.text(x + 8, y + 16, told, "head")
            drawing.text(x + 8, y + 31, words[launch], "label")
        x += width
    drawing.box(x, y, X + WIDTH - x, 40, "header")
    drawing.text(X + WIDTH, y + 62, f"hand-over: {(X + WIDTH - x) / unit:.1f} us more than the three alone", "label",
                 "end")


def _beside_dense(drawing: Drawing, rows: dict[str, Any]) -> None:
    y = 276
    drawing.text(X, y - 8, "beside dense attention over the same cache (FlashAttention-3), tokens x sequences", "head")
    unit = 640 / max(rows[f"chain:{case}"]["dense_us"] for case in COMPARED)
    for case, told in COMPARED.items():
        row = rows[f"chain:{case}"]
        drawing.text(X, y + 24, told, "text")
        for part, (kind, us, name) in enumerate((("dense", row["dense_us"], "dense"),
                                                 ("chosen", row["median_us"], "LOCKS"))):
            drawing.box(X + 110, y + 4 + 17 * part, unit * us, 15, kind)
            tail = f", {row['speedup']:.1f} times faster" if name == "LOCKS" else ""
            drawing.text(X + 116 + unit * us, y + 16 + 17 * part, f"{name} {us:.1f} us{tail}", "small")
        y += 50
