"""The reader's side of a launcher's logs: the end of one, and what is printed from then on.

The launcher appends to a file and now and then puts a shorter one in its place. Whoever has a file
open can read it to its end, also when it is replaced or removed meanwhile: so nothing that the
launcher took is missed, and what is missed after all says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from aenv_ray.engines.process.launcher_logs import marked_cut
from aenv_ray.runtime.container.pod_log import last_lines

LOOK_S: Final = 0.1
"""How often a log that is followed is looked at; files tell nobody."""
_PIECE_BYTES: Final = 65_536


class LogFile:
    """One log, open until `close`.

    Args:
        path: Made when missing: the launcher makes it at the first output only.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()
        self._position = 0
        """How much of all that was ever printed is behind us."""

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tail(self, lines: int | None) -> bytes:
        """Return the last `lines` that are there now; None: all, with the mark of what is gone."""
        content = b"".join(iter(lambda: os.read(self._fd, _PIECE_BYTES), b""))
        gone, mark = marked_cut(content)
        self._position = gone + len(content) - mark
        return content if lines is None else last_lines(content, lines)

    def read(self) -> bytes:
        """Return what comes next; empty when there is nothing yet."""
        data = os.read(self._fd, _PIECE_BYTES)
        if not data and self._was_replaced():
            # What was appended between the two looks; from then on nothing is.
            data = os.read(self._fd, _PIECE_BYTES)
            if not data:
                return self._go_on()
        self._position += len(data)
        return data

    def _was_replaced(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_ino != os.fstat(self._fd).st_ino
        return False

    def _go_on(self) -> bytes:
        """Turn to the file that replaced ours."""
        os.close(self._fd)
        self._fd = self._open()
        gone, mark = marked_cut(os.pread(self._fd, 100, 0))
        missed = max(0, gone - self._position)
        os.lseek(self._fd, mark + max(0, self._position - gone), os.SEEK_SET)
        if not missed:
            return self.read()
        self._position = gone
        return f"[log cut: {missed} bytes came faster than they were read]\n".encode()

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


async def read(
    path: Path, tail_lines: int | None, ended: asyncio.Event | None
) -> AsyncGenerator[bytes, None]:
    """Yield the end of a log, and what is written to it later.

    Args:
        path: The log.
        tail_lines: As for `LogFile.tail`.
        ended: Set when nothing more is written; until then the log is followed. None: it is not.
    """
    if ended is None and not os.path.exists(path):  # noqa: ASYNC240  # the node's memory
        return
    with contextlib.closing(LogFile(path)) as log:
        piece = log.tail(tail_lines)
        if piece:
            yield piece
        if ended is None:
            return
        async with contextlib.aclosing(_follow(log, ended)) as pieces:
            async for piece in pieces:
                yield piece
    # The launcher was done with it perhaps before we made it.
    path.unlink(missing_ok=True)  # noqa: ASYNC240  # the node's memory


async def _follow(log: LogFile, ended: asyncio.Event) -> AsyncGenerator[bytes, None]:
    is_last = False
    while not is_last:
        is_last = ended.is_set()
        while piece := log.read():
            yield piece
            await asyncio.sleep(0)  # one that prints all the time must not keep the loop
        if not is_last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await ended.wait()
