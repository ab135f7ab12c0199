"""What /metrics tells Prometheus."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from insertlm.server.registry import Served

__all__ = ["Metrics"]

# Upper bounds in seconds, from the answer to a health check to the default limit of a request.
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # or each has a second one, the time of its first count


class Metrics:
    """The metrics of one app, in a registry of their own: two apps in one process do not mix."""

    def __init__(self, served: Collection[Served]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "insertlm_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "insertlm_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["path"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_WorkerMetrics(served))

    def count(self, path: str, status: int, seconds: float) -> None:
        """A request that has been answered."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _WorkerMetrics(Collector):
    """Workers count for themselves; their numbers are read when Prometheus asks."""

    def __init__(self, served: Collection[Served]) -> None:
        self.served = served

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            "running": GaugeMetricFamily("insertlm_texts_running", "Texts being written.", labels=["model"]),
            "waiting": GaugeMetricFamily("insertlm_texts_waiting", "Texts in the queue.", labels=["model"]),
            "tokens": CounterMetricFamily("insertlm_tokens", "Tokens written.", labels=["model"]),
            "steps": CounterMetricFamily("insertlm_steps", "Steps, each of all running texts.", labels=["model"]),
            "cancelled": CounterMetricFamily(
                "insertlm_cancelled", "Requests whose client disconnected or whose time was over.", labels=["model"]
            ),
        }
        # No lock: a number that is a step old does no harm, and a scrape must not wait for a step.
        for name, metric in metrics.items():
            for one in self.served:
                metric.add_metric([one.name], getattr(one.worker, name))
            yield metric
