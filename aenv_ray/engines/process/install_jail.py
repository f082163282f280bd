"""Runs an installer in a sandbox that can reach package sources and nothing else.

``python -m aenv_ray.engines.process.install_jail`` reads an `InstallOrder` as JSON from its input.
The installer has the namespaces, limits and refused system calls of an instance, and the variables
of the order only. It can write to one directory. Its network namespace has no way out but
`PackageProxy`, which runs in a process outside.

Exit codes: 0; `FAILED`, after the installer's output; `NO_JAIL`, after the kernel's reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  # by name resolution, when no file can be read
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aenv_ray.engines.process.package_proxy import PackageProxy
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork.jail_spec import NOBODY, JailSpec, JailUnavailable
from aenv_ray.runtime.system import linux

FAILED: Final = 1
NO_JAIL: Final = 78
BUILD: Final = ".build"
"""Directory below the target for the installer's own files, deleted afterwards."""
MEMORY_BYTES: Final = 8 * 1024**3
MIN_FREE_BYTES: Final = 1024**3
"""An installation ends before the disk has less than this."""
MIN_FREE_FILES_SHARE: Final = 0.05
"""An installation ends before fewer files than this can be created, as a share of what the file
system can have."""
_LOOK_MS: Final = 500
_PROXY_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True)
class InstallOrder:
    """What to run, and what it may see and reach."""

    target: str
    """Directory that the installer may write to. What it needs of the project is below `BUILD`."""
    command: list[str]
    """The installer and its arguments."""
    variables: dict[str, str]
    shown: list[str] = field(default_factory=list)
    """Further paths of the node that the installer may read."""
    hosts: dict[str, str] = field(default_factory=dict)
    """See `PackageProxy`."""


def main() -> None:
    """Carry out the order on standard input."""
    order = InstallOrder(**json.load(sys.stdin))
    linux.die_with_parent()
    os.umask(0o022)
    with contextlib.suppress(OSError):  # then it is as likely to be killed as this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    with tempfile.TemporaryDirectory(prefix="aenv-install-") as scratch:
        code = _install(order, Path(scratch))
    sys.exit(code)


def _install(order: InstallOrder, scratch: Path) -> int:
    _give(order.target, NOBODY)
    here, there = socket.socketpair()
    installer = _forked(lambda: _in_jail(order, scratch, there))
    there.close()
    proxy = None
    with here:
        _, fds, _, _ = socket.recv_fds(here, 1, 1)
    if fds:
        listener = socket.socket(fileno=fds[0])
        proxy = _forked(lambda: _serve(listener, order))
        listener.close()
    code = _wait(installer, order.target)
    if proxy is not None:
        os.kill(proxy, signal.SIGKILL)
        os.waitpid(proxy, 0)
    shutil.rmtree(f"{order.target}/{BUILD}", ignore_errors=True)
    _give(order.target, 0)
    return code


def _forked(run: Callable[[], int]) -> int:
    """Run a function in a child that ends with this process; return the child's pid."""
    if (pid := os.fork()) != 0:
        return pid
    code = FAILED
    try:
        linux.die_with_parent()
        code = run()
    except BaseException:  # noqa: BLE001  # nothing of this process's own stack may run in a fork of it
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _say(text: str) -> None:
    """Add a line to the installer's output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _give(directory: str, user: int) -> None:
    """As root, make a user the owner of a directory; nothing in it may still be running."""
    if os.geteuid() != 0:
        return
    for path, _, files, fd in os.fwalk(directory):
        for name in files:
            os.chown(name, user, user, dir_fd=fd, follow_symlinks=False)
        del path
        os.chown(fd, user, user)


def _wait(pid: int, target: str) -> int:
    """Return a child's exit code; end it when the disk is nearly full, of data or of files."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while not poll.poll(_LOOK_MS):
        if shutil.disk_usage(target).free < MIN_FREE_BYTES:
            _say(f"stopped: less than {MIN_FREE_BYTES >> 20} MiB are free on the disk of {target}")
            os.kill(pid, signal.SIGKILL)
        files = os.statvfs(target)
        if files.f_favail < MIN_FREE_FILES_SHARE * files.f_files:  # some have no limit: 0 < 0
            _say(f"stopped: only {files.f_favail:,} more files fit on the disk of {target}")
            os.kill(pid, signal.SIGKILL)
    os.close(process)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else FAILED


# --- the proxy -----------------------------------------------------------------------------------


def _serve(listener: socket.socket, order: InstallOrder) -> int:
    "localhost".encode("idna")  # loads the codec while its file can be read
    if os.geteuid() == 0:
        _become_nobody()
        linux.die_with_parent()  # set again, because changing the user clears it
    asyncio.run(PackageProxy(order.hosts, _say).serve(listener))
    return 0


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


# --- the sandbox ---------------------------------------------------------------------------------


def _in_jail(order: InstallOrder, scratch: Path, channel: socket.socket) -> int:
    # Not the project: a package may name its files as requirements, which the cache's key omits.
    spec = JailSpec(
        f"{order.target}/{BUILD}", memory_bytes=MEMORY_BYTES, shown=tuple(order.shown),
        writable=order.target,
    )  # fmt: skip
    try:
        spec = jail.enter_root(scratch, spec, sys.executable, "install")
        linux.raise_loopback()
        listener = socket.create_server(("127.0.0.1", 0))
        linux.unshare(linux.CLONE_NEWPID)
        # Process 1 of the pid namespace: when it ends, so does all that the installer started.
        pid = _forked(lambda: _as_process_one(order, spec, channel, listener))
    except (JailUnavailable, OSError) as exc:
        _say(str(exc))
        return NO_JAIL
    channel.close()
    listener.close()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else FAILED


def _as_process_one(
    order: InstallOrder, spec: JailSpec, channel: socket.socket, listener: socket.socket
) -> int:
    try:
        jail.mount_proc()
        jail.lock(spec, jailed=True)
    except (JailUnavailable, OSError) as exc:
        _say(str(exc))
        return NO_JAIL
    socket.send_fds(channel, [b"!"], [listener.fileno()])
    port = listener.getsockname()[1]
    channel.close()
    listener.close()
    proxies = dict.fromkeys(_PROXY_VARIABLES, f"http://127.0.0.1:{port}")
    done = subprocess.run(
        order.command, env={**order.variables, **proxies}, cwd=order.target, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return FAILED if done.returncode != 0 else 0


if __name__ == "__main__":
    main()
