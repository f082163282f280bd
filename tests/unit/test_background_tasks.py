"""A task is ended although a library lost the cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from aenv_ray import background_tasks as tasks
from aenv_ray.background_tasks import Tasks, end_task


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
