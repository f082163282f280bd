"""A project attacks the node from the code that its template imports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import InsideCause, SandboxDiedInside, SandboxStartFailed
from aenv_ray.runtime.fork.jail_spec import (
    MAX_FILES,
    MAX_LOCKED_BYTES,
    MAX_PROCESSES,
    MAX_SIGNALS,
)
from aenv_ray.testing.contract_bench import Bench, evaluate, eventually, value_of
from tests.contract.process.node import Node

pytestmark = [pytest.mark.namespaces, pytest.mark.ordinary_user]

TOOL = (
    "from aenv_ray.runtime import register_tool\n"
    "@register_tool\ndef found() -> dict:\n    return globals().get('FOUND', {})\n"
)
SYS_ADMIN_AND_CHROOT = 1 << 21 | 1 << 18

PROBES = {
    "show what /proc covers": "check(libc.umount2(b'/proc', 2))",
    "show what the root covers": "check(libc.umount2(b'/', 2))",
    "make the programs writable": "mount(b'/usr', 32 | 4096)",
    "make the project writable": "mount(b'/project', 32)",
    "move a mount": "check(libc.mount(b'/usr', b'/tmp', None, 8192, None))",
    "share mounts": "mount(b'/', 1 << 20)",
    "attributes of mounts": "check(libc.syscall(442, -100, b'/usr', 0, None, 0))",
    "another root": "check(libc.chroot(b'/tmp'))",
    "network": "check(libc.unshare(0x40000000))",
    "users": "check(libc.unshare(0x10000000))",
    "clone": "check(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "files by handle": "check(libc.syscall(304, -100, 0, 0))",
    "bpf": "check(libc.syscall(321, 0, 0, 0))",
    "io_uring": "check(libc.syscall(425, 8, 0))",
    "keyring": "check(libc.syscall(250, 0, 0, 0, 0, 0))",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "netfilter": "socket.socket(16, socket.SOCK_RAW, 12)",
    "raw packets": "socket.socket(17, socket.SOCK_RAW)",
    "node's passwords": "open('/etc/shadow').read()",
    "runtime": "open(RUNTIME, 'a')",
    "programs": "open('/usr/bin/env', 'a')",
    "project": "open('/project/src/own.py', 'w')",
    "host name": "check(libc.sethostname(b'x', 1))",
    "kernel": "open('/proc/sys/kernel/core_pattern', 'w')",
}


def _looks(probes: dict[str, str]) -> str:
    """Return code that records what each probe raises."""
    return (
        "import ctypes, errno, os, socket\n"
        "import aenv_ray.runtime\nRUNTIME = aenv_ray.runtime.__file__\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def check(value):\n"
        "    if value < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        "def mount(place, flags): check(libc.mount(None, place, None, flags, None))\n"
        "FOUND = {'status': open('/proc/self/status').read(), 'pids':\n"
        "    [p for p in os.listdir('/proc') if p.isdigit()], 'refused': {}}\n"
        f"for name, source in {probes!r}.items():\n"
        "    try: exec(source)\n"
        "    except OSError as exc: FOUND['refused'][name] = errno.errorcode[exc.errno]\n"
    )


@pytest.mark.parametrize("stage", ["template", "instance"])
async def test_code_is_imported_after_the_lock_down(walled: Bench, stage: str) -> None:
    """Invariant 13: with nothing of the node to change, to read or to see, in both stages."""
    project = walled.project({"tools.py": _looks(PROBES) + TOOL})
    arguments = () if stage == "template" else ("--imported-in-the-instance",)
    sandbox = await walled.start(project, arguments=arguments)
    assert sandbox.start_mode.startswith("template" if stage == "template" else "bare")
    found = await value_of(sandbox, "found")
    assert set(found["refused"]) == set(PROBES)
    assert found["pids"] == ["1"]
    status = dict(line.split(":", 1) for line in found["status"].splitlines() if ":" in line)
    assert status["Seccomp"].strip() == "2"
    assert status["NoNewPrivs"].strip() == "1"
    # A template needs two of them, in its own user namespace, to isolate its forks.
    allowed = SYS_ADMIN_AND_CHROOT if stage == "template" else 0
    assert int(status["CapEff"], 16) & ~allowed == 0
    assert int(status["CapPrm"], 16) & ~allowed == 0


_UNFILTERED = """
import ctypes, errno, os, sys
from pathlib import Path
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork.jail_spec import JailSpec

jail.enter_root(Path(sys.argv[1]), JailSpec(sys.argv[2]), sys.executable, "attacked")
libc = ctypes.CDLL(None, use_errno=True)
assert "CapEff:\\t0000000000000000" not in open("/proc/self/status").read()
for place in (b"/proc", b"/usr", b"/project"):
    assert libc.umount2(place, 2) < 0, place
    assert ctypes.get_errno() == errno.EINVAL, (place, ctypes.get_errno())
for place in (b"/", b"/usr", b"/project", b"/etc"):
    assert libc.mount(None, place, None, 32 | 4096, None) < 0, place
    assert ctypes.get_errno() == errno.EPERM, (place, ctypes.get_errno())
assert [pid for pid in os.listdir("/proc") if pid.isdigit()] == ["1"]
print("locked")
"""


def test_the_kernel_locks_the_mounts_of_a_template(tmp_path: Path) -> None:
    """Invariant 13: also for a process with all capabilities in there, and without a filter."""
    scratch, project = tmp_path / "root", tmp_path / "project"
    for directory in (scratch, project):
        directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _UNFILTERED, str(scratch), str(project)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("locked\n", "")


FORGED: list[Any] = [
    {"jail_unavailable": "forged"},
    {"isolation": {"kind": "none", "missing": []}},
    {"exited": 1, "status": 0},
    {"exited": 1, "status": "0"},
    {"exited": [1], "status": 0},
    {"spare": 1},
    {"ready": []},
    {"failed": "forged"},
    {"waits": True},
    {"booted": True},
    "text",
    [],
    None,
]

SEND_TO_ALL = (
    "import json, os, socket, stat\n"
    "def sockets():\n"
    "    for fd in range(3, 2000):\n"
    "        try:\n"
    "            if stat.S_ISSOCK(os.fstat(fd).st_mode): yield fd\n"
    "        except OSError: pass\n"
    "IMPORTED_WITH = [fd for fd in sockets() if socket.socket(fileno=os.dup(fd)).type == 5]\n"
    "def send_all(packets):\n"
    "    read, write = os.pipe()\n"
    "    for fd in IMPORTED_WITH:\n"
    "        sock = socket.socket(fileno=os.dup(fd))\n"
    "        for packet in packets:\n"
    "            try: socket.send_fds(sock, [packet], [read], socket.MSG_DONTWAIT)\n"
    "            except (OSError, ValueError): pass\n"
    "        sock.close()\n"
    "    os.close(read); os.close(write)\n"
)


async def test_forged_reports_change_nothing_for_others(walled: Bench, walled_node: Node) -> None:
    """Invariants 7 and 13: the launcher, other sandboxes and their isolation are not affected."""
    victim = await walled.start()
    launcher = walled_node.launcher_pids()
    packets = [json.dumps(message).encode() for message in FORGED]
    packets += [b"", b"\xff", b"[" * 100_000, b'{"exited":' + b"1" * 5000 + b',"status":0}']
    for packet in packets:
        source = f"{SEND_TO_ALL}send_all([{packet[:100_000]!r}])\n" + TOOL
        with contextlib.suppress(SandboxStartFailed):
            odd = await walled.start(walled.project({"tools.py": source}))
            assert odd.isolation.kind == "namespaces"
            await walled.engine.stop([odd.instance_id])
    assert await value_of(victim, "echo", text="hi") == "hi"
    assert walled_node.launcher_pids() == launcher
    other = await walled.start(walled.project({"tools.py": _looks({}) + TOOL}))
    assert other.isolation.kind == "namespaces"
    status = (await value_of(other, "found"))["status"]
    assert "Seccomp:\t2" in status


@pytest.mark.parametrize(
    "packets",
    [[b'{"waits":true}'] * 2, [b'{"booted":true}']],
    ids=["waits", "booted"],
)
async def test_a_fork_that_reports_at_the_wrong_time_ends_only_its_template(
    walled: Bench, walled_node: Node, packets: list[bytes]
) -> None:
    """Invariants 7 and 13: a fork has a channel to the launcher until it is an instance.

    If a process could become a spare twice, it would be two instances at once, and read what is
    meant for the second, which may be of another owner.
    """
    victim = await walled.start()
    launcher = walled_node.launcher_pids()
    source = (
        f"{SEND_TO_ALL}OF_TEMPLATE = set(sockets())\n"
        "def forge():\n"
        "    IMPORTED_WITH[:] = set(sockets()) - OF_TEMPLATE\n"
        f"    send_all({packets!r})\n"
        "os.register_at_fork(after_in_child=forge)\n"
    )
    with pytest.raises(
        SandboxStartFailed,
        match=r"a process of its template sent an invalid message|its template ended twice",
    ):
        await walled.start(walled.project({"tools.py": source + TOOL}))
    assert await value_of(victim, "echo", text="hi") == "hi"
    assert walled_node.launcher_pids() == launcher


async def test_a_template_cannot_void_its_instances(walled: Bench) -> None:
    """Invariant 14: the end of a process is known from the kernel, not from a template's words."""
    forged = [json.dumps({"exited": number, "status": -9}).encode() for number in range(1, 20)]
    source = f"{SEND_TO_ALL}os.register_at_fork(after_in_parent=lambda: send_all({forged!r}))\n"
    project = walled.project({"tools.py": source + TOOL})
    sandboxes = [await walled.start(project) for _ in range(4)]
    for sandbox in sandboxes:
        assert sandbox.start_mode == "template"
        assert await value_of(sandbox, "found") == {}
    assert await walled.running() >= {sandbox.instance_id for sandbox in sandboxes}


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel tells only root why it ended")
async def test_a_death_from_inside_is_recognized_when_the_template_reports_late(
    walled: Bench,
) -> None:
    """Invariant 14: it forks and mounts on a node whose cores the agent can keep busy."""
    source = "import os, time\nos.register_at_fork(after_in_parent=lambda: time.sleep(4))\n"
    exits = "@register_tool\ndef leave() -> None:\n    os._exit(3)\n"
    sandbox = await walled.start(walled.project({"tools.py": source + TOOL + exits}))
    assert sandbox.start_mode == "template"
    with pytest.raises(SandboxDiedInside, match="exited with code 3") as raised:
        await value_of(sandbox, "leave")
    assert raised.value.died_of is InsideCause.EXIT


HOARD = (
    "import os, signal\n"
    "for _ in range(6):\n"
    "    if os.fork() == 0:\n"
    "        kept = os.urandom(1 << 20) * 60\n"
    "        signal.pause()\n"
    "signal.pause()\n"
)


async def test_a_template_beyond_the_memory_of_its_project_ends(walled: Bench) -> None:
    """Invariant 7: the code that it imports has the limit of an instance, as a whole."""
    config = {"deployConfig": {"memory": "128M", "network": "none"}}
    neighbour = await walled.start()
    async with asyncio.timeout(60.0):
        with pytest.raises(SandboxStartFailed, match="its limit of 128 MiB"):
            await walled.start(walled.project({"tools.py": HOARD + TOOL}, config))
    assert await value_of(neighbour, "echo", text="hi") == "hi"


async def test_a_tool_finds_no_socket_of_its_template(walled: Bench) -> None:
    """Invariant 7: also one that the project's code has duplicated."""
    source = (
        f"{SEND_TO_ALL}import fcntl\n"
        "KEPT = open('/etc/passwd')\n"
        "for fd in list(sockets()): fcntl.fcntl(fd, fcntl.F_DUPFD, 500)\n"
        "from aenv_ray.runtime import register_tool\n"
        "@register_tool\ndef seen() -> list:\n"
        "    names = {socket.socket(fileno=os.dup(fd)).getsockname() for fd in sockets()}\n"
        "    return [len(names), '' in names, KEPT.readline()[:4]]\n"
    )
    sandbox = await walled.start(walled.project({"tools.py": source}))
    assert sandbox.start_mode == "template"
    # Its listener and its connections have one name; a template's socket has none.
    assert await value_of(sandbox, "seen") == [1, False, "root"]


async def test_a_jail_that_cannot_be_built_fails_only_its_project(
    walled: Bench, tmp_path: Path
) -> None:
    """Invariant 13: neither this project nor any other runs without isolation."""
    spec = walled.spec(walled.project({"tools.py": TOOL}))
    shutil.rmtree(spec.project_dir)
    with pytest.raises(SandboxStartFailed, match="its sandbox cannot be built"):
        await walled.engine.start(spec)
    other = await walled.start(walled.project({"tools.py": TOOL}))
    assert other.isolation.kind == "namespaces"


async def test_a_hostile_fork_hook_leaves_nothing_running(own_node: Node, tmp_path: Path) -> None:
    """Invariant 3: a process that pretends to be a spare is ended like one."""
    source = f"{SEND_TO_ALL}os.register_at_fork(after_in_child=lambda: os.setsid())\n" + TOOL
    bench = Bench(own_node.engine("host-hostile"), tmp_path)  # type: ignore[arg-type]
    with contextlib.suppress(SandboxStartFailed):
        await bench.start(bench.project({"tools.py": source}))
    await bench.engine.stop([row.instance_id for row in await bench.engine.running()])
    await eventually(lambda: not own_node.sandbox_pids(), "nothing of it runs")
    await bench.engine.close()


@pytest.mark.ordinary_user
async def test_a_template_cannot_leave_out_the_limits_of_its_instances(walled: Bench) -> None:
    """Invariant 7: its code runs before a fork sets them; the launcher sets them, too."""
    source = (
        "import resource\n"
        "from aenv_ray.runtime.fork import jail\n"
        "jail.set_limits = lambda *_, **__: None\n"
        "from aenv_ray.runtime import register_tool\n"
        "@register_tool\n"
        "def hard_limits() -> dict:\n"
        "    names = 'NOFILE', 'NPROC', 'SIGPENDING', 'MEMLOCK', 'MSGQUEUE', 'CORE', 'DATA'\n"
        "    kinds = {name: getattr(resource, f'RLIMIT_{name}') for name in names}\n"
        "    return {name: resource.getrlimit(kind)[1] for name, kind in kinds.items()}\n"
    )
    deploy = {"deployConfig": {"memory": "256M"}}
    sandbox = await walled.start(walled.project({"tools.py": source}, deploy))
    assert sandbox.start_mode == "template"
    most = {
        "NOFILE": MAX_FILES, "NPROC": MAX_PROCESSES, "SIGPENDING": MAX_SIGNALS,
        "MEMLOCK": MAX_LOCKED_BYTES, "MSGQUEUE": 0, "CORE": 0, "DATA": 256 << 20,
    }  # fmt: skip
    found = await value_of(sandbox, "hard_limits")
    assert {name: limit for name, limit in found.items() if not 0 <= limit <= most[name]} == {}


SECRET = "hunter2-of-the-project"
VARIABLES = {
    "LD_PRELOAD": "/project/src/own.so",
    "LD_LIBRARY_PATH": "/project/src",
    "PYTHONSTARTUP": "/project/src/own.py",
    "PYTHONHOME": "",
    "PYTHONPATH": "/project/src",
    "GCONV_PATH": "/project/src",
    "PATH": "/project/src",
    "BASH_ENV": "/project/src/own.sh",
    "OWN_SECRET": SECRET,
}


async def test_variables_of_a_project_reach_no_process_outside(
    walled: Bench, walled_node: Node
) -> None:
    """Invariant 13: a library that they name would run with the launcher's privileges."""
    config = {"deployConfig": {"environmentVariables": VARIABLES, "network": "none"}}
    code = (
        "import os\nFOUND = {'secret': os.environ['OWN_SECRET'],\n"
        "    'namespace': os.readlink('/proc/self/ns/mnt')}\n"
    )
    sandbox = await walled.start(walled.project({"tools.py": code + TOOL}, config))
    assert (await value_of(sandbox, "found"))["secret"] == SECRET
    (launcher,) = walled_node.launcher_pids()
    outside = [launcher, *_outside(launcher)]
    assert len(outside) > 2
    for pid in outside:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        assert not [text for text in variables if "/project/" in text or SECRET in text]


def _outside(pid: int) -> list[int]:
    """Return the descendants of the launcher that are not in the sandbox: its jailers."""
    found = []
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        if b"fork.jailer" in Path(f"/proc/{child}/cmdline").read_bytes():
            found += [child, *_outside(child)]
    return found


async def test_a_sandbox_sees_no_variables_of_the_launcher(
    walled: Bench, walled_node: Node
) -> None:
    """Invariant 10: a sandbox sees none of the node's, and the launcher has no token to lose."""
    sandbox = await walled.start()
    (launcher,) = walled_node.launcher_pids()
    own = Path(f"/proc/{launcher}/environ").read_bytes().decode().split("\0")
    names = {text.partition("=")[0] for text in own if text}
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert names <= {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "PYTHONPATH"}
    seen = await evaluate(sandbox, "import os; result = sorted(os.environ)")
    assert not {"AENV_REDIS_URL", "RAY_ADDRESS", "PYTHONPATH"} & set(seen)
    assert os.environ["HOME"] not in await evaluate(
        sandbox, "import os; result = list(os.environ.values())"
    )
