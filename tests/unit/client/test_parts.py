"""Circuit breaker and tool names of the client."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.client.circuit import CircuitBreaker
from aenv_ray.client.openai_names import openai_name
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    CapacityExceeded,
    CircuitOpen,
    ConfigError,
    SandboxLost,
    ToolNotFound,
    ToolTimeout,
)


class Now:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def open_breaker(now: Now) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=3, pause_s=5.0, now=now)
    for _ in range(3):
        breaker.check()
        breaker.record(SandboxLost("gone"))
    return breaker


def test_failures_in_a_row_open_it_and_a_pause_lets_one_probe() -> None:
    now = Now()
    breaker = open_breaker(now)
    with pytest.raises(CircuitOpen, match=r"3 infrastructure failures.*5 s"):
        breaker.check()
    now.seconds += 5.0
    breaker.check()
    with pytest.raises(CircuitOpen):
        breaker.check()  # one probe at a time
    breaker.record(None)
    breaker.check()
    breaker.check()


def test_a_failed_probe_pauses_again() -> None:
    now = Now()
    breaker = open_breaker(now)
    now.seconds += 5.0
    breaker.check()
    breaker.record(CapacityExceeded("full"))
    with pytest.raises(CircuitOpen):
        breaker.check()
    now.seconds += 5.0
    breaker.check()


def test_a_cancelled_probe_proves_nothing_and_blocks_nothing() -> None:
    """Invariant 11."""
    now = Now()
    breaker = open_breaker(now)
    now.seconds += 5.0
    breaker.check()
    breaker.record(asyncio.CancelledError())
    breaker.check()


@pytest.mark.parametrize("error", [ToolTimeout("slow"), ToolNotFound("no"), ConfigError("x"), None])
def test_what_a_tool_does_is_no_failure_of_the_fabric(error: AenvError | None) -> None:
    breaker = CircuitBreaker(threshold=2, now=Now())
    for _ in range(5):
        breaker.record(SandboxLost("gone"))
        breaker.record(error)
        breaker.check()


@pytest.mark.parametrize("error", INFRASTRUCTURE, ids=lambda error: error.__name__)
def test_every_infrastructure_failure_counts(error: type[AenvError]) -> None:
    breaker = CircuitBreaker(threshold=1, now=Now())
    breaker.record(error("x"))
    with pytest.raises(CircuitOpen):
        breaker.check()
    breaker.reset()
    breaker.check()


NAMES = st.text(max_size=80)


@given(st.lists(NAMES, unique=True, max_size=12))
def test_every_tool_has_a_legal_name_of_its_own(names: list[str]) -> None:
    taken: dict[str, str] = {}
    for name in names:
        legal = openai_name(name, taken)
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", legal)
        assert legal not in taken
        taken[legal] = name


def test_legal_names_stay_as_they_are() -> None:
    assert openai_name("execute_command", {}) == "execute_command"
    assert openai_name("env/tool.name", {}) == "env_tool_name"
