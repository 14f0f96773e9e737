"""A soak from start to verdict: what tools/soak.py and the short test in CI run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from demo.document import build_document
from demo.smollm2 import ensure_model
from tools.soaking.load import SPARSE, Memory, Tick, soak
from tools.soaking.plan import draw_jobs
from tools.soaking.server import BLOCK_TOKENS, MAX_MODEL_LEN, NUM_BLOCKS, Server, serving

ROOT = Path(__file__).resolve().parents[2]
# Of the server's resident memory, from the second to the last quarter of the requests.
MEMORY_TOLERANCE = 0.02
# A short run is mostly warm-up: vLLM and oneDNN keep something for each new shape of a batch.
REQUESTS_FOR_MEMORY = 1000


@dataclass(frozen=True)
class Soak:
    """How much load, and of which seed."""

    requests: int
    seed: int

    @property
    def num_jobs(self) -> int:
        """Different requests: each is also answered alone, twice, and comes about twenty times under load."""
        return max(24, self.requests // 20)


def document_tokens() -> tuple[Path, list[int]]:
    """The demo's model, and its document as tokens: prompts are pieces of it."""
    model = ensure_model(ROOT / ".cache")
    return model, build_document(AutoTokenizer.from_pretrained(model)).token_ids


async def run_soak(plan: Soak, model: Path, text: Sequence[int], log: Path, tick: Tick) -> dict[str, Any]:
    """Starts the server, runs the load and judges. `faults` of the result is empty if everything held."""
    draw = random.Random(plan.seed)
    jobs = draw_jobs(draw, text, plan.num_jobs)
    async with serving(model, SPARSE, log) as server:
        result = await soak(server, draw, jobs, plan.requests, tick)
        memory = judge_memory(result["memory"], plan.requests, result["faults"])
        counters = await judge_records(server, result["faults"])
        if not await server.healthy():
            result["faults"].append("the server no longer answers")
    return {
        "requests": plan.requests, "seed": plan.seed, "different_requests": plan.num_jobs, "model": model.name,
        "cache_blocks": NUM_BLOCKS, "block_tokens": BLOCK_TOKENS, "max_model_len": MAX_MODEL_LEN,
        **result, "memory": memory, "counters": counters,
    }  # fmt: skip


def judge_memory(memory: Memory, requests: int, faults: list[str]) -> dict[str, Any]:
    """Whether memory stayed flat, which only a long run can tell."""
    early, late = memory.growth()
    judged = requests >= REQUESTS_FOR_MEMORY
    if judged and late > (1 + MEMORY_TOLERANCE) * early:
        sizes = f"{early / 2**20:.0f} to {late / 2**20:.0f} MiB"
        faults.append(f"memory grew from {sizes}, tolerance {MEMORY_TOLERANCE:.0%}")
    step = max(1, len(memory.samples) // 60)
    return {
        "early_mib": round(early / 2**20, 1), "late_mib": round(late / 2**20, 1), "tolerance": MEMORY_TOLERANCE,
        "judged": judged, "samples": [[done, round(size / 2**20, 1)] for done, size in memory.samples[::step]],
    }  # fmt: skip


async def judge_records(server: Server, faults: list[str]) -> dict[str, int]:
    """The counters of all layers, and what they must be."""
    layers = await server.call("locks_counters")
    totals: dict[str, int] = {}
    for layer in layers.values():
        for name, count in layer.items():
            totals[name] = totals.get(name, 0) + count
    for name in ("invalid_records", "nonfinite_pages"):
        if totals[name]:
            faults.append(f"{name} = {totals[name]}, expected 0")
    for name in ("sparse_rows", "dense_rows", "records_built"):
        if totals[name] == 0:
            faults.append(f"{name} = 0: the load did not reach what it is to test")
    return totals
