"""Hands the tasks of a run out to runners, and collects their episodes.

A group is the samples of one task: they are played together, on one runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.sampling.runners.assignments import Assignment, Assignments, Group
from aenv_ray.sampling.runners.concurrency import ConcurrencyLimit
from aenv_ray.trajectories.schema import Episode, EpisodeStatus

logger = logging.getLogger("aenv_ray")

LOOK_S: Final = 5.0
"""How often new runners are looked for, such as those of nodes that have joined."""
NO_RUNNER_S: Final = 300.0
"""A run without a runner for this long fails."""
_AHEAD_S: Final = 0.75
"""Seconds of work that a remote runner is given ahead: it reports its episodes a few times a
second."""
_MOST_AHEAD: Final = 2048
"""Most episodes that a runner is given ahead; bounds what is lost with it."""
_RATE_OVER_S: Final = 0.5
"""Time constant of the mean rate of episodes."""


class RunnerLost(Exception):
    """A runner is gone, and its unfinished episodes with it."""


class RunnerLink(Protocol):
    """One runner."""

    name: str
    """Unique in a run."""
    is_remote: bool
    """Whether a task takes a while to get there."""

    @property
    def queued(self) -> int:
        """Its episodes that wait for room in the cluster, as of the last `finished`."""

    async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
        """See `RunnerQueue.give`; raises RunnerLost."""

    async def take_back(self, most: int) -> list[int]:
        """See `RunnerQueue.take_back`; raises RunnerLost."""

    async def finished(self) -> list[Episode]:
        """See `RunnerQueue.finished`; may be empty. Raises RunnerLost."""

    async def close(self) -> None:
        """End all its episodes, and release their instances."""


class Runners(Protocol):
    """Where runners come from."""

    async def new(self, wait_s: float) -> list[RunnerLink]:
        """Return runners that were not returned before; starts them if necessary.

        Args:
            wait_s: How long to wait for one. Those that take longer are returned by a later call.
        """

    @property
    def expected(self) -> int:
        """How many further runners are likely to be there in a few seconds."""

    def leaving(self) -> set[str]:
        """Return the names of the runners that are to get no more tasks, as of the last `new`.

        Their nodes are to be stopped, or the run has a runner where it is to be played.
        """

    async def lost(self, runner: RunnerLink) -> None:
        """Clean up after a lost runner; it may get a successor."""

    async def close(self) -> None:
        """End what is left of lost runners."""


class _Member:
    """A runner in the pool."""

    def __init__(self, link: RunnerLink) -> None:
        self.link = link
        self.outbox: list[Group] = []
        self.limit = 0
        """How many episodes it may play at the same time. It has been told, or is told with the
        groups in its outbox."""
        self.is_leaving = False
        """Whether it gets no more tasks, and is closed once it has finished those that it plays."""
        self.is_apart = False
        """Whether it plays a batch of suspects, and gets nothing else until that is finished."""
        self.is_sending = False
        """Groups are on their way; those that are added meanwhile follow together."""
        self.expects_more = True
        """Whether it was last told that more tasks may follow."""
        self.rate = 0.0
        """Episodes per second that end, with the extra samples of finished groups."""
        self.was_asked = False
        """Whether it was asked to return tasks since its last report, and returned none yet."""
        self._reported_at = time.monotonic()

    def note(self, episodes: int) -> None:
        now = time.monotonic()
        if episodes:
            seconds = max(now - self._reported_at, 1e-3)
            self._reported_at = now
            # Weighted by time: a runner that runs out of tasks reports single episodes, in bursts.
            share = 1.0 - math.exp(-seconds / _RATE_OVER_S)
            self.rate += share * (episodes / seconds - self.rate)

    def ahead(self) -> int:
        """Return how many episodes it may have beyond those that it plays."""
        if not self.link.is_remote:
            return 0
        return min(math.ceil(self.rate * _AHEAD_S), _MOST_AHEAD)


class RunnerPool:
    """The runners of one run.

    Args:
        runners: Starts the runners.
        take: Returns at most the given number of groups of tasks; none if there are no more.
        report: Receives each finished episode, once.
        room: Waits until further episodes may be reported.
        concurrency: Decides how many episodes are played at the same time, divided among the
            runners; only a group that is larger exceeds it.
        most_attempts: Maximum number of attempts at a task whose runners are lost.
        group_size: Maximum number of episodes of a group.
        may_read_ahead: Whether a task may be taken before an episode can start.
        on_playing: Receives the number of episodes that runners play, and the number of those that
            wait for room in the cluster, whenever one has changed.
    """

    def __init__(
        self,
        runners: Runners,
        take: Callable[[int], Awaitable[list[Group]]],
        report: Callable[[Episode], None],
        room: Callable[[], Awaitable[None]],
        *,
        concurrency: ConcurrencyLimit,
        most_attempts: int,
        group_size: int = 1,
        may_read_ahead: bool = True,
        on_playing: Callable[[int, int], None] = lambda playing, waiting: None,
    ) -> None:
        self._runners = runners
        self._take = take
        self._report = report
        self._await_room = room
        self._concurrency = concurrency
        self._may_read_ahead = may_read_ahead
        self._on_playing = on_playing
        self._playing = (0, 0)
        self._assignments = Assignments(most_attempts)
        self._members: dict[str, _Member] = {}
        self._reserved: _Member | None = None
        """Gets no tasks while suspects wait, so that it is free for them once it has none left."""
        self._changed = asyncio.Event()
        self._has_more = True
        self._group_size = group_size
        self._group: asyncio.TaskGroup
        self._background: set[asyncio.Task[None]] = set()
        self._taking: asyncio.Task[Any] | None = None
        """The feeder, while it waits for the source of tasks."""
        self._draining = asyncio.Event()
        self._is_over = False

    async def play(self) -> None:
        """Play all tasks; whatever ends it, all episodes end and their instances are released.

        Raises:
            FabricUnavailable: There is no runner.
            Exception: What ends a run, as raised by a runner.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._start(self._look_for_runners())
                await group.create_task(self._feed())
                for task in self._background:
                    task.cancel()
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            self._is_over = True
            self._note_playing()
            await self._close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def drain(self) -> None:
        """Take no more tasks; `play` returns once those that runners have are finished."""
        if not self._draining.is_set():
            self._draining.set()
            if self._taking is not None:
                self._taking.cancel()

    async def _close(self) -> None:
        closing = [asyncio.create_task(member.link.close()) for member in self._members.values()]
        if closing:
            await asyncio.wait(closing)
        await self._runners.close()
        for task in closing:
            task.result()

    # --- runners --------------------------------------------------------------------------------

    async def _look_for_runners(self) -> None:
        loop = asyncio.get_running_loop()
        alive_at = loop.time()
        while True:
            for link in await self._new_runners(LOOK_S):
                member = self._members[link.name] = _Member(link)
                self._start(self._follow(member))
            self._note_leaving()
            self._note_change()
            if self._members:
                alive_at = loop.time()
            elif loop.time() - alive_at > NO_RUNNER_S:
                raise FabricUnavailable(
                    f"no node has run a runner for {NO_RUNNER_S:g} s",
                    hint='check the nodes with aenv cluster nodes, or give runners="driver"',
                )

    async def _new_runners(self, wait_s: float) -> list[RunnerLink]:
        """Return new runners; a run that has some continues if the fabric does not answer."""
        try:
            return await self._runners.new(wait_s)
        except FabricUnavailable as exc:
            if not self._members:
                raise
            logger.warning("new runners cannot be looked for at the moment: %s", exc.message)
            await asyncio.sleep(wait_s)
            return []

    def _note_leaving(self) -> None:
        """Have the runners that leave return the tasks that they have not begun."""
        leaving = self._runners.leaving()
        for member in self._members.values():
            if member.link.name in leaving and not member.is_leaving:
                member.is_leaving = True
                logger.info(
                    "the runner %s leaves: its node is being drained, or another node is preferred",
                    member.link.name,
                )
                self._start(self._take_back(member, self._assignments.count(member.link.name)))

    async def _follow(self, member: _Member) -> None:
        """Collect the episodes of a runner until it is lost."""
        try:
            while True:
                await self._await_room()
                episodes = await member.link.finished()
                member.was_asked = False
                self._note_finished(member, episodes)
                self._note_change()
                if await self._leave_if_done(member):
                    return
        except RunnerLost as exc:
            await self._lose(member, exc)

    def _note_finished(self, member: _Member, episodes: Sequence[Episode]) -> None:
        name, members = member.link.name, self._members.values()
        before = self._assignments.count(name)
        total = sum(self._assignments.count(one.link.name) for one in members)
        kept = [one for one in episodes if self._assignments.finish(name, one.index)]
        for episode in kept:
            self._report(episode)
        member.note(before - self._assignments.count(name))
        self._concurrency.note(
            kept,
            time.monotonic(),
            is_full=total >= self._concurrency.limit,
            queued=sum(one.link.queued for one in members),
        )
        if not self._assignments.count(name):
            member.is_apart = False

    async def _leave_if_done(self, member: _Member) -> bool:
        """Close a leaving runner that has no tasks left; return whether it is closed."""
        if not member.is_leaving or self._assignments.count(member.link.name):
            return False
        if self._members.pop(member.link.name, None) is not None:
            await member.link.close()
            await self._runners.lost(member.link)
            self._note_change()
        return True

    async def _lose(self, member: _Member, cause: RunnerLost) -> None:
        if self._members.pop(member.link.name, None) is None:
            return
        error = FabricUnavailable(f"the runner {member.link.name} is lost: {cause}")
        logger.warning("%s; its unfinished tasks are handed out again", error.message)
        most = max(member.limit, self._group_size)
        lost = self._assignments.lose(member.link.name, most, was_apart=member.is_apart)
        for one in lost:
            self._report(_void(one, error))
        self._note_change()
        await self._runners.lost(member.link)

    # --- tasks ----------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Hand out all tasks, and wait until they are finished."""
        while most := await self._room():
            groups = await self._next_groups(most)
            if not groups:
                self._has_more = False
                self._flush()
            self._assignments.returned.extendleft(reversed(self._handed_out(groups)))

    def _note_change(self) -> None:
        """Have the feeder look again; while it waits for the source, hand out returned groups.

        The source may itself wait for their episodes.
        """
        self._hand_out_suspects()
        self._note_playing()
        self._changed.set()
        returned = self._assignments.returned
        if returned and self._taking is not None:
            groups = list(returned)
            returned.clear()
            returned.extend(self._handed_out(groups))

    def _hand_out_suspects(self) -> None:
        """Give each batch of suspects to a runner without tasks; reserve one if there is none."""
        suspects = self._assignments.suspects
        if not suspects:
            self._reserved = None
            return
        shares = {member: share for member, share in self._shares().items() if share}
        for member, share in shares.items():
            if suspects and not self._assignments.count(member.link.name):
                self._set_apart(member, share)
        self._flush()
        # At most one runner at a time is kept from other tasks for them.
        if not suspects or any(member.is_apart for member in self._members.values()):
            self._reserved = None
        elif self._reserved not in shares:
            self._reserved = min(
                shares, key=lambda one: self._assignments.count(one.link.name), default=None
            )

    def _set_apart(self, member: _Member, share: int) -> None:
        """Give a runner what it can begin of a batch of suspects."""
        suspects = self._assignments.suspects
        batch = suspects.popleft()
        number = max(1, share // self._group_size)
        for group in batch[:number]:
            self._assignments.give(member.link.name, group)
            member.outbox.append(group)
        if batch[number:]:
            suspects.appendleft(batch[number:])
        member.limit, member.is_apart = share, True

    def _handed_out(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Divide groups among the runners that have room; return those for which there is none."""
        rooms = [
            (-room, n, member, share)
            for n, (member, share, room) in enumerate(self._rooms(groups))
            if room > 0
        ]
        heapq.heapify(rooms)
        for number, group in enumerate(groups):
            if not rooms:
                self._flush()
                return groups[number:]
            room, n, member, share = rooms[0]
            self._assignments.give(member.link.name, group)
            member.outbox.append(group)
            member.limit = share
            room += group.size
            if room < 0:
                heapq.heapreplace(rooms, (room, n, member, share))
            else:
                heapq.heappop(rooms)
        self._flush()
        return ()

    async def _next_groups(self, most: int) -> list[Group]:
        returned = self._assignments.returned
        if returned:
            return [returned.popleft() for _ in range(min(most, len(returned)))]
        if self._draining.is_set():
            return []
        feeder = self._taking = asyncio.current_task()
        assert feeder is not None
        try:
            return await self._take(most)
        except asyncio.CancelledError:
            if not self._draining.is_set() or feeder.uncancel():
                raise  # the run is cancelled
            return []
        finally:
            self._taking = None

    async def _room(self) -> int:
        """Wait until runners can take a group; return how many they can take, 0 if all is done."""
        while True:
            self._changed.clear()
            if self._has_more or self._assignments.returned:
                episodes = sum(max(0, room) for _, _, room in self._rooms())
                if episodes:
                    return math.ceil(episodes / self._group_size)
            elif self._assignments.is_empty:
                return 0
            else:
                self._relieve_slowest()
            await self._changed.wait()

    def _played_by(self, member: _Member) -> int:
        """Return how many episodes a runner plays; the groups that it has not begun wait there.

        It has begun a group whenever the group fitted, or nothing was played.
        """
        count, size = self._assignments.count(member.link.name), self._group_size
        most = max(member.limit, size)
        return count if count <= most else most - (most - count) % size

    def _note_playing(self) -> None:
        members = () if self._is_over else self._members.values()
        begun = sum(map(self._played_by, members))
        # Its runners report it later than what they have finished.
        waiting = min(begun, sum(member.link.queued for member in members))
        if (begun - waiting, waiting) != self._playing:
            self._playing = (begun - waiting, waiting)
            self._on_playing(*self._playing)

    def _relieve_slowest(self) -> None:
        """Have the runner with the most episodes return those that others could begin now."""
        limits, size = self._limits(), self._group_size
        counts = {member: self._assignments.count(member.link.name) for member in limits}
        # A runner begins a group once it fits.
        idle = sum(
            max(limit - counts[one], 0) // size * size
            for one, limit in limits.items()
            if not self._is_kept_apart(one)
        )
        slowest = max(counts, key=counts.__getitem__, default=None)
        if slowest is None or slowest.was_asked:
            return
        if idle and counts[slowest] > limits[slowest]:
            slowest.was_asked = True
            self._start(self._take_back(slowest, idle))

    async def _take_back(self, member: _Member, most: int) -> None:
        async with self._losing(member, "did not return tasks"):
            taken = await member.link.take_back(most)
            self._assignments.take_back(member.link.name, taken)
            member.was_asked = not taken
            self._note_change()
            await self._leave_if_done(member)

    def _limits(self) -> dict[_Member, int]:
        """Return how many episodes each runner may play at once, together the concurrency.

        It is divided in whole groups; the first runner also gets what is left of it.
        """
        staying = [member for member in self._members.values() if not member.is_leaving]
        size = self._group_size
        runners = max(1, len(staying) + self._runners.expected)
        groups, rest = divmod(self._concurrency.limit, size)
        each, more = divmod(groups, runners)
        return {
            member: (each + (number < more)) * size + (rest if number == 0 else 0)
            for number, member in enumerate(staying)
        }

    def _shares(self) -> dict[_Member, int]:
        """Return how many episodes each runner may play, so that all together keep the concurrency.

        A runner that plays more than its limit, since another has joined, or it leaves, gets no
        tasks; the others get the rest.
        """
        limits = self._limits()
        members = self._members.values()
        if not any(one.limit > limits.get(one, 0) for one in members):
            return limits
        count = self._assignments.count
        # What each may play without further tasks or a new limit.
        playing = {member: min(count(member.link.name), member.limit) for member in members}
        over = {one for one, number in playing.items() if number > limits.get(one, 0)}
        left = max(0, self._concurrency.limit - sum(playing.values()))
        shares: dict[_Member, int] = {}
        for member, limit in limits.items():
            share = min(limit, playing[member] + left)
            is_enough = member not in over and share >= min(self._group_size, limit)
            shares[member] = share if is_enough else 0
            left -= max(0, shares[member] - playing[member])
        return shares

    def _rooms(self, groups: Sequence[Group] = ()) -> list[tuple[_Member, int, int]]:
        """Return for each runner how many episodes it may play, and how many more it may get.

        Args:
            groups: They are handed out next, before those that were returned.
        """
        # The last tasks are those that a slow runner has returned, or a lost one has left. If one
        # of these ends its next runner, it must be known whether that had begun it.
        assignments = self._assignments
        may_be_ahead = (
            self._may_read_ahead
            and self._has_more
            and not assignments.were_lost(itertools.chain(groups, assignments.returned))
        )
        rooms = []
        for member, share in self._shares().items():
            if self._is_kept_apart(member):
                continue
            name, most = member.link.name, share
            if may_be_ahead and share and not assignments.has_lost(name):
                most += member.ahead()
            rooms.append((member, share, most - assignments.count(name)))
        return rooms

    def _is_kept_apart(self, member: _Member) -> bool:
        """Whether a runner gets no tasks because of suspects."""
        return member.is_apart or member is self._reserved

    def _flush(self) -> None:
        """Send the groups in all outboxes; each runner learns its limit with them."""
        if self._is_over:
            return
        self._note_playing()
        for member in self._members.values():
            is_due = member.outbox or member.expects_more is not self._has_more
            if is_due and not member.is_sending:
                member.is_sending = True
                self._start(self._send(member))

    async def _send(self, member: _Member) -> None:
        async with self._losing(member, "did not get tasks"):
            while member.outbox or member.expects_more is not self._has_more:
                groups, member.outbox = member.outbox, []
                has_more = member.expects_more = self._has_more
                await member.link.give(groups, member.limit, has_more=has_more)
        member.is_sending = False

    @contextlib.asynccontextmanager
    async def _losing(self, member: _Member, what: str) -> AsyncIterator[None]:
        """Give up a runner that fails in the block."""
        try:
            yield
        except RunnerLost as exc:
            await self._lose(member, exc)
        except AenvError as exc:
            logger.warning("the runner %s %s: %s", member.link.name, what, exc)
            await self._lose(member, RunnerLost(exc.message))


def _void(assignment: Assignment, error: AenvError) -> Episode:
    """Return the record of a task whose runners were lost."""
    return Episode(
        index=assignment.index,
        task_id=assignment.task.id,
        group=assignment.group,
        sample=assignment.sample,
        attempts=assignment.attempt,
        status=EpisodeStatus.INFRA_FAILED,
        reward=None,
        error=f"{error.code}: {error.message}",
        steps=(),
        duration_s=0.0,
    )
