"""A container's log is read without unmarked gaps and without repetition."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from aenv_ray.engines.docker.logs import CUT, HELD, RECENT, ContainerLog, follow
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import FabricUnavailable

EPOCH_S = 1_769_860_800
"""2026-01-31T12:00:00Z"""


class FakeDaemon(DockerClient):
    """Keeps the end of one log and returns it in pieces of any size."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("unix:///nowhere")
        self.kept: list[tuple[int, bytes]] = []
        self.refusal: DaemonRefused | None = None
        self.asked: list[dict[str, Any]] = []
        self._dice = random.Random(seed)

    def put(self, text: str, at_ns: int) -> None:
        self.kept.append((at_ns, text.encode()))

    async def frames(
        self, path: str, params: Mapping[str, Any]
    ) -> AsyncGenerator[list[bytes], None]:
        assert path == "/containers/c/logs"
        self.asked.append(dict(params))
        if self.refusal is not None:
            raise self.refusal
        rows = list(self.kept)
        if params.get("tail", "all") != "all":
            rows = rows[-params["tail"] :]
        if "since" in params:
            seconds, _, fraction = params["since"].partition(".")
            since = (int(seconds) - EPOCH_S) * 10**9 + int(fraction)
            rows = [row for row in rows if row[0] >= since]
        while rows:
            size = self._dice.randint(1, 400)
            batch, rows = rows[:size], rows[size:]
            yield [stamp(at_ns) + b" " + text for at_ns, text in batch]


def stamp(at_ns: int) -> bytes:
    seconds, nanoseconds = divmod(at_ns, 10**9)
    minutes, seconds = divmod(seconds, 60)
    return f"2026-01-31T12:{minutes:02d}:{seconds:02d}.{nanoseconds:09d}Z".encode()


async def read(log: ContainerLog) -> str:
    return b"".join([piece async for piece in log.read()]).decode()


@pytest.mark.parametrize(
    ("lines", "begins"), [(None, "a b c "), (2, "b c "), (0, ""), (9, "a b c ")]
)
async def test_a_log_begins_with_the_requested_lines(lines: int | None, begins: str) -> None:
    daemon = FakeDaemon()
    for number, text in enumerate("abc"):
        daemon.put(f"{text} ", number)
    log = ContainerLog(daemon, "c", lines)
    assert await read(log) == begins
    assert not await log.has_more()
    daemon.put("d ", 7)
    assert await log.has_more()
    assert await read(log) == "d "


@pytest.mark.parametrize("lines", [None, 0, 3])
async def test_a_log_that_is_empty_at_first_is_read_completely(lines: int | None) -> None:
    daemon = FakeDaemon()
    log = ContainerLog(daemon, "c", lines)
    assert await read(log) == ""
    assert not await log.has_more()
    for number in range(5):
        daemon.put(f"{number} ", number)
    assert await log.has_more()
    assert await read(log) == "0 1 2 3 4 "


@pytest.mark.parametrize("seed", range(20))
async def test_output_between_two_reads_is_returned_once_or_marked_as_cut(seed: int) -> None:
    """Invariant 12: with equal time stamps, lines out of order, and a daemon that drops lines."""
    dice, daemon = random.Random(seed), FakeDaemon(seed)
    log, now, number, told = ContainerLog(daemon, "c", None), 10**9, 1, 0
    daemon.put("0\n", now)
    assert await read(log) == "0\n"
    for _ in range(12):
        for _ in range(dice.choice([0, 1, 5, RECENT, 3 * RECENT, 2 * HELD])):
            now += dice.choice([0, 0, 1, 1000, 10**7])
            early = dice.choice([0, 0, 0, 500_000]) if now % 2 else 0
            daemon.put(f"{number}\n", now - early)
            number += 1
        kept = dice.choice([number, number, RECENT // 2, 2 * RECENT])
        daemon.kept = daemon.kept[-kept:]
        oldest = int(daemon.kept[0][1]) if daemon.kept else 0
        forgotten = oldest > told + 1
        words = (await read(log)).splitlines()
        if forgotten:
            assert words[0] == CUT.decode().strip()
            words = words[1:]
        assert CUT.decode().strip() not in words
        expected = range(oldest if forgotten else told + 1, number)
        assert [int(word) for word in words] == list(expected)
        told = number - 1


async def test_the_parts_of_a_long_line_stay_in_order() -> None:
    """They are equal and have the same time stamp."""
    daemon = FakeDaemon()
    daemon.put("before\n", 5)
    for _ in range(3):
        daemon.put("aaaa", 9)
    log = ContainerLog(daemon, "c", None)
    assert await read(log) == "before\naaaaaaaaaaaa"
    for _ in range(2):
        daemon.put("aaaa", 9)
    daemon.put("\n", 9)
    assert await read(log) == "aaaaaaaa\n"


async def test_new_lines_are_found_without_reading_the_whole_log() -> None:
    """To find a time stamp, the daemon scans its whole log."""
    daemon = FakeDaemon()
    for number in range(10 * RECENT):
        daemon.put(f"{number} ", number * 10**6)
    log = ContainerLog(daemon, "c", 1)
    await read(log)
    daemon.put("new ", 10**12)
    daemon.asked.clear()
    assert await read(log) == "new "
    assert [asked.get("tail") for asked in daemon.asked] == [RECENT]


async def test_a_log_is_followed_to_its_end() -> None:
    daemon = FakeDaemon()
    daemon.put("first\n", 1)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    pieces = follow(ContainerLog(daemon, "c", None), ended)
    assert await anext(pieces) == b"first\n"
    daemon.put("second\n", 2)
    assert await anext(pieces) == b"second\n"
    daemon.put("last", 3)
    ended.set_result("it ended")
    assert [piece async for piece in pieces] == [b"last"]


async def test_a_log_that_is_gone_is_empty_and_a_refusal_is_an_error() -> None:
    daemon = FakeDaemon()
    for status in (404, 409):
        daemon.refusal = DaemonRefused(status, "no such container")
        assert await read(ContainerLog(daemon, "c", None)) == ""
    daemon.refusal = DaemonRefused(500, "broken")
    with pytest.raises(FabricUnavailable, match="did not read a container's log: broken"):
        await read(ContainerLog(daemon, "c", None))
