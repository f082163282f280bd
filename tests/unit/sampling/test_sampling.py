"""The iteration of a sampling, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.sampling import Episode, EpisodeStatus, Task, sampler
from aenv_ray.sampling.runners.groups import Group
from aenv_ray.sampling.sampler import _UNREAD, Sampling, _Unread
from aenv_ray.trajectories import output_lock, read


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


class _SlowToEnd:
    """A pool that plays all tasks, or goes on until it is cancelled, if one is played at a time."""

    def __init__(
        self,
        runners: None,
        take: Callable[[int], Awaitable[list[Group]]],
        report: Callable[[Episode], None],
        room: object,
        **options: Any,
    ) -> None:
        del runners, room
        self._is_first = options["concurrency"].limit == 1
        self._take = take
        self._report = report

    async def play(self) -> None:
        while groups := await self._take(1):
            (one,) = groups[0].members
            if not self._is_first:
                self._report(_played(one.index, one.task))
                continue
            (second,) = (await self._take(1))[0].members
            (third,) = (await self._take(1))[0].members
            self._report(_played(second.index, second.task))
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(50):
                    await asyncio.sleep(0)
                self._report(_played(third.index, third.task))

    def drain(self) -> None:
        """Do nothing."""


def _played(index: int, task: Task) -> Episode:
    return Episode(index=index, task_id=task.id, task=task, reward=1.0, status=_COMPLETED)


async def _act(env: Any, task: Task) -> None:
    """Do nothing."""


@pytest.mark.parametrize("name", ["run.jsonl", "run", "run.parquet"])
async def test_a_run_that_is_left_can_be_resumed_at_once_on_the_same_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends on that loop, and has the output until then."""

    async def no_runners(_: Sampling) -> None:
        return None

    monkeypatch.setattr(output_lock, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sampler, "RunnerPool", _SlowToEnd)
    monkeypatch.setattr(Sampling, "_runners", no_runners)
    tasks = [{"id": f"t{n}"} for n in range(9)]

    def sampling(**options: Any) -> Sampling:
        return aenv_ray.sample("mini-terminal", _act, tasks, out=tmp_path / name, **options)

    async for _ in sampling(concurrency=1):
        break
    rest = sampling(resume=True)
    assert [episode.index async for episode in rest] == [0, *range(3, 9)]
    assert rest.kept == 2
    assert rest.summary().rollouts == 9
    assert [episode.index for episode in read(tmp_path / name)] == list(range(9))
