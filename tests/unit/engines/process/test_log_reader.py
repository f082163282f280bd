"""Who reads a launcher's log misses nothing, whatever the launcher does to the file meanwhile."""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.process.logs import LOG_KEEP_BYTES, LOG_LIMIT_BYTES, LogReader, Logs, read
from aenv_ray.runtime.container.pod_log import last_lines

LINE = 64


class Writer:
    """A launcher's log and the sandbox that prints into it, numbered lines of `LINE` bytes."""

    def __init__(self, directory: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self.logs = Logs(self._selector, directory)
        self.path = directory / "one"
        self._output = self.logs.open("one")
        self._lines = 0

    def print(self, size: int) -> bytes:
        """Print so many bytes more, and return them."""
        printed = b""
        while len(printed) < size:
            lines = b"".join(b"%063d\n" % n for n in range(self._lines, self._lines + 512))
            self._lines += 512
            os.write(self._output, lines)
            for key, events in self._selector.select(1.0):
                key.data(key.fileobj, events)
            printed += lines
        return printed

    def end(self) -> None:
        self.logs.close("one")

    def close(self) -> None:
        os.close(self._output)
        self.logs.discard("one")
        self._selector.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def rest(log: LogReader) -> bytes:
    return b"".join(iter(log.read, b""))


def test_a_cut_between_two_looks_is_not_noticed(writer: Writer) -> None:
    """Invariant 12."""
    printed = writer.print(LOG_LIMIT_BYTES - 40_000)
    log = LogReader(writer.path)
    heard = log.tail(None)
    for _ in range(6):
        printed += writer.print(LOG_LIMIT_BYTES // 2)
        heard += rest(log)
    log.close()
    assert writer.path.stat().st_size < LOG_LIMIT_BYTES < len(printed)
    assert heard == printed


def test_what_was_cut_before_it_was_read_is_marked(writer: Writer) -> None:
    """Invariant 12."""
    printed = writer.print(1000)
    log = LogReader(writer.path)
    assert log.tail(None) == printed
    later = writer.print(3 * LOG_LIMIT_BYTES)
    heard = rest(log)
    log.close()
    begin, mark, end = heard.partition(b"[log cut: ")
    missed, _, end = end.partition(b" bytes came faster than they were read]\n")
    assert mark
    assert later.startswith(begin)
    assert later.endswith(end)
    assert len(end) >= LOG_KEEP_BYTES
    assert len(begin) + int(missed) + len(end) == len(later)


def test_a_log_that_was_removed_is_read_to_its_end(writer: Writer) -> None:
    log = LogReader(writer.path)
    assert log.tail(None) == b""
    printed = writer.print(1000)
    writer.end()
    assert rest(log) == printed
    log.close()


def test_a_log_that_was_cut_says_so_first(writer: Writer) -> None:
    writer.print(2 * LOG_LIMIT_BYTES)
    log = LogReader(writer.path)
    assert log.tail(None).startswith(b"[log cut: the first ")
    assert len(log.tail(3)) == 0  # all was read
    log.close()


async def test_a_silent_log_that_was_followed_leaves_no_file(writer: Writer) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    writer.end()
    ended.set_result("released")
    assert [piece async for piece in read(writer.path, None, ended)] == []
    assert not writer.path.exists()
    assert [piece async for piece in read(writer.path, None, None)] == []


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"", 3, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 3, b"a\nb\nc\n"),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"a\nb\n", 0, b""),
        (b"\n\n\n", 2, b"\n\n"),
    ],
)
def test_the_last_lines_of_some_output(content: bytes, lines: int, expected: bytes) -> None:
    assert last_lines(content, lines) == expected
