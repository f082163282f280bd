"""What instances and templates print: the launcher reads it and keeps the end of it.

Standard output and error of an instance are a pipe. Nothing that is written to it can grow: a
writer that is faster than the launcher waits, and what the launcher has read lies in a file that it
keeps small itself. A file that the instance writes cannot be bounded that way: files in the
runtime directory are the node's memory, a size limit of the process would hold for all its files,
and a full file system would make ``print`` fail in every other sandbox too.

The launcher's loop does the reading, one piece of one pipe at a time, so that a sandbox that prints
all the time delays the others' requests by microseconds (about 1 GB is drained a second). A pipe
costs a create and a release 14 µs together, as much as a file; it costs no page while nothing is
printed, and one descriptor of the launcher. The file is made at the first output.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOG_LIMIT_BYTES: Final = 1024 * 1024
"""A longer log keeps its end only; logs lie in memory."""
LOG_KEEP_BYTES: Final = 256 * 1024
LOG_TAIL_BYTES: Final = 4000
"""What is told of the log of an instance that died."""
_PIECE_BYTES: Final = 65_536
_LAST_PIECES: Final = 16
"""Read of a pipe for the end of its log: more than any pipe of ours holds."""


_MARK: Final = re.compile(rb"\[log cut: the first (\d+) bytes are gone\]\n")


def cut_mark(cut_bytes: int) -> bytes:
    """Return the first line of a log whose first `cut_bytes` bytes are gone."""
    return f"[log cut: the first {cut_bytes} bytes are gone]\n".encode()


def marked_cut(content: bytes) -> tuple[int, int]:
    """Return how many bytes are gone before a log's content, and how long its mark is."""
    mark = _MARK.match(content)
    return (int(mark[1]), mark.end()) if mark else (0, 0)


@dataclass
class _Log:
    fd: int
    path: Path
    mark: bytes = b""
    size: int = 0
    """Of the file, with the mark at its beginning."""
    cut_bytes: int = 0

    def add(self, data: bytes) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(data)
            self.size += len(data)
            if self.size > LOG_LIMIT_BYTES:
                self._cut()
        except OSError:  # the node's memory is full: the instance must not wait for that
            self.cut_bytes += len(data)

    def _cut(self) -> None:
        """Put a shorter file in place of this one: who reads it has the old one to the end."""
        with self.path.open("rb") as file:
            file.seek(-LOG_KEEP_BYTES, os.SEEK_END)
            kept = file.read()
        cut_bytes = self.cut_bytes + self.size - len(self.mark) - LOG_KEEP_BYTES
        mark = cut_mark(cut_bytes)
        partial = self.path.with_name(f".{self.path.name}")
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
    """The logs of a launcher.

    Args:
        selector: The launcher's; its values are called as ``(fileobj, events)``.
        directory: Where the files are.
    """

    def __init__(self, selector: selectors.BaseSelector, directory: Path) -> None:
        self._selector = selector
        self._directory = directory
        self._logs: dict[str, _Log] = {}

    def open(self, name: str) -> int:
        """Return a descriptor for output to the log `name`; the caller closes its own copy.

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
        """Remove a log and return the end of it; whoever still writes to it gets an error."""
        tail = self.tail(name)
        self.discard(name)
        return tail

    def discard(self, name: str) -> None:
        """Remove a log unread."""
        log = self._logs.pop(name, None)
        if log is not None:
            self._stop_reading(log)
            log.path.unlink(missing_ok=True)  # a reader may have made it, of a log without output

    def _read(self, log: _Log) -> bool:
        """Take one piece of what was printed; False when there is none now."""
        if log.fd < 0:
            return False
        try:
            data = os.read(log.fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not data:  # all who could write are gone; a closed pipe would wake the loop for ever
            self._stop_reading(log)
            return False
        log.add(data)
        return True

    def _stop_reading(self, log: _Log) -> None:
        if log.fd >= 0:
            self._selector.unregister(log.fd)
            os.close(log.fd)
            log.fd = -1
