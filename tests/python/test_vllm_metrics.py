"""`locks:*` on /metrics: what an exporter adds up, and that a process's numbers reach another's /metrics."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from locks.ops import COUNTERS
from locks_vllm import metrics
from locks_vllm.metrics import COLUMNS, METRICS, Exporter, HostCounters, exporter_of, layer_groups
from locks_vllm.served_layer import ServedLayer, StepCounts
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "locks.json"


def served_layer(numbers=0) -> ServedLayer:
    """As much of a layer as counts."""
    layer = object.__new__(ServedLayer)
    layer.counters = torch.full((len(COUNTERS),), numbers, dtype=torch.int64)
    layer.counts = StepCounts()
    layer._at_reset = StepCounts(), torch.zeros_like(layer.counters)
    return layer


@pytest.fixture
def labels(request) -> dict[str, str]:
    """Of this test alone: Prometheus's counters live as long as the process."""
    return {"model_name": request.node.name, "engine": "0", "rank": "0"}


def exported(labels: dict[str, str], name: str, **further: str) -> float | None:
    return REGISTRY.get_sample_value(f"{name}_total", labels | further)


def exporter(layers: dict[int, ServedLayer], labels: dict[str, str], first_rank: bool = True) -> Exporter:
    return Exporter(layers, HostCounters(list(layers.values())), labels, first_rank)


def test_every_counter_has_its_metric():
    assert sorted(metric.counter for metric in METRICS) == sorted(COLUMNS)


def test_what_grew_is_added_over_the_layers_that_a_metric_is_of(labels):
    layers = {3: served_layer(), 7: served_layer(5)}
    running = exporter(layers, labels)
    assert exported(labels, "locks:pages_read") == 0  # there from the start
    running.publish()
    layers[3].counters[COUNTERS.index("pages_read")] += 100
    layers[7].counters[COUNTERS.index("invalid_records")] += 2
    layers[3].counts.add(decoding=4, prompt_tokens=17)
    running.publish()
    running.publish()  # nothing grew
    assert exported(labels, "locks:pages_read") == 105
    assert exported(labels, "locks:sparse_rows") == 0  # the first layer's, not the second's 5
    assert (exported(labels, "locks:decode_steps"), exported(labels, "locks:prefill_tokens")) == (1, 17)
    faults = [exported(labels, "locks:invalid_records", layers=run) for run in ("3-3", "7-7")]
    assert faults == [0, 7]


def test_counters_that_were_reset_go_on_growing(labels):
    layer = served_layer(10)
    running = exporter({0: layer}, labels)
    running.publish()
    layer.reset_counters()
    layer.counters += 1
    running.publish()
    assert layer.read_counters()["records_read"] == 1
    assert exported(labels, "locks:records_read") == 11


def test_a_step_counts_once_however_many_ranks_there_are(labels):
    for rank in range(2):
        layer = served_layer(6)
        layer.counts.add(decoding=1, prompt_tokens=0)
        exporter({0: layer}, labels | {"rank": str(rank)}, first_rank=rank == 0).publish()
    for name, values in (("sparse_rows", [6, None]), ("decode_steps", [1, None]), ("read_bytes", [6, 6])):
        assert [exported(labels | {"rank": rank}, f"locks:{name}") for rank in "01"] == values, name


def test_numbers_beyond_what_a_float_holds_are_added_as_they_grow(labels):
    layer = served_layer(2**62)
    running = exporter({0: layer, 1: served_layer(0)}, labels)
    running.publish()
    before = exported(labels, "locks:dense_bytes")
    layer.counters += 2**62 - 1
    running.publish()
    assert (before, exported(labels, "locks:dense_bytes")) == (2.0**62, 2.0**63)


@pytest.mark.parametrize(
    ("indices", "names"),
    [
        ([5], ["5-5"]),
        ([0, 1, 2], ["0-0", "1-1", "2-2"]),
        (list(range(9)), ["0-1", "2-3", "4-5", "6-7", "8-8"]),
        ([2, 5, 8, *range(10, 90)], None),
    ],
)
def test_layer_groups_hold_every_layer_once(indices, names):
    groups = layer_groups(indices)
    assert len(groups) <= metrics.MAX_GROUPS
    assert names is None or [name for name, _ in groups] == names
    assert [index for _, run in groups for index in indices[run]] == indices


def config(**model) -> SimpleNamespace:
    layers = {
        "model.layers.10.attn": SimpleNamespace(impl=SimpleNamespace(locks=served_layer(1))),
        "model.layers.2.attn": SimpleNamespace(impl=SimpleNamespace(locks=served_layer(2))),
        "model.layers.3.attn": SimpleNamespace(impl=SimpleNamespace(locks=None)),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"served_model_name": "m", "enable_sleep_mode": False} | model),
        parallel_config=SimpleNamespace(data_parallel_index=3, rank=0),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def test_an_exporter_knows_the_engine_and_the_order_of_layers():
    vllm_config = config(served_model_name="ordered")
    layers = metrics._layers_of(vllm_config)
    assert list(layers) == [2, 10]
    exporter_of(vllm_config, layers).publish()
    labels = {"model_name": "ordered", "engine": "3", "rank": "0"}
    assert exported(labels, "locks:sparse_rows") == 2 and exported(labels, "locks:pages_read") == 3
    assert exported(labels, "locks:nonfinite_pages", layers="10-10") == 1


@pytest.fixture
def threads_started(monkeypatch) -> list[object]:
    started: list[object] = []
    monkeypatch.setattr(metrics.threading.Thread, "start", lambda thread: started.append(thread))
    monkeypatch.setattr(metrics, "_running", None)
    return started


def test_without_the_variable_nothing_runs(monkeypatch, threads_started):
    monkeypatch.delenv(metrics.FOLDER_VARIABLE, raising=False)
    metrics.export(config())
    assert threads_started == []


def test_an_engine_that_may_sleep_is_not_read(monkeypatch, threads_started, tmp_path):
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    metrics.export(config(enable_sleep_mode=True))
    assert threads_started == []


def test_one_thread_reads_the_layers_of_an_engine(monkeypatch, threads_started, tmp_path):
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    first, second = config(), config()
    metrics.export(first)
    metrics.export(first)  # once for each group of layers
    assert len(threads_started) == 1
    _, stopped = metrics._running
    metrics.export(second)
    assert len(threads_started) == 2 and stopped.is_set()


def test_a_thread_that_fails_says_so_and_ends(labels, caplog, monkeypatch):
    class Broken(HostCounters):
        def read(self) -> np.ndarray:
            raise RuntimeError("no such device")

    monkeypatch.setattr(metrics, "INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(metrics.logger, "propagate", True)
    layer = served_layer()
    Exporter({0: layer}, Broken([layer]), labels, True).run(metrics.threading.Event())
    assert "stand still" in caplog.text and "no such device" in caplog.text


# Two workers, of which vLLM is loaded once only.
WORKERS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_vllm_metrics import exporter, served_layer
child = os.fork()
rank = "0" if child else "1"
layers = {index: served_layer(index) for index in range(4)}
exporter(layers, {"model_name": "m", "engine": "0", "rank": rank}, rank == "0").publish()
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


def test_the_numbers_of_all_processes_meet_in_one_answer(tmp_path):
    subprocess.run(
        [sys.executable, "-c", WORKERS, str(Path(__file__).parent)],
        env=dict(os.environ) | {metrics.FOLDER_VARIABLE: str(tmp_path)},
        check=True,
    )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    for rank in "01":
        labels = {"model_name": "m", "engine": "0", "rank": rank}
        assert registry.get_sample_value("locks:read_bytes_total", labels) == 6
        assert registry.get_sample_value("locks:invalid_records_total", labels | {"layers": "3-3"}) == 3
        assert registry.get_sample_value("locks:dense_rows_total", labels) == (0 if rank == "0" else None)
    text = generate_latest(registry).decode()
    for metric in METRICS:
        assert f"# HELP {metric.name}_total {metric.about}\n# TYPE {metric.name}_total counter\n" in text


def expressions(value: object) -> list[str]:
    """Every expression of a dashboard, its variables included."""
    if isinstance(value, dict):
        own = [text for key in ("expr", "query") if isinstance(text := value.get(key), str)]
        return own + [text for part in value.values() for text in expressions(part)]
    return [text for part in value for text in expressions(part)] if isinstance(value, list) else []


def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them():
    asked = {name for text in expressions(json.loads(DASHBOARD.read_text())) for name in re.findall(r"\w+:\w+", text)}
    assert asked == {f"{metric.name}_total" for metric in METRICS}


def test_the_dashboard_is_whole():
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"] and board["schemaVersion"] >= 38  # Grafana 10
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    known = {variable["name"] for variable in board["templating"]["list"]}
    for text in expressions(board):
        assert set(re.findall(r"\$(\w+)", text)) <= known | {"__rate_interval"}, text


def test_the_documents_list_the_metrics():
    page = (ROOT / "docs" / "metrics.md").read_text()
    listed = re.findall(r"^\| `(locks:\w+)_total`", page, re.M)
    assert listed == [metric.name for metric in METRICS]
