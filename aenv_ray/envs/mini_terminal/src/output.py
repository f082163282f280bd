"""Converts the bytes of the terminal to the output of one command."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Final

OUTPUT_LIMIT_BYTES: Final = 1024 * 1024
"""Size limit of one command's output; of more, the first and the last half of this remain."""

EDGE: Final = b"\x1e"
"""First and last byte of a mark: the ASCII record separator."""

_MARK_LIMIT_BYTES: Final = 200


class BoundedOutput:
    """Stores the head and the tail of output within `limit_bytes`, and counts the rest."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self.total_bytes = 0
        self._half = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self.total_bytes += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Rarely, since each cut copies the tail.
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def drop_line_end(self, since_bytes: int) -> None:
        """Drop the last byte if it ends an empty line that was added after `since_bytes`."""
        last = bytes((self._head + self._tail[-2:] if len(self._tail) < 2 else self._tail)[-2:])
        is_alone = self.total_bytes == since_bytes + 1 and last.endswith(b"\n")
        if is_alone or (self.total_bytes > since_bytes + 1 and last == b"\n\n"):
            del (self._tail or self._head)[-1]
            self.total_bytes -= 1

    @property
    def is_cut(self) -> bool:
        """Whether `text` omits part of the output."""
        return self.total_bytes > 2 * self._half

    def text(self) -> str:
        """Return the output; invalid UTF-8 becomes U+FFFD, and a mark says how much is omitted."""
        if not self.is_cut:
            return (self._head + self._tail).decode("utf-8", "replace")
        tail = bytes(self._tail[-self._half :])
        # A character that the cut splits is omitted rather than shown as invalid.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(bytes(self._head))
        head_bytes = len(self._head) - len(decoder.getstate()[0])
        split = next((i for i in range(min(4, len(tail))) if tail[i] & 0xC0 != 0x80), 0)
        tail = tail[split:]
        omitted = self.total_bytes - head_bytes - len(tail)
        mark = f"\n[output cut: {omitted} of {self.total_bytes} bytes left out here]\n"
        return head + mark + tail.decode("utf-8", "replace")


@dataclass(frozen=True)
class Mark:
    """What the shell writes to the terminal after the output of a command."""

    serial: int
    returncode: int
    options: str
    """Bash's ``$-``."""


class MarkedStream:
    """Splits the terminal's bytes at the shell's marks.

    A mark is ``EDGE nonce : serial : returncode : options EDGE``. Bash writes it to the same
    terminal as the output, so everything before it belongs to the command.

    Args:
        nonce: Random text, which output does not contain by chance.
    """

    def __init__(self, nonce: str) -> None:
        self._prefix = EDGE + nonce.encode() + b":"
        self._rest = b""

    def feed(self, data: bytes, serial: int, output: BoundedOutput) -> Mark | None:
        """Parse `data`, and add output to `output`.

        Returns:
            The mark with this `serial` once it is complete; later bytes are stored for the next
            command. Marks of earlier commands, which timed out, are dropped.
        """
        data = self._rest + data
        self._rest = b""
        while True:
            start = data.find(self._prefix)
            if start < 0:
                kept = self._partial(data)
                output.add(data[: len(data) - kept])
                self._rest = data[len(data) - kept :]
                return None
            end = data.find(EDGE, start + len(self._prefix), start + _MARK_LIMIT_BYTES)
            if end < 0 and len(data) - start < _MARK_LIMIT_BYTES:
                output.add(data[:start])
                self._rest = data[start:]
                return None
            mark = _parse(data[start + len(self._prefix) : end]) if end >= 0 else None
            if mark is None:
                # A command printed something that looks like a mark: it is output.
                output.add(data[: start + 1])
                data = data[start + 1 :]
                continue
            output.add(data[:start])
            data = data[end + 1 :]
            if mark.serial == serial:
                self._rest = data
                return mark

    def flush(self, output: BoundedOutput) -> None:
        """Add bytes that could have been the beginning of a mark; the stream has ended."""
        output.add(self._rest)
        self._rest = b""

    def _partial(self, data: bytes) -> int:
        """Return how many bytes at the end may be the beginning of a mark."""
        start = data.rfind(EDGE, max(0, len(data) - len(self._prefix)))
        return len(data) - start if start >= 0 and self._prefix.startswith(data[start:]) else 0


def _parse(body: bytes) -> Mark | None:
    fields = body.decode("ascii", "replace").split(":")
    if len(fields) != 3 or not fields[0].isdecimal() or not fields[1].isdecimal():
        return None
    return Mark(int(fields[0]), int(fields[1]), fields[2])
