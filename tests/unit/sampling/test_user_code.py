"""A policy acts no longer than it may, and no longer than its instance lives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import InstanceExpired
from aenv_ray.sampling.user_code import PolicyTimedOut, outcome, place_of, within

LONG_S = 120.0


async def lives() -> None:
    """The instance is there."""


async def hang(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


def test_a_policy_that_hangs_is_cancelled_at_its_limit() -> None:
    ended: list[str] = []
    with pytest.raises(PolicyTimedOut, match=r"within 0\.01 s"):
        asyncio.run(within(hang(ended), 0.01, lives))
    assert ended == ["cancelled"]


def test_a_policy_that_ignores_cancellation_is_abandoned() -> None:
    """And what it raises later is nobody's any more."""
    goes_on = asyncio.Event()

    async def stubborn() -> None:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("late")

    async def episode() -> None:
        with pytest.raises(PolicyTimedOut):
            await within(stubborn(), 0.01, lives, grace_s=0.01)
        (left,) = asyncio.all_tasks() - {asyncio.current_task()}
        goes_on.set()
        await asyncio.wait({left})

    asyncio.run(episode())


def test_without_a_limit_the_end_of_the_instance_ends_a_policy() -> None:
    """Invariant 9: an instance that ended leaves a policy nothing to act on."""
    ended: list[str] = []
    asked: list[str] = []

    async def ends() -> None:
        asked.append("")
        if len(asked) == 3:
            raise InstanceExpired("its TTL passed")

    with pytest.raises(InstanceExpired):
        asyncio.run(within(hang(ended), None, ends, check_s=0.001))
    assert (len(asked), ended) == (3, ["cancelled"])


@pytest.mark.parametrize("limit_s", [None, LONG_S])
def test_results_and_exceptions_of_a_policy_pass_unchanged(limit_s: float | None) -> None:
    async def gives() -> int:
        return 7

    async def raises() -> Any:
        raise TimeoutError("of the model")

    assert asyncio.run(within(gives(), limit_s, lives)) == 7
    with pytest.raises(TimeoutError, match="of the model"):
        asyncio.run(within(raises(), limit_s, lives))


def test_a_cancelled_episode_cancels_its_policy() -> None:
    """Invariant 11."""
    ended: list[str] = []

    async def cancel() -> None:
        episode = asyncio.create_task(within(hang(ended), None, lives))
        for _ in range(3):
            await asyncio.sleep(0)
        episode.cancel()
        await episode

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert ended == ["cancelled"]


def raise_inside_a_library() -> None:
    json.loads("{")


async def leave() -> None:
    raise SystemExit(3)


def test_the_line_of_user_code_that_raised_is_reported() -> None:
    """Not the library's that it called, and also where the exception was replaced."""
    with pytest.raises(ValueError, match="property name") as raised:
        raise_inside_a_library()
    line = raise_inside_a_library.__code__.co_firstlineno + 1
    assert place_of(raised.value) == f"{Path(__file__).name}:{line}, in raise_inside_a_library"
    with pytest.raises(RuntimeError) as replaced:
        asyncio.run(outcome(leave(), "the policy"))
    assert "in leave" not in str(replaced.value)
    assert str(place_of(replaced.value)).startswith(f"{Path(__file__).name}:")


def test_an_exception_raised_only_in_libraries_has_no_line() -> None:
    assert place_of(ValueError("it was not raised")) is None
    own_cause = ValueError("it is its own cause")
    own_cause.__cause__ = own_cause
    assert place_of(own_cause) is None
