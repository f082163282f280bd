"""The Ray of ``aenv up``: its start, its processes (found by an environment variable), its end."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.errors import DeadlineExceeded, FabricUnavailable
from aenv_ray.local_fabric import MARK, LocalFabric

START_S: Final = 180.0
"""Timeout for Ray's start, for a busy machine."""
_LEAVE_S: Final = 5.0
"""Timeout for the raylet's end, which takes tenths of a second on an idle machine."""
_TERM_S: Final = 10.0
"""Time between SIGTERM and SIGKILL: Ray ends its workers, Redis writes its data."""
_KILL_S: Final = 10.0
_SANDBOXES_S: Final = 20.0
"""Time for launcher and janitor to notice the end of Ray and end their sandboxes."""
_LOOK_S: Final = 0.1
_NOT_INHERITED: Final = ("RAY_ADDRESS", "AENV_API_KEY", "AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP")
"""Variables that concern only this command, not the fabric's processes."""
_NO_NODE: Final = {"node_dir": None}
_LOG: Final = "start.log"
_RAYS: Final = "ray"
_LOG_LINES: Final = 1


def new_temp_dir() -> Path:
    """Return a new private directory for a Ray, on a short path for its sockets."""
    parent = os.environ.get("RAY_TMPDIR") or "/tmp"
    return Path(tempfile.mkdtemp(prefix="aenv-", dir=parent))


def user() -> str:
    """Return the name of this user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container without an entry in /etc/passwd
        return str(os.getuid())


def start(fabric: LocalFabric, num_cpus: int | None) -> str:
    """Start a Ray that outlives this process, and return its address.

    Args:
        fabric: The record, with the directory for Ray.
        num_cpus: CPUs for Ray. None: all.

    Raises:
        FabricUnavailable: Ray did not start; the message has its last output.
    """
    from aenv_ray.actors.ray_shell.ray_api import SYSTEM_CONFIG

    directory = fabric.ray_temp_dir
    assert directory is not None
    shared = directory / _RAYS  # Ray opens it to every user, but nobody else can enter its parent
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0",
        f"--temp-dir={shared}", f"--ray-client-server-port={free_port('')}",
        "--include-dashboard=false", "--disable-usage-stats", "--no-monitor",
        f"--system-config={json.dumps(SYSTEM_CONFIG)}",
    ]  # fmt: skip
    if num_cpus is not None:
        command.append(f"--num-cpus={num_cpus}")
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    environment[MARK] = fabric.id
    log = directory / _LOG
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"Ray did not start within {START_S:g} s", hint=f"see the logs in {shared}"
            ) from None
    address = shared / "ray_current_cluster"
    if code or not address.is_file():
        lines = log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
        raise FabricUnavailable(
            f"Ray did not start: {' | '.join(map(str.strip, lines)) or f'code {code}'}",
            hint="check this machine with: aenv doctor",
        )
    return address.read_text().strip()


def processes(fabric: LocalFabric) -> dict[int, str]:
    """Return the commands of a fabric's live processes, by pid.

    These are the processes with the fabric's id in their environment, those in the same session
    (some of Ray's processes overwrite their environment), and those of the node's launcher.
    """
    mark = f"{MARK}={fabric.id}".encode()
    node_dir = os.fsencode(fabric.node_dir) if fabric.node_dir is not None else None
    every = [row for row in _all_processes() if row[0] != os.getpid()]
    marked = {pid for pid, _, environment in every if mark in environment.split(b"\0")}
    sessions = fabric.sessions | sessions_of(marked)
    return {
        pid: command.replace(b"\0", b" ").decode(errors="replace").strip()
        for pid, command, _ in every
        if pid in marked
        or _session(pid) in sessions
        or (node_dir is not None and node_dir in command.split(b"\0"))
    }


def sessions_of(pids: Iterable[int]) -> frozenset[int]:
    """Return the sessions of processes, without that of this process."""
    found = {_session(pid) for pid in pids} - {0, os.getsid(0)}
    return frozenset(found)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it has just ended
        return 0


def end(fabric: LocalFabric, say: Callable[[str], None]) -> None:
    """End the Ray of a fabric and everything it started.

    Raises:
        FabricUnavailable: A process does not end.
    """
    sessions = fabric.sessions | sessions_of(processes(fabric.model_copy(update=_NO_NODE)))
    fabric = fabric.model_copy(update={"sessions": sessions})
    marked = fabric.model_copy(update=_NO_NODE)
    _end_raylets(marked)
    _signal(processes(marked), signal.SIGTERM)
    if not _are_gone(marked, _TERM_S):
        stubborn = sorted(map(_short, processes(marked).values()))
        say(f"killing processes that did not end: {', '.join(stubborn)}")
        _signal(processes(marked), signal.SIGKILL)
        _are_gone(marked, _KILL_S)
    # Launchers and janitors are left: they end sandboxes and containers, then themselves.
    if not _are_gone(fabric, _SANDBOXES_S):
        _signal(processes(fabric), signal.SIGKILL)
        if not _are_gone(fabric, _KILL_S):
            left = ", ".join(map(str, processes(fabric)))
            raise FabricUnavailable(f"processes {left} did not end", hint="try again: aenv down")
    for directory in (fabric.ray_temp_dir, fabric.node_dir):
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _end_raylets(fabric: LocalFabric) -> None:
    """End the raylet before the head.

    It signs off at the head and waits for a response; if both are ended together, it hangs.
    """

    def raylets() -> list[int]:
        return [p for p, c in processes(fabric).items() if c.split()[0].endswith("/raylet")]

    _signal(raylets(), signal.SIGTERM)
    ends = time.monotonic() + _LEAVE_S
    while raylets() and time.monotonic() < ends:
        time.sleep(_LOOK_S)


def _short(command: str) -> str:
    return " ".join(Path(word).name for word in command.split()[:2])


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _are_gone(fabric: LocalFabric, deadline_s: float) -> bool:
    ends = time.monotonic() + deadline_s
    while processes(fabric):
        if time.monotonic() > ends:
            return False
        time.sleep(_LOOK_S)
    return True


def _all_processes() -> Iterable[tuple[int, bytes, bytes]]:
    """Yield pid, command and environment of each process that this user may inspect."""
    if not Path("/proc/self/environ").exists():
        yield from _all_processes_elsewhere()
        return
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            if command:  # a zombie or a kernel thread has none
                yield int(name), command, Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue


def _all_processes_elsewhere() -> Iterable[tuple[int, bytes, bytes]]:
    from aenv_ray.actors.ray_shell import ray_api

    for pid, command, variables in ray_api.all_processes():
        pairs = [f"{name}={value}" for name, value in variables.items()]
        yield pid, "\0".join(command).encode(), "\0".join(pairs).encode()
