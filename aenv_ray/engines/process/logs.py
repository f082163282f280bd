"""The logs of instances and templates: the launcher writes them, hosts read them.

Standard output and error of an instance are a pipe to the launcher, which keeps the end of what it
reads in a file. This bounds both: a writer that is faster than the launcher waits, and the launcher
cuts the file itself. A file that the instance writes could not be bounded: the runtime directory is
the node's memory, a file size limit would apply to all files of the process, and a full file system
would make ``print`` fail in every other sandbox.

The launcher's loop reads one piece of one pipe at a time, so that a sandbox that prints constantly
delays other requests by microseconds (about 1 GB/s is drained). A pipe costs 14 µs per instance, as
much as a file, and one descriptor of the launcher. The file is created at the first output.

The launcher imports this module, so it imports neither asyncio nor pydantic at the top.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

LOG_LIMIT_BYTES: Final = 1024 * 1024
"""A longer log is cut to its last `LOG_KEEP_BYTES`; logs are in memory."""
LOG_KEEP_BYTES: Final = 256 * 1024
LOG_TAIL_BYTES: Final = 4000
"""How much of the log is reported when an instance dies."""
POLL_S: Final = 0.1
"""How often a follower looks for new output."""
_PIECE_BYTES: Final = 65_536
_LAST_PIECES: Final = 16
"""Bytes to read from a pipe for the end of its log: more than any of our pipes holds."""
_MARK: Final = re.compile(rb"\[log cut: the first (\d+) bytes are gone\]\n")


def _cut_mark(cut_bytes: int) -> bytes:
    """Return the first line of a log without its first `cut_bytes` bytes."""
    return f"[log cut: the first {cut_bytes} bytes are gone]\n".encode()


def _parse_cut_mark(content: bytes) -> tuple[int, int]:
    """Return how many bytes were cut before a log's content, and the length of its mark."""
    mark = _MARK.match(content)
    return (int(mark[1]), mark.end()) if mark else (0, 0)


# --- writing: the launcher ------------------------------------------------------------------------


@dataclass
class _Log:
    fd: int
    path: Path
    mark: bytes = b""
    size: int = 0
    """The size of the file, including the mark at its beginning."""
    cut_bytes: int = 0

    def add(self, data: bytes) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(data)
            self.size += len(data)
            if self.size > LOG_LIMIT_BYTES:
                self._cut()
        except OSError:  # the node's memory is full; the instance must not block on that
            self.cut_bytes += len(data)

    def _cut(self) -> None:
        """Replace the file with a shorter one; readers can finish the old one."""
        with self.path.open("rb") as file:
            file.seek(-LOG_KEEP_BYTES, os.SEEK_END)
            kept = file.read()
        cut_bytes = self.cut_bytes + self.size - len(self.mark) - LOG_KEEP_BYTES
        mark = _cut_mark(cut_bytes)
        partial = self.path.with_name(f".{self.path.name}")  # the launcher is its only writer
        partial.write_bytes(mark + kept)
        partial.replace(self.path)
        self.cut_bytes, self.mark = cut_bytes, mark
        self.size = len(mark) + LOG_KEEP_BYTES

    def tail(self) -> str:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(max(0, self.size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


class Logs:
    """The logs that a launcher writes.

    Args:
        selector: The launcher's selector; its data are functions that take ``(fileobj, events)``.
        directory: Directory of the files.
    """

    def __init__(self, selector: selectors.BaseSelector, directory: Path) -> None:
        self._selector = selector
        self._directory = directory
        self._logs: dict[str, _Log] = {}

    def open(self, name: str) -> int:
        """Return a descriptor for output to the log `name`; the caller closes its copy.

        Raises:
            OSError: The limit of open files is reached.
        """
        fd, output = os.pipe()
        os.set_blocking(fd, False)
        log = self._logs[name] = _Log(fd, self._directory / name)
        self._selector.register(fd, selectors.EVENT_READ, lambda *_: self._read(log))
        return output

    def tail(self, name: str) -> str:
        """Return the end of a log."""
        log = self._logs.get(name)
        if log is None:
            return ""
        for _ in range(_LAST_PIECES):
            if not self._read(log):
                break
        return log.tail()

    def close(self, name: str) -> str:
        """Remove a log and return its end; processes that still write to it get an error."""
        tail = self.tail(name)
        self.discard(name)
        return tail

    def discard(self, name: str) -> None:
        """Remove a log unread."""
        log = self._logs.pop(name, None)
        if log is not None:
            self._stop_reading(log)
            log.path.unlink(missing_ok=True)  # a reader creates the file of a log without output

    def _read(self, log: _Log) -> bool:
        """Read one piece of output; False when there is none."""
        if log.fd < 0:
            return False
        try:
            data = os.read(log.fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not data:  # no writer is left; the selector would report a closed pipe for ever
            self._stop_reading(log)
            return False
        log.add(data)
        return True

    def _stop_reading(self, log: _Log) -> None:
        if log.fd >= 0:
            self._selector.unregister(log.fd)
            os.close(log.fd)
            log.fd = -1


# --- reading: hosts -------------------------------------------------------------------------------


class LogReader:
    """Reads one log until `close`, across the launcher's cuts.

    An open file can be read to its end even after it was replaced or removed, so nothing that the
    launcher wrote is missed. If output is missed all the same, the reader says so.

    Args:
        path: Created if missing; the launcher creates it at the first output.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()
        self._position = 0
        """Bytes of the whole output that have been read or skipped."""

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tail(self, lines: int | None) -> bytes:
        """Return the last `lines` of the present content; None: all, with the mark of a cut."""
        from aenv_ray.runtime.container.pod_log import last_lines

        content = b"".join(iter(lambda: os.read(self._fd, _PIECE_BYTES), b""))
        cut_bytes, mark = _parse_cut_mark(content)
        self._position = cut_bytes + len(content) - mark
        return content if lines is None else last_lines(content, lines)

    def read(self) -> bytes:
        """Return the next piece; empty when there is no new output."""
        data = os.read(self._fd, _PIECE_BYTES)
        if not data and self._was_replaced():
            # Output that was appended between the two reads; after this nothing is appended.
            data = os.read(self._fd, _PIECE_BYTES)
            if not data:
                return self._read_replacement()
        self._position += len(data)
        return data

    def _was_replaced(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_ino != os.fstat(self._fd).st_ino
        return False

    def _read_replacement(self) -> bytes:
        os.close(self._fd)
        self._fd = self._open()
        cut_bytes, mark = _parse_cut_mark(os.pread(self._fd, 100, 0))
        missed = max(0, cut_bytes - self._position)
        os.lseek(self._fd, mark + max(0, self._position - cut_bytes), os.SEEK_SET)
        if not missed:
            return self.read()
        self._position = cut_bytes
        return f"[log cut: {missed} bytes came faster than they were read]\n".encode()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


async def read(
    path: Path, tail_lines: int | None, ended: asyncio.Future[Any] | None
) -> AsyncGenerator[bytes, None]:
    """Yield the end of a log, and then what is written to it.

    Args:
        path: The log.
        tail_lines: As for `LogReader.tail`.
        ended: Follow the log until this is done. None: do not follow it.
    """
    if ended is None and not os.path.exists(path):  # noqa: ASYNC240  # a file in memory
        return
    with contextlib.closing(LogReader(path)) as log:
        piece = log.tail(tail_lines)
        if piece:
            yield piece
        if ended is None:
            return
        async with contextlib.aclosing(_follow(log, ended)) as pieces:
            async for piece in pieces:
                yield piece
    # The launcher may have removed the log before the reader created it again.
    path.unlink(missing_ok=True)  # noqa: ASYNC240  # a file in memory


async def _follow(log: LogReader, ended: asyncio.Future[Any]) -> AsyncGenerator[bytes, None]:
    import asyncio

    is_last = False
    while not is_last:
        is_last = ended.done()
        while piece := log.read():
            yield piece
            await asyncio.sleep(0)  # constant output must not block the loop
        if not is_last:
            await asyncio.wait([ended], timeout=POLL_S)
