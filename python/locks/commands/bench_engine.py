"""One engine of `locks bench`, in a process of its own (locks.commands.engine_child has the protocol).

Its job is an `EngineJob`. It answers for each case {"row": {...}}, or {"skipped": "why"}.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from locks.commands.engine_child import Say, answer_parent

# The first decode steps fill the cache, build its records and warm up; the last ones drain the pipeline.
FIRST_STEPS, LAST_STEPS = 8, 2
STEPS_BETWEEN_REPORTS = 16
# Counters of LOCKS that rows also tell, for a step, over all layers.
WATCHED_COUNTERS = (
    "records_read",
    "pages_read",
    "bytes_unused",
    "nonfinite_pages",
    "invalid_records",
    "raised_budgets",
)
PREFILL_REPEATS = 3
_VOCABULARY = 30000
_ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}

# How LOCKS reads the contexts of a case: as its options say; all of each context; all contexts by their records.
AS_SET, WHOLE, SPARSE = "as set", "whole", "sparse"


@dataclass(frozen=True)
class Case:
    """What is timed at a time."""

    kind: str  # serve, crossover or prefill: the first part of the row's name
    context: int  # tokens; for prefill those of the prompt
    batch: int = 1
    reads: str = AS_SET


class CaseSkipped(Exception):
    """A case that this engine cannot time, though it can time others."""


@dataclass
class EngineJob:
    """What one engine measures."""

    config: dict[str, Any]  # the model's config.json
    backend: str  # vLLM's name of the attention backend
    cases: list[Case]
    prefill: bool = False
    locks: dict[str, Any] | None = None  # the options of LOCKS; None: the engine runs without it
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    tensor_parallel: int = 1
    steps: int = 60
    spread: float = 0.0  # standard deviation of the logits; 0: as the dummy weights give
    memory: float = 0.93
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's LLM

    @property
    def num_answers(self) -> int:
        return len(self.cases)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def engine_arguments(job: EngineJob, model: str) -> dict[str, Any]:
    """Arguments of vLLM's LLM. Weights are dummies, and the time of a step does not depend on them."""
    longest = max(case.context for case in job.cases)
    arguments = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": longest + job.steps + 1,
        # vLLM captures graphs for 1, 2, 4 and multiples of 8 sequences, if that many may run.
        "max_num_seqs": -(-max(case.batch for case in job.cases) // 8) * 8,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": job.memory,
        "block_size": job.block_size,
        "kv_cache_dtype": job.kv_cache_dtype,
        "tensor_parallel_size": job.tensor_parallel,
        "attention_backend": job.backend,
        "disable_log_stats": True,
        "seed": 0,
    }
    if not job.prefill:
        # Fills the cache with noise and takes the prompt as computed. vLLM 0.26 draws noise for 16-bit caches only.
        spread = 1.0 if job.kv_cache_dtype == "auto" else 0.0
        arguments["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": spread},
        }
    if job.locks is not None:
        arguments["additional_config"] = {"locks": job.locks}
        arguments["worker_extension_cls"] = "locks.commands.bench_worker.BenchWorker"
    return arguments | job.engine


class Measurement:
    """A running engine and the cases that it times."""

    def __init__(self, job: EngineJob, llm: Any, say: Say) -> None:
        self.job, self.llm, self.say = job, llm, say
        self.engine = llm.llm_engine
        cache = self.engine.vllm_config.cache_config
        self.cache_tokens = cache.num_gpu_blocks * cache.block_size
        if job.locks is not None and job.spread:
            try:
                llm.collective_rpc("locks_spread_logits", args=(job.spread,))
            except Exception as error:  # a model of other parts: its logits stay alike, and rows say so
                print(f"locks bench: queries keep the dummy weights' scale: {error!r}", file=sys.stderr)
                job.spread = 0.0

    def add(self, name: str, tokens: int, new_tokens: int) -> None:
        """Hands the engine a request whose prompt no other name shares."""
        from vllm import SamplingParams

        seed = zlib.crc32(name.encode()) % _VOCABULARY
        prompt = [(7 * place + seed) % _VOCABULARY for place in range(tokens)]
        params = SamplingParams(max_tokens=new_tokens, detokenize=False, ignore_eos=True, temperature=0.0)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def set_reads(self, reads: str) -> None:
        """How LOCKS reads from the next step on."""
        from locks_vllm.options import LARGEST_COUNT, parse_options

        dense_tokens = {WHOLE: LARGEST_COUNT, SPARSE: 0, AS_SET: parse_options(self.job.locks).dense_tokens}[reads]
        self.llm.collective_rpc("locks_set_dense_tokens", args=(dense_tokens,))

    def decode(self, case: Case) -> dict[str, Any]:
        """Times decode steps of the case's sequences, from its context on."""
        context, batch = case.context, case.batch
        needed = batch * (context + self.job.steps)
        if needed > self.cache_tokens:
            raise CaseSkipped(f"{context}x{batch} needs {needed} tokens of cache, the engine has {self.cache_tokens}")
        if self.job.locks is not None:
            self.set_reads(case.reads)
        for item in range(batch):
            self.add(f"{case.kind}-{case.reads}-{context}x{batch}-{item}", context, self.job.steps)
        # From the end of a step to that of the next: the GPU works ahead, also while nothing here waits for it.
        ends = [time.perf_counter()]
        while self.engine.has_unfinished_requests():
            done = len(ends) - 1
            if done == FIRST_STEPS and self.job.locks is not None:
                self.llm.collective_rpc("locks_reset_counters")
            if done % STEPS_BETWEEN_REPORTS == 0:
                self.say({"doing": f"{context} x {batch}: step {done} of {self.job.steps}"})
            self.engine.step()
            ends.append(time.perf_counter())
        seconds = [end - begin for begin, end in itertools.pairwise(ends)]
        row = summary(seconds[FIRST_STEPS + 1 : -LAST_STEPS])
        if self.job.locks is None:
            return row
        return row | {"reads": case.reads, "spread": self.job.spread} | self.read(batch)

    def read(self, batch: int) -> dict[str, Any]:
        """What a step read, as the layers of all workers counted it on the device."""
        counters = [layer for worker in self.llm.collective_rpc("locks_counters") for layer in worker.values()]
        rows = {layer["sparse_rows"] + layer["dense_rows"] for layer in counters}
        if len(rows) != 1 or 0 in rows:
            raise RuntimeError(f"locks_counters: rows a layer = {sorted(rows)}, expected one number above 0")
        steps = rows.pop() / batch
        return {
            "bytes": sum(layer["bytes_read"] for layer in counters) / steps,
            "bytes_dense": sum(layer["bytes_dense"] for layer in counters) / steps,
            "sparse_share": sum(layer["sparse_rows"] for layer in counters) / (len(counters) * steps * batch),
            **{name: sum(layer[name] for layer in counters) / steps for name in WATCHED_COUNTERS},
        }

    def prefill(self, case: Case) -> dict[str, Any]:
        """Times a prompt to its first token."""
        tokens, times = case.context, []
        for repeat in range(PREFILL_REPEATS + 1):  # the first one warms up
            self.say({"doing": f"prompt of {tokens}: {repeat} of {PREFILL_REPEATS}"})
            self.add(f"{tokens}-{repeat}", tokens, 1)
            begin = time.perf_counter()
            while self.engine.has_unfinished_requests():
                self.engine.step()
            times.append(time.perf_counter() - begin)
        return summary(times[1:])

    def time(self, case: Case) -> dict[str, Any]:
        """The answer for one case."""
        try:
            row = self.prefill(case) if self.job.prefill else self.decode(case)
        except CaseSkipped as reason:
            return {"skipped": str(reason)}
        return {"row": {"kind": case.kind, "context": case.context, "batch": case.batch, **row}}


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median and spread of times, in microseconds."""
    if not seconds:
        raise RuntimeError("no step was timed: raise --steps")
    times = sorted(1e6 * second for second in seconds)
    tenth = len(times) // 10
    return {
        "median_us": statistics.median(times),
        "p10_us": times[tenth],
        "p90_us": times[-1 - tenth],
        "steps": len(times),
    }


def run(told: dict[str, Any], say: Say) -> None:
    """Starts the engine, times the cases and tells what came of each."""
    job = EngineJob(**told | {"cases": [Case(**case) for case in told["cases"]]})
    say({"doing": "starting the engine"})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(job.config))
        from vllm import LLM

        measurement = Measurement(job, LLM(**engine_arguments(job, folder)), say)
        for case in job.cases:
            say(measurement.time(case))
        if job.tensor_parallel > 1:
            measurement.engine.engine_core.shutdown()  # ends the workers


def load() -> None:
    """Takes seconds, in which the engine in front of this one is still busy."""
    from vllm import LLM  # noqa: F401


def main() -> None:
    answer_parent(run, _ENVIRONMENT, load)


if __name__ == "__main__":
    main()
