"""What the gateway counts: for Prometheus through Ray, and under ``/metrics`` of each replica.

Labels are bounded: routes are templates, errors are codes of `errors.py`, and of environments only
the first few are named.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from aenv_ray.hub.records import Lease

CONTENT_TYPE: Final = "text/plain"
MOST_ENVIRONMENTS: Final = 50
"""Further ones are counted as ``other``."""
_MOST_UNTOLD: Final = 500
"""Requests of one route that are told together, between two beats."""
_SECONDS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0)


class Twin(Protocol):
    """The same metrics elsewhere."""

    def count(self, name: str, number: int, labels: Mapping[str, str]) -> None:
        """Add to a counter."""

    def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        """Put a duration into a histogram."""

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""


COUNTERS: Final = {
    "aenv_gateway_requests": ("Answered requests", ("route", "status")),
    "aenv_gateway_errors": ("Requests that failed, by type of error", ("error",)),
}
HISTOGRAMS: Final = {
    "aenv_gateway_request_seconds": ("How long requests took", ("route",)),
    "aenv_gateway_create_seconds": ("How long creates took, by phase", ("phase",)),
}
GAUGES: Final = {
    "aenv_gateway_instances": ("Running instances made through the gateway", ("environment",)),
    "aenv_gateway_pool_ready": ("Sandboxes that are kept ready", ("environment",)),
    "aenv_gateway_requests_under_way": ("Requests that a replica works on", ()),
}


class Metrics:
    """The metrics of one replica.

    Args:
        twin: Is told the same; None: nobody.
    """

    def __init__(self, twin: Twin | None = None) -> None:
        self._registry = CollectorRegistry()
        self._twin = twin
        self._metrics: dict[str, Any] = {}
        for name, (text, labels) in COUNTERS.items():
            self._metrics[name] = Counter(name, text, labels, registry=self._registry)
        for name, (text, labels) in HISTOGRAMS.items():
            self._metrics[name] = Histogram(
                name, text, labels, registry=self._registry, buckets=_SECONDS
            )
        for name, (text, labels) in GAUGES.items():
            self._metrics[name] = Gauge(name, text, labels, registry=self._registry)
        self._environments: defaultdict[str, set[str]] = defaultdict(set)
        self._under_way = 0
        # Of requests that ended since the last beat: a metric costs more than a number.
        self._requests: Counted[tuple[str, int]] = Counted()
        self._errors: Counted[str] = Counted()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def text(self) -> bytes:
        """Return all of them as Prometheus reads them."""
        self.beat()
        return generate_latest(self._registry)

    def request_began(self) -> None:
        """Note that a request came."""
        self._under_way += 1

    def request_ended(self, route: str, status: int, seconds: float, error: str | None) -> None:
        """Note how a request ended.

        Args:
            route: Method and template.
            status: HTTP status.
            seconds: How long it took.
            error: Code of the error that it was answered with.
        """
        self._under_way -= 1
        self._requests[route, status] += 1
        self._seconds[route].append(seconds)
        if error is not None:
            self._errors[error] += 1
        if len(self._seconds[route]) >= _MOST_UNTOLD:
            self._tell()

    def create_phase(self, phase: str, seconds: float) -> None:
        """Note how long a phase of a create took."""
        self._observe("aenv_gateway_create_seconds", seconds, {"phase": phase})

    def beat(self) -> None:
        """Tell of the requests that ended, and what is under way now."""
        self._tell()
        self._set("aenv_gateway_requests_under_way", self._under_way, {})

    def _tell(self) -> None:
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

    def live(self, leases: Collection[Lease]) -> None:
        """Note what runs."""
        names = (lease.reference.partition("@")[0] for lease in leases)
        self._by_environment("aenv_gateway_instances", Counted(names))

    def pools(self, ready: Mapping[str, int]) -> None:
        """Note how many sandboxes are ready, by the reference of their environment."""
        counts: Counted[str] = Counted()
        for reference, count in ready.items():
            counts[reference.partition("@")[0]] += count
        self._by_environment("aenv_gateway_pool_ready", counts)

    def _by_environment(self, metric: str, counts: Mapping[str, int]) -> None:
        """Set a gauge for each environment, those that have none any more too."""
        known = self._environments[metric]
        bounded = Counted(dict.fromkeys(known, 0))
        for name, count in counts.items():
            is_named = name in bounded or len(bounded) < MOST_ENVIRONMENTS
            bounded[name if is_named else "other"] += count
        known.update(bounded)
        for name, count in bounded.items():
            self._set(metric, count, {"environment": name})

    def _count(self, name: str, labels: Mapping[str, str], number: int) -> None:
        self._metrics[name].labels(**labels).inc(number)
        if self._twin is not None:
            self._twin.count(name, number, labels)

    def _observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        self._metrics[name].labels(**labels).observe(seconds)
        if self._twin is not None:
            self._twin.observe(name, seconds, labels)

    def _set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        metric = self._metrics[name]
        (metric.labels(**labels) if labels else metric).set(value)
        if self._twin is not None:
            self._twin.set(name, value, labels)
