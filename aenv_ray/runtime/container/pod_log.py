"""The log of an instance in a pod. Only its end is kept, in memory; it can be read and followed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

LIMIT_BYTES: Final = 1024 * 1024
"""At this size the log is cut to its last `KEEP_BYTES`."""
KEEP_BYTES: Final = 256 * 1024
TAIL_BYTES: Final = 2500
"""How much of a dead instance's log is reported; a termination message has at most 4096 bytes."""


def last_lines(content: bytes, lines: int) -> bytes:
    """Return the last lines of some output; an unfinished line counts."""
    start = len(content) - content.endswith(b"\n")
    for _ in range(lines):
        start = content.rfind(b"\n", 0, start)
        if start < 0:
            return content
    return content[start + 1 :] if lines else b""


class PodLog:
    """A log with one writer and any number of readers, each in its own thread."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._dropped = 0
        """Number of bytes that were cut off at the front."""
        self._ended = False
        self._changed = threading.Condition()

    def add(self, data: bytes) -> None:
        """Append output."""
        with self._changed:
            self._content += data
            if len(self._content) > LIMIT_BYTES:
                cut = len(self._content) - KEEP_BYTES
                self._dropped += cut
                del self._content[:cut]
            self._changed.notify_all()

    def end(self) -> None:
        """Mark the log as complete."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def tail(self) -> bytes:
        """The last `TAIL_BYTES` of the log."""
        with self._changed:
            return bytes(self._content[-TAIL_BYTES:])

    def read(self, tail_lines: int | None, follow: bool) -> Iterator[bytes]:
        """Yield the stored log and, with `follow`, new output.

        Args:
            tail_lines: Number of lines to begin with. None: all that is stored, after a line that
                says how much was cut off.
            follow: Continue until `end`.
        """
        with self._changed:
            content, position = bytes(self._content), self._dropped + len(self._content)
            dropped = self._dropped
        if tail_lines is not None:
            content = last_lines(content, tail_lines)
        elif dropped:
            yield f"[log cut: the first {dropped} bytes are gone]\n".encode()
        yield content
        while follow:
            with self._changed:
                while self._dropped + len(self._content) <= position and not self._ended:
                    self._changed.wait()
                missed = max(0, self._dropped - position)
                piece = bytes(self._content[max(0, position - self._dropped) :])
                position = self._dropped + len(self._content)
                follow = not self._ended
            if missed:
                yield f"[log cut: {missed} bytes came faster than they were read]\n".encode()
            yield piece
