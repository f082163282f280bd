"""The docker engine's janitor: a small process of the node that outlives every host.

``python -m aenv_ray.engines.docker.janitor DIR SCOPE SOCKET OWNER_PID GRACE_S`` runs in a session
of its own. Once or twice a second it asks the daemon what has the label of its scope, and ends

- what is past its deadline,
- what belongs to a host that stays away longer than GRACE_S,
- what ended by itself and nobody has removed,
- what has written more to its image's directories than it may, where the daemon cannot limit it,
- everything, when the process that owns it (the raylet) is gone.

It also ends what is past its deadline in scopes whose own janitor is gone. It touches nothing
without our labels, and decides by the daemon's list, not by anybody's memory (design D8).
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.docker import firewall as docker_network
from aenv_ray.engines.docker.files import DockerFiles, first_name
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.directory import remove_stale, remove_tree
from aenv_ray.files import is_locked

ADOPTION_GRACE_S: Final = 30.0
"""A restarted host actor is back within a second or two; Ray gives a worker a minute to start."""
BURIAL_GRACE_S: Final = 10.0
"""A container that ended is left this long to its host, which wants its last words."""
SWEEP_S: Final = 0.5
LONGEST_SWEEP_S: Final = 4.0
PAUSE_PER_CONTAINER_S: Final = 0.005
"""The daemon's list of a full node takes long: it is asked for less often."""
FASTEST_WRITE: Final = 1 << 30
"""Bytes a second: a container that has room for more is looked at later."""
STORAGE_SLACK_BYTES: Final = 1 << 20
"""One file may have all of the limit, and a byte more ends nobody."""
LONGEST_LOOK_S: Final = 10.0
_FOREIGN_SWEEP_S: Final = 30.0
IDLE_EXIT_S: Final = 60.0
_LOCK_TRIES: Final = 20
_LOCK_PAUSE_S: Final = 0.01
_DAEMON_DEADLINE_S: Final = 60.0

TTL_PASSED: Final = "its TTL passed"
HOST_GONE: Final = "its host is gone"


class _Connection(http.client.HTTPConnection):
    """HTTP over the daemon's Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=_DAEMON_DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Daemon:
    """The few requests that a janitor makes.

    Args:
        path: The daemon's socket.

    Each raises `OSError` or `http.client.HTTPException` when the daemon does not answer.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def containers(self, label: str) -> list[dict[str, Any]]:
        """Return the containers with a label, whatever their state."""
        return list(self._get("/containers/json", {"label": [label]}, all=1))

    def remove(self, container: str) -> bool:
        """End and remove a container; False when the daemon did not."""
        status, _ = self._ask("DELETE", f"/containers/{container}?force=1&v=1")
        return status in (204, 404)

    def written_bytes(self, container: str) -> int:
        """Return how much a container has written to its image's directories; 0 when it is gone."""
        status, content = self._ask("GET", f"/containers/{container}/json?size=1")
        return int(json.loads(content).get("SizeRw") or 0) if status == 200 else 0

    def remove_volume(self, name: str) -> None:
        """Remove a volume; the last of its containers to go takes it with it."""
        self._ask("DELETE", f"/volumes/{name}")

    def unused_volumes(self, label: str) -> set[str]:
        """Return the volumes with a label that no container has."""
        found = self._get("/volumes", {"label": [label], "dangling": ["true"]})
        return {str(volume["Name"]) for volume in found.get("Volumes") or ()}

    def networks(self, label: str) -> list[dict[str, Any]]:
        """Return the networks with a label."""
        return list(self._get("/networks", {"label": [label]}))

    def remove_network(self, network: str) -> bool:
        """Remove a network; False when it is used."""
        status, _ = self._ask("DELETE", f"/networks/{network}")
        return status in (204, 404)

    def _get(self, path: str, filters: dict[str, list[str]], **query: Any) -> Any:
        text = urllib.parse.urlencode({**query, "filters": json.dumps(filters)})
        status, content = self._ask("GET", f"{path}?{text}")
        if status != 200:
            raise http.client.HTTPException(f"{path}: {status} {content[:300]!r}")
        return json.loads(content)

    def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        with contextlib.closing(_Connection(self._path)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()


class Janitor:
    """Decides what is ended, from the daemon's list and the clock.

    Args:
        scope: Whose containers it looks after.
        files: Their directory.
        daemon: Asked what exists.
        clock: Wall-clock seconds; deadlines are compared across processes.
        grace_s: How long containers wait for a host that went away.
    """

    def __init__(
        self,
        scope: str,
        files: DockerFiles,
        daemon: Daemon,
        clock: Clock | None = None,
        grace_s: float = ADOPTION_GRACE_S,
    ) -> None:
        self._scope = scope
        self._label = f"{docker_labels.SCOPE_LABEL}={scope}"
        self._files = files
        self._daemon = daemon
        self._now = (clock or SystemClock()).now
        self._grace_s = grace_s
        self._away: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._look_at: dict[str, float] = {}
        self._unknown: dict[str, float] = {}
        self._foreign_at = 0.0
        self._unused: set[str] = set()
        self._quiet_since = self._now()

    def sweep(self) -> int:
        """Look once at everything, end what is due, and return how much there was to look at."""
        now = self._now()
        rows = self._daemon.containers(self._label)
        alive = {_name(row) for row in rows if row["State"] not in ("exited", "dead")}
        for row in rows:
            cause = self._due(row, now, alive)
            if cause is not None:
                self._end(row, cause)
        names = {_name(row) for row in rows}
        self._clean_up(names, now)
        self._look_at = {name: at for name, at in self._look_at.items() if name in names}
        self._ended = {name: since for name, since in self._ended.items() if name in names}
        hosts = {row["Labels"].get(docker_labels.HOST_LABEL, "") for row in rows}
        self._away = {host: since for host, since in self._away.items() if host in hosts}
        if now >= self._foreign_at:
            self._foreign_at = now + _FOREIGN_SWEEP_S
            self._end_overdue_strangers(now)
            self._remove_unused_volumes()
            self._remove_unused_networks()
        if rows or self._files.has_hosts:
            self._quiet_since = now
        return len(rows)

    @property
    def is_idle(self) -> bool:
        """Whether there was nobody to look after for a while."""
        return self._now() - self._quiet_since > IDLE_EXIT_S

    def _due(self, row: dict[str, Any], now: float, alive: set[str]) -> str | None:
        """Return why a container is to be ended now; "" when its end needs no word, None if not."""
        name, labels = _name(row), row["Labels"]
        if now >= self._files.deadline(name, labels[docker_labels.DEADLINE_LABEL]):
            return TTL_PASSED
        host = labels[docker_labels.HOST_LABEL]
        if self._files.is_present(host):
            self._away.pop(host, None)
        elif now - self._away.setdefault(host, now) > self._grace_s:
            return HOST_GONE
        is_left = docker_labels.SIDECAR_LABEL in labels and first_name(name) not in alive
        if row["State"] not in ("exited", "dead") and not is_left:
            return self._overflow(row, now)
        return "" if now - self._ended.setdefault(name, now) > BURIAL_GRACE_S else None

    def _overflow(self, row: dict[str, Any], now: float) -> str | None:
        """Return what is to be said of a container that wrote more than it may; None if not."""
        limit, name = int(row["Labels"].get(docker_labels.STORAGE_LABEL, 0)), _name(row)
        if not limit or now < self._look_at.get(name, 0.0):
            return None
        written = self._daemon.written_bytes(row["Id"])
        if written > limit + STORAGE_SLACK_BYTES:
            return (
                f"it wrote {written >> 20} MiB to its image's directories (limit {limit >> 20} "
                "MiB: deployConfig.ephemeralStorage)"
            )
        self._look_at[name] = now + min(LONGEST_LOOK_S, max(0, limit - written) / FASTEST_WRITE)
        return None

    def _end(self, row: dict[str, Any], cause: str) -> None:
        name = _name(row)
        if cause and row["State"] == "running":
            self._files.note_cause(name, cause)
        if not self._remove(row):
            return  # the next sweep tries again
        self._ended.pop(name, None)
        if not self._files.is_present(row["Labels"][docker_labels.HOST_LABEL]):
            self._files.clean(name)  # else its host wants to know the cause, and cleans up

    def _remove(self, row: dict[str, Any]) -> bool:
        """Remove a container, and the volume that it shared if it was the last; False if not."""
        is_gone = self._daemon.remove(row["Id"])
        if is_gone and docker_labels.VOLUME_LABEL in row["Labels"]:
            self._daemon.remove_volume(row["Labels"][docker_labels.VOLUME_LABEL])
        return is_gone

    def _remove_unused_volumes(self) -> None:
        """Remove volumes whose containers somebody else removed: unused at two looks, so old."""
        unused = self._daemon.unused_volumes(self._label)
        for name in unused & self._unused:
            self._daemon.remove_volume(name)
        self._unused = unused

    def _remove_unused_networks(self) -> None:
        """Remove networks of allow-lists, and their rules, that nobody is on: there may be many."""
        for network in self._daemon.networks(self._label):
            chain = network["Labels"].get(docker_labels.CHAIN_LABEL)
            if chain is None:
                continue
            with self._files.unheld_network(chain) as is_unheld:
                if is_unheld and self._daemon.remove_network(network["Id"]):
                    docker_network.remove_chains(chain)
                    self._files.forget_network(chain)

    def _clean_up(self, names: set[str], now: float) -> None:
        """Remove files of containers that are gone, once nobody can want them any more."""
        unknown = self._files.names() - names
        self._unknown = {name: self._unknown.get(name, now) for name in unknown}
        for name, since in self._unknown.items():
            # A container that is just being made has files, and is not listed yet.
            if now - since > max(self._grace_s, IDLE_EXIT_S):
                self._files.clean(name)
        self._files.forget_absent_hosts()

    def _end_overdue_strangers(self, now: float) -> None:
        for row in self._daemon.containers(docker_labels.SCOPE_LABEL):
            directory = Path(row["Labels"].get(docker_labels.DIRECTORY_LABEL, "/nowhere"))
            deadline = float(row["Labels"].get(docker_labels.DEADLINE_LABEL, "inf"))
            if now >= deadline and not is_locked(DockerFiles(directory).janitor_lock):
                self._remove(row)

    def end_all(self) -> None:
        """End everything of this scope."""
        for row in self._daemon.containers(self._label):
            self._remove(row)
        for name in self._daemon.unused_volumes(self._label):
            self._daemon.remove_volume(name)
        for network in self._daemon.networks(self._label):
            self._daemon.remove_network(network["Id"])
        docker_network.remove_rules(self._scope)


def _name(row: dict[str, Any]) -> str:
    return str(row["Names"][0]).lstrip("/")


# --- the process ---------------------------------------------------------------------------------


def spawn(directory: Path, scope: str, socket_path: str, owner_pid: int, grace_s: float) -> None:
    """Start the janitor of a directory unless it is there; returns when it is on its way."""
    command = [
        sys.executable, "-P", "-m", "aenv_ray.engines.docker.janitor",
        str(directory), scope, socket_path, str(owner_pid), str(grace_s),
    ]  # fmt: skip
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, check=False, start_new_session=True
    )


def _become_daemon(log: Path) -> None:
    """Detach from the starter: a session of its own, no inherited descriptors, normal priority."""
    for _ in range(2):
        if os.fork():
            os._exit(0)
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.closerange(3, 65_536)
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # a Ray worker runs at nice 15; only root may go back


def _take_lock(path: Path) -> bool:
    """Hold the lock that says that this directory has a janitor; False when there is another."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(_LOCK_TRIES):  # who looks whether it is held holds it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_PAUSE_S)
    os.close(fd)
    return False


def _open_owner(pid: int) -> int:
    """Return a descriptor that is readable once the owner is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.open(os.devnull, os.O_RDONLY)  # always readable: it is gone already


def main() -> None:
    """Run the janitor of a directory; a second one there ends at once."""
    directory, scope, socket_path = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    owner_pid, grace_s = int(sys.argv[4]), float(sys.argv[5])
    files = DockerFiles(directory)
    files.prepare()
    _become_daemon(directory / "janitor.log")
    if not _take_lock(files.janitor_lock):
        return
    remove_stale(directory.parent)
    owner = _open_owner(owner_pid)
    wake, wakes = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(wakes, b"x"))
    janitor = Janitor(scope, files, Daemon(socket_path), grace_s=grace_s)
    pause_s, trouble = 0.0, ""
    while not janitor.is_idle:
        ready, _, _ = select.select([owner, wake], [], [], pause_s)
        if wake in ready:
            return  # a host starts another one if there is still need
        pause_s = SWEEP_S
        try:
            if owner in ready:
                janitor.end_all()
                remove_tree(directory)
                remove_stale(directory.parent)  # records of its hosts; a launcher removes its own
                return
            pause_s = min(LONGEST_SWEEP_S, SWEEP_S + PAUSE_PER_CONTAINER_S * janitor.sweep())
            trouble = ""
        except (OSError, http.client.HTTPException) as exc:
            # The next sweep tries again; the log says it once.
            trouble, before = f"{type(exc).__name__}: {exc}", trouble
            if trouble != before:
                print(trouble, file=sys.stderr, flush=True)  # noqa: T201  # its own log
        if owner in ready:
            time.sleep(SWEEP_S)  # readable from now on: without the daemon, try again later


if __name__ == "__main__":
    main()
