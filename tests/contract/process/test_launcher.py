"""The process engine when the launcher, its owner, a host or a template dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aenv_ray import daemon
from aenv_ray.engines import door
from aenv_ray.engines.base import Sandbox, SandboxSpec
from aenv_ray.engines.node import caches
from aenv_ray.engines.node.directory import short_name
from aenv_ray.engines.process import engine as process_engine
from aenv_ray.engines.process.engine import ProcessEngine
from aenv_ray.engines.process.logs import LOG_LIMIT_BYTES
from aenv_ray.errors import (
    CallOutcomeUnknown,
    ConfigError,
    FabricUnavailable,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.runtime.door.roles import DoorRole
from aenv_ray.testing.contract_bench import Bench, call, evaluate, eventually, value_of
from tests.contract.engines import filled
from tests.contract.process.node import Node
from tests.contract.processes import children, signal_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")
HOST = HostId("host-faults")


@pytest.fixture
async def bench(own_node: Node, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = own_node.engine(HOST)
    yield Bench(engine, tmp_path)
    await engine.close()


def _template_pids(node: Node) -> list[int]:
    return children(node.launcher_pids())


async def test_the_launcher_has_its_own_session(bench: Bench, own_node: Node) -> None:
    """Ray kills a worker's process group, and the launcher is not in it."""
    sandbox = await bench.start()
    (launcher,) = own_node.launcher_pids()
    assert os.getsid(launcher) not in (os.getsid(0), os.getpid())
    fields = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    opened = [os.readlink(fd) for fd in Path(f"/proc/{launcher}/fd").iterdir()]
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
    assert not {target for target in opened if target.startswith(("socket:", "pipe:"))} & mine
    await bench.engine.stop([sandbox.instance_id])


async def test_what_a_template_uses_stays_in_the_caches(
    bench: Bench, own_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the launcher has ended, however full the cache is, and even if the host has died."""
    monkeypatch.setattr(caches, "LEAST_AGE_S", -1.0)
    project = bench.contract_project({"network": "none"})
    caches.note_use(project)
    sandbox = await bench.start(project)
    assert caches.collect(project.parent, 0, 0.0) == []
    await bench.engine.close()
    assert caches.collect(project.parent, 0, 0.0) == []
    again = own_node.engine(HOST)
    assert await value_of(await again.attach(sandbox.instance_id), "echo", text="hi") == "hi"
    await again.stop([sandbox.instance_id])
    await again.close()
    signal_all(own_node.launcher_pids())
    await eventually(
        lambda: caches.collect(project.parent, 0, 0.0) == [project.name],
        "the launcher ends, and its templates with it",
    )


async def test_an_unusable_cgroup_is_reported(own_node: Node, tmp_path: Path) -> None:
    """Instances run with measured memory, and their facts say so."""
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    engine = ProcessEngine(
        HOST, runtime_dir=own_node.root / "r", data_dir=own_node.data_dir, scope="tests",
        owner_pid=os.getpid(), cgroup=tmp_path,
    )  # fmt: skip
    bench = Bench(engine, tmp_path)
    try:
        sandbox = await bench.start(bench.contract_project({"network": "none", "memory": "1G"}))
        assert "the launcher looks" in sandbox.isolation.limits["memory"]
        (missing,) = [text for text in sandbox.isolation.missing if "cgroup" in text]
        assert "its controllers are hugetlb" in missing
        await engine.stop([sandbox.instance_id])
    finally:
        await engine.close()


async def test_engines_of_a_node_share_one_launcher(own_node: Node, tmp_path: Path) -> None:
    engines = [own_node.engine(HostId(f"host-{index}")) for index in range(6)]
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(Bench(engine, tmp_path).start()) for engine in engines]
    assert len(own_node.launcher_pids()) == 1
    assert len(_template_pids(own_node)) == 1
    for engine, start in zip(engines, starts, strict=True):
        (running,) = await engine.running()
        assert running.instance_id == start.result().instance_id
        await engine.stop([running.instance_id])
        await engine.close()


async def test_everything_ends_with_the_launcher(bench: Bench, own_node: Node) -> None:
    """Invariants 2 and 3: typed, with the cause, and nothing lives on."""
    sandbox, idle = await bench.start(), await bench.start()
    under_way = asyncio.create_task(call(sandbox, "nap", {"seconds": 60.0}))
    await value_of(sandbox, "echo", text="up")
    (launcher,) = own_node.launcher_pids()
    os.kill(launcher, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="launcher"):
        await under_way
    await eventually(lambda: idle.end_cause is not None, "the idle one knows too")
    await eventually(lambda: not own_node.mentions(), "every process is gone")
    again = await bench.start()
    assert await value_of(again, "echo", text="a new launcher") == "a new launcher"
    await bench.engine.stop([sandbox.instance_id, again.instance_id])


async def test_an_end_that_cannot_be_recorded_ends_no_other_sandbox(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 2: the disk of the node may be full."""

    def fail(_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    one, other = await bench.start(), await bench.start()
    one.on_end(fail)
    with pytest.raises(SandboxLost):
        await evaluate(one, "import os; os._exit(7)")
    await eventually(lambda: f"the end of {one.instance_id}" in caplog.text, "it is logged")
    assert await value_of(other, "echo", text="it runs on") == "it runs on"
    assert other.end_cause is None
    await bench.engine.stop([other.instance_id])


async def _speak(node: Node, *lines: bytes) -> socket.socket:
    """Connect to the launcher as an unknown host, and send a message."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(node.directory / "launcher.sock"))
    if lines:
        sock.sendall(b"".join(line + b"\n" for line in lines))
    return sock


async def test_invalid_messages_of_a_peer_affect_no_other(walled: Bench, walled_node: Node) -> None:
    sandbox = await walled.start()
    for line in (b"{", b"[]", b"{}", b'{"op":"start","seq":1,"items":[{}]}', b"\xff"):
        (await _speak(walled_node, line)).close()
    assert await value_of(sandbox, "echo", text="hi") == "hi"
    await walled.engine.stop([sandbox.instance_id])


async def test_a_host_that_disconnects_during_an_answer_affects_no_other(
    walled: Bench, walled_node: Node
) -> None:
    """Invariant 2: what happens to one host does not reach the others' sandboxes."""
    sandbox = await walled.start()
    (launcher,) = walled_node.launcher_pids()
    hello = json.dumps({"op": "hello", "seq": 1, "host": "other", "owner_pid": 0}).encode()
    asked = [json.dumps({"op": "list", "seq": n}).encode() for n in range(2, 40)]
    for _ in range(20):
        os.kill(launcher, signal.SIGSTOP)
        (await _speak(walled_node, hello, *asked)).close()
        os.kill(launcher, signal.SIGCONT)
    assert await value_of(sandbox, "echo", text="hi") == "hi"
    assert walled_node.launcher_pids() == [launcher]
    await walled.engine.stop([sandbox.instance_id])


async def test_more_connections_than_descriptors_affect_no_sandbox(
    walled: Bench, walled_node: Node
) -> None:
    sandbox = await walled.start()
    (launcher,) = walled_node.launcher_pids()
    opened = len(list(Path(f"/proc/{launcher}/fd").iterdir()))
    limits = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (opened + 3, limits[1]))
    peers = [await _speak(walled_node) for _ in range(12)]
    assert select.select(peers, [], [], 30.0)[0], "the launcher refused none"
    for peer in peers:
        peer.close()
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, limits)
    assert await value_of(sandbox, "echo", text="hi") == "hi"
    await walled.engine.stop([sandbox.instance_id])


async def test_a_sandbox_that_accepts_no_connections_delays_no_other(
    bench: Bench, own_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a host serves thousands of others in the same event loop."""
    monkeypatch.setattr(door, "FULL_S", 0.2)
    sandbox = await bench.start()
    stopped = own_node.sandbox_pids()
    signal_all(stopped, signal.SIGSTOP)
    rescue = threading.Timer(20.0, signal_all, (stopped, signal.SIGCONT))
    rescue.start()
    path = own_node.directory / "s" / short_name(sandbox.instance_id)
    later = own_node.engine(HOST)
    try:
        with filled(str(path)):
            with pytest.raises(BlockingIOError):
                await sandbox.open_door(DoorRole.OWNER)
            await bench.engine.close()
            with pytest.raises(FabricUnavailable, match="accepts no connection now"):
                await later.attach(sandbox.instance_id)
        assert rescue.is_alive()
    finally:
        rescue.cancel()
        signal_all(stopped, signal.SIGCONT)
    assert await value_of(await later.attach(sandbox.instance_id), "echo", text="hi") == "hi"
    await later.stop([sandbox.instance_id])
    await later.close()


async def test_a_sandbox_that_never_accepts_a_connection_is_ended(
    bench: Bench, own_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: its start failed, so no one else would end it."""

    async def refuse(_: Path) -> socket.socket:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process_engine, "connect_to_door", refuse)
    with pytest.raises(FabricUnavailable, match="accepts no connection now"):
        await bench.start()
    await eventually(lambda: own_node.sandbox_pids() == [], "its process ends")


async def test_more_callers_at_once_than_can_wait_are_all_served(
    bench: Bench, own_node: Node
) -> None:
    sandbox = await bench.start()
    stopped = own_node.sandbox_pids()
    signal_all(stopped, signal.SIGSTOP)
    async with asyncio.TaskGroup() as group:
        opening = [group.create_task(sandbox.open_door(DoorRole.OWNER)) for _ in range(40)]
        await asyncio.sleep(0)
        signal_all(stopped, signal.SIGCONT)
    for one in opening:
        one.result().close()
    await bench.engine.stop([sandbox.instance_id])


async def test_a_sandbox_that_does_not_read_does_not_fill_its_hosts_memory(
    bench: Bench, own_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: calls that it does not read are refused, and accepted once it reads again."""
    monkeypatch.setattr(door, "STALLED_S", 0.2)
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 8 << 20)
    sandbox = await bench.start()
    text = "x" * (door.MAX_UNREAD_BYTES // 2)
    stopped = own_node.sandbox_pids()
    signal_all(stopped, signal.SIGSTOP)
    first = asyncio.create_task(value_of(sandbox, "echo", text=text))
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(CallOutcomeUnknown, match="has not read"):
            await value_of(sandbox, "echo", text=text * 2)
    signal_all(stopped, signal.SIGCONT)
    assert len(await first) == len(text)
    monkeypatch.setattr(door, "STALLED_S", 30.0)
    texts = await asyncio.gather(*(value_of(sandbox, "echo", text=text) for _ in range(6)))
    assert [len(each) for each in texts] == [len(text)] * 6
    await bench.engine.stop([sandbox.instance_id])


async def test_code_that_writes_to_the_launchers_socket_ends_only_itself(walled: Bench) -> None:
    sandbox = await walled.start()
    for words in ("hello", '{"exited": "zz"}', '{"spare": 1}', "[]"):
        source = (
            "import os, socket, stat\n"
            "for fd in range(3, 64):\n"
            "    try:\n"
            "        if stat.S_ISSOCK(os.fstat(fd).st_mode):\n"
            f"            os.write(fd, {words.encode()!r})\n"
            "    except OSError:\n"
            "        pass\n"
            "from aenv_ray.runtime import register_tool\n"
            "@register_tool\n"
            "def one() -> int:\n"
            "    return 1\n"
        )
        with contextlib.suppress(SandboxStartFailed):
            odd = await walled.start(walled.project({"tools.py": source}))
            await walled.engine.stop([odd.instance_id])
        assert await value_of(sandbox, "echo", text="hi") == "hi"
    await walled.engine.stop([sandbox.instance_id])


@pytest.mark.parametrize("variables", [{"A": "x" * 200_000}, {"A": "a\0b"}], ids=["long", "NUL"])
async def test_invalid_variables_fail_only_their_own_start(
    walled: Bench, variables: dict[str, str]
) -> None:
    sandbox = await walled.start()
    config = {"deployConfig": {"environmentVariables": variables}}
    source = "from aenv_ray.runtime import register_tool\n@register_tool\ndef one() -> int: ...\n"
    with pytest.raises((SandboxStartFailed, ConfigError)):
        await walled.start(walled.project({"tools.py": source}, config=config))
    assert await value_of(sandbox, "echo", text="hi") == "hi"
    await walled.engine.stop([sandbox.instance_id])


async def test_a_template_that_ended_is_replaced(bench: Bench, own_node: Node) -> None:
    """Idle for long, or killed: the next start does not notice."""
    sandbox = await bench.start()
    await bench.engine.stop([sandbox.instance_id])
    signal_all(_template_pids(own_node))
    await eventually(lambda: not _template_pids(own_node), "the template is gone")
    group = await bench.engine.start_many([bench.spec(), bench.spec()])
    assert [started.start_mode for started in group if isinstance(started, Sandbox)] == [
        "template", "template"
    ]  # fmt: skip
    await bench.engine.stop([s.instance_id for s in group if isinstance(s, Sandbox)])


async def test_stopping_a_launcher_leaves_nothing(bench: Bench, own_node: Node) -> None:
    """Invariant 3."""
    sandbox = await bench.start()
    await value_of(sandbox, "spawn", command=["sleep", "60"], daemon=True)
    signal_all(own_node.launcher_pids(), signal.SIGTERM)
    await eventually(lambda: not own_node.mentions(), "every process is gone")
    assert own_node.left_over() == []


async def test_everything_ends_with_the_owner(own_node: Node, tmp_path: Path) -> None:
    """Invariant 3: when the raylet is gone, so is all that its node ran."""
    owner = subprocess.Popen(["sleep", "60"])
    engine = ProcessEngine(
        HOST, runtime_dir=own_node.root / "r", data_dir=own_node.data_dir, scope="tests",
        owner_pid=owner.pid, isolation="auto",
    )  # fmt: skip
    sandbox = await Bench(engine, tmp_path).start()
    owner.kill()
    owner.wait()
    await eventually(lambda: sandbox.end_cause is not None, "the sandbox is lost")
    await eventually(lambda: not own_node.mentions(), "every process is gone")
    await engine.close()


def _launch(node: Node, grace_s: float) -> None:
    """Start the launcher of a node with its own grace period for hosts that are away."""
    command = [sys.executable, "-P", "-m", "aenv_ray.engines.process.launcher"]
    subprocess.run(
        [*command, str(node.directory), str(grace_s)],
        env=daemon.environment(), check=True, timeout=30,
    )  # fmt: skip


async def test_a_host_that_stays_away_loses_its_sandboxes(own_node: Node, tmp_path: Path) -> None:
    """Invariant 3: a grace to come back within, and an end after it."""
    _launch(own_node, 1.0)
    leaves, stays = own_node.engine(HOST), own_node.engine(HostId("host-stays"))
    gone = await Bench(leaves, tmp_path).start()
    kept = await Bench(stays, tmp_path).start()
    await leaves.close()
    back = own_node.engine(HOST)
    assert [row.instance_id for row in await back.running()] == [gone.instance_id]
    assert len(own_node.sandbox_pids()) == 2
    await back.close()
    await eventually(lambda: len(own_node.sandbox_pids()) == 1, "the one without a host ended")
    assert await value_of(kept, "echo", text="mine stays") == "mine stays"
    again = own_node.engine(HOST)
    with pytest.raises(SandboxLost, match="its host is gone"):
        await again.attach(gone.instance_id)
    await stays.stop([kept.instance_id])
    await stays.close()
    await again.close()


async def test_a_reused_id_does_not_report_its_earlier_end(own_node: Node, tmp_path: Path) -> None:
    """Invariants 3 and 14: Ray repeats a start after its host was away for too long."""
    _launch(own_node, 0.5)
    first = own_node.engine(HOST)
    bench = Bench(first, tmp_path)
    spec = bench.spec()
    await first.start(spec)
    await first.close()
    await eventually(lambda: not own_node.sandbox_pids(), "its host stayed away")
    second = own_node.engine(HOST)
    await second.start(spec)
    await second.close()
    third = own_node.engine(HOST)
    adopted = await third.attach(spec.instance_id)
    assert await value_of(adopted, "echo", text="hi") == "hi"
    with pytest.raises(SandboxLost, match="closed its connection"):
        await evaluate(
            adopted,
            "import os, socket\n"
            "for fd in map(int, os.listdir('/proc/self/fd')):\n"
            "    try:\n"
            "        sock = socket.socket(fileno=os.dup(fd))\n"
            "        sock.getpeername()  # raises for the listening socket\n"
            "        sock.shutdown(socket.SHUT_RDWR)\n"
            "    except OSError: pass\n",
        )
    await third.close()


async def test_everything_of_a_template_ends_with_it(bench: Bench, own_node: Node) -> None:
    """A template that the kernel's memory killer took: typed, and the next start makes another."""
    sandbox = await bench.start()
    signal_all(_template_pids(own_node))
    await eventually(lambda: sandbox.end_cause is not None, "it is known to be lost")
    assert "template" in str(sandbox.end_cause)
    await eventually(lambda: not own_node.left_over(), "nothing is left")

    async def starts_again() -> bool:
        try:
            await bench.start()
        except SandboxStartFailed:
            return False  # the engine learns of it by the first try
        return True

    await eventually(starts_again, "another template serves")
    await bench.engine.stop([row.instance_id for row in await bench.engine.running()])


async def test_the_error_for_a_crash_has_the_end_of_the_log(walled: Bench) -> None:
    project = walled.project(
        {
            "tools.py": "import os, sys\nfrom aenv_ray.runtime import register_tool\n"
            "@register_tool\ndef crash():\n    print('the last words', flush=True)\n"
            "    os.write(2, b'and an error\\n')\n    os.kill(os.getpid(), 11) or os.abort()\n"
        }
    )
    sandbox = await walled.start(project)
    with pytest.raises(SandboxLost, match="the last words\nand an error"):
        await call(sandbox, "crash")


def _size_of_logs(node: Node) -> int:
    found = 0
    for path in (node.directory / "log").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def _sleeps(arguments: str) -> bool:
    """Whether a process with these arguments waits for something."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if arguments.encode() in (entry / "cmdline").read_bytes():
                return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    return False


async def test_output_that_nobody_reads_fills_nothing(bench: Bench, own_node: Node) -> None:
    """Logs lie in the node's memory: they are small at every moment, and keep their end."""
    source = (
        "import os, subprocess\nfrom aenv_ray.runtime import register_tool\n"
        "@register_tool\ndef shout(megabytes: int) -> int:\n"
        "    command = ['head', '-c', str(megabytes << 20), '/dev/zero']\n"
        "    return subprocess.run(command, check=True).returncode\n"
        "@register_tool\ndef crash():\n"
        "    os.write(1, b'the last words')\n    os.kill(os.getpid(), 11) or os.abort()\n"
    )
    sandbox = await bench.start(bench.project({"tools.py": source}))
    (launcher,) = own_node.launcher_pids()
    os.kill(launcher, signal.SIGSTOP)  # as if it had no time: the writer waits, or fills the memory
    shouting = asyncio.create_task(value_of(sandbox, "shout", megabytes=64))
    try:
        await eventually(
            lambda: shouting.done() or _sleeps(f"-c\0{64 << 20}\0"), "it is done, or waits"
        )
        assert _size_of_logs(own_node) < 2 * LOG_LIMIT_BYTES
    finally:
        os.kill(launcher, signal.SIGCONT)
    largest = 0
    while not shouting.done():
        largest = max(largest, _size_of_logs(own_node))
        await asyncio.wait([shouting], timeout=0.005)
    assert await shouting == 0
    assert largest < 2 * LOG_LIMIT_BYTES
    with pytest.raises(SandboxLost, match="the last words"):
        await call(sandbox, "crash")
    await eventually(lambda: not own_node.left_over(), "its log is gone")


async def test_the_error_for_a_template_that_dies_while_loading_has_the_end_of_its_log(
    walled: Bench,
) -> None:
    source = "import os\nprint('x' * 3_000_000)\nprint('the last words', flush=True)\nos.abort()\n"
    with pytest.raises(SandboxStartFailed, match="the last words"):
        await walled.start(walled.project({"tools.py": source}))


def _entries(engine: ProcessEngine) -> int:
    return sum(len(value) for value in vars(engine).values() if isinstance(value, dict))


async def test_an_engine_forgets_sandboxes_that_died(bench: Bench) -> None:
    """A host serves millions of instances; the cause of an end stays with its sandbox."""
    engine = bench.engine
    assert isinstance(engine, ProcessEngine)
    entries: set[int] = set()
    for _ in range(3):
        sandboxes = await engine.start_many([bench.spec() for _ in range(20)])
        for sandbox in sandboxes:
            assert isinstance(sandbox, Sandbox)
            with pytest.raises(SandboxLost, match="exited with code 7"):
                await evaluate(sandbox, "import os; os._exit(7)")
            assert "exited with code 7" in str(sandbox.end_cause)
            with pytest.raises(SandboxLost):
                await engine.set_deadline(sandbox.instance_id, bench.now())
        entries.add(_entries(engine))
    assert len(entries) == 1


async def test_an_id_that_runs_is_not_started_twice(walled: Bench) -> None:
    spec = walled.spec()
    sandbox = await walled.engine.start(spec)
    with pytest.raises(SandboxStartFailed, match="already running"):
        await walled.engine.start(spec)
    assert await value_of(sandbox, "echo", text="undisturbed") == "undisturbed"
    await walled.engine.stop([spec.instance_id])


async def test_an_unusable_runtime_directory_is_refused(tmp_path: Path) -> None:
    def make(directory: Path) -> ProcessEngine:
        return ProcessEngine(
            HOST, runtime_dir=directory, data_dir=tmp_path, scope="x", owner_pid=os.getpid()
        )

    with pytest.raises(ConfigError, match="too long"):
        make(tmp_path / ("x" * 100))
    if os.geteuid() == 0:
        with tempfile.TemporaryDirectory(prefix="ae-", dir="/tmp") as foreign:
            os.chown(foreign, 1234, 1234)
            with pytest.raises(ConfigError, match="belongs to another user"):
                make(Path(foreign))


async def test_a_batch_that_fails_in_its_second_round_leaves_nothing(
    own_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: the sandboxes of the first round have started, and no caller knows them."""
    engine = own_node.engine(HOST)
    bench = Bench(engine, tmp_path)
    specs = [bench.spec() for _ in range(2)]
    start = engine._start
    rounds: list[int] = []

    async def _start(given: Sequence[SandboxSpec]) -> dict[InstanceId, Any]:
        rounds.append(len(given))
        if len(rounds) == 2:
            raise FabricUnavailable("the launcher ended")
        results: dict[InstanceId, Any] = dict(await start(given[:1]))
        return results | {given[1].instance_id: None}  # its template was ended as idle

    monkeypatch.setattr(engine, "_start", _start)
    with pytest.raises(FabricUnavailable):
        await engine.start_many(specs)
    assert rounds == [2, 1]
    await eventually(lambda: not own_node.sandbox_pids(), "nothing is left")
    await engine.close()


@pytest.mark.parametrize("data", [b"", b"a message"])
def test_a_daemon_that_is_killed_at_once_is_no_error(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's actors run on uvloop, whose pipes to an ended process raise."""
    create = asyncio.create_subprocess_exec

    async def killed(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*command, **options)
        process.kill()
        await process.wait()
        await asyncio.sleep(0.05)  # the loop notices the closed pipe
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", killed)
    uvloop.run(daemon.start("aenv_ray.engines.process.launcher", "/nowhere", data=data))
