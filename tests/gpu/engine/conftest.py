"""Models and the dense run of the GPU engine tests: `python -m pytest tests/gpu/engine`, on a machine with one GPU.

The weights are those of SmolLM2-135M-Instruct: the folder that LOCKS_TEST_MODEL names, or what the demo made. Test
files may run at the same time in processes of their own: each takes a small, fixed part of the GPU.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

# vLLM forks its engine from this process. A pool of threads that torch had started here would be missing there, and the
# engine would wait for it at its first large tensor.
torch.set_num_threads(1)

REPOSITORY = Path(__file__).parents[3]
# Workers are processes of their own, started with this path.
sys.path[:0] = [str(Path(__file__).parent), str(REPOSITORY / "tests/python/engine"), str(REPOSITORY)]

from engine_harness import MAX_TOKENS, Generated, greedy, text_prompts
from gpu_harness import gpu_engine


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))  # the first test of a module starts its engines


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """30 layers, 9 query and 3 KV heads of 64 channels."""
    named = os.environ.get("LOCKS_TEST_MODEL")
    if named:
        return Path(named)
    from demo.smollm2 import ensure_model

    return ensure_model(REPOSITORY / ".cache")


@pytest.fixture(scope="session")
def prompts(smollm2) -> list[list[int]]:
    """Prompts of real text around pages (4), blocks (16) and chunks, and one of 3,000 tokens."""
    return text_prompts(smollm2, (1, 3, 4, 15, 16, 17, 31, 33, 64, 129, 400, 880, 3000))


@pytest.fixture(scope="session")
def plain_vllm(smollm2, prompts) -> list[Generated]:
    """What vLLM's FlashAttention generates, for all prompts in one batch. Test processes share one run."""
    from filelock import FileLock

    shared = Path(tempfile.gettempdir(), f"locks-plain-{os.getppid()}.json")
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            with gpu_engine(smollm2, backend="FLASH_ATTN") as llm:
                shared.write_text(json.dumps([asdict(one) for one in greedy(llm, prompts, MAX_TOKENS)]))
        return [Generated(**one) for one in json.loads(shared.read_text())]
