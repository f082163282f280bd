"""The host's side of the fast door: which messages it accepts, and which end the sandbox."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.calls import wire
from aenv_ray.engines import base, door
from aenv_ray.engines.base import EndCause
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import (
    CallOutcomeUnknown,
    CapacityExceeded,
    FunctionFailed,
    InsideCause,
    ResetFailed,
    SandboxDiedInside,
    SandboxLost,
    is_infrastructure,
    reported_by_sandbox,
)
from aenv_ray.ids import InstanceId
from aenv_ray.models import Isolation
from tests.contract.engines import filled


async def _no_cause() -> str:
    return "its process ended"


class Peer:
    """A sandbox's door whose other end the test holds."""

    def __init__(self) -> None:
        self.sock, self._theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.sandbox = DoorSandbox(InstanceId("e-1"), Isolation(kind="none"), "test", _no_cause)

    def open(self) -> None:
        self.sandbox.connect(self._theirs)

    async def asked(self) -> bytes:
        """Return what the host sent."""
        return await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20)

    def call(self, *, may_wait: bool = False) -> asyncio.Task[bytes]:
        """Begin a call."""
        return asyncio.create_task(
            self.sandbox.request_json("ping", b"{}", deadline_s=30, may_wait=may_wait)
        )


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    made.open()
    yield made
    await made.sandbox.close()
    made.sock.close()


async def test_answers_may_come_in_pieces_and_together(peer: Peer) -> None:
    first, second = peer.call(), peer.call()
    assert (await peer.asked()).count(b"\n") == 2
    peer.sock.send(b'{"jsonrpc":"2.0","id":2,"resu')
    await asyncio.sleep(0)
    peer.sock.send(b'lt":{}}\n{"jsonrpc":"2.0","id":1,"result":[1]}\n')
    assert (await first, await second) == (b"[1]", b"{}")


async def test_calls_that_may_wait_are_sent_together(peer: Peer) -> None:
    calls = [peer.call(may_wait=True) for _ in range(3)]
    sent = await peer.asked()
    assert sent.count(b"\n") == 3
    for number in (1, 2, 3):
        peer.sock.send(b'{"jsonrpc":"2.0","id":%d,"result":[%d]}\n' % (number, number))
    assert await asyncio.gather(*calls) == [b"[1]", b"[2]", b"[3]"]


async def test_a_call_in_a_hurry_takes_those_that_may_wait_along(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_BATCH_DELAY_S", 3600.0)
    patient = [peer.call(may_wait=True) for _ in range(2)]
    hurried = peer.call()
    sent = await peer.asked()
    assert [line[: line.index(b",", 17)] for line in sent.splitlines()] == [
        b'{"jsonrpc":"2.0","id":%d' % number for number in (1, 2, 3)
    ]
    for number in (1, 2, 3):
        peer.sock.send(b'{"jsonrpc":"2.0","id":%d,"result":[%d]}\n' % (number, number))
    assert await asyncio.gather(*patient, hurried) == [b"[1]", b"[2]", b"[3]"]


async def test_a_door_where_many_wait_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    """A burst of callers is no failure."""
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with filled(str(path)):
            connecting = asyncio.create_task(door.connect_to_door(path))
            await asyncio.sleep(0)
            assert not connecting.done()
            listener.accept()[0].close()
            with await connecting as sock:
                assert sock.getpeername() == str(path)


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"jsonrpc":"2.0","id":x}\n', b"\xff\n"])
async def test_a_sandbox_that_sends_invalid_messages_is_ended(peer: Peer, line: bytes) -> None:
    """Invariant 2: its calls are lost at once, with the reason, and not at their deadlines."""
    call = peer.call()
    await peer.asked()
    peer.sock.send(line)
    with pytest.raises(SandboxLost, match="invalid message"):
        await call


async def test_a_message_without_end_does_not_fill_the_host(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_MESSAGE_BYTES", 1000)
    call = peer.call()
    await peer.asked()
    peer.sock.send(b"x" * 2000)
    with pytest.raises(SandboxLost, match="more than 1000 bytes"):
        await call


async def test_incomplete_messages_of_many_sandboxes_do_not_fill_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 7: the one with the longest ends; the others, and complete messages, go on."""
    monkeypatch.setattr(door, "_LITTLE_BYTES", 100_000)
    monkeypatch.setattr(door.HELD, "limit_bytes", 1_000_000)
    peers = [Peer() for _ in range(4)]
    calls = []
    for one in peers:
        one.open()
        calls.append(one.call())
        await one.asked()
    send = asyncio.get_running_loop().sock_sendall
    for one, size in zip(peers, (200_000, 500_000, 150_000, 300_000), strict=True):
        await send(one.sock, b'{"jsonrpc":"2.0","id":1,"result":"' + b"x" * size)
    with pytest.raises(SandboxDiedInside, match="most of the messages"):
        await calls[1]
    for one in (peers[0], peers[2], peers[3]):
        await send(one.sock, b'"}\n')
    for call in (calls[0], calls[2], calls[3]):
        assert (await call).startswith(b'"xx')
    assert not door.HELD._sizes
    assert door.HELD._total == 0
    for one in peers:
        await one.sandbox.close()
        one.sock.close()


async def test_requests_that_wait_hold_little_of_the_host(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a sandbox may have a thousand requests that wait for a day."""
    monkeypatch.setattr(door, "MAX_MESSAGE_BYTES", 500_000)
    monkeypatch.setattr(door, "_LITTLE_BYTES", 100_000)
    may_answer = asyncio.Event()

    async def serve(_: dict[str, Any]) -> bytes:
        await may_answer.wait()
        return b"1"

    peer.sandbox.services = {"ask": serve}
    send = asyncio.get_running_loop().sock_sendall
    line = b'{"jsonrpc":"2.0","method":"ask","id":"%s","params":{"a":"' + b"x" * 200_000 + b'"}}\n'
    for key in (b"a", b"b", b"c"):
        await send(peer.sock, line % key)
    refused = json.loads(await peer.asked())
    assert (refused["id"], refused["error"]["data"]["code"]) == ("c", "policy_refused")
    assert door.HELD._total > 400_000
    may_answer.set()
    answered = await peer.asked()
    while answered.count(b"\n") < 2:
        answered += await peer.asked()
    assert door.HELD._total == 0
    call = peer.call()
    await send(peer.sock, line.replace(b'"%s"', b'"' + b"i" * 101 + b'"'))
    with pytest.raises(SandboxDiedInside, match="invalid message"):
        await call


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","method":"aenv/environment","id":"1","params":{"a":[%s]}}\n',
        b'{"jsonrpc":"2.0","id":1,"error":{"message":"m","data":{"a":[%s]}}}\n',
    ],
)
async def test_what_takes_much_memory_to_read_is_not_read(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """Invariant 7: 256 MiB of empty lists would take 5 GiB of a host."""
    monkeypatch.setattr(door, "MAX_REQUEST_VALUES", 1000)
    call = peer.call()
    await peer.asked()
    await asyncio.get_running_loop().sock_sendall(peer.sock, line % b",".join([b"[]"] * 600))
    with pytest.raises(SandboxDiedInside, match="invalid"):
        await call


def test_a_result_has_a_limit_of_values() -> None:
    """Invariant 7: as above, for runners and drivers; texts may be as long as before."""
    with pytest.raises(ValueError, match="the limit is 10"):
        base.read_json(b"[[],[],[],[],[],[]]", 10)
    assert base.read_json(b'{"a":"' + b"x" * 1000 + b'"}', 10) == {"a": "x" * 1000}


async def test_the_requests_of_a_runtime_have_a_limit(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: each takes memory of the host, which others share."""
    monkeypatch.setattr(door, "MAX_REQUESTS", 3)
    may_answer = asyncio.Event()

    async def serve(_: dict[str, Any]) -> bytes:
        await may_answer.wait()
        return b"1"

    peer.sandbox.services = {"ask": serve}
    line = b'{"jsonrpc":"2.0","method":"ask","id":"%s","params":{}}\n'
    for key in (b"a", b"b", b"a", b"c", b"d"):
        peer.sock.send(line % key)
    refused = b""
    while refused.count(b"\n") < 2:
        refused += await peer.asked()
    answers = [json.loads(one) for one in refused.splitlines()]
    assert [one["id"] for one in answers] == ["a", "d"], "a repeated id, and one too many"
    assert {one["error"]["data"]["code"] for one in answers} == {"policy_refused"}
    may_answer.set()
    assert (await peer.asked()).count(b'"result":1') >= 1
    peer.sock.send(line % b"e")
    assert b'"id":"e","result":1' in await peer.asked()


async def test_a_runtime_that_asks_and_does_not_read_is_ended(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: the answers would fill the memory of the host."""
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 1 << 20)

    async def serve(_: dict[str, Any]) -> bytes:
        return b'"' + b"x" * 500_000 + b'"'

    peer.sandbox.services = {"ask": serve}
    ended: asyncio.Future[EndCause] = asyncio.get_running_loop().create_future()
    peer.sandbox.on_end(ended.set_result)
    for number in range(100):
        if not ended.done():
            peer.sock.send(b'{"jsonrpc":"2.0","method":"ask","id":"%d","params":{}}\n' % number)
            await asyncio.sleep(0)
    cause = await asyncio.wait_for(ended, 60)
    assert "does not read" in cause.text
    assert cause.inside is InsideCause.CONNECTION


async def test_calls_of_a_sandbox_that_does_not_read_do_not_fill_the_host(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a caller that repeats a large call would fill the memory that others need."""
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(door, "STALLED_S", 0.05)
    params = b'{"text":"' + b"x" * 4_000_000 + b'"}'
    async with asyncio.TaskGroup() as group:
        first = group.create_task(peer.sandbox.request_json("ping", params, deadline_s=30))
        await asyncio.sleep(0)
        for _ in range(20):
            with pytest.raises(CallOutcomeUnknown, match="has not read"):
                await peer.sandbox.request_json("ping", params, deadline_s=30)
        small = peer.call()
        with pytest.raises(CallOutcomeUnknown, match="not sent"):  # so it certainly did not run
            await small
        assert len(peer.sandbox._unsent) < 5_000_000
        received = b""
        while received.count(b"\n") < 1:
            received += await peer.asked()
        peer.sock.send(b'{"jsonrpc":"2.0","id":1,"result":{}}\n')
    assert first.result() == b"{}"


async def test_large_calls_at_the_same_time_wait_for_a_sandbox_that_reads(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 1 << 20)
    params = b'{"text":"' + b"x" * 4_000_000 + b'"}'
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(peer.sandbox.request_json("ping", params, deadline_s=30))
            for _ in range(20)
        ]
        given_up = group.create_task(peer.sandbox.request_json("ping", params, deadline_s=30))
        await asyncio.sleep(0)
        given_up.cancel()
        received = b""
        for number in range(1, 21):
            while b"\n" not in received:
                assert len(peer.sandbox._unsent) < 5_000_000
                received += await peer.asked()
            line, _, received = received.partition(b"\n")
            assert b'"id":%d,' % number in line[:40]
            peer.sock.send(b'{"jsonrpc":"2.0","id":%d,"result":%d}\n' % (number, number))
    assert [call.result() for call in calls] == [b"%d" % number for number in range(1, 21)]
    peer.call()
    assert b'"id":21,' in await peer.asked(), "nothing of the call that was given up was sent"


async def test_calls_that_wait_to_be_sent_end_with_their_sandbox(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 1 << 20)
    params = b'{"text":"' + b"x" * 4_000_000 + b'"}'
    calls = [
        asyncio.create_task(peer.sandbox.request_json("ping", params, deadline_s=30))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    peer.sandbox.end(EndCause("it was released"))
    for call in calls:
        with pytest.raises(SandboxLost, match="it was released"):
            await call


async def test_a_large_call_ends_no_runtime_that_asks_meanwhile(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 1 << 20)

    async def serve(_: dict[str, Any]) -> bytes:
        return b"1"

    peer.sandbox.services = {"ask": serve}
    params = b'{"text":"' + b"x" * 4_000_000 + b'"}'
    call = asyncio.create_task(peer.sandbox.request_json("ping", params, deadline_s=30))
    await asyncio.sleep(0)
    peer.sock.send(b'{"jsonrpc":"2.0","method":"ask","id":"a","params":{}}\n')
    received = b""
    while received.count(b"\n") < 2:
        received += await peer.asked()
    assert received.endswith(b'"id":"a","result":1}\n')
    peer.sock.send(b'{"jsonrpc":"2.0","id":1,"result":{}}\n')
    assert await call == b"{}"


async def test_what_the_socket_does_not_take_at_once_is_sent_later(peer: Peer) -> None:
    params = b'{"text":"' + b"x" * 4_000_000 + b'"}'
    call = asyncio.create_task(peer.sandbox.request_json("ping", params, deadline_s=30))
    cancelled = peer.call()
    await asyncio.sleep(0)
    cancelled.cancel()
    received = b""
    while received.count(b"\n") < 3:
        received += await peer.asked()
    lines = received.split(b"\n")
    assert (len(lines[0]) > len(params), b'"id":2' in lines[1]) == (True, True)
    assert b"cancelled" in lines[2]
    peer.sock.send(b'{"jsonrpc":"2.0","id":1,"result":{}}\n')
    assert await call == b"{}"


async def test_the_end_of_the_connection_is_told_with_its_cause(peer: Peer) -> None:
    call = peer.call()
    await peer.asked()
    peer.sock.close()
    with pytest.raises(SandboxLost, match="its process ended"):
        await call
    with pytest.raises(SandboxLost):
        await peer.call()


async def test_a_sandbox_that_says_why_it_hangs_up_is_quoted(peer: Peer) -> None:
    async def never() -> str:
        return str(await asyncio.get_running_loop().create_future())

    peer.sandbox._find_cause = never  # the launcher knows of no end
    peer.sandbox._cause_wait_s = 0.01
    call = peer.call()
    await peer.asked()
    peer.sock.send(
        b'{"jsonrpc":"2.0","error":{"code":-32000,"message":"RLIMIT_NPROC is 1024"},"id":null}\n'
    )
    peer.sock.close()
    with pytest.raises(SandboxLost, match="RLIMIT_NPROC is 1024"):
        await call


# --- what a sandbox may say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "fabric_unavailable", "sandbox_lost", "instance_expired", "capacity_exceeded",
        "sandbox_start_failed", "?",
    ],
)  # fmt: skip
def test_a_sandbox_cannot_report_an_infrastructure_failure(code: str) -> None:
    """Invariant 14: code of an agent may speak for it, and would void the episode."""
    data = {"code": code, "message": "away"}
    error = reported_by_sandbox(data, "tools/call", instance_id="i-1")
    assert isinstance(error, SandboxDiedInside)
    assert not is_infrastructure(error)
    assert error.died_of is InsideCause.CONNECTION


@pytest.mark.parametrize(
    ("code", "method"),
    [
        ("call_outcome_unknown", "tools/call"), ("function_failed", "aenv/reward"),
        ("tool_timeout", "tools/call"), ("capacity_exceeded", "aenv/port_open"),
        ("reset_failed", "tools/call"), ("config_error", "aenv/reset"),
    ],
)  # fmt: skip
def test_what_the_runtime_reports_keeps_its_type(code: str, method: str) -> None:
    assert reported_by_sandbox({"code": code, "message": "m"}, method).code == code


def test_of_an_error_only_texts_are_read_and_they_have_a_limit() -> None:
    """Invariants 7 and 12: drivers collect errors; a time to wait is not the sandbox's to say."""
    wide = {"code": "capacity_exceeded", "message": "x" * 10_000_000, "retry_after_s": 1e400}
    error = reported_by_sandbox(wide | {"hint": ["h"], "instance_id": "i-2"}, "aenv/port_open")
    assert isinstance(error, CapacityExceeded)
    assert (error.retry_after_s, error.hint) == (1.0, "['h']")
    assert len(error.message) < 101_000
    assert error.message.endswith("[9900000 characters cut]")
    error = reported_by_sandbox({"code": "reset_failed", "instance_id": "i-2"}, "aenv/reset")
    assert isinstance(error, ResetFailed)
    assert error.instance_id is None


@pytest.mark.parametrize("method", ["tools/call", "aenv/call_tools", "resources/read"])
@pytest.mark.parametrize("code", ["config_error", "policy_refused", "unauthorized", "forbidden"])
def test_a_tool_cannot_report_that_its_caller_is_wrong(code: str, method: str) -> None:
    """Invariant 14: trainers stop at such an error, and agents could cause it."""
    error = reported_by_sandbox({"code": code, "message": "m", "hint": "h"}, method)
    assert type(error) is FunctionFailed
    assert (error.message, error.hint) == (f"{code}: m", "h")


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("tools/call", b"{]"),
        ("tools/call", b'{"content":7}'),
        ("tools/call", b'{"content":[{"type":"text","text":5}]}'),
        ("tools/call", b'{"content":[],"structuredContent":[1]}'),
        ("tools/call", b'{"content":[],"_meta":5}'),
        ("tools/call", b'{"content":[],"structuredContent":{},"_meta":{"aenv/wrapped":true}}'),
        ("tools/list", b'{"tools":[{}]}'),
        ("tools/list", b'{"tools":[{"name":7,"inputSchema":{}}]}'),
        ("tools/list", b'{"tools":{}}'),
        ("prompts/list", b'{"prompts":[7]}'),
        ("aenv/reward", b"[]"),
        ("aenv/reward", b'{"data":"' + b"x" * 11_000_000 + b'"}'),
        ("aenv/exec", b'{"data":{"stdout":"%"}}'),
        ("aenv/read_file", b'{"data":null}'),
    ],
)
def test_a_malformed_result_is_typed(method: str, text: bytes) -> None:
    """Invariant 14: a sandbox whose results cannot be read does not void its episode."""
    with pytest.raises(SandboxDiedInside, match="malformed"):
        wire.decode_json(method, text)


PROGRESS = (
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p1",%s}}\n'
)
NOTED = (
    b'{"jsonrpc":"2.0","method":"notifications/aenv/caller","params":{"progressToken":"p1",%s}}\n'
)


async def reports_of(peer: Peer, *lines: bytes) -> list[Any]:
    """Return what a call is told of lines that its sandbox sends before the answer."""
    found: list[Any] = []
    call = asyncio.create_task(
        peer.sandbox.request_json(
            "ping", b"{}", deadline_s=30, on_progress=lambda *report: found.append(report)
        )
    )
    await peer.asked()
    for line in (*lines, b'{"jsonrpc":"2.0","id":1,"result":{}}\n'):
        await asyncio.get_running_loop().sock_sendall(peer.sock, line)
    await call
    return found


async def test_a_call_is_told_of_progress_and_notes(peer: Peer) -> None:
    note = b'"note":{"method":"notifications/message","params":{"level":"info"}}'
    found = await reports_of(peer, PROGRESS % b'"progress":1,"message":"half"', NOTED % note)
    assert found[0] == (1, None, "half")
    assert found[1][:2] == (None, None)
    assert json.loads(found[1][2])["method"] == "notifications/message"


@pytest.mark.parametrize(
    "line",
    [
        PROGRESS % b'"progress":null,"message":"no JSON"',
        PROGRESS % b'"progress":"1"',
        PROGRESS % b'"progress":1,"message":[1]',
        PROGRESS % b'"progress":1,"total":{}',
        NOTED % b'"note":7',
        NOTED % b'"note":{"params":{}}',
        NOTED % b'"note":{"method":"a","params":[1]}',
        NOTED % b'"other":1',
    ],
)
async def test_a_report_that_is_none_ends_its_sandbox(peer: Peer, line: bytes) -> None:
    """Invariant 14: the host would fail at it, which would void the episode."""
    with pytest.raises(SandboxDiedInside, match="invalid message"):
        await reports_of(peer, line)


async def test_a_long_report_is_left_out(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariants 7 and 12: hosts hold many for slow callers, and what is missing is named."""
    monkeypatch.setattr(door, "MAX_REPORT_BYTES", 500)
    note = b'"note":{"method":"elicitation/create","question":"q","params":{"message":"%s"}}'
    found = await reports_of(
        peer,
        PROGRESS % (b'"progress":1,"message":"%s"' % (b"x" * 600)),
        NOTED % (note % (b"x" * 600)),
    )
    assert found[0][0] == 1
    assert "was left out" in found[0][2]
    told = json.loads(found[1][2])
    assert told["method"] == "notifications/message"
    assert "was left out" in told["params"]["data"]["msg"]
