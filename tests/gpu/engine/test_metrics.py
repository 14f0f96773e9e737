"""`locks:*` of a GPU: a worker exports what its layers count, though graphs were captured meanwhile."""

import time

import pytest
from engine_harness import MAX_TOKENS, counters, environment_of, greedy, only, reset_counters
from gpu_harness import LAYERS, gpu_engine, python_decodes
from locks_vllm.metrics import FOLDER_VARIABLE, METRICS, ONE_LAYER
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

WAIT_SECONDS = 1.0  # two hundred readings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module", params=[1, 2], ids=["first runner", "second runner"])
def llm(smollm2, folder, request):
    # A process that starts anew, as a server's does: prometheus_client looks at its environment once.
    variables = {FOLDER_VARIABLE: str(folder), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with environment_of(variables), gpu_engine(
        smollm2,
        runner=request.param,
        locks={"budget": 96, "dense_tokens": 0},
        worker_extension_cls="hurried_metrics.HurriedWorker",
    ) as engine:
        engine.collective_rpc("watch_python_decodes")
        yield engine


def exported(folder) -> dict[str, float]:
    """The counters of every process that wrote to the folder, summed over labels."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    totals: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return {metric.counter: totals[f"{metric.name}_total"] for metric in METRICS}


def test_the_export_is_what_the_layers_count_in_graphs(llm, prompts, folder):
    greedy(llm, [prompts[-1]], 1)
    time.sleep(WAIT_SECONDS)
    before = exported(folder)
    reset_counters(llm)
    llm.collective_rpc("watch_python_decodes")
    greedy(llm, [prompts[-1], prompts[-2]], MAX_TOKENS)
    assert python_decodes(llm) == 0  # graphs were captured while the counters were read
    time.sleep(WAIT_SECONDS)
    grown = {name: value - before[name] for name, value in exported(folder).items()}
    layers = list(counters(llm).values())
    assert len(layers) == LAYERS
    counted = layers[:1]
    for metric in METRICS:
        of = counted if metric.over == ONE_LAYER else layers
        assert grown[metric.counter] == sum(layer[metric.counter] for layer in of), metric.name
    assert grown["sparse_rows"] == 2 * (MAX_TOKENS - 1) and 0 < grown["bytes_read"] < 0.5 * grown["bytes_dense"]
    assert only(llm.collective_rpc("metrics_threads")) == 1


def test_readings_between_steps_change_nothing(llm, prompts, folder):
    time.sleep(WAIT_SECONDS)
    before = exported(folder)
    time.sleep(WAIT_SECONDS)
    assert exported(folder) == before
    first, second = (greedy(llm, [prompts[-1]], MAX_TOKENS)[0].tokens for _ in range(2))
    assert first == second
