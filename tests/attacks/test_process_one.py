"""Code in a sandbox of the process engine attacks its walls, as process 1 and as a child of it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from aenv_ray.errors import AenvError
from aenv_ray.runtime.fork import seccomp
from aenv_ray.testing.contract_bench import Bench, evaluate, execute, request, value_of

pytestmark = [pytest.mark.namespaces, pytest.mark.ordinary_user]

UPROBES = {335, 336}
"""Calls of the kernel's own code on x86_64, which it exempts from all filters."""
TRY_CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
result = {}
for number in NUMBERS:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        libc.syscall(number, -1, -1, -1, -1, -1, -1)
        os.write(write, str(ctypes.get_errno()).encode())
        os._exit(0)
    os.close(write)
    result[number] = int(os.read(read, 100) or -1)
    os.close(read)
    os.waitpid(pid, 0)
"""


async def test_every_system_call_that_is_not_listed_is_refused(walled: Bench) -> None:
    """Invariant 7: with the kernel's answer, not the filter's source."""
    listed = set(seccomp.allowed_calls(os.uname().machine).values())
    checked = {both[os.uname().machine != "x86_64"] for both in seccomp._CHECKED.values()}
    skipped = listed | checked | UPROBES
    numbers = [number for number in range(520) if number not in skipped]
    sandbox = await walled.start()
    answers = await evaluate(sandbox, TRY_CALLS.replace("NUMBERS", repr(numbers)))
    refused = {errno.EPERM, errno.ENOSYS}
    assert len(answers) > 150
    assert {number: code for number, code in answers.items() if code not in refused} == {}


ESCAPES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
)
def tried(call, *arguments):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        done = call(*arguments)
        os.write(write, b'done' if done >= 0 else str(ctypes.get_errno()).encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 100).decode()
    os.close(read)
    os.waitpid(pid, 0)
    return answer
tmpfs = (b'x', b'/tmp', b'tmpfs')
own = os.open('/proc/self/ns/user', os.O_RDONLY)
result = {tried(libc.unshare, flags) for flags in (
    NEWUSER | NEWUTS, NEWUSER, NEWNS | NEWIPC, NEWPID, NEWNET
)}
result |= {tried(libc.mount, *tmpfs, flags, None) for flags in (0, 4, 6, 10, 14, 32, 4096, 20480)}
result |= {tried(libc.umount2, b'/proc', 2), tried(libc.setns, own, 0)}
result |= {tried(libc.syscall, number, 0, 0, 0, 0, 0, 0) for number in NAMED}
result = sorted(result)
"""
NAMED = {
    "x86_64": {
        "bpf": 321, "io_uring_setup": 425, "userfaultfd": 323, "perf_event_open": 298,
        "keyctl": 250, "add_key": 248, "kexec_load": 246, "init_module": 175, "finit_module": 313,
        "open_by_handle_at": 304, "name_to_handle_at": 303, "move_mount": 429, "fsopen": 430,
        "open_tree": 428, "mount_setattr": 442, "pivot_root": 155, "chroot": 161, "swapon": 167,
        "settimeofday": 164, "clock_settime": 227, "quotactl": 179, "acct": 163, "reboot": 169,
    },
    "aarch64": {
        "bpf": 280, "io_uring_setup": 425, "userfaultfd": 282, "perf_event_open": 241,
        "keyctl": 219, "add_key": 217, "kexec_load": 104, "init_module": 105, "finit_module": 273,
        "open_by_handle_at": 265, "name_to_handle_at": 264, "move_mount": 429, "fsopen": 430,
        "open_tree": 428, "mount_setattr": 442, "pivot_root": 41, "chroot": 51, "swapon": 224,
        "settimeofday": 170, "clock_settime": 112, "quotactl": 60, "acct": 89, "reboot": 142,
    },
}  # fmt: skip


async def test_an_instance_makes_no_namespace_and_no_mount(walled: Bench) -> None:
    """Invariant 7: this includes the calls that its template makes for it, and those of escapes."""
    sandbox = await walled.start()
    numbers = sorted(NAMED[os.uname().machine].values())
    answers = await evaluate(sandbox, ESCAPES.replace("NAMED", repr(numbers)))
    assert answers == [str(errno.EPERM)]


@pytest.mark.parametrize("network", ["none", "host"])
async def test_no_socket_of_another_family_opens(walled: Bench, network: str) -> None:
    """Invariant 7: vsock has one space of ports for the node and all network namespaces."""
    sandbox = await walled.start(walled.contract_project({"network": network}))
    source = (
        "import socket\nresult = []\n"
        "for family in range(64):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        for protocol in (0, 12, 16):\n"
        "            try: socket.socket(family, kind, protocol).close()\n"
        "            except OSError: continue\n"
        "            result.append([family, protocol])\n"
    )
    opened = {(family, protocol) for family, protocol in await evaluate(sandbox, source)}
    assert {family for family, _ in opened} <= {1, 2, 10, 16}
    assert {protocol for family, protocol in opened if family == 16} <= {0}


async def test_no_route_leaves_a_sandbox_without_network(walled: Bench) -> None:
    """Invariant 7: its one interface is its own loopback."""
    sandbox = await walled.start()
    assert await evaluate(
        sandbox, "import socket; result = [name for _, name in socket.if_nameindex()]"
    ) == ["lo"]
    source = (
        "import socket\nresult = []\n"
        "for family, host in ((2, '10.0.0.1'), (2, '169.254.169.254'), (10, 'fe80::1'), "
        "(10, '2001:db8::1')):\n"
        "    for kind in (1, 2):\n"
        "        try: socket.socket(family, kind).connect((host, 80)); result.append(host)\n"
        "        except OSError: pass\n"
    )
    assert await evaluate(sandbox, source) == []


async def test_no_signal_from_inside_ends_process_one(walled: Bench) -> None:
    """Invariant 14: an agent cannot void its episode."""
    sandbox = await walled.start()
    await execute(sandbox, "for n in $(seq 1 64); do kill -$n 1; done; true")
    assert await value_of(sandbox, "echo", text="alive") == "alive"


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/maps", "/proc/1/maps", "/proc/thread-self/smaps", "/proc/1/task/1/maps",
        "/proc/self/mem", "/proc/self/environ", "/proc/self/auxv", "/proc/1/root/proc/1/maps",
        "link",
    ],
)  # fmt: skip
async def test_file_methods_reveal_nothing_about_process_one(walled: Bench, path: str) -> None:
    """Invariant 14: the graders are in its memory, and addresses help to read it."""
    sandbox = await walled.start()
    await execute(sandbox, "ln -s /proc/self/maps link")
    for method, more in (("read_file", {}), ("write_file", {"data": "", "append": True})):
        parameters: dict[str, Any] = {"arguments": {"path": path, **more}}
        with pytest.raises(AenvError, match=r"Permission denied|not permitted|No such"):
            await request(sandbox, f"aenv/{method}", parameters)
    plain = {"arguments": {"path": "/proc/meminfo", "length": 10}}
    assert await request(sandbox, "aenv/read_file", plain)


async def test_file_methods_reveal_nothing_through_the_id_of_a_thread(either_engine: Bench) -> None:
    """Invariant 14: /proc has a directory for each thread, though it lists processes only."""
    sandbox = await either_engine.start()
    threads = (await execute(sandbox, "ls /proc/1/task")).text().split()
    assert len(threads) > 1
    for thread in threads:
        for method, path in (
            ("read_file", f"/proc/{thread}/maps"),
            ("read_file", f"/proc/1/task/{thread}/maps"),
            ("list_files", f"/proc/{thread}/map_files"),
        ):
            with pytest.raises(AenvError, match=r"Permission denied|No such"):
                await request(sandbox, f"aenv/{method}", {"arguments": {"path": path}})


async def test_the_file_methods_do_not_list_the_memory_of_process_one(walled: Bench) -> None:
    """Invariant 14: the names in this directory are addresses."""
    sandbox = await walled.start()
    for path in ("/proc/self/map_files", "/proc/1/map_files"):
        with pytest.raises(AenvError, match="Permission denied"):
            await request(sandbox, "aenv/list_files", {"arguments": {"path": path}})


async def test_usual_programs_work_under_the_filter(walled: Bench) -> None:
    """Whatever is refused, programs that environments use must not need it."""
    sandbox = await walled.start()
    script = (
        "set -e; cd /tmp; python3 -c 'import asyncio, ctypes, multiprocessing as m, ssl, sqlite3\n"
        "p = m.Process(target=print, args=(1,)); p.start(); p.join()\n"
        'async def go(): return await (await asyncio.create_subprocess_exec("true")).wait()\n'
        "asyncio.run(go())'\n"
        "if command -v git; then git init -q r; fi\n"
        "if command -v cc; then printf 'int main(){return 0;}' > a.c; cc a.c -o a; ./a; fi\n"
        "if command -v node; then node -e 'require(\"os\").networkInterfaces()'; fi\n"
        "tar cf t.tar /etc/hostname 2>/dev/null; sort /etc/passwd > s; ls -l > l; echo done\n"
    )
    done = await execute(sandbox, ["bash", "-c", script])
    assert done.exit_code == 0, done.text()
