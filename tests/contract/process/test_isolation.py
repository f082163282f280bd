"""What the walls of the process engine hold back: tried from inside, as an attacker would.

Invariant 7: nothing inside a sandbox reaches Ray, Redis, the hub, the Docker socket or another
sandbox. Everything here runs in the runtime's own process or in a child of it, which has no less.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.testing.contract_bench import Bench, eventually, execute, sleeper, value_of
from aenv_ray.testing.contract_bench import evaluate as run
from tests.contract.process.node import Node

pytestmark = pytest.mark.namespaces


async def text(sandbox: Sandbox, command: str) -> str:
    """Return what a command prints, errors included."""
    done = await execute(sandbox, f"( {command} ) 2>&1")
    return done.text()


async def errno_of(sandbox: Sandbox, statements: str) -> str:
    """Return the name of the error that the statements end with; empty when they succeed."""
    body = "".join(f"    {line}\n" for line in statements.splitlines())
    source = (
        "import ctypes, errno, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def check(value):\n"
        "    if value < 0: raise OSError(ctypes.get_errno(), 'call')\n"
        f"result = ''\ntry:\n{body}"
        "except OSError as exc:\n    result = errno.errorcode[exc.errno]\n"
    )
    return str(await run(sandbox, source))


@pytest.fixture
def host_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --- files ----------------------------------------------------------------------------------------


async def test_home_directories_and_secrets_of_the_node_are_unreadable(
    walled: Bench, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    sandbox = await walled.start()
    places = ["/root/.ssh", "/root/.bash_history", str(Path.home() / ".ssh"), str(secret)]
    places += ["/etc/shadow", "/var/log", "/home/ubuntu", "/proc/1/root/etc/shadow"]
    for place in places:
        shown = await text(sandbox, f"cat {place} || ls {place}/* | head -3")
        assert "hunter2" not in shown
        assert "No such file" in shown or "Permission denied" in shown, (place, shown)
    shown_of_root = set(await run(sandbox, "import os; result = os.listdir('/root')"))
    assert shown_of_root <= set(Path(sys.base_prefix).parts)  # the interpreter may lie there


async def test_the_sockets_of_the_node_are_not_there(walled: Bench, walled_node: Node) -> None:
    sandbox = await walled.start()
    sockets = ("/run/docker.sock", "/var/run/docker.sock", "/tmp/ray", "/var/run/redis")
    for place in (*sockets, str(walled_node.directory)):
        assert not await run(sandbox, f"import os; result = os.path.exists({place!r})")


async def test_the_solutions_of_built_in_environments_are_hidden(walled: Bench) -> None:
    sandbox = await walled.start()
    import aenv_ray

    envs = Path(aenv_ray.__file__).parent / "envs"
    assert await run(sandbox, f"import os; result = os.listdir({str(envs)!r})") == []


async def test_the_source_is_hidden_where_the_project_asks(walled: Bench) -> None:
    open_one = await walled.start(walled.contract_project({}))
    hidden = await walled.start(walled.contract_project({"hideSource": True}))
    listing = "import os; result = sorted(os.listdir('/project'))"
    assert await run(open_one, listing) == ["config.json", "src"]
    assert await run(hidden, listing) == []
    assert await value_of(hidden, "echo", text="it works all the same") == "it works all the same"


async def test_hidden_source_is_loaded_also_where_it_cannot_be_forked(walled: Bench) -> None:
    project = walled.contract_project({"hideSource": True})
    sandbox = await walled.start(project, arguments=("--seed", "1"))
    assert sandbox.start_mode.startswith("bare")
    assert await value_of(sandbox, "echo", text="loaded") == "loaded"
    assert await run(sandbox, "import os; result = os.listdir('/project')") == []
    assert await text(sandbox, "ls /project; umount /project 2>/dev/null; ls /project") == ""
    pids = await run(sandbox, "import os; result = [p for p in os.listdir('/proc') if p.isdigit()]")
    assert pids == ["1"]


async def test_hidden_source_is_loaded_where_its_code_starts_threads(walled: Bench) -> None:
    """A process with threads could not build walls any more: they stand before it loads."""
    source = (
        "import threading\nfrom pathlib import Path\nfrom aenv_ray.runtime import register_tool\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "SEEN = len(list(Path('/project/src').iterdir()))\n"
        "@register_tool\ndef seen() -> list[int]:\n"
        "    return [SEEN, len(list(Path('/project').iterdir()))]\n"
    )
    config = {"deployConfig": {"hideSource": True, "network": "none"}}
    sandbox = await walled.start(walled.project({"tools.py": source}, config))
    assert "threads" in sandbox.start_mode
    assert await value_of(sandbox, "seen") == [1, 0]


async def test_the_hosts_programs_are_read_only(walled: Bench) -> None:
    sandbox = await walled.start()
    for place in ("/", "/usr", "/etc", "/project", "/bin", "/dev", "/opt"):
        error = await errno_of(sandbox, f"open('{place}/contract-file', 'w')")
        assert error in {"EROFS", "EACCES", "EPERM"}, (place, error)
    writable = await text(
        sandbox, "find / -xdev -writable -not -type l -not -path '/proc/*' 2>/dev/null | head"
    )
    allowed = ("/home/agent", "/tmp", "/var/tmp", "/dev/", "/.box")  # its own tmpfs, all of them
    assert [line for line in writable.split() if not line.startswith(allowed)] == []


async def test_only_its_own_descriptors_are_open(walled: Bench) -> None:
    """A leaked descriptor of the launcher, a template or another sandbox would be a way out."""
    sandbox = await walled.start()
    source = (
        "import os\nresult = {}\nfor fd in os.listdir('/proc/self/fd'):\n"
        "    try: result[int(fd)] = os.readlink('/proc/self/fd/' + fd)\n"
        "    except OSError: pass\n"
    )
    opened = {int(fd): target for fd, target in (await run(sandbox, source)).items()}
    sockets = [target for target in opened.values() if target.startswith("socket:")]
    assert len(sockets) <= 3, opened  # the listener, its connection, and a pair of the loop's
    # Room on its disk that is kept for the reward is a file without a name.
    own = "/home/agent/#"
    directories = [f for f in opened.values() if f.startswith("/") and not f.startswith(own)]
    assert set(directories) <= {"/dev/null", "/dev/urandom", "/proc"}, opened


async def test_what_a_tool_starts_inherits_nothing_of_the_runtime(either: Bench) -> None:
    """The listener in an agent's hands would be a second runtime: its graders, its answers."""
    spare, sandbox = [await either.start() for _ in range(2)]
    source = (
        "import subprocess\nresult = subprocess.run(\n"
        "    ['ls', '-l', '/proc/self/fd'], close_fds=False, capture_output=True, check=True,\n"
        "    stdin=subprocess.DEVNULL).stdout.decode()\n"
    )
    for one in (spare, sandbox):
        numbers = [
            line.split()[-3] for line in str(await run(one, source)).splitlines() if "->" in line
        ]
        assert numbers == ["0", "1", "2", "3"]  # its three, and the directory that `ls` reads


# --- processes --------------------------------------------------------------------------------


async def test_only_its_own_processes_are_seen(walled: Bench) -> None:
    sandbox = await walled.start()
    pids = await run(sandbox, "import os; result = [p for p in os.listdir('/proc') if p.isdigit()]")
    assert pids == ["1"]
    shown = await text(sandbox, "cat /proc/*/cmdline | tr '\\0' ' '")
    assert "pytest" not in shown
    assert "launcher" not in shown


async def test_the_runtime_cannot_be_killed_traced_or_read_by_its_children(walled: Bench) -> None:
    """The graders are in the runtime's memory."""
    sandbox = await walled.start(environment_variables={"TOKEN": "hunter2"})
    await execute(sandbox, "kill -9 1; kill -STOP 1; kill -TERM 1")
    assert await value_of(sandbox, "echo", text="alive") == "alive"
    for name in ("mem", "environ", "maps", "fd/1"):
        shown = await text(sandbox, f"cat /proc/1/{name} | head -c 100")
        assert "Permission denied" in shown or "Operation not permitted" in shown, (name, shown)
    trace = (
        "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "sys.exit(0 if libc.ptrace(16, 1, 0, 0) == 0 else 7)\n"  # PTRACE_ATTACH
    )
    done = await execute(sandbox, ["python3", "-c", trace])
    assert done.exit_code == 7, done
    peek = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "buf = ctypes.create_string_buffer(8)\nlocal = V(ctypes.addressof(buf), 8)\n"
        "remote = V(0x400000, 8)\n"
        "print(libc.process_vm_readv(1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))\n"
    )
    assert (await execute(sandbox, ["python3", "-c", peek])).text().strip() == "-1"


async def test_every_privilege_is_given_up(walled: Bench) -> None:
    sandbox = await walled.start()
    for where in ("/proc/1/status", "/proc/self/status"):
        status = await text(sandbox, f"cat {where}")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(fields[name], 16) == 0, (where, name)
        assert fields["NoNewPrivs"].strip() == "1"
        assert fields["Seccomp"].strip() == "2"
        assert fields["Uid"].split()[0] == "1000"
        assert "0" not in fields["Uid"].split()
    assert await text(sandbox, "id -u; id -un") == "1000\nagent\n"


@pytest.mark.parametrize(
    "call",
    [
        "check(libc.unshare(0x10000000))",
        "check(libc.unshare(0x20000))",
        "check(libc.unshare(0x40000000))",
        "check(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
        "check(libc.umount2(b'/tmp', 2))",
        "check(libc.umount2(b'/proc', 2))",
        "check(libc.chroot(b'/tmp'))",
        "check(libc.sethostname(b'x', 1))",
        "check(libc.setuid(0))",
        "check(libc.setgroups(0, None))",
        "check(libc.syscall(ctypes.c_long(321), 0, 0, 0))",
        "check(libc.syscall(ctypes.c_long(425), 8, 0))",
        "check(libc.swapon(b'/x', 0))",
        "check(libc.setns(0, 0))",
        "check(libc.pivot_root(b'/', b'/tmp') if hasattr(libc, 'pivot_root') else "
        "libc.syscall(ctypes.c_long(155), b'/', b'/tmp'))",
        "os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))",
        "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "open('/proc/sysrq-trigger', 'w').write('b')",
        "open('/sys/kernel/uevent_helper', 'w').write('x')",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    ],
    ids=lambda call: call[:44],
)
async def test_the_kernel_refuses_what_an_escape_needs(walled: Bench, call: str) -> None:
    if "syscall" in call and os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    sandbox = await walled.start()
    error = await errno_of(sandbox, call)
    refusals = {"EPERM", "EACCES", "EINVAL", "ENOSYS", "EROFS", "ENOENT", "EAFNOSUPPORT"}
    assert error in refusals, error


async def test_set_user_id_programs_give_nothing(walled: Bench) -> None:
    sandbox = await walled.start()
    for command in ("su root -c id", "sudo -n id", "mount -t tmpfs x /tmp", "unshare -Ur id"):
        shown = await text(sandbox, command)
        assert "uid=0" not in shown, (command, shown)


# --- network and ipc ------------------------------------------------------------------------


async def test_the_hosts_loopback_is_out_of_reach(walled: Bench, host_port: int) -> None:
    sandbox = await walled.start()
    assert await value_of(sandbox, "connect", port=host_port) is False
    interfaces = await text(sandbox, "cat /proc/net/dev")
    assert [line.split(":")[0].strip() for line in interfaces.splitlines()[2:]] == ["lo"]
    unreachable = "socket.create_connection(('192.0.2.1', 80), timeout=2)"
    assert await errno_of(sandbox, unreachable) == "ENETUNREACH"


async def test_its_own_loopback_works(walled: Bench) -> None:
    sandbox = await walled.start()
    port = await value_of(sandbox, "listen")
    assert await value_of(sandbox, "connect", port=port) is True


async def test_host_network_is_a_reported_fact(walled: Bench, host_port: int) -> None:
    """A project that asks for the host's network gets it, and its facts say what that costs."""
    sandbox = await walled.start(walled.contract_project({"network": "host"}))
    assert await value_of(sandbox, "connect", port=host_port) is True
    assert "net" not in sandbox.isolation.namespaces
    assert any("network: host" in words for words in sandbox.isolation.missing)
    closed = await walled.start()
    assert "net" in closed.isolation.namespaces
    assert closed.isolation.missing == ()


async def test_abstract_sockets_of_the_host_are_out_of_reach(walled: Bench) -> None:
    name = f"\0aenv-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        sandbox = await walled.start()
        connect = f"socket.socket(socket.AF_UNIX).connect({name!r})"
        assert await errno_of(sandbox, connect) == "ECONNREFUSED"


async def test_sandboxes_share_no_memory(walled: Bench) -> None:
    one, two = await walled.start(), await walled.start()
    await execute(one, "echo secret > /dev/shm/note")
    assert "No such file" in await text(two, "cat /dev/shm/note")
    assert not Path("/dev/shm/note").exists()


# --- limits -----------------------------------------------------------------------------------


async def test_a_fork_bomb_is_bounded_and_harms_no_other(walled: Bench) -> None:
    bomb, other = await walled.start(), await walled.start()
    script = "i=0; while [ $i -lt 1500 ]; do sleep 60 >/dev/null 2>&1 & i=$((i+1)); done; echo all"
    shown = await text(bomb, script)
    assert "all" not in shown.split("\n")[:1]
    assert "fork" in shown.lower() or "Resource temporarily unavailable" in shown
    assert (await execute(other, "true; true | true")).exit_code == 0
    await walled.engine.stop([bomb.instance_id])
    assert (await execute(other, "true; true | true")).exit_code == 0


async def test_memory_beyond_the_limit_is_the_tools_own_error(walled: Bench) -> None:
    sandbox = await walled.start(walled.contract_project({"memory": "512M"}))
    source = (
        "result = 'got it'\ntry:\n    bytearray(1 << 30)\nexcept MemoryError:\n    result = 'no'\n"
    )
    assert await run(sandbox, source) == "no"
    assert "512 MiB" in sandbox.isolation.limits["memory"]


async def test_cores_are_limited_where_the_project_says(walled: Bench) -> None:
    sandbox = await walled.start(walled.contract_project({"cpu": "1C"}))
    assert await run(sandbox, "import os; result = len(os.sched_getaffinity(0))") == 1


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "crash"])
async def test_no_grandchild_survives_however_it_hid(
    either_node: Node, either: Bench, crash: bool
) -> None:
    """Invariant 3: sessions, double forks and ignored signals do not help."""
    node, bench = either_node, either
    sandbox, command = await bench.start(), sleeper()
    nap = " ".join(command)
    script = (
        f"setsid sh -c 'trap \"\" TERM HUP INT; setsid {nap} & setsid setsid {nap} & wait' "
        f">/dev/null 2>&1 & ( ( exec {nap} ) >/dev/null 2>&1 & ) & nohup {nap} >/dev/null 2>&1 &"
    )
    await execute(sandbox, script)

    async def all_run() -> bool:
        return await value_of(sandbox, "running", argument=command[1]) == 4

    await eventually(all_run, "all four run")
    if crash:
        node.kill_sandboxes()
        await eventually(lambda: sandbox.end_cause is not None, "its end is known")
    else:
        await bench.engine.stop([sandbox.instance_id])
    await eventually(lambda: not node.left_over(), "nothing is left")

    def is_alive() -> bool:
        words = command[1].encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if words in entry.read_bytes():
                    return True
            except OSError:
                continue
        return False

    await eventually(lambda: not is_alive(), "no sleep is left on this machine")
