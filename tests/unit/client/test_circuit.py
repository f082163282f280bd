"""The circuit breaker pauses calls for the infrastructure's sake, never for a tool's."""

from __future__ import annotations

import asyncio

import pytest

from aenv_ray.client import CircuitBreaker
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    CircuitOpen,
    ConfigError,
    SandboxLost,
    ToolError,
    ToolNotFound,
    ToolTimeout,
)


class Bench:
    """A breaker with a clock that moves only when told."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.breaker = CircuitBreaker(now=lambda: self.time_s)

    def fail(self, times: int, error: BaseException | None = None) -> None:
        for _ in range(times):
            self.breaker.check()
            self.breaker.record(error or SandboxLost("gone"))

    @property
    def is_open(self) -> bool:
        try:
            self.breaker.check()
        except CircuitOpen:
            return True
        return False


def test_five_infrastructure_failures_in_a_row_open_it() -> None:
    bench = Bench()
    bench.fail(4)
    assert not bench.is_open
    bench.fail(1)
    with pytest.raises(CircuitOpen, match="5 infrastructure failures in a row") as caught:
        bench.breaker.check()
    assert caught.value.retryable
    assert caught.value.hint


@pytest.mark.parametrize("error", INFRASTRUCTURE)
def test_every_infrastructure_error_counts(error: type[AenvError]) -> None:
    bench = Bench()
    bench.fail(5, error("away"))
    assert bench.is_open


@pytest.mark.parametrize(
    "error", [ToolError("x"), ToolNotFound("x"), ToolTimeout("x"), ConfigError("x")]
)
def test_what_a_tool_does_never_opens_it(error: AenvError) -> None:
    """Also a tool's timeout: the sandbox answered."""
    bench = Bench()
    bench.fail(50, error)
    assert not bench.is_open


def test_a_success_between_failures_starts_the_count_anew() -> None:
    bench = Bench()
    bench.fail(4)
    bench.breaker.record(None)
    bench.fail(4)
    assert not bench.is_open


def test_after_the_pause_one_call_probes_and_the_others_wait() -> None:
    bench = Bench()
    bench.fail(5)
    bench.time_s += 4.9
    assert bench.is_open
    bench.time_s += 0.2
    bench.breaker.check()
    assert bench.is_open, "one probe at a time"


def test_a_probe_that_succeeds_closes_it() -> None:
    bench = Bench()
    bench.fail(5)
    bench.time_s += 5.0
    bench.breaker.check()
    bench.breaker.record(None)
    bench.fail(4)
    assert not bench.is_open


def test_a_probe_that_fails_pauses_again() -> None:
    bench = Bench()
    bench.fail(5)
    bench.time_s += 5.0
    bench.fail(1)
    assert bench.is_open
    bench.time_s += 5.0
    bench.breaker.check()


def test_a_probe_that_is_cancelled_leaves_room_for_the_next() -> None:
    """Invariant 11: a cancelled call neither closes the circuit nor blocks it for good."""
    bench = Bench()
    bench.fail(5)
    bench.time_s += 5.0
    bench.breaker.check()
    bench.breaker.record(asyncio.CancelledError())
    bench.breaker.check()
    assert bench.is_open


def test_reset_forgets_everything() -> None:
    bench = Bench()
    bench.fail(5)
    bench.breaker.reset()
    bench.fail(4)
    assert not bench.is_open
