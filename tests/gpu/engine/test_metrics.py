"""`locks:*` of a GPU: a worker exports what its layers count, though graphs were captured meanwhile."""

import random
import time

import pytest
import torch
from engine_harness import MAX_TOKENS, counters, environment_of, greedy, only, reset_counters
from gpu_harness import LAYERS, gpu_engine, python_decodes
from locks.commands.doctor_engine import write_random_model
from locks_vllm.metrics import FOLDER_VARIABLE, METRICS, ONE_LAYER
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

WAIT_SECONDS = 1.0  # two hundred readings
HURRIED = "hurried_metrics.HurriedWorker"


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
        worker_extension_cls=HURRIED,
    ) as engine:
        engine.collective_rpc("watch_python_decodes")
        yield engine


def samples(folder) -> list:
    """What the processes that wrote to the folder export."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return [sample for family in registry.collect() for sample in family.samples]


def exported(folder) -> dict[str, float]:
    """The counters, summed over labels."""
    totals: dict[str, float] = {}
    for sample in samples(folder):
        totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return {metric.counter: totals[f"{metric.name}_total"] for metric in METRICS}


def test_the_export_is_what_the_layers_count_in_graphs(llm, prompts, folder):
    greedy(llm, [prompts[-1]], 1)
    time.sleep(WAIT_SECONDS)
    before = exported(folder)
    reset_counters(llm)
    llm.collective_rpc("watch_python_decodes")
    for prompt in (prompts[-1], prompts[-2]):  # apart: beside a prompt, a step is no graph
        greedy(llm, [prompt], MAX_TOKENS)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_count_a_row_once_and_each_its_own_heads(tmp_path):
    model, folder = tmp_path / "model", tmp_path / "metrics"
    write_random_model(model, torch.bfloat16)  # two KV heads, one for each GPU
    folder.mkdir()
    draw = random.Random(3)
    prompt = [draw.randrange(512) for _ in range(600)]
    variables = {FOLDER_VARIABLE: str(folder), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    split = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True, "max_model_len": 1024}
    options = {"budget": 96, "dense_tokens": 0}
    with environment_of(variables), gpu_engine(model, locks=options, worker_extension_cls=HURRIED, **split) as llm:
        greedy(llm, [prompt], MAX_TOKENS)
        time.sleep(WAIT_SECONDS)
        of_ranks = [sample for sample in samples(folder) if "rank" in sample.labels]
        found = {(sample.name, sample.labels["rank"]): sample.value for sample in of_ranks}
        workers = [list(worker.values()) for worker in llm.collective_rpc("locks_counters")]
    assert found["locks:sparse_rows_total", "0"] == workers[0][0]["sparse_rows"] >= MAX_TOKENS - 1
    assert ("locks:sparse_rows_total", "1") not in found
    for rank, layers in enumerate(workers):
        assert found["locks:pages_read_total", str(rank)] == sum(layer["pages_read"] for layer in layers) > 0
