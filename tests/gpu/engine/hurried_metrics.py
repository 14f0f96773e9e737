"""A worker whose metrics are read every few milliseconds, also while it captures its graphs."""

from gpu_harness import WatchedWorker
from locks_vllm import metrics

metrics.INTERVAL_SECONDS = 0.005


class HurriedWorker(WatchedWorker):
    def metrics_threads(self) -> int:
        return sum(thread.name == "locks-metrics" for thread in metrics.threading.enumerate())
