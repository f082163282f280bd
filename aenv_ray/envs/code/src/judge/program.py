"""Tests of programs: what is written to standard input, and what has to be printed."""

from __future__ import annotations

import os
import select

from judge.link import MOST_BYTES


class TooMuchOutput(Exception):
    """The program has printed more than the limit."""


def output(replies: int, process: int) -> str:
    """Return what a program prints until it ends.

    Args:
        replies: Descriptor of its standard output.
        process: A pidfd of the program.

    Raises:
        TooMuchOutput: It is longer than the limit.
    """
    parts, size = [], 0
    while True:
        ready, _, _ = select.select([replies, process], [], [])
        # It may have printed and ended after `select` had looked at the output.
        if replies not in ready and not select.select([replies], [], [], 0)[0]:
            return b"".join(parts).decode("utf-8", "replace")
        part = os.read(replies, 1 << 20)
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise TooMuchOutput(f"it printed more than {MOST_BYTES} bytes")


def is_same(printed: str, expected: str) -> bool:
    """Return whether an output is right: line by line, without spaces around, numbers by value."""
    lines = [line.strip() for line in printed.strip().split("\n")]
    wanted = [line.strip() for line in expected.strip().split("\n")]
    return len(lines) == len(wanted) and all(map(_is_same_line, lines, wanted))


def _is_same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    from decimal import Decimal, InvalidOperation

    try:
        return [*map(Decimal, line.split())] == [*map(Decimal, wanted.split())]
    except InvalidOperation:
        return False
