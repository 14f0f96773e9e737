"""Models and shared runs of the engine tests."""

import sys
from pathlib import Path

import pytest

# Workers are processes of their own, started with this path: they import test classes from the harness.
sys.path.insert(0, str(Path(__file__).parent))

from engine_harness import PLAIN_ARGUMENTS, Generated, PlainRun, engine, text_prompts

REPOSITORY = Path(__file__).parents[3]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # The first test of a module starts its engines.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random Llama of two layers, for what does not depend on weights."""
    import torch
    from locks.commands.doctor_engine import write_random_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(folder, torch.float32)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: 30 layers, 9 query and 3 KV heads of 64 channels."""
    from demo.smollm2 import ensure_model

    return ensure_model(REPOSITORY / ".cache")


@pytest.fixture(scope="session")
def prompts(smollm2) -> list[list[int]]:
    """Prompts of very different lengths, around pages (4), blocks (16) and cache blocks (32), of real text."""
    return text_prompts(smollm2, (1, 3, 4, 15, 16, 17, 31, 32, 33, 64, 129, 400, 880))


@pytest.fixture(scope="session")
def plain_run(smollm2, prompts) -> PlainRun:
    with engine(smollm2, plugin=False, **PLAIN_ARGUMENTS) as llm:
        return PlainRun.of(llm, prompts)


@pytest.fixture(scope="session")
def plain_vllm(plain_run) -> list[Generated]:
    """What vLLM generates without the plug-in, for all prompts in one batch."""
    return plain_run.batch
