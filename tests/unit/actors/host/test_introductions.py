"""Callers on a node, introduced to instances by their host: keys, roles, idle times."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from aenv_ray.actors.calls.call_batching import call_name
from aenv_ray.actors.calls.introduction import ActivityReport, DoorClaim, Introduction, line_of
from aenv_ray.actors.calls.local_door import _CallReporter, present
from aenv_ray.actors.host import introductions
from aenv_ray.actors.host.host import Host
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import (
    CallOutcomeUnknown,
    CapacityExceeded,
    ConfigError,
    InstanceExpired,
    InstanceReleased,
)
from aenv_ray.models import ActorDensity, InstanceSpec
from aenv_ray.project.project import Project
from aenv_ray.runtime.door.roles import DoorRole
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.fake_clock import FakeClock
from tests.unit.actors.host.spy_engine import HOST, SpyEngine

Specs = Callable[..., InstanceSpec]
Start = Callable[..., Awaitable[InstanceSpec]]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path that is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="aenv-i", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(SystemClock().now())  # the engine has a clock of its own


@pytest.fixture
async def host(
    directory: Path, source: Project, engine: SpyEngine, clock: FakeClock
) -> AsyncIterator[Host]:
    made = Host(
        HOST, node_id="n", density=ActorDensity.SHARED, make_engine=lambda _: engine,
        store=MemoryInstanceStore(), projects_dir=directory / "projects", clock=clock,
        introductions_path=directory / "h" / "host",
    )  # fmt: skip
    await made.put_project(source.digest, source.archive())
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def started(host: Host, spec: Specs) -> Start:
    async def start(**fields: object) -> InstanceSpec:
        made = spec(ttl_s=100_000.0, **fields)
        await host.start([made])
        return made

    return start


class Caller:
    """An introduced caller."""

    def __init__(self, host: socket.socket, door: socket.socket) -> None:
        self.host, self.door = host, door

    @classmethod
    async def introduced(cls, introduction: Introduction, spec: InstanceSpec) -> Caller:
        return cls(*await present(introduction, DoorClaim(spec.instance_id, introduction.key)))

    async def report(self, *, calls: int = 0, is_busy: bool, quiet_s: float = 0.0) -> None:
        """Report, and wait until the host has counted it."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.host, line_of(ActivityReport(7, calls, is_busy, quiet_s)))
        assert json.loads(await loop.sock_recv(self.host, 1000)) == {"counted": 7}

    def close(self) -> None:
        self.host.close()
        self.door.close()


@pytest.fixture
async def caller(host: Host, started: Start) -> AsyncIterator[Caller]:
    """A caller of an instance that ends when it is idle for ten seconds."""
    spec = await started(idle_timeout_s=10.0)
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    assert introduction.idle_timeout_s == 10.0
    made = await Caller.introduced(introduction, spec)
    yield made
    made.close()


async def live(host: Host) -> int:
    await host.sweep()
    return len(await host.instances())


async def gone(host: Host) -> None:
    """Return once the host has noticed that no caller is connected."""
    async with asyncio.timeout(30):
        while host._introductions and host._introductions._callers:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_an_instance_is_not_idle_while_its_caller_is_busy(
    host: Host, caller: Caller, clock: FakeClock
) -> None:
    """Calls that the host does not see count, from the last one on."""
    await caller.report(is_busy=True)
    clock.advance(100.0)
    assert await live(host) == 1
    await caller.report(calls=3, is_busy=False, quiet_s=4.0)
    clock.advance(5.0)
    assert await live(host) == 1
    (info,) = await host.instances()
    assert info.calls == 3
    clock.advance(2.0)
    assert await live(host) == 0
    with pytest.raises(InstanceExpired, match="idle"):
        await host.renew(info.id, 60.0)


async def unobserved(host: Host) -> None:
    """Return once the host expects no call of the callers that are gone."""
    await gone(host)
    async with asyncio.timeout(30):
        while any(life.calls_under_way for life in host._table.lives.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_caller_that_dies_is_not_busy_any_more(
    host: Host, caller: Caller, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: a dead caller keeps no instance alive."""
    monkeypatch.setattr(introductions, "_ASK_S", 0.0)
    await caller.report(is_busy=True)
    clock.advance(100.0)
    caller.close()
    await unobserved(host)
    assert await live(host) == 1
    clock.advance(11.0)
    assert await live(host) == 0


@pytest.mark.parametrize("answers", ["at once", "late"])
async def test_a_call_outlives_its_caller(
    host: Host,
    caller: Caller,
    clock: FakeClock,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
) -> None:
    """Its client may ask another gateway replica for the outcome, and how long it runs is open."""
    monkeypatch.setattr(introductions, "_ASK_S", 0.0)
    asked: list[str] = []
    request = DoorSandbox.request

    async def noted(self: DoorSandbox, method: str, *args: object, **options: float) -> object:
        asked.append(method)
        if answers == "late" and len(asked) == 1:
            raise CallOutcomeUnknown("a tool keeps the interpreter busy")
        return await request(self, method, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DoorSandbox, "request", noted)
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    params = {"arguments": {"command": f"cat {pipe}"}, "_meta": {"aenv/call_id": "mine"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "aenv/exec", "params": params}
    await caller.report(is_busy=True)
    await asyncio.get_running_loop().sock_sendall(caller.door, json.dumps(message).encode() + b"\n")
    with await asyncio.to_thread(pipe.open, "w"):
        caller.close()
        await gone(host)
        async with asyncio.timeout(30):
            while len(asked) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        clock.advance(100.0)
        assert await live(host) == 1
    await unobserved(host)
    clock.advance(9.0)
    assert await live(host) == 1
    clock.advance(2.0)
    assert await live(host) == 0


async def test_callers_that_leave_do_not_pile_up(
    host: Host, started: Start, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a runtime breaks all connections in mid-call and says that a call runs on."""
    calls, asked = 1, 0

    async def request(self: DoorSandbox, method: str, *args: object, **options: float) -> object:
        nonlocal asked
        asked += 1
        return {"calls": calls}

    monkeypatch.setattr(introductions, "_ASK_S", 0.0)
    monkeypatch.setattr(DoorSandbox, "request", request)
    spec = await started(idle_timeout_s=10.0)
    assert host._introductions is not None
    before = len(host._introductions._tasks)
    for number in range(20):
        introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
        assert introduction is not None
        caller = await Caller.introduced(introduction, spec)
        await caller.report(is_busy=True)
        caller.close()
        await gone(host)
        asked_before = asked
        async with asyncio.timeout(30):
            while asked < asked_before + 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert len(host._introductions._tasks) == before + 1, number
    clock.advance(100.0)
    assert await live(host) == 1
    calls = 0
    await unobserved(host)
    clock.advance(11.0)
    assert await live(host) == 0


async def test_a_caller_that_leaves_late_is_asked_for_once_more(
    host: Host, caller: Caller, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime may not have read the last caller's calls when it answered for an earlier one."""
    monkeypatch.setattr(introductions, "_ASK_S", 0.0)
    (info,) = await host.instances()
    introduction = await host.introduce(info.id, DoorRole.OWNER)
    assert introduction is not None
    late = Caller(*await present(introduction, DoorClaim(info.id, introduction.key)))
    await late.report(is_busy=True)
    answers, asked = asyncio.Queue[int](), asyncio.Queue[None]()

    async def request(self: DoorSandbox, method: str, *args: object, **options: float) -> object:
        asked.put_nowait(None)
        return {"calls": await answers.get()}

    monkeypatch.setattr(DoorSandbox, "request", request)
    await caller.report(is_busy=True)
    async with asyncio.timeout(30):
        caller.close()
        await asked.get()
        late.close()
        await gone(host)
        answers.put_nowait(0)
        await asked.get()
        clock.advance(100.0)
        assert await live(host) == 1
        answers.put_nowait(0)
    await unobserved(host)
    clock.advance(11.0)
    assert await live(host) == 0


async def test_an_introduction_is_not_activity(
    host: Host, caller: Caller, clock: FakeClock
) -> None:
    del caller
    clock.advance(11.0)
    assert await live(host) == 0


async def test_a_key_expires(host: Host, started: Start, clock: FakeClock) -> None:
    spec = await started()
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    clock.advance(introductions.KEY_S + 1.0)
    with pytest.raises(ConnectionRefusedError):
        await Caller.introduced(introduction, spec)


async def test_a_key_opens_its_instance_and_only_once(host: Host, started: Start) -> None:
    """Invariant 15: one that leaked from a caller's memory later is worthless."""
    own, other = await started(), await started()
    introduction = await host.introduce(own.instance_id, DoorRole.OWNER)
    assert introduction is not None
    with pytest.raises(ConnectionRefusedError):
        await Caller.introduced(introduction, other)
    with pytest.raises(ConnectionRefusedError):  # the try has used it up
        await Caller.introduced(introduction, own)
    introduction = await host.introduce(own.instance_id, DoorRole.OWNER)
    assert introduction is not None
    caller = await Caller.introduced(introduction, own)
    with pytest.raises(ConnectionRefusedError):
        await Caller.introduced(introduction, own)
    caller.close()


async def test_an_instance_that_ended_has_no_introductions(host: Host, started: Start) -> None:
    """Neither a new one, nor the use of an earlier one."""
    spec = await started()
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    await host.release([spec.instance_id])
    with pytest.raises(ConnectionRefusedError):
        await Caller.introduced(introduction, spec)
    with pytest.raises(InstanceReleased):
        await host.introduce(spec.instance_id, DoorRole.OWNER)


async def test_an_instance_has_a_limited_number_of_callers(
    host: Host, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: each costs threads in the sandbox; who is refused calls through the host."""
    monkeypatch.setattr(introductions, "MAX_CALLERS", 1)
    spec = await started()
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    caller = await Caller.introduced(introduction, spec)
    with pytest.raises(CapacityExceeded):
        await host.introduce(spec.instance_id, DoorRole.OWNER)
    caller.close()


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1, 2]\n", b'["probe-1"]\n', b"{}\n", b"\xff\n"])
async def test_nonsense_is_not_introduced(host: Host, started: Start, line: bytes) -> None:
    spec = await started()
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, introduction.path)
        await loop.sock_sendall(sock, line)
        assert await loop.sock_recv(sock, 10) == b""


async def test_a_cancellation_reaches_the_callers_of_its_instance(
    host: Host, caller: Caller, started: Start
) -> None:
    """Any process may cancel a call, whichever process made it; keys of batches are not names."""
    other = await started()
    introduction = await host.introduce(other.instance_id, DoorRole.OWNER)
    assert introduction is not None
    another = await Caller.introduced(introduction, other)
    await another.report(is_busy=False)
    (own,) = {info.id for info in await host.instances()} - {other.instance_id}
    host.cancel_direct(["key-1", call_name(own, "named"), call_name("gone-1", "named")])
    host.cancel_direct([call_name(other.instance_id, "other")])
    loop = asyncio.get_running_loop()
    for each, instance_id, name in ((caller, own, "named"), (another, other.instance_id, "other")):
        line = await loop.sock_recv(each.host, 1000)
        assert json.loads(line) == {"cancel": call_name(instance_id, name)}
    another.close()


async def test_a_caller_learns_that_an_engine_has_no_doors(
    host: Host, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask again."""

    async def open_door(self: DoorSandbox, role: DoorRole) -> socket.socket:
        return await Sandbox.open_door(self, role)

    monkeypatch.setattr(DoorSandbox, "open_door", open_door)
    spec = await started()
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    with pytest.raises(ConfigError, match="only through its host"):
        await Caller.introduced(introduction, spec)


async def test_the_socket_is_private_and_goes_with_the_host(
    host: Host, started: Start, directory: Path
) -> None:
    spec = await started()
    await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert os.stat(directory / "h").st_mode & 0o777 == 0o700
    assert os.listdir(directory / "h") == ["host"]
    await host.close()
    assert os.listdir(directory / "h") == []


async def test_the_first_call_after_a_long_pause_is_the_hosts() -> None:
    """The host may be about to end the instance: only it can decide which comes first."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = _CallReporter(ours, 10.0, lambda: None)
    link._last_call -= 6.0
    assert not link.begin()
    assert link.begin()  # the host knows of the call before
    link._last_call -= 6.0
    assert link.begin()  # another is running
    link.close()
    theirs.close()


async def test_calls_of_a_closed_connection_are_counted(host: Host, started: Start) -> None:
    """They are reported once a second, and the rest when the connection closes."""
    spec = await started()
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    caller = await Caller.introduced(introduction, spec)
    link = _CallReporter(caller.host, None, lambda: None)
    for _ in range(10):
        assert link.begin()
        link.end()
    link.close()
    await gone(host)
    (info,) = await host.instances()
    assert info.calls == 10
    caller.close()
