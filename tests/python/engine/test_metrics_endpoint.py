"""`locks serve` on loopback: what its /metrics say of a few completions, and vLLM's /metrics without LOCKS's option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from locks.formats import BLOCK_TOKENS, Format
from locks_vllm.metrics import FOLDER_VARIABLE, INTERVAL_SECONDS, METRICS
from prometheus_client.parser import text_string_to_metric_families

from tools.soaking.server import free_port, running

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
TOKEN_BYTES = 2 * HEAD_DIM * 4  # key and value of one KV head in float32
BUDGET, MAX_TOKENS = 128, 24
START_SECONDS = 600
READINGS = 12  # that a busy machine may take
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", "32", "--seed", "0"]


def get(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


@contextmanager
def server(words: Sequence[str], log: Path, folder: Path | None = None) -> Iterator[str]:
    """A server that answers, by its address. folder: where its processes keep their metrics."""
    port = free_port()
    environment = dict(os.environ) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop(FOLDER_VARIABLE, None)
    if folder is not None:
        environment[FOLDER_VARIABLE] = str(folder)
    words = [sys.executable, "-m", *words, *OPTIONS, "--host", "127.0.0.1", "--port", str(port)]
    with running(words, log, environment) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(START_SECONDS):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            get(url)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
    pytest.fail(f"no answer in {START_SECONDS} s: {log.read_text()[-4000:]}")


def samples(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What /metrics says: labels and value of each sample of a name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(get(url + "/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def complete(url: str, model: Path, prompt: Sequence[int]) -> dict[str, int]:
    body = {"model": str(model), "prompt": list(prompt), "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
    return json.loads(get(url + "/v1/completions", body))["usage"]


def expected(prompts: Sequence[Sequence[int]], cached: int) -> dict[str, int]:
    """What one completion of each prompt counts, one after the other; `cached` tokens of the prompts were there."""
    lengths = [len(prompt) + step for prompt in prompts for step in range(1, MAX_TOKENS)]
    sparse = [length for length in lengths if length > BUDGET]
    dense = [length for length in lengths if length <= BUDGET]
    pages = [-(-length // 4) for length in dense] + [BUDGET // 4] * len(sparse)
    records = sum(length // BLOCK_TOKENS for length in sparse)
    # The newest page is read as far as it is written.
    tokens = sum(dense) + BUDGET * len(sparse) - sum(-length % 4 for length in sparse)
    blocks = sum((len(prompt) + MAX_TOKENS - 1) // BLOCK_TOKENS for prompt in prompts) - cached // BLOCK_TOKENS
    heads = LAYERS * KV_HEADS
    return {
        "steps": len(lengths),
        "prefill_tokens": sum(map(len, prompts)) - cached,
        "sparse_rows": len(sparse),
        "dense_rows": len(dense),
        "raised_budgets": 0,
        "records_read": heads * records,
        "pages_read": heads * sum(pages),
        "records_built": heads * blocks,
        "bytes_read": heads * (Format.parse("fine").record_bytes(HEAD_DIM) * records + TOKEN_BYTES * tokens),
        "bytes_dense": heads * TOKEN_BYTES * sum(lengths),
        "bytes_unused": 0,
        "nonfinite_pages": 0,
        "invalid_records": 0,
    }


def counted(found: dict[str, list[tuple[dict[str, str], float]]]) -> dict[str, float]:
    """The counters, summed over labels."""
    return {metric.counter: sum(value for _, value in found[f"{metric.name}_total"]) for metric in METRICS}


def test_the_endpoint_says_what_arithmetic_says(smollm2, prompts, tmp_path):
    asked = [prompts[-1], prompts[8], prompts[-2]]  # 880 tokens, 33 that stay dense, 400
    with server(["locks.cli", "serve", str(smollm2), "--budget", str(BUDGET)], tmp_path / "log") as url:
        assert set(counted(samples(url)).values()) == {0}
        usage = [complete(url, smollm2, prompt) for prompt in asked]
        assert [one["prompt_tokens"] for one in usage] == [len(prompt) for prompt in asked]
        ((_, cached),) = samples(url)["vllm:prefix_cache_hits_total"]
        want = expected(asked, int(cached))
        for _ in range(READINGS):
            time.sleep(INTERVAL_SECONDS)
            found = samples(url)
            if counted(found) == want:
                break
    assert counted(found) == want
    assert 0 < want["dense_rows"] < want["sparse_rows"] and want["bytes_read"] < 0.5 * want["bytes_dense"]
    labels, _ = found["locks:read_bytes_total"][0]
    assert labels == {"model_name": str(smollm2), "engine": "0", "rank": "0"}
    # vLLM's own metrics are there in this mode too.
    assert sum(value for _, value in found["vllm:generation_tokens_total"]) == MAX_TOKENS * len(asked)


def test_without_the_option_there_are_none(smollm2, prompts, tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    words = ["vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    with server(words, tmp_path / "log", folder) as url:
        complete(url, smollm2, prompts[5])
        time.sleep(2 * INTERVAL_SECONDS)
        found = samples(url)
    assert [name for name in found if name.startswith("locks:")] == []
    assert found["vllm:generation_tokens_total"][0][1] == MAX_TOKENS
