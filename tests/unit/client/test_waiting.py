"""A client that waits for a server logs it, and its timeout error has the last failure."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aenv_ray import Environment, SyncEnvironment
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.waiting import FIRST_LOG_S, Wait, expect_healthy, until_healthy
from aenv_ray.errors import (
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    SandboxStartFailed,
)

GONE = FabricUnavailable("nobody answers", hint="start a server")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_long_wait_is_logged_and_then_each_time_it_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    wait = Wait("a server", 500.0, clock)
    logged = []
    for second in range(41):
        clock.now_s = 100.0 + second
        before = len(caplog.records)
        wait.goes_on(GONE.message_and_hint)
        logged += [second] if len(caplog.records) > before else []
    assert logged == [FIRST_LOG_S, 2 * FIRST_LOG_S, 4 * FIRST_LOG_S, 8 * FIRST_LOG_S]
    assert (wait.remaining_s, wait.why) == (460.0, "nobody answers (start a server)")
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].getMessage() == (
        "still waiting for a server after 5 s of at most 500 s: nobody answers (start a server)"
    )


@pytest.mark.parametrize("status", ["healthy", "success", "ok"])
def test_a_server_that_starts_late_is_waited_for(status: str) -> None:
    """AEnvironment's client waits for a server that is not there yet."""
    answers: list[Any] = [GONE, {"data": {"status": "error"}}, {"data": {"status": status}}]

    async def check(timeout_s: float) -> dict[str, Any]:
        assert timeout_s > 0
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    body = asyncio.run(until_healthy(check, "http://x", Wait("x", 60.0)))
    assert (body, answers) == ({"data": {"status": status}}, [])


def test_a_server_that_never_starts_ends_the_wait_with_the_last_failure() -> None:
    """Invariant 9."""

    async def check(timeout_s: float) -> dict[str, Any]:
        del timeout_s
        raise GONE

    with pytest.raises(DeadlineExceeded, match=r"http://x was not healthy .* nobody answers"):
        asyncio.run(until_healthy(check, "http://x", Wait("x", 0.05)))


def test_code_that_does_not_load_is_not_waited_for() -> None:
    async def check(timeout_s: float) -> dict[str, Any]:
        del timeout_s
        return {"data": {"status": "error", "code": SandboxStartFailed.code, "message": "boom"}}

    with pytest.raises(SandboxStartFailed, match="boom"):
        asyncio.run(until_healthy(check, "http://x", Wait("x", 60.0)))


async def test_an_environment_without_a_server_says_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 9: also when its own deadline comes first."""

    async def create(*args: Any) -> None:
        raise GONE

    monkeypatch.delenv("AENV_SYSTEM_URL", raising=False)
    monkeypatch.delenv("DUMMY_INSTANCE_IP", raising=False)
    monkeypatch.setattr(AsyncEnvHandle, "create", create)
    environment = Environment("nobody", startup_timeout=0.01)
    with pytest.raises(DeadlineExceeded, match=r"nobody was not .* 0\.01 s: nobody answers \("):
        await environment.initialize()


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": -1}, {"timeout": "x"}, {"timeout": True}, {"startup_timeout": 0},
        {"startup_timeout": float("nan")}, {"max_retries": -1}, {"max_retries": "x"},
        {"max_retries": 1.5},
    ],
)  # fmt: skip
def test_invalid_numbers_are_refused_before_anything_starts(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Environment("mini-terminal", **wrong)


def test_a_sync_environment_that_was_closed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_INSTANCE_IP", "127.0.0.1:1")
    environment = SyncEnvironment("nobody")
    environment.close()
    environment.close()
    environment.release()
    with pytest.raises(ConfigError, match="is closed"):
        environment.call_tool("echo", {})
    with pytest.raises(ConfigError, match="is closed"), environment:
        pass


def test_an_instance_that_is_not_healthy_is_named_with_the_way_out() -> None:
    expect_healthy({"status": "ok"}, "a-1", hint="x")
    with pytest.raises(SandboxStartFailed, match="a-1 is unhealthy: no disk") as raised:
        expect_healthy({"status": "unhealthy", "message": "no disk"}, "a-1", hint="read its log")
    assert (raised.value.instance_id, raised.value.hint) == ("a-1", "read its log")
