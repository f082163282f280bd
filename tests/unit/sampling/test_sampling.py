"""The iteration of a sampling, without Ray."""

from __future__ import annotations

import asyncio
import threading

from aenv_ray.sampling import Episode, EpisodeStatus
from aenv_ray.sampling.sampler import _UNREAD, Sampling, _Unread


class _EndlessRun(Sampling):
    """A run that finishes episodes as fast as they may be reported, and takes a while to end."""

    def __init__(self) -> None:
        self.is_full = threading.Event()
        self.has_ended = False

    async def _run(self, finished: _Unread) -> None:
        index = 0
        try:
            while True:
                if index >= 2 * _UNREAD:
                    self.is_full.set()
                await finished.room()
                finished.put(Episode(index=index, task_id="t", reward=1.0, status=_COMPLETED))
                index += 1
                await asyncio.sleep(0)  # so that the episode is passed on
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            self.has_ended = True


_COMPLETED = EpisodeStatus.COMPLETED


def test_a_slow_reader_that_leaves_early_ends_the_run() -> None:
    """Its instances are released before the loop of the reader goes on, however many are unread."""
    run = _EndlessRun()
    for _ in run:
        assert run.is_full.wait(60.0)
        break
    assert run.has_ended
