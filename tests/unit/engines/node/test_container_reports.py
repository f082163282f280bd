"""What a container says about itself may hold anything, and costs its host little."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from aenv_ray.engines.images.runtime_bundle import ImagePython
from aenv_ray.engines.kubernetes.pod_instance import ControlConnection
from aenv_ray.engines.node.container_reports import MAX_REPORT_BYTES, parse_report, read_report

PYTHON = {"version": [3, 12], "machine": "x86_64", "libc": "glibc"}


@pytest.mark.parametrize(
    "line",
    ["", "[]", "7", "no JSON", '{"a": ', "[" * 100_000, '{"a":' * 100_000, "9" * 5000],
    ids=["nothing", "a list", "a number", "words", "half", "deep", "deep objects", "many digits"],
)
def test_a_report_is_a_json_object(line: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        parse_report(line)


async def test_a_report_without_an_end_is_given_up() -> None:
    """Invariant 7: it would fill the memory of the host, and end the instances of others."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(theirs, b"x" * (MAX_REPORT_BYTES * 2)))
        with pytest.raises(ValueError, match="more than 1 MiB"):
            await read_report(ours)
        sending.cancel()
        await asyncio.wait([sending])


@pytest.mark.parametrize("flood", [b"x" * (4 * MAX_REPORT_BYTES), b"{}\n" * 100_000, b"[[\n"])
async def test_a_pod_that_floods_its_control_connection_is_no_longer_listened_to(
    flood: bytes,
) -> None:
    """Invariant 7: the memory of the host is that of others' instances, too."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    control = ControlConnection(ours, lambda *_: None)
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(theirs, flood))
    await asyncio.wait([control._task], timeout=60)
    assert control._task.done()
    assert control._task.exception() is None
    assert not await control.move_deadline(60.0)
    sending.cancel()
    await asyncio.wait([sending])
    await control.close()
    theirs.close()


def test_a_python_is_what_it_says() -> None:
    python = ImagePython.reported({**PYTHON, "more": 1})
    assert str(python) == "3.12-x86_64-glibc"


@pytest.mark.parametrize(
    "wrong",
    [
        {"machine": "../../../../tmp/x"},
        {"machine": "x86_64 --index-url http://10.0.0.1"},
        {"machine": ""},
        {"machine": 7},
        {"libc": "../glibc"},
        {"version": ["3", "12"]},
        {"version": [3, "12/../.."]},
        {"version": [3, 10**30]},
        {"version": [3]},
        {"version": None},
    ],
)
def test_facts_that_are_no_python_become_no_path(wrong: dict[str, Any]) -> None:
    """Invariant 13: the python3 of an image may be any program."""
    with pytest.raises(ValueError, match="not a description of a Python"):
        ImagePython.reported({**PYTHON, **wrong})
