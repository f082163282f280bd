"""Requests to the hub that block."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aenv_ray.background_tasks import shielded
from aenv_ray.hub.client import blocking


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt, as in a notebook, instead of cancelling the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_thread_with_an_event_loop_blocks_for_the_result_or_the_error() -> None:
    async def fail() -> None:
        raise OSError("no more")

    assert blocking(asyncio.sleep(0, "an answer")) == "an answer"
    with pytest.raises(OSError, match="no more"):
        blocking(fail())


@pytest.mark.parametrize("is_shielded", [False, True])
async def test_ctrl_c_in_a_thread_with_an_event_loop_ends_the_request_first(
    is_shielded: bool,
) -> None:
    """Otherwise a request that a cleanup undoes could still be carried out after it."""
    main, outcome = threading.main_thread().ident, list[str]()
    assert main is not None

    async def asked() -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            for _ in range(50 if is_shielded else 10_000):
                await asyncio.sleep(0.001)
            outcome.append("answered")
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise

    with keyboard_interrupts(), pytest.raises(KeyboardInterrupt):
        blocking(shielded(asked()) if is_shielded else asked())
    assert outcome == ["answered" if is_shielded else "cancelled"]
