"""`locks:*` on vLLM's /metrics.

A worker counts, and the API server answers /metrics in another process. prometheus_client joins the two: where the
environment variable PROMETHEUS_MULTIPROC_DIR names a folder, each process keeps its metrics in files there, and vLLM's
server answers from the files of all. `locks serve` sets the variable; without it nothing here runs.

A decode step does nothing for it and waits for nothing. Counters are counted anyway, by the kernels and on the GPU; a
thread of the worker fetches them every INTERVAL_SECONDS: one copy of 88 bytes a layer, on a stream of its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from locks.ops import COUNTERS
from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from locks_vllm.serving import locks_of

if TYPE_CHECKING:
    from locks_vllm.served_layer import ServedLayer

logger = init_logger("vllm.locks")

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
INTERVAL_SECONDS = 5.0
# Counters of faults tell where in the model they are: by so many groups of neighbouring layers at most.
MAX_GROUPS = 8

COLUMNS = (*COUNTERS, "steps", "prefill_tokens")  # of what is read, for each layer
LABELS = ("model_name", "engine", "rank")

# What a metric adds up. All layers and all GPUs have the same steps and rows: one layer of the first rank tells them,
# so that a sum over ranks counts a row once. Records, pages and bytes are of a rank's own KV heads.
ONE_LAYER, ALL_LAYERS, LAYER_GROUPS = "one layer", "all layers", "layer groups"


@dataclass(frozen=True)
class Metric:
    """A counter of Prometheus: /metrics calls it `name` with "_total" behind."""

    name: str
    counter: str  # of COLUMNS
    over: str
    about: str

    @property
    def labels(self) -> tuple[str, ...]:
        return (*LABELS, "layers") if self.over == LAYER_GROUPS else LABELS


METRICS = (
    Metric("locks:decode_steps", "steps", ONE_LAYER, "Steps of the engine in which LOCKS decoded for some request."),
    Metric("locks:prefill_tokens", "prefill_tokens", ONE_LAYER, "Prompt tokens that attended exactly."),
    Metric("locks:sparse_rows", "sparse_rows", ONE_LAYER, "Decoded tokens that read a part of their context."),
    Metric("locks:dense_rows", "dense_rows", ONE_LAYER, "Decoded tokens that read all of their context."),
    Metric(
        "locks:raised_budgets",
        "raised_budgets",
        ONE_LAYER,
        "Decoded tokens whose budget was below what is always read, and was raised to it.",
    ),
    Metric("locks:records_read", "records_read", ALL_LAYERS, "Records read, over layers and KV heads."),
    Metric("locks:pages_read", "pages_read", ALL_LAYERS, "Pages of the KV cache read, over layers and KV heads."),
    Metric(
        "locks:records_built", "records_built", ALL_LAYERS, "Records built, new or again, over layers and KV heads."
    ),
    Metric(
        "locks:read_bytes",
        "bytes_read",
        ALL_LAYERS,
        "Bytes that decode attention read: records, and keys and values attended to.",
    ),
    Metric("locks:dense_bytes", "bytes_dense", ALL_LAYERS, "Bytes that dense attention would have read instead."),
    Metric(
        "locks:unused_bytes",
        "bytes_unused",
        ALL_LAYERS,
        "Bytes fetched before the choice of pages was final, and not used; not in locks:read_bytes.",
    ),
    Metric(
        "locks:nonfinite_pages",
        "nonfinite_pages",
        LAYER_GROUPS,
        "Pages read because their score was NaN or infinite.",
    ),
    Metric(
        "locks:invalid_records",
        "invalid_records",
        LAYER_GROUPS,
        "Records refused because their header is not of the format; their pages were read.",
    ),
)


@cache
def _counters() -> dict[Metric, Counter]:
    """Prometheus's objects, which a process may make once only."""
    return {metric: Counter(metric.name, metric.about, metric.labels) for metric in METRICS}


class Source(Protocol):
    """Where the counters of some layers come from."""

    def enter_thread(self) -> None:
        """Called once, in the thread that will read."""

    def read(self) -> np.ndarray:
        """int64 [layers, len(COUNTERS)], a copy."""


class HostCounters:
    """Counters in the memory of the CPU: reading them while a kernel counts gives each number before or after."""

    def __init__(self, layers: Sequence[ServedLayer]) -> None:
        self._counters = [layer.counters.numpy() for layer in layers]

    def enter_thread(self) -> None:
        pass

    def read(self) -> np.ndarray:
        return np.stack(self._counters)


class DeviceCounters:
    """Counters on a GPU. One asynchronous copy fetches all of them; only the thread that reads waits for it.

    Nothing is allocated after the start, and the stream is not one that the engine uses, so no step waits. A kernel
    that counts during the copy shows in it with a part of its numbers, and in the next copy with all.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """layers: GpuLayers that share a state."""
        self._table = layers[0].state.counters
        self._rows = [layer.row for layer in layers]
        self._host = torch.empty(self._table.shape, dtype=self._table.dtype, pin_memory=True)
        # torch hands out streams of a pool of 32, in turn. vLLM captures its graphs on one of those without priority.
        self._stream = torch.cuda.Stream(self._table.device, priority=-1)
        self._copied = torch.cuda.Event(blocking=True)  # to wait for it takes no time of a CPU core

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._table.device)
        _stay_out_of_captures()

    def read(self) -> np.ndarray:
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._table, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        return self._host.numpy()[self._rows]


def _stay_out_of_captures() -> None:
    """Lets this thread call CUDA while the engine captures a graph.

    torch captures in CUDA's global mode: a call of any other thread that might touch the captured stream, such as
    waiting for an event, would end the capture with an error. A thread in relaxed mode vouches for its calls.
    """
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    if status != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode: CUDA error {status}")


def layer_groups(indices: Sequence[int]) -> list[tuple[str, slice]]:
    """At most MAX_GROUPS runs of neighbours among layers of these numbers: "first-last" and where they are."""
    size = -(-len(indices) // MAX_GROUPS)
    runs = [slice(first, min(first + size, len(indices))) for first in range(0, len(indices), size)]
    return [(f"{indices[run][0]}-{indices[run][-1]}", run) for run in runs]


class Exporter:
    """Adds what the layers of a worker count to Prometheus's counters."""

    def __init__(
        self, layers: dict[int, ServedLayer], source: Source, labels: dict[str, str], first_rank: bool
    ) -> None:
        """layers: by their number, in order. labels: values of LABELS. first_rank: this worker tells the rows."""
        self._layers = list(layers.values())
        self._source = source
        self._seen = np.zeros((len(layers), len(COLUMNS)), dtype=np.int64)
        self._sums: list[tuple[Any, slice, int]] = []  # a counter, the layers and the column that it adds up
        for metric, counter in _counters().items():
            column = COLUMNS.index(metric.counter)
            # A child exists from here on: /metrics has it with 0 before anything was counted.
            if metric.over == LAYER_GROUPS:
                for name, run in layer_groups(list(layers)):
                    self._sums.append((counter.labels(**labels, layers=name), run, column))
            elif metric.over == ALL_LAYERS:
                self._sums.append((counter.labels(**labels), slice(None), column))
            elif first_rank:
                self._sums.append((counter.labels(**labels), slice(1), column))

    def publish(self) -> None:
        """Adds what was counted since the last call."""
        counts = [(layer.counts.steps, layer.counts.prefill_tokens) for layer in self._layers]
        now = np.column_stack([self._source.read(), np.array(counts, dtype=np.int64)])
        grown, self._seen = now - self._seen, now
        for child, run, column in self._sums:
            if amount := int(grown[run, column].sum()):
                child.inc(amount)

    def run(self, stopped: threading.Event) -> None:
        """Publishes until it is stopped."""
        try:
            self._source.enter_thread()
            while not stopped.wait(INTERVAL_SECONDS):
                self.publish()
        except Exception:
            logger.exception("LOCKS: locks:* on /metrics stand still from here on; the engine itself goes on")


_running: tuple[list[ServedLayer], threading.Event] | None = None


def export(vllm_config: VllmConfig) -> None:
    """Starts to publish what the LOCKS layers of this worker count, if the environment asks for it.

    To be called when all layers exist; again for the same layers it does nothing, for those of another engine in this
    process it changes over to them.
    """
    global _running
    if not os.environ.get(FOLDER_VARIABLE):
        logger.info_once("LOCKS: no locks:* on /metrics, since %s is not set: see docs/metrics.md", FOLDER_VARIABLE)
        return
    if vllm_config.model_config.enable_sleep_mode:
        logger.warning_once("LOCKS: no locks:* on /metrics with --enable-sleep-mode, since counters sleep too")
        return
    layers = _layers_of(vllm_config)
    if _running is not None:
        if _running[0] == list(layers.values()):
            return
        _running[1].set()
    stopped = threading.Event()
    exporter = exporter_of(vllm_config, layers)
    threading.Thread(target=exporter.run, args=(stopped,), name="locks-metrics", daemon=True).start()
    _running = list(layers.values()), stopped


def _layers_of(vllm_config: VllmConfig) -> dict[int, ServedLayer]:
    context = vllm_config.compilation_config.static_forward_context
    served = {name: locks for name, layer in context.items() if (locks := locks_of(layer)) is not None}
    return dict(sorted((extract_layer_index(name), locks) for name, locks in served.items()))


def exporter_of(vllm_config: VllmConfig, layers: dict[int, ServedLayer]) -> Exporter:
    """An exporter under vLLM's own labels of this worker."""
    served, parallel = list(layers.values()), vllm_config.parallel_config
    source: Source = DeviceCounters(served) if served[0].counters.is_cuda else HostCounters(served)
    labels = {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": str(parallel.data_parallel_index),
        "rank": str(parallel.rank),
    }
    return Exporter(layers, source, labels, first_rank=parallel.rank == 0)
