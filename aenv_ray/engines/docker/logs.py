"""What a container prints, read from the daemon bit by bit, each from where the last one ended.

The daemon follows a log by itself, but skips and repeats when it turns its files over faster than
somebody reads (20.10). It is asked for what came since the last line that is known instead: then
what is missing says so, a slow reader holds nobody up, and nothing is kept for it.
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
"""How soon a log that is followed is looked at again; the daemon does not tell."""
LONGEST_LOOK_S: Final = 1.0
"""The same, once nothing came for a while."""
CUT: Final = b"[log cut: what comes here came faster than it was read]\n"
RECENT: Final = 256
"""Messages: so many are looked at first; one has at most 16 KiB."""
HELD: Final = 1024
"""Messages after which what was read is taken to be gone."""
MOMENTS: Final = 64
_BEFORE_NS: Final = 1_000_000
_GONE: Final = (404, 409)
"""There is no such container any more, or it is just being removed."""


Message = tuple[bytes, bytes]
"""When it was printed, as the daemon writes it, and its text."""
Messages = list[Message]


class ContainerLog:
    """The log of one container, and how far it was read.

    Args:
        client: Of the daemon.
        container: Its name or id.
        lines: How many of the last ones to begin with. None: all that the daemon keeps.

    Requests raise `FabricUnavailable` when the daemon does not answer, or refuses.
    """

    def __init__(self, client: DockerClient, container: str, lines: int | None) -> None:
        self._client = client
        self._container = container
        self._lines = lines
        self._stamp = b""
        """When the last message that was read was printed, as the daemon writes it."""
        self._read_at: dict[bytes, int] = {}
        """How many messages of the last moments were read: parts of a long line have but one."""
        self._last = b""

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield what there is and was not read before, in pieces as they come."""
        if not self._stamp:
            async with contextlib.aclosing(self._begin()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        # The end of a log is at hand; to look for a moment, the daemon goes through all of it.
        recent: Messages = []
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
        """Yield what the log begins with, and note how far that is."""
        if self._lines == 0:
            newest = await self._newest()
            if newest is not None:
                self._take([newest])
        else:
            wanted = {"tail": "all" if self._lines is None else self._lines}
            async with contextlib.aclosing(self._messages(wanted)) as batches:
                async for batch in batches:
                    yield self._take(batch)
        self._lines = None  # if nothing was there yet, all that comes counts

    async def has_more(self) -> bool:
        """Whether there is something that was not read; cheaper than reading where there is not."""
        newest = await self._newest()
        return newest is not None and newest != (self._stamp, self._last)

    async def _newest(self) -> Message | None:
        newest = None
        async with contextlib.aclosing(self._messages({"tail": 1})) as batches:
            async for batch in batches:
                newest = batch[-1]
        return newest

    def _take(self, messages: Messages) -> bytes:
        """Count messages as read, and return what they say."""
        for stamp, text in messages:
            self._read_at[stamp] = self._read_at.pop(stamp, 0) + 1
            self._stamp, self._last = stamp, text
            if len(self._read_at) > MOMENTS:
                del self._read_at[next(iter(self._read_at))]
        return b"".join(text for _, text in messages)

    async def _messages(self, wanted: dict[str, Any]) -> AsyncGenerator[Messages, None]:
        """Yield messages with their times, as many at once as came; none of a log that is gone."""
        params = {"stdout": 1, "stderr": 1, "timestamps": 1, **wanted}
        frames = self._client.frames(f"/containers/{self._container}/logs", params)
        try:
            async with contextlib.aclosing(frames):
                async for batch in frames:
                    rows = [frame.partition(b" ") for frame in batch]
                    yield [(stamp, text) for stamp, _, text in rows]
        except DaemonRefused as exc:
            if exc.status not in _GONE:
                raise FabricUnavailable(f"the Docker daemon gives no log: {exc.message}") from exc


class _Newer:
    """Finds in messages, in their order, those that come after what was read.

    Args:
        stamp: When the last one that was read was printed.
        count: How many of that moment were read.
    """

    def __init__(self, stamp: bytes, count: int) -> None:
        self._stamp = stamp
        self._count = count
        self._held: Messages = []
        self.was_cut = False
        """What was read is not there any more, nor, perhaps, what came next."""

    def of(self, batch: Messages) -> Messages | None:
        """Return the newer ones of the next messages; None while that is not known."""
        for index, message in enumerate(batch):
            if self._count == 0:
                return batch[index:]
            # Two streams are written at once: the order of the log is not quite that of time.
            self._held.append(message)
            self._count -= message[0] == self._stamp
            if self._count == 0:
                self._held.clear()
            elif len(self._held) > HELD and self._held[0][0] >= self._stamp:
                self.was_cut, self._count = True, 0
                return self.rest() + batch[index + 1 :]
        return None if self._count else []

    def rest(self) -> Messages:
        """Return, at the end of the messages, those of which it never became known."""
        held, self._held = self._held, []
        return [message for message in held if message[0] > self._stamp]


async def follow(log: ContainerLog, ended: asyncio.Future[str]) -> AsyncGenerator[bytes, None]:
    """Yield what there is in a log, and what comes, until its container ended.

    Args:
        log: Read by nobody else.
        ended: Done when it ended.
    """
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
    """Return a millisecond before a time of the daemon's, in seconds since the epoch.

    Args:
        stamp: As the daemon writes it: ``2026-01-31T12:00:00.123456789Z``.
    """
    whole, _, fraction = stamp.decode().rstrip("Z").partition(".")
    moment = datetime.datetime.fromisoformat(f"{whole}+00:00")
    nanoseconds = int(moment.timestamp()) * 10**9 + int(f"{fraction:0<9}") - _BEFORE_NS
    return f"{nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
