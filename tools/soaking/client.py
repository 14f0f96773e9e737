"""The clients of a soak: each does one action and tells what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tools.soaking.plan import Action, Job, Kind
from tools.soaking.server import Server

_SECONDS_TO_SEND = 60  # of a client that is killed: a server that takes no connection is stuck


@dataclass
class Answer:
    """Greedy tokens; of each its log probability and its distance to the runner-up."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """What a choice of an answer, or of a piece of a stream, holds."""
        self.tokens += choice["token_ids"]
        self.logprobs += choice["logprobs"]["token_logprobs"]
        for candidates in choice["logprobs"]["top_logprobs"]:
            best, second = sorted(candidates.values(), reverse=True)[:2]
            self.gaps.append(best - second)


@dataclass
class Outcome:
    """What came of an action; `fault` says what should not have."""

    action: Action
    answer: Answer | None = None
    fault: str | None = None


async def ask(server: Server, job: Job) -> Answer:
    """A completion, waited for. Raises RuntimeError for any status but 200."""
    answer = Answer()
    async with server.session.post(f"{server.url}/v1/completions", json=job.body(server.model)) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
        answer.add((await response.json())["choices"][0])
    return answer


async def _stream(server: Server, job: Job, most: int) -> Answer:
    """A completion token by token; after `most` tokens the connection is closed, which aborts it."""
    answer = Answer()
    body = job.body(server.model, stream=True)
    async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                answer.add(json.loads(data)["choices"][0])
            if len(answer.tokens) >= most and most < job.max_tokens:
                response.close()
                break
    return answer


async def _be_killed(server: Server, action: Action) -> None:
    bodies = [json.dumps(job.body(server.model, stream=True)) for job in action.jobs]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("doomed.py")), server.url.rsplit(":", 1)[1],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        process.stdin.write("\n".join(bodies).encode())
        process.stdin.close()
        sent = await asyncio.wait_for(process.stdout.readline(), _SECONDS_TO_SEND)
        await asyncio.sleep(action.patience)
        if sent != b"sent\n" or process.returncode is not None:
            raise RuntimeError(f"the client ended by itself, with {await process.wait()}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _be_refused(server: Server, action: Action) -> None:
    data = action.bad.data if isinstance(action.bad.data, bytes) else json.dumps(action.bad.data).encode()
    headers = {"Content-Type": "application/json"}
    async with server.session.post(f"{server.url}/v1/completions", data=data, headers=headers) as response:
        text = await response.text()
        if response.status not in action.bad.statuses:
            raise RuntimeError(f"HTTP {response.status}, expected {action.bad.statuses}: {text[:200]}")


async def perform(server: Server, action: Action) -> Outcome:
    """Does it. Whatever the server does wrong is the outcome's fault, never an exception."""
    what = action.bad.name if action.bad else f"{len(action.jobs[0].prompt)} + {action.jobs[0].max_tokens} tokens"
    try:
        answer = await _perform(server, action)
    except (asyncio.TimeoutError, TimeoutError):
        return Outcome(action, fault=f"{action.kind.value}, {what}: stuck")
    # An answer may lack anything that is read from it.
    except (RuntimeError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        return Outcome(action, fault=f"{action.kind.value}, {what}: {type(error).__name__}: {error}")
    if answer is not None and action.kind is not Kind.ABORT and len(answer.tokens) != action.jobs[0].max_tokens:
        return Outcome(action, fault=f"{action.kind.value}, {what}: {len(answer.tokens)} tokens came")
    return Outcome(action, answer)


async def _perform(server: Server, action: Action) -> Answer | None:
    if action.kind is Kind.ANSWER:
        return await ask(server, action.jobs[0])
    if action.kind is Kind.STREAM:
        return await _stream(server, action.jobs[0], action.jobs[0].max_tokens)
    if action.kind is Kind.ABORT:
        return await _stream(server, action.jobs[0], int(action.patience * action.jobs[0].max_tokens))
    if action.kind is Kind.KILLED:
        return await _be_killed(server, action)
    return await _be_refused(server, action)
