"""Lists what the engines really run on this machine.

The sources are the process table, the Docker daemon and the Kubernetes API, not the tables of
aenv-ray, so that "nothing is left" can be verified.
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
from aenv_ray.files import read_start

_NOT_YET: Final = frozenset({"aenv-spare", "aenv-template"})
"""Names that `aenv_ray.runtime.fork.template` gives to processes that are not instances."""
_LAUNCHER: Final = b"aenv_ray.engines.process.launcher"
_PROC: Final = "/proc"


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    has_ended: bool
    name: str


def live_processes(directory: Path | None = None) -> list[int]:
    """Return the pids of all sandbox processes on this machine; empty on other systems than Linux.

    Args:
        directory: Only those of the launcher with this directory. None: of every launcher.

    Launchers, templates and spare processes do not count. In a jail, a template is two pid
    namespaces deeper than its launcher, its jailer one, and its instances are deeper. Without a
    jail, the children of the launcher are templates and all their descendants belong to instances.
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
    """Return the ids of the containers of a node's instances, in any state.

    Args:
        runtime_dir: The runtime directory of the node. If the docker engine was never used there,
            the daemon is not asked.
        scope: The node's, as given to engines.
        address: The address of the daemon: ``unix:///path``.

    Raises:
        FabricUnavailable: The daemon does not answer.
        ConfigError: `address` is not a Unix socket.
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
            f"the Docker daemon at {address} cannot list its containers: {exc!r}",
            hint="check the daemon with: docker ps",
        ) from exc
    return [row["Id"] for row in rows if INSTANCE_LABEL in row["Labels"]]


def live_pods(scope: str, settings: Settings) -> list[str]:
    """Return the pods of a node's instances, in any state, as the API lists them.

    Args:
        scope: The node's, as given to engines. If the kubernetes engine was never used there, the
            API is not asked.
        settings: The settings of the node.

    Raises:
        FabricUnavailable: The API does not answer.
        ConfigError: A setting of the kubernetes engine is invalid.
    """
    if not node_path(settings.runtime_dir, kubernetes_names.node_scope(scope)).exists():
        return []
    from aenv_ray.engines.kubernetes.pods import list_owned_pods
    from aenv_ray.engines.kubernetes.settings import PodSettings

    return asyncio.run(list_owned_pods(PodSettings.of(settings)))


def _below(
    template: _Process, launchers_depth: int, children: dict[int, list[_Process]]
) -> list[int]:
    found: list[int] = []
    pending = list(children[template.pid])
    while pending:
        process = pending.pop()
        pending += children[process.pid]
        if not process.has_ended and process.name not in _NOT_YET:
            depth = _pid_namespaces(process.pid)
            is_gone, is_inner = depth == 0, launchers_depth < depth <= launchers_depth + 2
            if not is_gone and not is_inner:
                found.append(process.pid)
    return found


def _processes() -> Iterator[_Process]:
    """Yield all processes, with one short read for each, because there may be thousands."""
    for name in os.listdir(_PROC) if os.path.isdir(_PROC) else ():
        if name.isdigit():
            text = read_start(f"{_PROC}/{name}/stat").decode(errors="replace")
            # proc(5): pid (name) state parent …; a name may contain parentheses and spaces.
            before, _, after = text.rpartition(") ")
            if after:
                fields = after.split()
                # The state is that of the main thread, which may end before the others.
                has_ended = fields[0] == "Z" and int(fields[17]) <= 1
                yield _Process(int(name), int(fields[1]), has_ended, before.partition("(")[2])


def _pid_namespaces(pid: int) -> int:
    """Return the depth of a process in nested pid namespaces; 0 if it has ended."""
    status = read_start(f"{_PROC}/{pid}/status")
    _, _, after = status.partition(b"\nNSpid:")
    return len(after.partition(b"\n")[0].split()) or min(1, len(status))


def _is_launcher(pid: int, directory: Path | None) -> bool:
    command = read_start(f"{_PROC}/{pid}/cmdline")
    if _LAUNCHER not in command:
        return False
    words = command.split(b"\0")
    return _LAUNCHER in words and (directory is None or os.fsencode(directory) in words)
