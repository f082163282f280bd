"""The pool of runners: tasks are divided, and those of lost runners are handed out again."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import pytest

from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.sampling import Episode, EpisodeStatus, Task
from aenv_ray.sampling.runners import runner_pool
from aenv_ray.sampling.runners.assignments import Assignment, Group
from aenv_ray.sampling.runners.concurrency import ConcurrencyBounds, ConcurrencyLimit
from aenv_ray.sampling.runners.instance_source import GroupStart
from aenv_ray.sampling.runners.local_runner import PlaySample, RunnerQueue
from aenv_ray.sampling.runners.runner_pool import RunnerLink, RunnerLost, RunnerPool, _Member


def _fixed(concurrency: int) -> ConcurrencyLimit:
    return ConcurrencyLimit(ConcurrencyBounds(concurrency, concurrency))


def _episode(one: Assignment) -> Episode:
    return Episode(
        index=one.index,
        task_id=one.task.id,
        attempts=one.attempt,
        status=EpisodeStatus.COMPLETED,
        reward=1.0,
        steps=(),
        duration_s=0.0,
    )


class _FakeRunner:
    """A runner whose episodes are played by a function, until it is lost."""

    is_remote = False
    queued = 0

    def __init__(self, name: str, play: PlaySample) -> None:
        self.name = name
        self.queue = RunnerQueue(play)
        self.limits: list[int] = []
        self.gone = asyncio.Event()
        self.is_closed = False

    async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
        if self.gone.is_set():
            raise RunnerLost("its node died")
        self.limits.append(limit)
        await self.queue.give(groups, limit, has_more=has_more)

    async def take_back(self, most: int) -> list[int]:
        if self.gone.is_set():
            raise RunnerLost("its node died")
        return await self.queue.take_back(most)

    async def finished(self) -> list[Episode]:
        finished = asyncio.create_task(self.queue.finished())
        gone = asyncio.create_task(self.gone.wait())
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise RunnerLost("its node died")
            return finished.result()
        finally:
            finished.cancel()
            gone.cancel()

    async def close(self) -> None:
        self.is_closed = True
        await self.queue.close()


class _FakeRunners:
    def __init__(self, *runners: _FakeRunner) -> None:
        self.waiting: list[RunnerLink] = list(runners)
        self.were_lost: list[str] = []
        self.are_leaving: set[str] = set()

    expected = 0

    def leaving(self) -> set[str]:
        return self.are_leaving

    async def new(self, wait_s: float) -> list[RunnerLink]:
        found, self.waiting = self.waiting, []
        if not found:
            await asyncio.sleep(wait_s)
        return found

    async def lost(self, runner: RunnerLink) -> None:
        self.were_lost.append(runner.name)

    async def close(self) -> None:
        """Nothing is left."""


Take = Callable[[int], Awaitable[list[Group]]]


def _tasks(count: int) -> Take:
    return _taken_from([Group((Assignment(n, Task(id=f"t{n}")),)) for n in range(count)])


def _taken_from(groups: list[Group]) -> Take:
    left = iter(groups)

    async def take(most: int) -> list[Group]:
        return list(itertools.islice(left, most))

    return take


async def _played(
    runners: _FakeRunners, count: int, concurrency: int = 4, most_attempts: int = 3
) -> list[Episode]:
    episodes: list[Episode] = []
    pool = RunnerPool(
        runners,
        _tasks(count),
        episodes.append,
        _always,
        concurrency=_fixed(concurrency),
        most_attempts=most_attempts,
    )
    await pool.play()
    return episodes


async def _always() -> None:
    """There is always room."""


async def _at_once(one: Assignment, start: GroupStart) -> Episode:
    await asyncio.sleep(0)
    return _episode(one)


async def test_every_task_is_played_once() -> None:
    """By whichever runner has room."""
    first, second = _FakeRunner("a", _at_once), _FakeRunner("b", _at_once)
    episodes = await _played(_FakeRunners(first, second), 50)
    assert sorted(one.index for one in episodes) == list(range(50))
    assert first.is_closed
    assert second.is_closed


class _Counting:
    """Plays episodes that take a few turns of the loop, and counts those at once."""

    def __init__(self, turns: Callable[[int], int] = lambda index: 5 + index % 7) -> None:
        self._turns = turns
        self.most = 0
        self.playing: Counter[str] = Counter()
        self.played: Counter[str] = Counter()

    def on(self, name: str) -> PlaySample:
        async def play(one: Assignment, start: GroupStart) -> Episode:
            self.playing[name] += 1
            self.most = max(self.most, self.playing.total())
            try:
                for _ in range(self._turns(one.index)):
                    await asyncio.sleep(0)
            finally:
                self.playing[name] -= 1
            self.played[name] += 1
            return _episode(one)

        return play

    def runner(self, name: str, *, is_remote: bool = False) -> _FakeRunner:
        runner = _FakeRunner(name, self.on(name))
        runner.is_remote = is_remote
        return runner


def _groups(count: int, size: int, extra: int = 0) -> list[Group]:
    def group(number: int) -> Group:
        task, first = Task(id=f"t{number}"), size * number
        samples = range(size)
        members = tuple(Assignment(first + n, task, 1, str(number), n) for n in samples)
        return Group(members, extra)

    return [group(number) for number in range(count)]


@pytest.mark.parametrize(
    ("runners", "concurrency", "size", "most"),
    [
        (2, 6, 1, 6), (8, 1, 1, 1), (8, 10, 1, 10), (8, 8, 4, 8), (3, 24, 4, 24), (8, 2, 4, 4),
        (4, 24, 4, 24), (3, 11, 4, 11),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_remote", [False, True])
async def test_as_many_episodes_are_played_as_the_concurrency_allows(
    monkeypatch: pytest.MonkeyPatch,
    runners: int,
    concurrency: int,
    size: int,
    most: int,
    is_remote: bool,
) -> None:
    """It is divided among the runners, in whole groups; a larger group is played alone.

    A group begins once all of it fits, also beside what is left of another.
    """
    monkeypatch.setattr(_Member, "ahead", lambda member: 5 if member.link.is_remote else 0)
    counting, episodes = _Counting(), list[Episode]()
    pool = RunnerPool(
        _FakeRunners(*(counting.runner(f"r{n}", is_remote=is_remote) for n in range(runners))),
        _taken_from(_groups(40, size)),
        episodes.append,
        _always,
        concurrency=_fixed(concurrency),
        most_attempts=3,
        group_size=size,
    )
    async with asyncio.timeout(30.0):
        await pool.play()
    assert sorted(one.index for one in episodes) == list(range(40 * size))
    assert counting.most == most


@pytest.mark.parametrize(
    ("concurrency", "size", "extra"), [(16, 1, 0), (16, 4, 0), (2, 4, 0), (32, 4, 4), (2, 4, 4)]
)
@pytest.mark.parametrize("is_remote", [False, True])
async def test_runners_that_join_and_leave_do_not_exceed_the_concurrency(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, size: int, extra: int, is_remote: bool
) -> None:
    """What the others play already counts, however long it takes."""
    monkeypatch.setattr(runner_pool, "LOOK_S", 0.0)
    monkeypatch.setattr(_Member, "ahead", lambda member: 50 if member.link.is_remote else 0)
    counting, episodes = _Counting(), list[Episode]()

    def report(episode: Episode) -> None:
        episodes.append(episode)
        match len(episodes):
            case 40 | 120:
                names = (f"r{len(episodes)}", f"r{len(episodes) + 1}")
                runners.waiting += [counting.runner(name, is_remote=is_remote) for name in names]
            case 200:
                runners.are_leaving = {"r0", "r40", "r120"}

    runners = _FakeRunners(counting.runner("r0", is_remote=is_remote))
    pool = RunnerPool(
        runners,
        _taken_from(_groups(600 // size, size, extra)),
        report,
        _always,
        concurrency=_fixed(concurrency),
        most_attempts=3,
        group_size=size + extra,
    )
    async with asyncio.timeout(30.0):
        await pool.play()
    assert sorted(one.index for one in episodes) == list(range(600))
    assert counting.most == max(concurrency, size + extra)
    if concurrency > size + extra and not is_remote:
        # One that has tasks ahead may have all that are left.
        assert set(counting.played) == {"r0", "r40", "r41", "r120", "r121"}


async def test_a_group_begins_once_all_of_it_fits_beside_a_runner_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runner without episodes would begin it whatever its limit."""
    monkeypatch.setattr(runner_pool, "LOOK_S", 0.0)
    counting, episodes = _Counting(lambda n: 1 if n < 3 else 100 if n < 8 else 5), list[Episode]()

    def report(episode: Episode) -> None:
        episodes.append(episode)
        if len(episodes) == 3:
            runners.waiting.append(counting.runner("other"))
            runners.are_leaving = {"leaving"}

    runners = _FakeRunners(counting.runner("leaving"))
    pool = RunnerPool(
        runners, _taken_from(_groups(8, 4)), report, _always,
        concurrency=_fixed(8), most_attempts=3, group_size=4,
    )  # fmt: skip
    async with asyncio.timeout(30.0):
        await pool.play()
    assert len(episodes) == 32
    assert (counting.most, set(counting.played)) == (8, {"leaving", "other"})


async def test_the_tasks_of_a_lost_runner_are_played_by_others() -> None:
    """A node that dies costs attempts, and no episode."""
    held = asyncio.Event()

    async def hold(one: Assignment, start: GroupStart) -> Episode:
        lost.gone.set()
        await held.wait()
        return _episode(one)

    lost = _FakeRunner("lost", hold)
    runners = _FakeRunners(lost, _FakeRunner("other", _at_once))
    episodes = await _played(runners, 20)
    assert sorted(one.index for one in episodes) == list(range(20))
    assert {one.attempts for one in episodes} == {1, 2}
    assert runners.were_lost == ["lost"]


@pytest.mark.parametrize("is_drained", [False, True])
async def test_tasks_that_are_handed_out_again_do_not_wait_for_further_tasks(
    monkeypatch: pytest.MonkeyPatch, is_drained: bool
) -> None:
    """The source may wait for their episodes: a curriculum makes its next tasks from them."""
    monkeypatch.setattr(runner_pool, "LOOK_S", 0.01)
    monkeypatch.setattr(_Member, "ahead", lambda member: 4 if member.link.is_remote else 0)
    others_are_done, all_are_done = asyncio.Event(), asyncio.Event()
    batches = iter([[Group((Assignment(n, Task(id=f"t{n}")),)) for n in range(4)]])
    episodes: list[Episode] = []

    async def take(most: int) -> list[Group]:
        if batch := next(batches, None):
            return batch
        if is_drained:
            runners.are_leaving = {"first"}
        else:
            first.gone.set()
        await all_are_done.wait()
        return []

    def report(episode: Episode) -> None:
        episodes.append(episode)
        if len(episodes) == 4:
            all_are_done.set()

    async def hold(one: Assignment, start: GroupStart) -> Episode:
        await others_are_done.wait()
        return _episode(one)

    async def play(one: Assignment, start: GroupStart) -> Episode:
        if one.index == 3:
            others_are_done.set()
        return _episode(one)

    first = _FakeRunner("first", hold)
    first.is_remote = True
    runners = _FakeRunners(first, _FakeRunner("other", play))
    pool = RunnerPool(runners, take, report, _always, concurrency=_fixed(2), most_attempts=3)
    async with asyncio.timeout(30.0):
        await pool.play()
    assert sorted(one.index for one in episodes) == list(range(4))
    # The lost runner had begun one of them.
    assert {one.attempts for one in episodes} == ({1} if is_drained else {1, 2})


async def test_a_task_whose_runners_are_lost_is_void() -> None:
    """Invariant 2: an infrastructure failure, with its reason."""

    async def never(one: Assignment, start: GroupStart) -> Episode:
        lost.gone.set()
        await asyncio.Event().wait()
        return _episode(one)

    lost = _FakeRunner("lost", never)
    (episode,) = await _played(_FakeRunners(lost), 1, most_attempts=1)
    assert (episode.status, episode.reward) == (EpisodeStatus.INFRA_FAILED, None)
    assert episode.error == "fabric_unavailable: the runner lost is lost: its node died"


class _Endless(_FakeRunners):
    """Each lost runner has a successor."""

    def __init__(self, new: Callable[[str], _FakeRunner], count: int = 1) -> None:
        super().__init__(*(new(f"r{n}") for n in range(count)))
        self._new = new
        self._count = count

    async def lost(self, runner: RunnerLink) -> None:
        await super().lost(runner)
        self._count += 1
        self.waiting.append(self._new(f"r{self._count}"))


class _Deadly:
    """Plays episodes; those of some tasks end their runner."""

    def __init__(self, *deadly: int, is_remote: bool = False, turns: int = 3) -> None:
        self._deadly = deadly
        self._is_remote = is_remote
        self._turns = turns
        self.runners: list[_FakeRunner] = []

    def runner(self, name: str) -> _FakeRunner:
        async def play(one: Assignment, start: GroupStart) -> Episode:
            await asyncio.sleep(0)
            if one.index in self._deadly:
                runner.gone.set()
                await asyncio.Event().wait()
            for _ in range(self._turns):
                await asyncio.sleep(0)
            return _episode(one)

        runner = _FakeRunner(name, play)
        runner.is_remote = self._is_remote
        self.runners.append(runner)
        return runner

    async def close(self) -> None:
        for runner in self.runners:
            await runner.queue.close()


@pytest.mark.parametrize("runners", [1, 3])
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize(("size", "turns"), [(1, 3), (1, 500), (4, 3), (4, 500)])
async def test_tasks_that_always_end_their_runner_void_no_others(
    monkeypatch: pytest.MonkeyPatch, runners: int, is_remote: bool, size: int, turns: int
) -> None:
    """A policy that exits the process for one task, or uses up its memory, costs only that."""
    monkeypatch.setattr(runner_pool, "LOOK_S", 0.001)
    monkeypatch.setattr(_Member, "ahead", lambda member: 20 if member.link.is_remote else 0)
    deadly, episodes = _Deadly(7, 50, is_remote=is_remote, turns=turns), list[Episode]()
    pool = RunnerPool(
        _Endless(deadly.runner, runners), _taken_from(_groups(80 // size, size)), episodes.append,
        _always, concurrency=_fixed(24), most_attempts=3, group_size=size,
    )  # fmt: skip
    async with asyncio.timeout(60.0):
        await pool.play()
    await deadly.close()
    assert sorted(one.index for one in episodes) == list(range(80))
    void = {one.index for one in episodes if one.status is EpisodeStatus.INFRA_FAILED}
    assert {7, 50} <= void
    assert {n // size for n in void} == {7 // size, 50 // size}
    assert {one.attempts for one in episodes if one.index in void} == {3}


async def test_only_runners_with_tasks_of_lost_ones_get_none_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a long task of a lost runner would slow down all others until it has finished."""
    monkeypatch.setattr(_Member, "ahead", lambda member: 4)
    pool = RunnerPool(
        _FakeRunners(), _tasks(0), lambda _: None, _always,
        concurrency=_fixed(4), most_attempts=3,
    )  # fmt: skip
    members = {name: _Member(_FakeRunner(name, _at_once)) for name in ("a", "b")}
    pool._members.update(members)
    groups, assignments = _groups(9, 1), pool._assignments

    def rooms() -> dict[str, int]:
        return {member.link.name: room for member, _, room in pool._rooms()}

    assert rooms() == {"a": 6, "b": 6}
    assignments.give("gone", groups[0])
    assert not assignments.lose("gone", 1)
    assert rooms() == {"a": 2, "b": 2}, "one of them gets the task, and is to begin it at once"
    lost = assignments.returned.popleft()
    for n in range(1, 5):
        assignments.give("ab"[n % 2], groups[n])
    assert pool._handed_out([lost]) == [lost], "both play as many as they may"
    assert assignments.finish("a", 2)
    assignments.give("a", lost)
    assert rooms() == {"a": 0, "b": 4}
    assert assignments.finish("a", 0)
    assert rooms() == {"a": 5, "b": 4}


async def test_an_error_of_a_runner_ends_the_run() -> None:
    """A policy that cannot be loaded cannot be loaded by other runners either."""

    async def broken(one: Assignment, start: GroupStart) -> Episode:
        raise ConfigError(f"{one.task.id} cannot be played")

    runner = _FakeRunner("a", broken)
    with pytest.raises(ConfigError, match="t0 cannot be played"):
        await _played(_FakeRunners(runner), 3)
    assert runner.is_closed


async def test_a_group_begins_as_a_whole() -> None:
    """All or none: it waits until there is room for all of it."""
    began: list[int] = []
    go = asyncio.Event()

    async def play(one: Assignment, start: GroupStart) -> Episode:
        began.append(one.index)
        await go.wait()
        return _episode(one)

    queue = RunnerQueue(play)
    pairs = ((0, 1), (2, 3), (4, 5))
    groups = [Group(tuple(Assignment(n, Task(id="t")) for n in pair)) for pair in pairs]
    await queue.give(groups, 5, has_more=False)
    await asyncio.sleep(0)
    assert began == [0, 1, 2, 3]
    assert queue.left() == 2
    go.set()
    episodes: list[Episode] = []
    while len(episodes) < 6:
        episodes += await queue.finished()
    assert sorted(began) == list(range(6))
    await queue.close()


async def test_an_episode_that_ends_while_others_are_collected_is_kept() -> None:
    """Each is returned once, whenever it ends."""
    go = [asyncio.Event() for _ in range(3)]

    async def play(one: Assignment, start: GroupStart) -> Episode:
        await go[one.index].wait()
        return _episode(one)

    queue = RunnerQueue(play)
    await queue.give([Group((Assignment(n, Task(id="t")),)) for n in range(3)], 3, has_more=False)
    await asyncio.sleep(0)
    for n in range(3):
        go[n].set()
        assert [one.index for one in await queue.finished()] == [n]
    await queue.close()


async def test_a_runner_without_tasks_reports_at_once() -> None:
    """It gets new tasks in answer to its report, so that it must not wait for further episodes."""
    queue = RunnerQueue(_at_once)
    await queue.give([Group((Assignment(0, Task(id="t")),))], 2, has_more=True)
    async with asyncio.timeout(30):
        assert [one.index for one in await queue.finished(linger_s=3600)] == [0]

    go = asyncio.Event()

    async def play(one: Assignment, start: GroupStart) -> Episode:
        if one.index:
            await go.wait()
        return _episode(one)

    queue = RunnerQueue(play)
    await queue.give([Group((Assignment(n, Task(id="t")),)) for n in range(3)], 2, has_more=True)
    collecting = asyncio.create_task(queue.finished(linger_s=3600))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not collecting.done()  # both places are taken: it collects episodes
    go.set()
    async with asyncio.timeout(30):
        assert len(await collecting) >= 2


async def test_a_slow_runner_holds_up_neither_the_others_nor_the_end() -> None:
    """A node may take minutes to start its runner; the others take its share meanwhile."""
    first = _FakeRunner("a", _at_once)

    class Slow(_FakeRunners):
        async def new(self, wait_s: float) -> list[RunnerLink]:
            if self.waiting:
                return await super().new(wait_s)
            await asyncio.Event().wait()
            return []

    async with asyncio.timeout(30):
        assert len(await _played(Slow(first), 20)) == 20


async def test_a_runner_that_is_expected_has_a_share() -> None:
    first = _FakeRunner("a", _at_once)
    runners = _FakeRunners(first)
    runners.expected = 1
    await _played(runners, 20, concurrency=6)
    assert set(first.limits) == {3}


async def test_draining_finishes_what_runners_have() -> None:
    """What the first Ctrl-C does, even while the source of tasks blocks."""
    go = asyncio.Event()

    async def play(one: Assignment, start: GroupStart) -> Episode:
        await go.wait()
        return _episode(one)

    tasks = iter([Group((Assignment(0, Task(id="t")),))])

    async def take(most: int) -> list[Group]:
        if found := list(itertools.islice(tasks, most)):
            return found
        pool.drain()  # as from a signal handler, while this waits
        go.set()
        await asyncio.Event().wait()
        return []

    episodes: list[Episode] = []
    runners = _FakeRunners(_FakeRunner("a", play))
    pool = RunnerPool(
        runners, take, episodes.append, _always, concurrency=_fixed(4), most_attempts=1
    )
    await pool.play()
    assert [one.index for one in episodes] == [0]


async def test_tasks_that_arrive_during_a_send_follow_in_one_message() -> None:
    """A source of single tasks would otherwise cost the driver a message for each."""
    may_arrive, all_taken = asyncio.Event(), asyncio.Event()
    sent: list[tuple[int, bool]] = []

    class Slow(_FakeRunner):
        async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
            await may_arrive.wait()
            sent.append((len(groups), has_more))
            await super().give(groups, limit, has_more=has_more)

    left = iter([Group((Assignment(n, Task(id=f"t{n}")),)) for n in range(6)])

    async def one_by_one(most: int) -> list[Group]:
        await asyncio.sleep(0)
        found = list(itertools.islice(left, 1))
        if not found:
            all_taken.set()
        return found

    episodes: list[Episode] = []
    runners = _FakeRunners(Slow("a", _at_once))
    pool = RunnerPool(
        runners, one_by_one, episodes.append, _always, concurrency=_fixed(8), most_attempts=1
    )
    async with asyncio.timeout(30.0):
        run = asyncio.create_task(pool.play())
        await all_taken.wait()
        may_arrive.set()
        await run
    assert sent == [(1, True), (5, False)]
    assert sorted(one.index for one in episodes) == list(range(6))


async def test_a_run_goes_on_while_new_runners_cannot_be_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 2: a restart of Ray's control service fails no run."""
    monkeypatch.setattr(runner_pool, "LOOK_S", 0.0)
    failed = asyncio.Event()

    class Unreachable(_FakeRunners):
        async def new(self, wait_s: float) -> list[RunnerLink]:
            if self.waiting:
                return await super().new(wait_s)
            failed.set()
            raise FabricUnavailable("the control service restarts")

    async def play(one: Assignment, start: GroupStart) -> Episode:
        await failed.wait()
        return _episode(one)

    assert len(await _played(Unreachable(_FakeRunner("a", play)), 2)) == 2


async def test_episodes_are_not_collected_while_nobody_reads_them() -> None:
    episodes: list[Episode] = []
    has_room, is_full = asyncio.Event(), asyncio.Event()

    async def room() -> None:
        if len(episodes) >= 8:
            is_full.set()
            await has_room.wait()

    runners = _FakeRunners(_FakeRunner("a", _at_once))
    pool = RunnerPool(
        runners, _tasks(40), episodes.append, room, concurrency=_fixed(4), most_attempts=1
    )
    async with asyncio.timeout(30.0):
        run = asyncio.create_task(pool.play())
        await is_full.wait()
        assert len(episodes) <= 8 + 4
        has_room.set()
        await run
    assert len(episodes) == 40


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_idle_runner_gets_the_tasks_that_a_slow_one_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Each is played once, even if the slow runner is lost meanwhile."""
    fast_ones: list[int] = []
    begun: list[int] = []
    others_are_done = asyncio.Event()

    async def fast(one: Assignment, start: GroupStart) -> Episode:
        await asyncio.sleep(0)
        fast_ones.append(one.index)
        if len(fast_ones) == 10:
            others_are_done.set()
        return _episode(one)

    async def slow(one: Assignment, start: GroupStart) -> Episode:
        begun.append(one.index)
        await others_are_done.wait()
        if is_lost:
            runners["slow"].gone.set()
            await asyncio.Event().wait()
        return _episode(one)

    runners = {"fast": _FakeRunner("fast", fast), "slow": _FakeRunner("slow", slow)}
    runners["slow"].is_remote = True
    monkeypatch.setattr(_Member, "ahead", lambda member: 4 if member.link.is_remote else 0)
    episodes: list[Episode] = []
    pool = RunnerPool(
        _FakeRunners(*runners.values()), _tasks(12), episodes.append, _always,
        concurrency=_fixed(4), most_attempts=3,
    )  # fmt: skip
    async with asyncio.timeout(30.0):
        await pool.play()
    assert len(begun) == 2
    assert sorted(one.index for one in episodes) == list(range(12))
    assert len(fast_ones) == (12 if is_lost else 10)


@pytest.mark.parametrize("extra", [0, 4])
async def test_an_idle_runner_gets_groups_that_a_slow_one_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    """Whole ones."""
    played: dict[str, set[str | None]] = {"fast": set(), "slow": set()}
    others_are_done = asyncio.Event()

    async def fast(one: Assignment, start: GroupStart) -> Episode:
        played["fast"].add(one.group)
        if len(played["fast"]) == 3:
            others_are_done.set()
        return _episode(one)

    async def slow(one: Assignment, start: GroupStart) -> Episode:
        played["slow"].add(one.group)
        await others_are_done.wait()
        return _episode(one)

    runners = _FakeRunner("fast", fast), _FakeRunner("slow", slow)
    runners[1].is_remote = True
    monkeypatch.setattr(_Member, "ahead", lambda member: 100 if member.link.is_remote else 0)
    episodes: list[Episode] = []
    pool = RunnerPool(
        _FakeRunners(*runners), _taken_from(_groups(4, 4, extra)), episodes.append, _always,
        concurrency=_fixed(2 * (4 + extra)), most_attempts=3, group_size=4 + extra,
    )  # fmt: skip
    async with asyncio.timeout(30.0):
        await pool.play()
    assert played["slow"] == {"0"}
    assert sorted(one.index for one in episodes) == list(range(16))


async def test_tasks_whose_return_is_answered_after_the_loss_are_played_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runner dies once it has removed them, and its loss is noticed before its answer."""
    is_lost = asyncio.Event()
    answers: list[list[int]] = []

    class Dying(_FakeRunner):
        async def take_back(self, most: int) -> list[int]:
            taken = await super().take_back(most)
            self.gone.set()
            await is_lost.wait()
            answers.append(taken)
            return taken

    class Noticing(_FakeRunners):
        async def lost(self, runner: RunnerLink) -> None:
            await super().lost(runner)
            is_lost.set()

    async def never(one: Assignment, start: GroupStart) -> Episode:
        await asyncio.Event().wait()
        return _episode(one)

    dying = Dying("dying", never)
    dying.is_remote = True
    monkeypatch.setattr(_Member, "ahead", lambda member: 4 if member.link.is_remote else 0)
    runners = Noticing(_FakeRunner("fast", _at_once), dying)
    async with asyncio.timeout(30.0):
        episodes = await _played(runners, 12)
    await dying.queue.close()
    assert [len(taken) for taken in answers] == [2]
    assert sorted(one.index for one in episodes) == list(range(12))
    again = {one.index for one in episodes if one.attempts == 2}
    assert again
    assert not again & {*answers[0]}, "it had not begun them"


async def test_a_runner_whose_node_drains_finishes_what_it_plays_and_gets_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others get what it has not begun, and no episode is played twice."""
    monkeypatch.setattr(runner_pool, "LOOK_S", 0.01)
    begun: list[tuple[str, int]] = []
    has_begun, may_end, has_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Noticing(_FakeRunners):
        async def lost(self, runner: RunnerLink) -> None:
            has_left.set()

    def playing(name: str) -> PlaySample:
        async def play(one: Assignment, start: GroupStart) -> Episode:
            begun.append((name, one.index))
            if name == "leaving":
                has_begun.set()
                await may_end.wait()
            elif has_begun.is_set() and not runners.are_leaving:
                runners.are_leaving = {"leaving"}
            elif one.index == 29:
                may_end.set()
                await has_left.wait()
            return _episode(one)

        return play

    leaving, staying = (_FakeRunner(name, playing(name)) for name in ("leaving", "staying"))
    runners = Noticing(leaving, staying)
    episodes = await _played(runners, 30, concurrency=4)
    assert sorted(one.index for one in episodes) == list(range(30))
    assert all(one.attempts == 1 for one in episodes)
    assert sorted(index for _, index in begun) == list(range(30)), "each was played once"
    assert sum(name == "leaving" for name, _ in begun) <= 4
    assert leaving.is_closed


async def test_the_number_of_episodes_being_played_is_reported() -> None:
    """Those that wait at a remote runner are not counted, and in the end none is played."""
    told, seen = [0], []

    async def play(one: Assignment, start: GroupStart) -> Episode:
        seen.append(told[-1])
        return await _at_once(one, start)

    runner = _FakeRunner("a", play)
    runner.is_remote = True
    pool = RunnerPool(
        _FakeRunners(runner), _tasks(30), lambda _: None, _always,
        concurrency=_fixed(4), most_attempts=1, on_playing=lambda playing, _: told.append(playing),
    )  # fmt: skip
    await pool.play()
    assert seen[0] == max(told) == 4
    assert told[-1] == 0


async def test_episodes_that_wait_for_room_in_the_cluster_are_not_reported_as_played() -> None:
    """Otherwise a full cluster looks like a slow policy."""
    told: list[tuple[int, int]] = []
    first, second = _FakeRunner("a", _at_once), _FakeRunner("b", _at_once)
    first.queued, second.queued = 1, 2
    pool = RunnerPool(
        _FakeRunners(first, second), _tasks(20), lambda _: None, _always,
        concurrency=_fixed(8), most_attempts=1,
        on_playing=lambda playing, waiting: told.append((playing, waiting)),
    )  # fmt: skip
    await pool.play()
    assert max(told) == (5, 3)
    assert told[-1] == (0, 0)


@pytest.mark.parametrize("concurrency", [4, 8, 12, 16, 20, 24])
async def test_groups_that_wait_at_runners_are_not_reported_as_played(
    monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    """A group begins once all of it fits; one that is larger than the limit is played alone."""
    monkeypatch.setattr(_Member, "ahead", lambda member: 20)
    playing: dict[int, asyncio.Event] = {}
    told: list[int] = []

    async def play(one: Assignment, start: GroupStart) -> Episode:
        playing[one.index] = asyncio.Event()
        await playing[one.index].wait()
        del playing[one.index]
        return _episode(one)

    pool = RunnerPool(
        _FakeRunners(_FakeRunner("a", play), _FakeRunner("b", play)), _taken_from(_groups(20, 8)),
        lambda _: None, _always, concurrency=_fixed(concurrency), most_attempts=1, group_size=8,
        on_playing=lambda playing, _: told.append(playing),
    )  # fmt: skip
    played, seen = asyncio.create_task(pool.play()), list[tuple[int, int]]()
    async with asyncio.timeout(30.0):
        while not played.done():
            for _ in range(50):
                await asyncio.sleep(0)
            seen.append((told[-1], len(playing)))
            for index in sorted(playing)[:3]:
                playing[index].set()
        await played
    assert [count for count, _ in seen] == [count for _, count in seen]
    assert max(told) <= max(concurrency, 8)


@pytest.mark.parametrize("is_remote", [False, True])
async def test_the_current_limit_bounds_the_episodes_being_played(
    monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    """Runners learn of a higher limit and of a lower one with the tasks that follow."""
    monkeypatch.setattr(_Member, "ahead", lambda member: 5 if member.link.is_remote else 0)
    counting, limit, most = _Counting(), _fixed(2), list[int]()

    def report(episode: Episode) -> None:
        reported.append(episode)
        if len(reported) % 100 == 0:
            most.append(counting.most)
            limit.limit = 8 if len(reported) == 100 else 3
        if len(reported) % 100 == 50:
            counting.most = 0  # those that began with the limit before have ended

    reported: list[Episode] = []
    pool = RunnerPool(
        _FakeRunners(*(counting.runner(f"r{n}", is_remote=is_remote) for n in range(2))),
        _tasks(400), report, _always, concurrency=limit, most_attempts=3,
    )  # fmt: skip
    async with asyncio.timeout(30.0):
        await pool.play()
    assert sorted(one.index for one in reported) == list(range(400))
    assert most == [2, 8, 3, 3]


async def test_the_limit_counts_episodes_that_wait_for_room_at_all_runners() -> None:
    """And how many are played: with all places taken, the rate says whether they pay."""
    noted: list[tuple[int, bool, int]] = []

    class Noting(ConcurrencyLimit):
        def note(
            self, episodes: Iterable[Episode], now: float, *, is_full: bool, queued: int
        ) -> None:
            noted.append((len(list(episodes)), is_full, queued))

    first, second = _FakeRunner("a", _at_once), _FakeRunner("b", _at_once)
    first.queued, second.queued = 2, 3
    pool = RunnerPool(
        _FakeRunners(first, second), _tasks(20), lambda _: None, _always,
        concurrency=Noting(ConcurrencyBounds(4, 8)), most_attempts=3,
    )  # fmt: skip
    await pool.play()
    assert sum(finished for finished, _, _ in noted) == 20
    assert {queued for _, _, queued in noted} == {5}
    assert (noted[0][1], noted[-1][1]) == (True, False)
