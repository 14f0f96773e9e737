"""The load: phases of many clients at once, and what must hold after each of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.soaking.client import Answer, Outcome, ask, perform
from tools.soaking.plan import Action, BadBody, Job, bad_bodies, draw_actions
from tools.soaking.server import Server

SPARSE = 96  # tokens: above what is always read, below most prompts
# Of log probabilities, in nats. vLLM's own float32 results depend on the shape of the batch in their last bits: two
# correct runs may choose different tokens where the best two lie within the margin. Under a sparse budget those bits
# may also let the last page of a selection and the first behind it change places.
MARGIN: dict[int | str, float] = {"all": 1e-2, SPARSE: 5e-2}
TOLERANCE: dict[int | str, float] = {"all": 2e-3, SPARSE: 5e-2}
IDLE_SECONDS = 60

Tick = Callable[[str, int], None]  # a phase's name, and how many of its requests have ended


@dataclass(frozen=True)
class Phase:
    """A share of the requests, under one budget, from so many clients at once."""

    name: str
    budget: int | str
    clients: int
    share: float
    crowded: bool  # more clients than the cache holds: requests must be preempted


PHASES = (
    Phase("sparse, room for all", SPARSE, 2, 0.3, crowded=False),
    Phase("sparse, too little room", SPARSE, 16, 0.4, crowded=True),
    Phase("dense, too little room", "all", 16, 0.3, crowded=True),
)


@dataclass
class Comparison:
    """Answers of a phase against those of the same requests alone."""

    answers: int = 0
    tokens: int = 0  # that could be compared: up to the first at which both runs may differ, and do
    ties: int = 0  # answers that part where the best two tokens lie within MARGIN
    different: list[str] = field(default_factory=list)
    largest_distance: float = 0.0  # of log probabilities, in nats

    def add(self, job: Job, got: Answer, alone: Answer, budget: int | str) -> None:
        """Compares what came, which for an aborted request is the beginning."""
        self.answers += 1
        for step, (token, wanted) in enumerate(zip(got.tokens, alone.tokens, strict=False)):
            distance = abs(got.logprobs[step] - alone.logprobs[step]) if token == wanted else 0.0
            self.largest_distance = max(self.largest_distance, distance)
            if token != wanted and alone.gaps[step] <= MARGIN[budget]:
                self.ties += 1
                return
            if token != wanted or distance > TOLERANCE[budget]:
                gap = alone.gaps[step]
                self.different.append(
                    f"{len(job.prompt)} + {job.max_tokens} tokens, at {step}: {token} for {wanted}, whose lead is"
                    f" {gap:.4f}; log probabilities {distance:.4f} apart"
                )
                return
            self.tokens += 1


async def answers_alone(server: Server, jobs: Sequence[Job], budget: int | str, tick: Tick) -> dict[Job, Answer]:
    """Each job by itself, with nothing in the prefix cache."""
    await server.call("locks_set_budget", budget)
    answers = {}
    for done, job in enumerate(jobs, 1):
        await server.forget_prefixes()
        answers[job] = await ask(server, job)
        tick(f"alone, budget {budget}", done)
    return answers


async def run_phase(
    server: Server, phase: Phase, actions: Sequence[Action], alone: dict[Job, Answer], tick: Tick
) -> dict[str, Any]:
    """Sends the actions and tells what came of them, faults first."""
    await server.call("locks_set_budget", phase.budget)
    before, start = await server.metrics(), time.monotonic()
    outcomes = await _perform_all(server, phase, actions, tick)
    idle = await server.idle(IDLE_SECONDS)
    after = await server.metrics()
    preemptions, hits = (
        int(after[name] - before[name]) for name in ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total")
    )
    comparison = Comparison()
    for outcome in outcomes:
        if outcome.answer is not None:
            job = outcome.action.jobs[0]
            comparison.add(job, outcome.answer, alone[job], phase.budget)
    faults = [outcome.fault for outcome in outcomes if outcome.fault is not None]
    if not idle:
        faults.append(f"requests or cache blocks were still held {IDLE_SECONDS} s after the last answer")
    faults += _faults_of_phase(phase, comparison, preemptions, hits)
    kinds: Counter[str] = Counter()
    for action in actions:
        kinds[action.kind.value] += action.requests
    return {
        "phase": phase.name, "budget": phase.budget, "clients": phase.clients, "requests": dict(kinds),
        "seconds": round(time.monotonic() - start, 1), "preemptions": preemptions, "prefix_hit_tokens": hits,
        "answers_compared": comparison.answers, "tokens_compared": comparison.tokens, "ties": comparison.ties,
        "different": comparison.different, "largest_logprob_distance": comparison.largest_distance, "faults": faults,
    }  # fmt: skip


async def _perform_all(server: Server, phase: Phase, actions: Sequence[Action], tick: Tick) -> list[Outcome]:
    waiting, outcomes = list(reversed(actions)), []

    async def client() -> None:
        while waiting:
            outcomes.append(await perform(server, waiting.pop()))
            tick(phase.name, sum(outcome.action.requests for outcome in outcomes))

    await asyncio.gather(*(client() for _ in range(phase.clients)))
    return outcomes


def _faults_of_phase(phase: Phase, comparison: Comparison, preemptions: int, hits: int) -> list[str]:
    faults = []
    if phase.crowded and preemptions == 0:
        faults.append("no request was preempted: the cache is too large for this load")
    if hits == 0:
        faults.append("no prefix was found in the cache")
    # A preempted request's own tokens are computed again as a prompt, exactly. With a sparse budget it may then go on
    # otherwise than alone, and vLLM does not tell which request it was: no more may differ than were preempted.
    allowed = preemptions if phase.budget != "all" else 0
    if len(comparison.different) > allowed:
        shown = "; ".join(comparison.different[:3])
        count = len(comparison.different)
        faults.append(f"{count} answers differ from those alone, expected at most {allowed}: {shown}")
    return faults


@dataclass
class Memory:
    """What the server holds in memory, while it is under load."""

    samples: list[tuple[int, int]] = field(default_factory=list)  # requests ended, bytes

    def growth(self) -> tuple[float, float]:
        """Mean bytes in the second and in the last quarter of the requests: the first quarter warms up."""
        total = self.samples[-1][0]

        def mean_of_quarter(number: int) -> float:
            sizes = [size for done, size in self.samples if number * total <= 4 * done <= (number + 1) * total]
            return sum(sizes) / len(sizes) if sizes else float(self.samples[-1][1])

        return mean_of_quarter(1), mean_of_quarter(3)


async def _watch_memory(server: Server, memory: Memory, ended: Callable[[], int]) -> None:
    while True:
        memory.samples.append((ended(), server.resident_bytes()))
        await asyncio.sleep(0.5)


async def soak(
    server: Server, draw: random.Random, jobs: Sequence[Job], requests: int, tick: Tick
) -> dict[str, Any]:
    """All phases. `faults` of the result is empty if everything held."""
    alone = {budget: await answers_alone(server, jobs, budget, tick) for budget in (SPARSE, "all")}
    await server.forget_prefixes()
    await server.call("locks_reset_counters")
    bad: list[BadBody] = bad_bodies(server.model)
    ended: Counter[str] = Counter()
    memory = Memory()

    def count(name: str, done: int) -> None:
        ended[name] = done
        tick(name, done)

    watch = asyncio.create_task(_watch_memory(server, memory, ended.total))
    rows, faults = [], []
    try:
        for phase in PHASES:
            actions = draw_actions(draw, jobs, bad, round(phase.share * requests))
            row = await run_phase(server, phase, actions, alone[phase.budget], count)
            row["records"] = await server.call("locks_verify_records")
            rows.append(row)
    finally:
        watch.cancel()
    for row in rows:
        faults += [f"{row['phase']}: {fault}" for fault in row.pop("faults")]
        if row["records"]["mismatched"] or not row["records"]["checked"]:
            faults.append(f"{row['phase']}: of {row['records']['checked']} valid records {row['records']['mismatched']}"
                          " are not those of the keys beside them")
    return {"phases": rows, "memory": memory, "faults": faults}
