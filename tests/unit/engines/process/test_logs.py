"""The logs of instances: bounded at every moment, and what is cut says so."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.process.logs import LOG_LIMIT_BYTES, LOG_TAIL_BYTES, Logs


class Bench:
    """Logs and the loop that drains them."""

    def __init__(self, directory: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.logs = Logs(self.selector, directory)
        self.largest = 0
        self.directory = directory

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Run the loop once; False when nothing was ready."""
        ready = self.selector.select(timeout_s)
        for key, events in ready:
            key.data(key.fileobj, events)
        self.largest = max([self.largest, *(p.stat().st_size for p in self.directory.iterdir())])
        return bool(ready)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for name in ("one", "two"):
        made.logs.discard(name)
    assert not made.selector.get_map()
    assert list(tmp_path.iterdir()) == []
    made.selector.close()


def test_the_end_of_a_log_is_told_also_what_nobody_has_read_yet(bench: Bench) -> None:
    output = bench.logs.open("one")
    os.write(output, b"read, ")
    assert bench.turn()
    os.write(output, b"and unread")
    os.close(output)
    assert bench.logs.close("one") == "read, and unread"
    assert bench.logs.close("one") == ""


def test_a_silent_log_makes_no_file(bench: Bench, tmp_path: Path) -> None:
    output = bench.logs.open("one")
    assert not bench.turn()
    assert list(tmp_path.iterdir()) == []
    os.close(output)


def test_a_long_log_keeps_its_end_and_says_what_is_gone(bench: Bench, tmp_path: Path) -> None:
    """Invariant 12."""
    output, total = bench.logs.open("one"), 8 * LOG_LIMIT_BYTES
    words = b"".join(b"%07d\n" % number for number in range(total // 8))

    def write() -> None:
        view = memoryview(words)
        while view:
            view = view[os.write(output, view) :]
        os.close(output)

    writer = threading.Thread(target=write)
    writer.start()
    while bench.selector.get_map():
        bench.turn(10.0)
    writer.join()
    assert bench.largest <= LOG_LIMIT_BYTES
    text = (tmp_path / "one").read_bytes()
    mark, kept = text.split(b"\n", 1)
    gone = int(mark.split()[4])
    assert mark == b"[log cut: the first %d bytes are gone]" % gone
    assert kept == words[gone:]
    assert bench.logs.close("one") == words[-LOG_TAIL_BYTES:].decode()


def test_a_writer_that_closed_its_output_wakes_nobody(bench: Bench) -> None:
    os.close(bench.logs.open("one"))
    assert bench.turn()
    assert not bench.turn()


def test_a_log_that_is_gone_is_an_error_for_who_writes_on(bench: Bench) -> None:
    one, two = bench.logs.open("one"), bench.logs.open("two")
    bench.logs.discard("one")
    with pytest.raises(BrokenPipeError):
        os.write(one, b"x")
    os.write(two, b"x")
    assert bench.logs.close("two") == "x"
    os.close(one)
    os.close(two)


def test_a_log_that_cannot_be_written_stops_nobody(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's memory is full: what is lost counts as cut (invariant 12)."""
    output = bench.logs.open("one")
    (tmp_path / "one").mkdir()
    os.write(output, b"lost")
    assert bench.turn()
    (tmp_path / "one").rmdir()
    monkeypatch.setattr("aenv_ray.engines.process.logs.LOG_LIMIT_BYTES", 8)
    monkeypatch.setattr("aenv_ray.engines.process.logs.LOG_KEEP_BYTES", 4)
    os.write(output, b"gone-kept")
    os.close(output)
    assert bench.logs.close("one") == "[log cut: the first 9 bytes are gone]\nkept"
