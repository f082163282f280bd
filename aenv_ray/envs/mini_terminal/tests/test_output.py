"""Parsing the terminal's bytes: output, marks, cuts."""

from __future__ import annotations

import pytest
from output import BoundedOutput, Mark, MarkedStream

MARK = b"\x1eABCD:7:3:himBs\x1e"


@pytest.mark.parametrize("size", range(1, len(MARK) + 8))
def test_mark_is_found_wherever_reads_split_it(size: int) -> None:
    stream, output = MarkedStream("ABCD"), BoundedOutput()
    data = b"out\x1e\x1eAB\n" + MARK
    mark = None
    for start in range(0, len(data), size):
        assert mark is None
        mark = stream.feed(data[start : start + size], 7, output)
    assert mark == Mark(7, 3, "himBs")
    assert output.text() == "out\x1e\x1eAB\n"


def test_output_after_the_mark_belongs_to_the_next_command() -> None:
    stream, output = MarkedStream("ABCD"), BoundedOutput()
    assert stream.feed(MARK + b"late ", 7, output) is not None
    assert output.text() == ""
    assert stream.feed(b"next" + MARK.replace(b":7:", b":8:"), 8, output) is not None
    assert output.text() == "late next"


def test_mark_of_an_earlier_command_is_dropped() -> None:
    stream, output = MarkedStream("ABCD"), BoundedOutput()
    assert stream.feed(b"a" + MARK + b"b", 8, output) is None
    assert output.text() == "ab"


@pytest.mark.parametrize(
    "fake", [b"\x1eABCD:x:0:h\x1e", b"\x1eABCD:7\x1e", b"\x1eABCD:" + b"9" * 300]
)
def test_text_that_looks_like_a_mark_is_output(fake: bytes) -> None:
    stream, output = MarkedStream("ABCD"), BoundedOutput()
    assert stream.feed(fake + b"." * 200 + MARK, 7, output) == Mark(7, 3, "himBs")
    assert output.text().encode() == fake + b"." * 200


def test_an_incomplete_mark_at_the_end_is_output() -> None:
    stream, output = MarkedStream("ABCD"), BoundedOutput()
    assert stream.feed(b"x\x1eAB", 7, output) is None
    assert output.text() == "x"
    stream.flush(output)
    assert output.text() == "x\x1eAB"


def test_a_cut_counts_bytes_and_splits_no_character() -> None:
    output = BoundedOutput(10)
    for _ in range(1000):
        output.add("aé".encode())
    assert output.is_cut
    # The first 5 bytes are "aéa" and half an é, which is left out.
    mark = "\n[output cut: 2991 of 3000 bytes left out here]\n"
    assert output.text() == f"aéa{mark}éaé"


def test_output_at_the_limit_is_not_cut() -> None:
    output = BoundedOutput(10)
    output.add(b"0123456789")
    assert not output.is_cut
    assert output.text() == "0123456789"


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("a\n", "\n", "a\n"),
        ("a\n", "b\n\n", "a\nb\n"),
        ("a\n", "b\n", "a\nb\n"),
        ("a\n", "", "a\n"),
    ],
)
def test_line_end_of_an_interrupt_is_dropped(before: str, after: str, kept: str) -> None:
    output = BoundedOutput()
    output.add(before.encode())
    since = output.total_bytes
    output.add(after.encode())
    output.drop_line_end(since)
    assert output.text() == kept
