"""Tasks are ended, kept and shielded."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from typing import Any

import pytest

from aenv_ray import background_tasks as tasks
from aenv_ray.background_tasks import Tasks, end_task, shielded, start_shared
from aenv_ray.engines.kubernetes.client import KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.pods import Pods


async def test_a_task_is_told_again_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 11."""
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.01)

    async def deaf() -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await end_task(task)
    assert task.cancelled()


async def test_a_shared_task_has_the_context_of_no_caller() -> None:
    caller = contextvars.ContextVar("caller", default="none")
    caller.set("first")

    async def named() -> str:
        return caller.get()

    assert await start_shared(named()) == "none"


async def test_a_failure_before_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise OSError("no more")

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    with caplog.at_level(logging.ERROR):
        await end_task(task)
    assert "no more" in caplog.text


async def test_a_failure_of_a_spawned_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise OSError("no more")

    spawned = Tasks()
    with caplog.at_level(logging.ERROR):
        await asyncio.wait({spawned.spawn(fail())})
    assert len(spawned) == 0
    assert "no more" in caplog.text


async def test_tasks_that_do_not_settle_in_time_are_cancelled() -> None:
    """Invariant 9."""
    spawned, last = Tasks(), asyncio.Event()
    quick, late = spawned.spawn(asyncio.sleep(0)), spawned.spawn(last.wait())
    await spawned.settle(0.01)
    assert quick.done()
    assert not quick.cancelled()
    await asyncio.wait({late})
    assert late.cancelled()


async def test_closing_returns_once_the_tasks_have_ended() -> None:
    """Invariant 11."""
    spawned, last = Tasks(), asyncio.Event()
    task = spawned.spawn(last.wait())
    await spawned.aclose()
    assert task.cancelled()


class Slow(KubernetesClient):
    """An API that answers when the test says so."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def request(self, access: Access, name: str = "", **_: Any) -> dict[str, Any]:
        del access, name
        self.asked.set()
        await self.answers.wait()
        return {}


async def test_a_cancelled_pod_creation_waits_for_the_answer() -> None:
    """Invariant 3: otherwise the API could create the pod after its deletion."""
    client = Slow()
    creating = asyncio.create_task(Pods(client, "", lambda *_: None).create({}))
    await client.asked.wait()
    for _ in range(3):  # as `end_task` does
        creating.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not creating.done()
    client.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await creating


async def test_an_error_after_the_cancellation_is_not_logged_as_unhandled() -> None:
    go = asyncio.Event()

    async def refused() -> None:
        await go.wait()
        raise ValueError

    asking = asyncio.create_task(shielded(refused()))
    await asyncio.sleep(0)
    asking.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_results_and_errors_are_passed_on() -> None:
    async def refused() -> None:
        raise ValueError("no")

    assert await shielded(asyncio.sleep(0, "yes")) == "yes"
    with pytest.raises(ValueError, match="no"):
        await shielded(refused())
