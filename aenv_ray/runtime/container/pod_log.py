"""What an instance in a pod printed: the end of it, in memory, for those who read or follow it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

LIMIT_BYTES: Final = 1024 * 1024
"""A longer log keeps its end only."""
KEEP_BYTES: Final = 256 * 1024
TAIL_BYTES: Final = 2500
"""What is told of the log of an instance that died; a termination message holds 4096 bytes."""


def last_lines(content: bytes, lines: int) -> bytes:
    """Return the last lines of some output; an unfinished one counts."""
    start = len(content) - content.endswith(b"\n")
    for _ in range(lines):
        start = content.rfind(b"\n", 0, start)
        if start < 0:
            return content
    return content[start + 1 :] if lines else b""


class PodLog:
    """One writer, any number of readers, each in a thread of its own."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._gone = 0
        """Bytes that are not kept any more."""
        self._ended = False
        self._changed = threading.Condition()

    def add(self, data: bytes) -> None:
        """Note what was printed."""
        with self._changed:
            self._kept += data
            if len(self._kept) > LIMIT_BYTES:
                cut = len(self._kept) - KEEP_BYTES
                self._gone += cut
                del self._kept[:cut]
            self._changed.notify_all()

    def end(self) -> None:
        """Note that nothing more comes."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def tail(self) -> bytes:
        """The end of it, short."""
        with self._changed:
            return bytes(self._kept[-TAIL_BYTES:])

    def read(self, tail_lines: int | None, follow: bool) -> Iterator[bytes]:
        """Yield what is there, and with `follow` what comes until the end.

        Args:
            tail_lines: Begin with so many of the last lines. None: with all that is kept, after a
                line that says how much is not.
            follow: Go on until `end`.
        """
        with self._changed:
            content, position = bytes(self._kept), self._gone + len(self._kept)
            gone = self._gone
        if tail_lines is not None:
            content = last_lines(content, tail_lines)
        elif gone:
            yield f"[log cut: the first {gone} bytes are gone]\n".encode()
        yield content
        while follow:
            with self._changed:
                while self._gone + len(self._kept) <= position and not self._ended:
                    self._changed.wait()
                missed = max(0, self._gone - position)
                piece = bytes(self._kept[max(0, position - self._gone) :])
                position = self._gone + len(self._kept)
                follow = not self._ended
            if missed:
                yield f"[log cut: {missed} bytes came faster than they were read]\n".encode()
            yield piece
