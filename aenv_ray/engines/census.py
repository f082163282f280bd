"""Counts what the engines really run on this machine, from the operating system and the daemon.

For statements like "nothing is left" our own tables are no witness; the process table is, and the
lists of the Docker daemon and of the Kubernetes API.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aenv_ray.config import Settings
from aenv_ray.engines import kubernetes_names
from aenv_ray.engines.launcher_client import node_path
from aenv_ray.errors import FabricUnavailable

_NOT_YET: Final = frozenset({"aenv-spare", "aenv-template"})
"""What `aenv_ray.runtime.template` calls a forked process that is no instance yet."""
_LAUNCHER: Final = b"aenv_ray.engines.launcher"


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    state: str
    name: str
    pid_namespaces: int
    """How deep it is in nested pid namespaces."""


def live_processes(directory: Path | None = None) -> list[int]:
    """Return the pids of all sandbox processes on this machine, whatever they were started as.

    Args:
        directory: Count only those of this launcher. None: of every launcher of this user.

    Launchers, templates and their spare processes are not sandboxes. A template in a jail is one
    pid namespace deeper than its launcher, and its instances are deeper still; without a jail the
    launcher's children are templates and everything below them are instances. Linux only; elsewhere
    empty.
    """
    processes = _processes()
    children: dict[int, list[_Process]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process)
    found: list[int] = []
    for launcher in processes.values():
        if not _is_launcher(launcher.pid, directory):
            continue
        for template in children[launcher.pid]:
            found += _below(template, launcher, children)
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
    from aenv_ray.engines.docker_client import socket_path
    from aenv_ray.engines.docker_files import INSTANCE_LABEL, SCOPE_LABEL, docker_scope
    from aenv_ray.engines.docker_janitor import Daemon

    if not node_path(runtime_dir, docker_scope(scope)).exists():
        return []
    try:
        rows = Daemon(socket_path(address)).containers(f"{SCOPE_LABEL}={docker_scope(scope)}")
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
    from aenv_ray.engines.kubernetes_census import pods_of
    from aenv_ray.engines.kubernetes_place import place_of

    return asyncio.run(pods_of(place_of(settings)))


def _below(
    template: _Process, launcher: _Process, children: dict[int, list[_Process]]
) -> list[int]:
    found: list[int] = []
    pending = list(children[template.pid])
    while pending:
        process = pending.pop()
        pending += children[process.pid]
        is_inner_template = process.pid_namespaces == launcher.pid_namespaces + 1
        is_sandbox = process.name not in _NOT_YET and not is_inner_template
        if process.state != "Z" and is_sandbox:
            found.append(process.pid)
    return found


def _processes() -> dict[int, _Process]:
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, KeyError, IndexError):
                fields = dict(
                    line.split(":", 1)
                    for line in Path("/proc", name, "status").read_text().splitlines()
                    if ":" in line
                )
                found[int(name)] = _Process(
                    pid=int(name),
                    parent=int(fields["PPid"]),
                    state=fields["State"].split()[0],
                    name=fields["Name"].strip(),
                    pid_namespaces=len(fields.get("NSpid", name).split()),
                )
    return found


def _is_launcher(pid: int, directory: Path | None) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if _LAUNCHER in words:
            return directory is None or os.fsencode(directory) in words
    return False
