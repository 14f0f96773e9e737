"""A real server on loopback, started by `locks serve` as a user would, and what can be asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 512
# Enough for two of the largest requests, too few for sixteen.
NUM_BLOCKS = 40
# Prompts come in small chunks, so that one begins in what is left of the cache and runs out of it half-way.
CHUNK_TOKENS = 64
# float32, so that another order of summation moves a result little. vLLM's dev mode offers collective_rpc, by which the
# plug-in's counters are read and records verified; it is not for an open network, and this server is on loopback.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"
}
START_SECONDS = 420


def server_options(port: int) -> list[str]:
    """vLLM's options; a cache so small that requests preempt each other."""
    values = {
        "--host": "127.0.0.1", "--port": port, "--dtype": "float32", "--max-model-len": MAX_MODEL_LEN,
        "--block-size": BLOCK_TOKENS, "--num-gpu-blocks-override": NUM_BLOCKS, "--max-num-seqs": 16,
        "--max-num-batched-tokens": CHUNK_TOKENS, "--seed": 0,
    }  # fmt: skip
    words = [word for name, value in values.items() for word in (name, str(value))]
    return [*words, "--enforce-eager", "--disable-uvicorn-access-log"]


@dataclass
class Server:
    """A server that answers."""

    url: str
    model: str
    session: aiohttp.ClientSession
    process: psutil.Process

    async def call(self, method: str, *arguments: Any) -> Any:
        """The one worker's answer to a call into the engine."""
        body = {"method": method, "args": list(arguments)}
        async with self.session.post(f"{self.url}/collective_rpc", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{method}{arguments}: HTTP {answer.status}: {(await answer.text())[:400]}")
            (result,) = (await answer.json())["results"]
            return result

    async def forget_prefixes(self) -> None:
        """Empties the prefix cache; fails where a request still holds blocks."""
        async with self.session.post(f"{self.url}/reset_prefix_cache") as answer:
            if not (await answer.json())["success"]:
                raise RuntimeError("reset_prefix_cache: blocks are still held, though no request should be running")

    async def metrics(self) -> dict[str, float]:
        """What vLLM counts, summed over labels."""
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("vllm:"):
                    totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    async def healthy(self) -> bool:
        try:
            async with self.session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def idle(self, seconds: float) -> bool:
        """Waits until no request is running or waiting and no cache block is held."""
        held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            metrics = await self.metrics()
            if all(metrics[name] == 0 for name in held):
                return True
            await asyncio.sleep(0.5)
        return False

    def resident_bytes(self) -> int:
        """Memory of the server, its engine and their helpers."""
        total = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def serving(model: Path, budget: int, log: Path) -> AsyncIterator[Server]:
    """Starts the server, hands it out once it answers, and ends it. Its output goes to `log`."""
    port = free_port()
    command = [sys.executable, "-m", "locks.cli", "serve", str(model), "--budget", str(budget), *server_options(port)]
    with running(command, log, {**os.environ, **ENVIRONMENT}) as child:
        # A connection for each request: uvicorn closes an idle one after 5 s, just when it may be used again. The limit
        # of time is far above what a request takes.
        connector, limit = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=180)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
            server = Server(f"http://127.0.0.1:{port}", str(model), session, psutil.Process(child.pid))
            end = time.monotonic() + START_SECONDS
            while not await server.healthy():
                if child.poll() is not None or time.monotonic() > end:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the server did not start within {START_SECONDS} s; the end of {log}:\n{tail}")
                await asyncio.sleep(1)
            yield server


@contextlib.contextmanager
def running(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `log`, ended with all that it started."""
    with log.open("w") as output:
        child = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield child
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the server with all that it started: they are one session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
