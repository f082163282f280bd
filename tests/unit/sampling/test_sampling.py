"""The iteration of a sampling, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, EpisodeStatus, Task, sampler
from aenv_ray.sampling.runners.assignments import Group
from aenv_ray.sampling.sampler import _UNREAD, Sampling, _Unread
from aenv_ray.trajectories import files, output_lock, read
from aenv_ray.trajectories.attachments import attachment_of
from tests.unit.trajectories.episodes import episode, step


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


async def _no_runners(_: Sampling) -> None:
    return None


@pytest.mark.parametrize("name", ["run.jsonl", "run", "run.parquet"])
async def test_a_run_that_is_left_can_be_resumed_at_once_on_the_same_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends on that loop, and has the output until then."""
    monkeypatch.setattr(output_lock, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sampler, "RunnerPool", _SlowToEnd)
    monkeypatch.setattr(Sampling, "_runners", _no_runners)
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


# --- attachments of episodes that cannot be written ----------------------------------------------


class _Finished(NamedTuple):
    """A sampling without Ray, whose episodes finish when a test says so."""

    sampling: Sampling
    finish: Callable[[int], Episode]
    end: Callable[[], Awaitable[None]]


@pytest.fixture
async def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Finished]:
    """A sampling that writes to `run.jsonl`, and keeps attachments here instead of in Ray."""
    report: asyncio.Future[Callable[[Episode], None]] = asyncio.get_running_loop().create_future()
    end = asyncio.Event()

    class Pool:
        def __init__(self, *given: Any, **_: Any) -> None:
            report.set_result(given[2])

        async def play(self) -> None:
            await end.wait()

        def drain(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(sampler, "RunnerPool", Pool)
    monkeypatch.setattr(Sampling, "_runners", _no_runners)
    monkeypatch.setattr("aenv_ray.actors.ray_shell.ray_api.put", lambda data: data)
    monkeypatch.setattr(files, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(files, "_RETRY_EVERY_S", 0.0)
    tasks = [{"id": f"t{n}"} for n in range(9)]
    sampling = aenv_ray.sample("mini-terminal", _act, tasks, out=tmp_path / "run.jsonl")
    running = asyncio.create_task(sampling._run(_Unread()))
    reported = await report

    def finish(index: int) -> Episode:
        data = f"image {index}".encode()
        image = attachment_of(data, "image/png")
        one = episode(index, steps=(step(attachments=(image,)),))
        one.contents[image.digest] = data
        reported(one)
        return one

    async def ended() -> None:
        end.set()
        await running

    yield _Finished(sampling, finish, ended)
    running.cancel()
    await asyncio.wait([running])


async def test_an_output_that_is_lost_leaves_no_attachments_in_memory(
    finished: _Finished, full_disk: Callable[[int | None], None], tmp_path: Path
) -> None:
    """They are in Ray, which moves them to a disk; a run may go on for days."""
    finished.finish(0)
    full_disk(10)
    held = [finished.finish(1), finished.finish(2)]
    full_disk(None)
    assert all(one.contents for one in held)
    (tmp_path / "run.jsonl").unlink()
    held += [finished.finish(3), finished.finish(4)]
    assert [one.index for one in finished.sampling.episodes] == [1, 2, 3, 4]
    assert not any(one.contents for one in (*held, *finished.sampling.episodes))
    assert set(finished.sampling._attachments.values()) == {
        f"image {n}".encode() for n in range(1, 5)
    }
    with pytest.raises(ConfigError, match="was removed"):
        await finished.end()


@pytest.mark.parametrize("is_at_end", [False, True])
async def test_attachments_that_are_written_at_last_are_not_kept_in_ray(
    is_at_end: bool, finished: _Finished, full_disk: Callable[[int | None], None]
) -> None:
    full_disk(10)
    held = [finished.finish(n) for n in range(2)]
    full_disk(None)
    assert len(finished.sampling._attachments) == 2
    if not is_at_end:
        held.append(finished.finish(2))
        assert finished.sampling._attachments == {}
    await finished.end()
    assert finished.sampling._attachments == {}
    assert not any(one.contents for one in held)
    for one in held:
        (image,) = one.steps[0].attachments
        assert finished.sampling.attachment(image) == f"image {one.index}".encode()
