"""Tables of times on GPUs: docs/benchmark.md, docs/kernels.md and README.md."""

from tables import is_measured, load, markdown

# Result files of `locks bench serve`, and what the models' shapes are called.
SERVED = {"serve_qwen": "Qwen2.5-7B-1M", "serve_llama": "Llama-3.1-8B", "serve_llama_tp2": "Llama-3.1-8B, two GPUs"}
# Further backends that a file may have, each a column of its own then.
BESIDE = {"flashinfer": "FlashInfer", "flash_attn_fp8": "FA3, fp8 cache"}
PACKAGES = {"vllm": "vLLM", "torch": "torch", "flashinfer": "FlashInfer"}


def served() -> dict[str, dict]:
    """The files that are there, by the name of their shape."""
    return {shape: load(name) for name, shape in SERVED.items() if is_measured(name)}


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
        f"`locks bench serve`, a step of the whole engine, median of {steps} steps (10th to 90th percentile), "
        f"FlashAttention-3 and LOCKS in one run{other_runs(results)}; budget {budget} tokens, format `{form}`, random "
        f"weights and a cache filled with noise, which the time does not depend on; {ran_on(results)}. Speed-up and "
        "tokens/s are LOCKS's; bytes are counted on the device."))


def other_runs(results: dict[str, dict]) -> str:
    """The backends whose rows are of another run than their file's, which those rows tell."""
    kept = {(BESIDE[row["backend"]], row["commit"][:7], row["date"])
            for result in results.values() for row in result["rows"] if "commit" in row}
    return "".join(f" ({name}: a run of its own, commit {commit}, {date})" for name, commit, date in sorted(kept))


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
    results = {shape: load(name) for name, shape in PREFILLED.items() if is_measured(name)}
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
