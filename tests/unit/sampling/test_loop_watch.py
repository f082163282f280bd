"""A blocked event loop is measured, and reported once."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from aenv_ray.sampling import loop_watch
from aenv_ray.sampling.loop_watch import LoopWatch


async def test_a_loop_that_runs_is_not_blocked() -> None:
    watch = LoopWatch()
    assert watch.blocked_s(time.perf_counter() + 100.0) == 0.0
    watch.start()
    for _ in range(5):
        await asyncio.sleep(loop_watch._BEAT_S)
    watch.stop()
    watch.stop()
    before_s = watch.blocked_s(time.perf_counter())
    assert watch.blocked_s(time.perf_counter() + 100.0) == before_s, "it is not watched any more"


async def test_a_block_counts_while_it_lasts_and_afterwards() -> None:
    watch = LoopWatch()
    watch.start()
    began = time.perf_counter()
    time.sleep(2 * loop_watch._BLOCK_S)  # noqa: ASYNC251  # what is measured
    ended = time.perf_counter()
    during_s = watch.blocked_s(ended)
    assert during_s >= ended - began
    await asyncio.sleep(loop_watch._BEAT_S)
    assert watch.blocked_s(time.perf_counter()) >= during_s
    watch.stop()


async def test_a_loop_that_is_blocked_for_long_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the two likely reasons: a policy, and what the caller does with episodes."""
    monkeypatch.setattr(loop_watch, "_MOST_S", 3 * loop_watch._BLOCK_S)
    watch = LoopWatch()
    watch.start()
    with caplog.at_level(logging.WARNING, "aenv_ray"):
        watch.report()
        assert not caplog.records
        for _ in range(6):
            time.sleep(loop_watch._BLOCK_S)  # noqa: ASYNC251  # what is reported
            await asyncio.sleep(loop_watch._BEAT_S)
        watch.report()
    watch.stop()
    (record,) = caplog.records
    message = record.getMessage()
    assert "the event loop of the episodes was blocked" in message
    assert "if the policy is async" in message
    assert "if your code reads episodes with async for" in message
