"""Tables of what selectors keep: docs/quality.md and docs/tuning.md."""

from tables import load, markdown

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
    shown = result["budgets"][len(result["budgets"]) // 2]  # the middle one
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
