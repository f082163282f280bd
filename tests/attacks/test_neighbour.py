"""A sandbox attacks another sandbox on its node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_ray.engines.base import EndCause
from aenv_ray.errors import CallOutcomeUnknown, InsideCause, SandboxDiedInside, SandboxLost
from aenv_ray.runtime.fork import jail, jail_spec
from aenv_ray.testing.contract_bench import Bench, evaluate, eventually, execute, value_of
from tests.contract.process.node import Node


@pytest.mark.ordinary_user
async def test_a_neighbours_files_and_sockets_cannot_be_reached(either_engine: Bench) -> None:
    """Invariant 7: not its shared memory, temporary files, abstract sockets or ports."""
    victim, attacker = await either_engine.start(), await either_engine.start()
    port = await value_of(victim, "listen")
    await execute(victim, "echo secret | tee /dev/shm/note > /tmp/note")
    await evaluate(
        victim,
        "import builtins, socket\n"
        "builtins.listener = socket.socket(socket.AF_UNIX)\n"
        "builtins.listener.bind('\\0victim')\nbuiltins.listener.listen()\nresult = None\n",
    )
    connect = (
        "import socket\nresult = 'reached'\n"
        "try: socket.socket(socket.AF_UNIX).connect('\\0victim')\n"
        "except OSError as exc: result = type(exc).__name__\n"
    )
    assert await evaluate(victim, connect) == "reached"
    assert await evaluate(attacker, connect) == "ConnectionRefusedError"
    assert await value_of(attacker, "connect", port=port) is False
    for note in ("/dev/shm/note", "/tmp/note"):
        assert (await execute(victim, f"cat {note}")).exit_code == 0
        assert (await execute(attacker, f"cat {note}")).exit_code != 0


async def test_files_without_content_are_limited(either_engine: Bench) -> None:
    """Invariant 7: each costs the node a kibibyte that no limit of bytes counts."""
    small = either_engine.contract_project({"ephemeralStorage": "64M"})
    attacker, neighbour = await either_engine.start(small), await either_engine.start(small)
    created = await evaluate(
        attacker,
        "import os\nresult = 0\n"
        "try:\n"
        "    while result < 100_000:\n"
        "        os.close(os.open(f'{os.environ[\"HOME\"]}/{result}', os.O_CREAT))\n"
        "        result += 1\n"
        "except OSError as exc:\n    assert exc.errno == 28, exc\n",
    )
    assert 1000 < created <= 4096
    assert (await execute(neighbour, "touch note && rm note")).exit_code == 0


@pytest.mark.ordinary_user
async def test_bytes_on_disk_are_limited(either_engine: Bench) -> None:
    """Invariant 7: a full work directory is full for the sandbox alone."""
    small = either_engine.contract_project({"ephemeralStorage": "16M"})
    attacker, neighbour = await either_engine.start(small), await either_engine.start(small)
    fill = "head -c 100M /dev/zero > full; stat -c %s full; echo more > more && cat more"
    done = await execute(attacker, fill)
    assert 8 << 20 < int(done.text().split()[0]) <= 16 << 20
    assert "more" not in done.text()
    assert (await execute(neighbour, "head -c 8M /dev/zero > file && rm file")).exit_code == 0


HOARD_DESCRIPTORS = """
import errno, json, os, resource, socket
def hoard(take):
    kept = []
    try:
        while len(kept) < 100_000:
            kept.append(take())
    except OSError as exc:
        assert exc.errno == errno.EMFILE, exc
    return len(kept)
def raise_limit():
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
    except (OSError, ValueError):
        return False
    return True
print(json.dumps([
    hoard(lambda: open("/dev/null")),
    hoard(lambda: socket.socket(socket.AF_UNIX)),
    raise_limit(),
]))
"""


@pytest.mark.ordinary_user
async def test_descriptors_are_limited(either_engine: Bench) -> None:
    """Invariant 7: each process has its limit, which it cannot raise; neighbours open files."""
    attacker, neighbour = await either_engine.start(), await either_engine.start()
    done = await execute(attacker, ["python3", "-c", HOARD_DESCRIPTORS])
    files, sockets, is_raised = json.loads(done.text())
    assert 1000 < files < 4096
    assert 1000 < sockets < 4096
    assert not is_raised
    assert (await execute(neighbour, "cat /etc/passwd")).exit_code == 0


HOARD_OF_USER = """
import ctypes, json, signal
libc, rt = ctypes.CDLL(None), ctypes.CDLL('librt.so.1')
def hoard(take):
    count = 0
    while count < 100_000 and take() >= 0:
        count += 1
    return count
timer = ctypes.c_void_p()
found = [hoard(lambda: rt.timer_create(1, None, ctypes.byref(timer))), hoard(libc.inotify_init)]
print(json.dumps(found), flush=True)
signal.pause()
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_kernel_resources_per_user_are_limited(walled: Bench) -> None:
    """Invariant 7: timers, queued signals and inotify; all sandboxes are the same user outside."""
    attacker, neighbour = await walled.start(), await walled.start()
    hoarding = f"python3 -c '{HOARD_OF_USER.replace(chr(39), chr(34))}' > out & "
    wait = "while ! test -s out; do sleep 0.01; done; cat out"
    done = await execute(attacker, ["bash", "-c", hoarding + wait], timeout_s=60.0)
    timers, watchers = json.loads(done.text())
    assert 100 < timers <= 1024
    assert 0 < watchers <= 8
    script = HOARD_OF_USER.replace("100_000", "4").replace("signal.pause()", "")
    done = await execute(neighbour, ["python3", "-c", script])
    assert json.loads(done.text()) == [4, 4]


HOARD_OF_NODE = """
import ctypes, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
terminals = []
try:
    while len(terminals) < 500:
        terminals.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as exc:
    refusal = exc.errno
with open("/proc/sys/user/max_inotify_watches") as file:
    watches = int(file.read())
queue = libc.syscall({"x86_64": 240, "aarch64": 180}[os.uname().machine], b"q", 0o102, 0o600, None)
print(json.dumps([len(terminals), refusal, watches, queue, ctypes.get_errno()]), flush=True)
signal.pause()
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_terminals_watches_and_queues_of_a_sandbox_are_limited(walled: Bench) -> None:
    """Invariant 7: the kernel counts them for the node, or for the user who is all sandboxes."""
    attacker, neighbour = await walled.start(), await walled.start()
    hoarding = f"python3 -c '{HOARD_OF_NODE}' > out 2>&1 & "
    wait = "while ! test -s out; do sleep 0.1; done; cat out"
    done = await execute(attacker, ["bash", "-c", hoarding + wait], timeout_s=60.0)
    terminals, refusal, watches, queue, why = json.loads(done.text())
    assert (terminals, refusal) == (jail_spec.MAX_TERMINALS, errno.ENOSPC)
    assert watches == jail_spec.MAX_INOTIFY_WATCHES
    assert (queue, why) == (-1, errno.EMFILE)
    script = "import os; print(len(os.openpty()))"
    assert (await execute(neighbour, ["python3", "-c", script])).text() == "2\n"


FORK = """
import errno, os, signal
count = 0
try:
    while count < 5000:
        if os.fork() == 0:
            signal.pause()
        count += 1
except OSError as exc:
    assert exc.errno == errno.EAGAIN, exc
print(count, flush=True)
os.kill(-1, signal.SIGKILL)
"""


@pytest.mark.ordinary_user
async def test_processes_are_limited(either_engine: Bench) -> None:
    """Invariant 7: real processes, on the node, while a neighbour starts its own."""
    attacker, neighbour = await either_engine.start(), await either_engine.start()
    forking = asyncio.create_task(execute(attacker, ["python3", "-c", FORK], timeout_s=60.0))
    assert (await execute(neighbour, "echo fine | cat")).text() == "fine\n"
    done = await forking
    assert 100 < int(done.text()) <= 1024
    assert (await execute(neighbour, "echo fine | cat")).text() == "fine\n"

    async def is_fine() -> bool:
        return (await execute(attacker, "echo fine | cat")).text() == "fine\n"

    await eventually(is_fine, "the attacker's dead processes are gone, and it can start others")


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_the_kernel_ends_sandboxes_before_the_launcher(
    walled: Bench, walled_node: Node
) -> None:
    """Invariant 7: a sandbox that uses up the node's memory costs neither its launcher nor Ray."""
    sandbox = await walled.start()
    await evaluate(
        sandbox,
        "import builtins, subprocess\nresult = None\n"
        "builtins.child = subprocess.Popen(['sleep', '100'])\n",
    )
    (launcher,) = walled_node.launcher_pids()
    pids = walled_node.sandbox_pids()
    assert len(pids) >= 2
    assert {_oom_score(pid) for pid in pids} == {1000}
    assert _oom_score(launcher) <= 0


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


HOARDS = {
    "memory of many processes": (
        "import os\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        kept = os.urandom(1 << 20) * 60\n"
        "        signal.pause()\n"
    ),
    "memfd": (
        "builtins.kept = os.memfd_create('kept')\n"
        "for _ in range(300): os.write(builtins.kept, bytes(1 << 20))\n"
    ),
    "shared memory": (
        "builtins.kept = mmap.mmap(-1, 300 << 20)\n"
        "for at in range(0, 300 << 20, 4096): builtins.kept[at] = 1\n"
    ),
    "files in memory": (
        "for number in range(300):\n"
        "    with open(f'/dev/shm/{number}', 'wb') as file: file.write(bytes(1 << 20))\n"
    ),
    "unread data in sockets": (
        "builtins.kept = []\n"
        "for _ in range(1500):\n"
        "    sender, receiver = socket.socketpair()\n"
        "    sender.setblocking(False)\n"
        "    builtins.kept.append(receiver)\n"
        "    try:\n"
        "        while sender.send(bytes(1 << 16)): pass\n"
        "    except BlockingIOError: sender.close()\n"
    ),
    "memfd in transit": (
        "builtins.kept = socket.socketpair()\n"
        "for _ in range(15):\n"
        "    memfd = os.memfd_create('kept')\n"
        "    for _ in range(20): os.write(memfd, bytes(1 << 20))\n"
        "    socket.send_fds(builtins.kept[0], [b'x'], [memfd])\n"
        "    os.close(memfd)\n"
    ),
    "memfd in transit to a socket that nobody accepts": (
        "builtins.kept = socket.socket(socket.AF_UNIX)\n"
        "builtins.kept.bind('\\0hoard')\n"
        "builtins.kept.listen()\n"
        "with socket.socket(socket.AF_UNIX) as sender:\n"
        "    sender.connect('\\0hoard')\n"
        "    for _ in range(15):\n"
        "        memfd = os.memfd_create('kept')\n"
        "        for _ in range(20): os.write(memfd, bytes(1 << 20))\n"
        "        socket.send_fds(sender, [b'x'], [memfd])\n"
        "        os.close(memfd)\n"
    ),
    "memfd of a thread with its own descriptors": (
        "import ctypes, threading\n"
        "def hoard():\n"
        "    ctypes.CDLL(None).syscall(436, 1 << 20, 1 << 20, 2)  # close_range, which unshares\n"
        "    kept = os.memfd_create('kept')\n"
        "    for _ in range(300): os.write(kept, bytes(1 << 20))\n"
        "    signal.sigwait([signal.SIGUSR1])\n"
        "threading.Thread(target=hoard).start()\n"
    ),
    "memfd of a process whose first thread has ended": (
        "import ctypes, platform, threading\n"
        "def hoard():\n"
        "    kept = os.memfd_create('kept')\n"
        "    for _ in range(300): os.write(kept, bytes(1 << 20))\n"
        "    signal.sigwait([signal.SIGUSR1])\n"
        "threading.Thread(target=hoard).start()\n"
        "ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)\n"
    ),
    "memory of processes whose first threads have ended": (
        "import ctypes, platform, threading\n"
        "def hoard():\n"
        "    kept = os.urandom(1 << 20) * 60\n"
        "    signal.sigwait([signal.SIGUSR1])\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        threading.Thread(target=hoard).start()\n"
        "        ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)\n"
    ),
}
_OF_ORDINARY_USERS = ("memfd", "memfd in transit", "memfd of a thread with its own descriptors")


@pytest.mark.namespaces
@pytest.mark.parametrize(
    "hoard",
    [
        pytest.param(
            hoard, id=name, marks=pytest.mark.ordinary_user if name in _OF_ORDINARY_USERS else ()
        )
        for name, hoard in HOARDS.items()
    ],
)
async def test_a_sandbox_beyond_its_memory_ends_from_inside(walled: Bench, hoard: str) -> None:
    """Invariants 7 and 14: its limit covers everything it uses, and its neighbours continue."""
    limits = {"memory": "128M", "ephemeralStorage": "512M"}
    neighbour = await walled.start()
    attacker = await walled.start(walled.contract_project(limits))
    ended: asyncio.Future[EndCause] = asyncio.get_running_loop().create_future()
    attacker.on_end(ended.set_result)
    script = f"import builtins, mmap, os, signal, socket, subprocess, sys\nresult = None\n{hoard}"
    with contextlib.suppress(SandboxLost, CallOutcomeUnknown):
        await execute(
            attacker,
            ["python3", "-c", f"{script}\nsignal.pause()"],
            timeout_s=30.0,
        )
    async with asyncio.timeout(20.0):
        cause = await ended
    assert cause.inside is InsideCause.MEMORY
    assert "128 MiB (deployConfig.memory)" in cause.text
    assert (await execute(neighbour, "echo fine")).stdout == b"fine\n"


_QUEUE = """
import socket
sender, receiver = socket.socketpair()
before = sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
sender.setblocking(False)
sent = 0
try:
    while sent < 1 << 24: sent += sender.send(bytes(1 << 15))
except BlockingIOError: pass
result = sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before and sent <= 2 * before
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_queues_of_sockets_which_no_limit_counts_are_small(walled: Bench) -> None:
    """Invariant 7: thousands of sockets in transit may each have a full one."""
    sandbox = await walled.start()
    assert await evaluate(sandbox, _QUEUE) is True


_SYSTEM_V = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
result = {}
def note(name, value):
    result[name] = errno.errorcode[ctypes.get_errno()] if value < 0 else "made"
note("lock", libc.shmget(0, 4096, 0o1600))
note("segment", libc.shmget(0, 4097, 0o1600))
note("large segment", libc.syscall(SHMGET, 0, ctypes.c_size_t(1 << 32), 0o1600))
note("set", libc.semget(0, 20, 0o1600))
note("large set", libc.semget(0, 21, 0o1600))
note("queue", libc.msgget(0, 0o1600))
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_system_v_objects_which_no_limit_counts_are_small(walled: Bench) -> None:
    """Invariant 7: they stay when their processes end, 32,000 of them, of up to 2 MiB each."""
    sandbox = await walled.start()
    number = {"x86_64": 29, "aarch64": 194}[platform.machine()]
    assert await evaluate(sandbox, _SYSTEM_V.replace("SHMGET", str(number))) == {
        "lock": "made", "segment": "EINVAL", "large segment": "EINVAL", "set": "made",
        "large set": "EINVAL", "queue": "EPERM",
    }  # fmt: skip


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_every_sandbox_is_below_the_limit_of_all(walled: Bench, walled_node: Node) -> None:
    """Invariant 7: the kernel also counts the processes of a namespace towards its creator."""
    await walled.start()
    (launcher,) = walled_node.launcher_pids()
    most = int(jail_spec.SANDBOXES_SHARE * jail.node_process_ids())
    for pid in walled_node.sandbox_pids():
        between = []
        while (pid := _parent(pid)) != launcher:
            between.append(pid)
        assert between, "a jailer isolated it"
        assert {_most_processes(one) for one in between} <= {most, jail_spec.MAX_PROCESSES}
        assert _most_processes(between[-1]) == most


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _most_processes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Max processes")]
    return int(line.split()[2])


FULL = """
import os, resource, signal
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.system import linux

if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(61_236, 61_236, 61_236)
    os.setresuid(61_236, 61_236, 61_236)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)

def user_of(pid):
    try:
        return os.stat(f'/proc/{pid}').st_uid
    except FileNotFoundError:  # it has just ended
        return None

running = sum(user_of(name) == os.geteuid() for name in os.listdir('/proc') if name.isdigit())
jail.node_process_ids = lambda: int((running + 100) / jail.SANDBOXES_SHARE)
jail.limit_all_sandboxes()
for sandbox in range(2):
    reader, writer = os.pipe()
    if os.fork() == 0:
        linux.unshare(linux.CLONE_NEWUSER)
        count = 0
        try:
            while count < 80:
                if os.fork() == 0:
                    signal.pause()
                count += 1
        except BlockingIOError:
            pass
        os.write(writer, str(count).encode())
        signal.pause()
    print(os.read(reader, 9).decode(), flush=True)
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
def test_sandboxes_together_leave_process_ids_to_the_node() -> None:
    """Invariant 7: two sandboxes below their own limits share what all of them may have."""
    done = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60,
        start_new_session=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    first, second = map(int, done.stdout.split())
    assert first == 80
    assert second < 20


HOARD_OF_WATCHES = """
import os, select, signal
files = [os.eventfd(0) for _ in range(1500)]
kept = []
def hoard():
    while len(kept) * len(files) < MOST // 5:
        kept.append(select.epoll())
        for file in files:
            kept[-1].register(file, select.EPOLLIN)
    return len(kept)
for _ in range(4):
    if os.fork() == 0:
        hoard()
        signal.pause()
print(hoard(), flush=True)
signal.pause()
"""
MAX_WATCHES = Path("/proc/sys/fs/epoll/max_user_watches")


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_a_sandbox_that_takes_the_watches_of_epoll_ends(walled: Bench) -> None:
    """Invariant 7: the kernel limits them for each user only, and all sandboxes are one."""
    if int(MAX_WATCHES.read_text()) > 8_000_000:
        pytest.skip("on a node with this much memory the attack takes several GiB")
    # Fewer than all, so that other tests can run meanwhile.
    most = str(int(0.4 * int(MAX_WATCHES.read_text())))
    attacker, neighbour = await walled.start(), await walled.start()
    hoarding = f"python3 -c '{HOARD_OF_WATCHES.replace('MOST', most)}' > out & "
    wait = "while ! test -s out; do sleep 0.1; done; cat out"
    with pytest.raises(SandboxDiedInside, match="watches of epoll") as raised:
        await execute(attacker, ["bash", "-c", f"{hoarding}{wait}; sleep 60"], timeout_s=100.0)
    assert raised.value.died_of is InsideCause.PROCESSES
    script = "import os, select; select.epoll().register(os.eventfd(0)); print('fine')"
    assert (await execute(neighbour, ["python3", "-c", script])).text() == "fine\n"


TAKE_REQUESTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
context = ctypes.c_ulong(0)
libc.syscall(number, 60_000, ctypes.byref(context))
result = ctypes.get_errno()
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_asynchronous_requests_of_the_node_cannot_be_taken(walled: Bench) -> None:
    """Invariant 7: the kernel has one limit of them for the whole node, `fs.aio-max-nr`."""
    before = Path("/proc/sys/fs/aio-nr").read_text()
    assert await evaluate(await walled.start(), TAKE_REQUESTS) == errno.ENOSYS
    assert Path("/proc/sys/fs/aio-nr").read_text() == before


HOARD_IN_TRANSIT = """
import os, socket
ours, theirs = socket.socketpair()
null = os.open(os.devnull, os.O_RDONLY)
sent = 0
pairs = []
try:
    while sent < 20_000:
        pair = socket.socketpair()
        pairs.append(pair)
        for _ in range(50):
            socket.send_fds(pair[0], [b"x"], [null] * 250)
            sent += 250
except OSError as exc:
    print(exc.errno, sent)
import builtins
builtins.pairs = pairs
result = sent
"""


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_descriptors_in_transit_take_nothing_from_a_neighbour(walled: Bench) -> None:
    """Invariant 7: the kernel counts descriptors in transit for each user."""
    attacker = await walled.start()
    assert await evaluate(attacker, HOARD_IN_TRANSIT) >= 4000
    neighbours = [await walled.start() for _ in range(10)]
    for one in neighbours:
        assert (await execute(one, "echo fine")).text() == "fine\n"
