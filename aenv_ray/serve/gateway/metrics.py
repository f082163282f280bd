"""Prometheus metrics of the gateway, in ``/metrics`` of each replica and in Ray's exporter.

The number of label values is bounded: routes are templates, errors are codes of `errors.py`, and
only the first environments are named.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from aenv_ray.hub.records import Lease

MAX_ENVIRONMENTS: Final = 50
"""Environments that are named; further ones are counted as ``other``."""
_MAX_PENDING: Final = 500
"""Requests of one route that are recorded together, between two flushes."""

_COUNTERS: Final = {
    "aenv_gateway_requests": ("Answered requests", ("route", "status")),
    "aenv_gateway_errors": ("Failed requests by error code", ("error",)),
}
_HISTOGRAMS: Final = {
    "aenv_gateway_request_seconds": ("Duration of requests", ("route",)),
    "aenv_gateway_create_seconds": ("Duration of creates by phase", ("phase",)),
}
_GAUGES: Final = {
    "aenv_gateway_instances": ("Running instances made through the gateway", ("environment",)),
    "aenv_gateway_pool_ready": ("Sandboxes that are kept ready", ("environment",)),
    "aenv_gateway_requests_under_way": ("Requests in progress at a replica", ()),
}
_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0)
_RAY_BUCKETS_S: Final = [0.002, 0.01, 0.05, 0.25, 1.0, 10.0, 60.0]
"""Fewer, because Ray collects them from every replica."""


class Metrics:
    """The metrics of one replica. Use them on one event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for name, (text, labels) in _COUNTERS.items():
            self._metrics[name] = Counter(name, text, labels, registry=self._registry)
        for name, (text, labels) in _HISTOGRAMS.items():
            self._metrics[name] = Histogram(
                name, text, labels, registry=self._registry, buckets=_BUCKETS_S
            )
        for name, (text, labels) in _GAUGES.items():
            self._metrics[name] = Gauge(name, text, labels, registry=self._registry)
        self._environments: defaultdict[str, set[str]] = defaultdict(set)
        self._in_progress = 0
        # Of requests that ended since the last flush: counting costs less than a metric.
        self._requests: Counts[tuple[str, int]] = Counts()
        self._errors: Counts[str] = Counts()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def text(self) -> bytes:
        """Return all metrics in Prometheus format."""
        self.flush()
        return generate_latest(self._registry)

    # --- requests -----------------------------------------------------------------------------

    def request_began(self) -> None:
        """Note that a request arrived."""
        self._in_progress += 1

    def request_ended(self, route: str, status: int, seconds: float, error: str | None) -> None:
        """Note how a request ended."""
        self._in_progress -= 1
        self._requests[route, status] += 1
        self._seconds[route].append(seconds)
        if error is not None:
            self._errors[error] += 1
        if len(self._seconds[route]) >= _MAX_PENDING:
            self._record_requests()

    def create_phase(self, phase: str, seconds: float) -> None:
        """Note the duration of a phase of a create."""
        self._observe("aenv_gateway_create_seconds", seconds, {"phase": phase})

    def flush(self) -> None:
        """Record the requests that ended, and the number in progress."""
        self._record_requests()
        self._set("aenv_gateway_requests_under_way", self._in_progress, {})

    def _record_requests(self) -> None:
        for (route, status), number in self._requests.items():
            self._count("aenv_gateway_requests", {"route": route, "status": str(status)}, number)
        for error, number in self._errors.items():
            self._count("aenv_gateway_errors", {"error": error}, number)
        for route, durations in self._seconds.items():
            for seconds in durations:
                self._observe("aenv_gateway_request_seconds", seconds, {"route": route})
        self._requests.clear()
        self._errors.clear()
        self._seconds.clear()

    # --- instances and pools ------------------------------------------------------------------

    def live(self, leases: Collection[Lease]) -> None:
        """Set the number of running instances of each environment."""
        names = (lease.reference.partition("@")[0] for lease in leases)
        self._set_by_environment("aenv_gateway_instances", Counts(names))

    def pools(self, ready: Mapping[str, int]) -> None:
        """Set the number of ready sandboxes of each environment."""
        counts: Counts[str] = Counts()
        for reference, count in ready.items():
            counts[reference.partition("@")[0]] += count
        self._set_by_environment("aenv_gateway_pool_ready", counts)

    def _set_by_environment(self, metric: str, counts: Mapping[str, int]) -> None:
        """Set a gauge for each environment, to 0 for those that are no longer there."""
        known = self._environments[metric]
        bounded = Counts(dict.fromkeys(known, 0))
        for name, count in counts.items():
            is_named = name in bounded or len(bounded) < MAX_ENVIRONMENTS
            bounded[name if is_named else "other"] += count
        known.update(bounded)
        for name, count in bounded.items():
            self._set(metric, count, {"environment": name})

    # --- recording ----------------------------------------------------------------------------

    def _count(self, name: str, labels: dict[str, str], number: int) -> None:
        self._metrics[name].labels(**labels).inc(number)

    def _observe(self, name: str, seconds: float, labels: dict[str, str]) -> None:
        self._metrics[name].labels(**labels).observe(seconds)

    def _set(self, name: str, value: float, labels: dict[str, str]) -> None:
        metric = self._metrics[name]
        (metric.labels(**labels) if labels else metric).set(value)


class ExportedMetrics(Metrics):
    """Metrics that Ray's exporter, which collects from all replicas, has as well."""

    def __init__(self) -> None:
        from aenv_ray.actors.ray_shell import ray_metrics

        super().__init__()
        self._exported: dict[str, Any] = {}
        for name, (text, labels) in _COUNTERS.items():
            self._exported[name] = ray_metrics.Counter(name, description=text, tag_keys=labels)
        for name, (text, labels) in _GAUGES.items():
            self._exported[name] = ray_metrics.Gauge(name, description=text, tag_keys=labels)
        for name, (text, labels) in _HISTOGRAMS.items():
            self._exported[name] = ray_metrics.Histogram(
                name, description=text, boundaries=_RAY_BUCKETS_S, tag_keys=labels
            )

    def _count(self, name: str, labels: dict[str, str], number: int) -> None:
        super()._count(name, labels, number)
        self._exported[name].inc(float(number), tags=labels)

    def _observe(self, name: str, seconds: float, labels: dict[str, str]) -> None:
        super()._observe(name, seconds, labels)
        self._exported[name].observe(seconds, tags=labels)

    def _set(self, name: str, value: float, labels: dict[str, str]) -> None:
        super()._set(name, value, labels)
        self._exported[name].set(value, tags=labels)
