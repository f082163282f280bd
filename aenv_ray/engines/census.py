"""Counts what the engines really run on this machine, from the operating system and the daemon.

For statements like "nothing is left" our own tables are no witness; the process table is, and the
lists of the Docker daemon and of the Kubernetes API.
"""

from __future__ import annotations

import asyncio
import http.client
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aenv_ray.config import Settings
from aenv_ray.engines.kubernetes import names as kubernetes_names
from aenv_ray.engines.node.directory import node_path
from aenv_ray.errors import FabricUnavailable

_NOT_YET: Final = frozenset({"aenv-spare", "aenv-template"})
"""What `aenv_ray.runtime.fork.template` calls a forked process that is no instance yet."""
_LAUNCHER: Final = b"aenv_ray.engines.process.launcher"
_PROC: Final = "/proc"
_MORE_THAN_THESE_HOLD: Final = 16_384


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    state: str
    name: str


def live_processes(directory: Path | None = None) -> list[int]:
    """Return the pids of all sandbox processes on this machine, whatever they were started as.

    Args:
        directory: Count only those of this launcher. None: of every launcher of this user.

    Launchers, templates and their spare processes are not sandboxes. A template in a jail is one
    pid namespace deeper than its launcher, and its instances are deeper still; without a jail the
    launcher's children are templates and everything below them are instances. Linux only; elsewhere
    empty.
    """
    children: dict[int, list[_Process]] = defaultdict(list)
    launchers: list[int] = []
    for process in _processes():
        children[process.parent].append(process)
        if _is_launcher(process.pid, directory):
            launchers.append(process.pid)
    found: list[int] = []
    for launcher in launchers:
        depth = _pid_namespaces(launcher)
        for template in children[launcher]:
            found += _below(template, depth, children)
    return found


def live_containers(runtime_dir: Path, scope: str, address: str) -> list[str]:
    """Return the containers of a node's instances, by the daemon's own list, whatever their state.

    Args:
        runtime_dir: Of the node; where the docker engine was never used, no daemon is asked.
        scope: The node's, as engines are given it.
        address: Of the daemon: ``unix:///path``.

    Raises:
        FabricUnavailable: The daemon does not answer, so that nobody can say what it runs.
        ConfigError: `address` is no Unix socket.
    """
    from aenv_ray.engines.docker.janitor import JanitorClient
    from aenv_ray.engines.docker.names import docker_scope
    from aenv_ray.engines.node.docker_client import socket_path
    from aenv_ray.engines.node.docker_labels import INSTANCE_LABEL, SCOPE_LABEL

    if not node_path(runtime_dir, docker_scope(scope)).exists():
        return []
    try:
        rows = JanitorClient(socket_path(address)).containers(
            f"{SCOPE_LABEL}={docker_scope(scope)}"
        )
    except (OSError, http.client.HTTPException) as exc:
        raise FabricUnavailable(
            f"the Docker daemon at {address} does not say what it runs: {exc!r}"
        ) from exc
    return [row["Id"] for row in rows if INSTANCE_LABEL in row["Labels"]]


def live_pods(scope: str, settings: Settings) -> list[str]:
    """Return the pods of a node's instances, by the API's own list, whatever their state.

    Args:
        scope: The node's, as engines are given it; where the kubernetes engine was never used, no
            API is asked.
        settings: Of the node.

    Raises:
        FabricUnavailable: The API does not answer, so that nobody can say what it runs.
        ConfigError: A setting of the kubernetes engine is none.
    """
    if not node_path(settings.runtime_dir, kubernetes_names.node_scope(scope)).exists():
        return []
    from aenv_ray.engines.kubernetes.census import pods_of
    from aenv_ray.engines.kubernetes.namespace import place_of

    return asyncio.run(pods_of(place_of(settings)))


def _below(
    template: _Process, launchers_depth: int, children: dict[int, list[_Process]]
) -> list[int]:
    found: list[int] = []
    pending = list(children[template.pid])
    while pending:
        process = pending.pop()
        pending += children[process.pid]
        if process.state != "Z" and process.name not in _NOT_YET:
            depth = _pid_namespaces(process.pid)
            is_gone, is_inner_template = depth == 0, depth == launchers_depth + 1
            if not is_gone and not is_inner_template:
                found.append(process.pid)
    return found


def _processes() -> Iterator[_Process]:
    """Yield all processes, by one short read each: who counts, counts among thousands."""
    for name in os.listdir(_PROC) if os.path.isdir(_PROC) else ():
        if name.isdigit():
            text = _read(f"{_PROC}/{name}/stat").decode(errors="replace")
            # proc(5): pid (name) state parent …; a name may hold any of these characters.
            before, _, after = text.rpartition(") ")
            if after:
                state, parent, _ = after.split(" ", 2)
                yield _Process(int(name), int(parent), state, before.partition("(")[2])


def _pid_namespaces(pid: int) -> int:
    """Return how deep a process is in nested pid namespaces; 0 when it is gone."""
    status = _read(f"{_PROC}/{pid}/status")
    _, _, after = status.partition(b"\nNSpid:")
    return len(after.partition(b"\n")[0].split()) or min(1, len(status))


def _is_launcher(pid: int, directory: Path | None) -> bool:
    command = _read(f"{_PROC}/{pid}/cmdline")
    if _LAUNCHER not in command:
        return False
    words = command.split(b"\0")
    return _LAUNCHER in words and (directory is None or os.fsencode(directory) in words)


def _read(path: str) -> bytes:
    """Return a file of a process; empty when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _MORE_THAN_THESE_HOLD)
    except OSError:
        return b""
    finally:
        os.close(fd)
