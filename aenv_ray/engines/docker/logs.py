"""A container's log, read from the daemon by polling, each time from where the last read ended.

The daemon can follow a log, but it skips and repeats lines when it rotates its files faster than
they are read (20.10). Asking for what came since the last known line avoids that: a gap is marked,
a slow reader blocks nobody, and nothing is buffered for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncGenerator
from typing import Any, Final

from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import FabricUnavailable

LOOK_S: Final = 0.1
"""Poll interval of a followed log."""
LONGEST_LOOK_S: Final = 1.0
"""The same, when nothing has come for a while."""
CUT: Final = b"[log cut: output came faster than it was read]\n"
RECENT: Final = 256
"""Messages that a poll requests first; a message has at most 16 KiB."""
HELD: Final = 1024
"""After this many messages, the last one that was read is assumed to have been rotated away."""
MOMENTS: Final = 64
_BEFORE_NS: Final = 1_000_000
_GONE: Final = (404, 409)
"""The container is gone, or is being removed."""


LogFrame = tuple[bytes, bytes]
"""The daemon's time stamp and the text."""


class ContainerLog:
    """The log of one container, and how far it has been read.

    Args:
        client: The client of the daemon.
        container: Its name or id.
        lines: How many of the last lines to begin with. None: all that the daemon keeps.

    Requests raise `FabricUnavailable` if the daemon does not answer, or refuses.
    """

    def __init__(self, client: DockerClient, container: str, lines: int | None) -> None:
        self._client = client
        self._container = container
        self._lines = lines
        self._stamp = b""
        """The time stamp of the last message read."""
        self._read_at: dict[bytes, int] = {}
        """How many messages have been read per time stamp: the parts of a long line share one."""
        self._last = b""

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield what is new since the last read, in pieces as they come."""
        if not self._stamp:
            async with contextlib.aclosing(self._begin()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        # The end of a log is cheap to read; for a time stamp the daemon scans all of it.
        recent: list[LogFrame] = []
        async with contextlib.aclosing(self._messages({"tail": RECENT})) as batches:
            async for batch in batches:
                recent += batch
        new = _Newer(self._stamp, self._read_at[self._stamp])
        if recent and recent[0][0] < self._stamp and (found := new.of(recent)) is not None:
            if found:
                yield self._take(found)
            return
        new = _Newer(self._stamp, self._read_at[self._stamp])
        wanted = {"since": _moment_before(self._stamp)}
        async with contextlib.aclosing(self._messages(wanted)) as batches:
            async for batch in batches:
                if found := new.of(batch):
                    yield (CUT if new.was_cut else b"") + self._take(found)
                    new.was_cut = False
        if found := new.rest():
            yield CUT + self._take(found)

    async def _begin(self) -> AsyncGenerator[bytes, None]:
        """Yield the beginning that was asked for, and note how far it goes."""
        if self._lines == 0:
            newest = await self._newest()
            if newest is not None:
                self._take([newest])
        else:
            wanted = {"tail": "all" if self._lines is None else self._lines}
            async with contextlib.aclosing(self._messages(wanted)) as batches:
                async for batch in batches:
                    yield self._take(batch)
        self._lines = None  # if the log was empty, everything from now on is new

    async def has_more(self) -> bool:
        """Return whether there is something new; cheaper than reading if there is not."""
        newest = await self._newest()
        return newest is not None and newest != (self._stamp, self._last)

    async def _newest(self) -> LogFrame | None:
        newest = None
        async with contextlib.aclosing(self._messages({"tail": 1})) as batches:
            async for batch in batches:
                newest = batch[-1]
        return newest

    def _take(self, messages: list[LogFrame]) -> bytes:
        """Count messages as read and return their text."""
        for stamp, text in messages:
            self._read_at[stamp] = self._read_at.pop(stamp, 0) + 1
            self._stamp, self._last = stamp, text
            if len(self._read_at) > MOMENTS:
                del self._read_at[next(iter(self._read_at))]
        return b"".join(text for _, text in messages)

    async def _messages(self, wanted: dict[str, Any]) -> AsyncGenerator[list[LogFrame], None]:
        """Yield batches of messages as they come; none if the log is gone."""
        params = {"stdout": 1, "stderr": 1, "timestamps": 1, **wanted}
        frames = self._client.frames(f"/containers/{self._container}/logs", params)
        try:
            async with contextlib.aclosing(frames):
                async for batch in frames:
                    rows = [frame.partition(b" ") for frame in batch]
                    yield [(stamp, text) for stamp, _, text in rows]
        except DaemonRefused as exc:
            if exc.status not in _GONE:
                raise FabricUnavailable(
                    f"the Docker daemon did not read a container's log: {exc.message}"
                ) from exc


class _Newer:
    """Finds the messages after those already read: the last time stamp, and how many have it."""

    def __init__(self, stamp: bytes, count: int) -> None:
        self._stamp = stamp
        self._count = count
        self._held: list[LogFrame] = []
        self.was_cut = False
        """The last message read is gone, and perhaps others after it."""

    def of(self, batch: list[LogFrame]) -> list[LogFrame] | None:
        """Return the new ones of the next messages; None while that cannot be told."""
        for index, message in enumerate(batch):
            if self._count == 0:
                return batch[index:]
            # stdout and stderr are logged concurrently, so time stamps are not quite in order.
            self._held.append(message)
            self._count -= message[0] == self._stamp
            if self._count == 0:
                self._held.clear()
            elif len(self._held) > HELD and self._held[0][0] >= self._stamp:
                self.was_cut, self._count = True, 0
                return self.rest() + batch[index + 1 :]
        return None if self._count else []

    def rest(self) -> list[LogFrame]:
        """Return, after the last message, those that could not be told."""
        held, self._held = self._held, []
        return [message for message in held if message[0] > self._stamp]


async def follow(log: ContainerLog, ended: asyncio.Future[Any]) -> AsyncGenerator[bytes, None]:
    """Yield a log until its container has ended."""
    is_last, pause_s, has_more = False, LOOK_S, True
    while True:
        if has_more or is_last:
            pause_s = LOOK_S
            async with contextlib.aclosing(log.read()) as pieces:
                async for piece in pieces:
                    yield piece
        if is_last:
            return
        await asyncio.wait([ended], timeout=pause_s)
        pause_s = min(LONGEST_LOOK_S, 1.5 * pause_s)
        is_last = ended.done()
        has_more = is_last or await log.has_more()


def _moment_before(stamp: bytes) -> str:
    """Return a time one millisecond before a time stamp, in seconds since the epoch.

    Args:
        stamp: A time in the daemon's format: ``2026-01-31T12:00:00.123456789Z``.
    """
    whole, _, fraction = stamp.decode().rstrip("Z").partition(".")
    moment = datetime.datetime.fromisoformat(f"{whole}+00:00")
    nanoseconds = int(moment.timestamp()) * 10**9 + int(f"{fraction:0<9}") - _BEFORE_NS
    return f"{nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
