"""Coroutines that serve callers that await and callers that block."""

from __future__ import annotations

import asyncio

import pytest

from aenv_ray.blocking import awaited, run_blocking


async def _all(*results: object) -> list[object]:
    return [await awaited(result) for result in results]


def test_a_coroutine_that_waits_for_nothing_runs_without_an_event_loop() -> None:
    assert run_blocking(_all(1, "two")) == [1, "two"]


async def test_what_may_be_awaited_is_awaited() -> None:
    assert await _all(1, asyncio.sleep(0, "two")) == [1, "two"]


def test_a_coroutine_that_suspends_is_a_bug_and_not_a_hang() -> None:
    with pytest.raises(AssertionError, match="suspended outside of an event loop"):
        run_blocking(asyncio.sleep(0))
