"""The docker engine's janitor: a small process of the node that outlives the hosts.

``python -m aenv_ray.engines.docker.janitor DIR SCOPE SOCKET OWNER_PID GRACE_S`` detaches itself.
Once or twice a second it lists the containers of its scope and ends those that

- are past their deadline,
- belong to a host that has been away for longer than GRACE_S,
- have exited and were not removed by their host,
- have written more to their image's directories than they may, if the daemon cannot limit it,

and all of them when the owner process (the raylet) is gone. It also ends containers past their
deadline in scopes whose own janitor is gone. It touches nothing without our labels, and decides by
the daemon's list alone.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.daemon import detach
from aenv_ray.engines.docker import firewall
from aenv_ray.engines.docker.files import DockerFiles, ScopeLocks
from aenv_ray.engines.docker.names import main_name, volume_name
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.directory import remove_stale, remove_tree
from aenv_ray.files import FileLock, is_locked

ADOPTION_GRACE_S: Final = 30.0
"""A restarted host actor is back within a second or two; Ray gives a worker a minute to start."""
REMOVAL_GRACE_S: Final = 10.0
"""How long an exited container is kept for its host, which reads its exit code and log."""
SWEEP_S: Final = 0.5
LONGEST_SWEEP_S: Final = 4.0
PAUSE_PER_CONTAINER_S: Final = 0.005
"""Added to the pause between sweeps: listing a full node takes the daemon long."""
FASTEST_WRITE: Final = 1 << 30
"""Bytes per second; disk use is checked only once this rate could have exceeded the limit."""
STORAGE_SLACK_BYTES: Final = 1 << 20
"""A single file may use up the limit, and directories and small files take some space."""
LONGEST_CHECK_S: Final = 10.0
_FOREIGN_SWEEP_S: Final = 30.0
IDLE_EXIT_S: Final = 60.0
_LOCK_DEADLINE_S: Final = 0.5
"""A process that checks whether the lock is held takes it briefly; wait that long."""
_REQUEST_DEADLINE_S: Final = 60.0
CHECKS_S: Final = 2.0
"""How long a sweep goes on to check disk use; deadlines wait meanwhile."""
_COUNT_S: Final = 3.0
"""Time limit for counting the files of one container."""
COUNTS: Final = 3
"""A container ends if its files could not be counted this many times in a row."""
_LAST_COUNT_S: Final = 20.0
"""Time limit for the last of them. The end counts as the agent's: a busy disk must not cause it."""
_ANONYMOUS: Final = 64
"""Length of the name that the daemon gives to a volume of an image."""

TTL_PASSED: Final = "its TTL passed"
HOST_GONE: Final = "its host is gone"


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class JanitorClient:
    """The janitor's requests to Docker, made with the standard library alone.

    With `DockerClient` the process would use 30 MiB instead of 21 and take twice as long to start.

    Requests raise `OSError` or `http.client.HTTPException` if the daemon does not answer.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def containers(self, label: str) -> list[dict[str, Any]]:
        """Return the containers with a label, in any state."""
        return list(self._get("/containers/json", {"label": [label]}, all=1))

    def remove(self, container: str) -> bool:
        """Kill and remove a container; False if the daemon did not."""
        status, _ = self._request("DELETE", f"/containers/{container}?force=1&v=1")
        return status in (204, 404)

    def written_bytes(self, container: str, within_s: float) -> int | None:
        """Return how much a container has written to its image's directories; 0 if it is gone.

        Directories that the image declares as volumes count with their whole content. Returns None
        if they are not counted in time: too many files, or a busy disk. Volumes have as much time.
        """
        path = f"/containers/{container}/json?size=1"
        try:
            status, content = self._request("GET", path, within_s)
        except TimeoutError:
            return None
        if status != 200:
            return 0
        details = json.loads(content)
        volumes = [
            mount["Source"]
            for mount in details["Mounts"]
            if mount["Type"] == "volume" and mount["RW"] and len(mount["Name"]) == _ANONYMOUS
        ]
        in_volumes = disk_use(volumes, within_s)
        return None if in_volumes is None else int(details.get("SizeRw") or 0) + in_volumes

    def remove_volume(self, name: str) -> None:
        """Remove a volume; the daemon refuses while a container uses it."""
        self._request("DELETE", f"/volumes/{name}")

    def unused_volumes(self, label: str) -> set[str]:
        """Return the volumes that have the label and that no container uses."""
        found = self._get("/volumes", {"label": [label], "dangling": ["true"]})
        return {str(volume["Name"]) for volume in found.get("Volumes") or ()}

    def networks(self, label: str) -> list[dict[str, Any]]:
        """Return the networks with a label."""
        return list(self._get("/networks", {"label": [label]}))

    def remove_network(self, network: str) -> bool:
        """Remove a network; False if it is in use."""
        status, _ = self._request("DELETE", f"/networks/{network}")
        return status in (204, 404)

    def _get(self, path: str, filters: dict[str, list[str]], **query: Any) -> Any:
        text = urllib.parse.urlencode({**query, "filters": json.dumps(filters)})
        status, content = self._request("GET", f"{path}?{text}")
        if status != 200:
            raise http.client.HTTPException(f"{path}: {status} {content[:300]!r}")
        return json.loads(content)

    def _request(
        self, method: str, path: str, timeout_s: float = _REQUEST_DEADLINE_S
    ) -> tuple[int, bytes]:
        with contextlib.closing(_UnixConnection(self._path, timeout_s)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()


class ContainerJanitor:
    """Decides which containers end, by the daemon's list and the wall clock."""

    def __init__(
        self,
        scope: str,
        files: DockerFiles,
        client: JanitorClient,
        clock: Clock | None = None,
        grace_s: float = ADOPTION_GRACE_S,
    ) -> None:
        self._scope = scope
        self._label = f"{docker_labels.SCOPE_LABEL}={scope}"
        self._files = files
        self._client = client
        self._now = (clock or SystemClock()).now
        self._grace_s = grace_s
        self._absent_since: dict[str, float] = {}  # keys are hosts
        self._exited_since: dict[str, float] = {}  # keys are containers, as for the next three
        self._check_disk_at: dict[str, float] = {}
        self._uncounted: dict[str, int] = {}
        self._stray_since: dict[str, float] = {}
        self._foreign_sweep_at = 0.0
        self._troubles: set[str] = set()
        self._known_troubles: set[str] = set()
        self._unused_volumes: set[str] = set()
        self._idle_since = self._now()

    def sweep(self) -> int:
        """Check every container once, end those that are due; return the number of containers.

        A container that makes trouble, or is slow to check, keeps no other from its end.
        """
        now = self._now()
        self._troubles, self._known_troubles = set(), self._troubles
        rows = self._client.containers(self._label)
        alive = {_name(row) for row in rows if row["State"] not in ("exited", "dead")}
        staying = []
        for row in rows:
            with self._apart(row):
                cause = self._cause_to_end(row, now, alive)
                if cause is not None:
                    self._end(row, cause)
                elif _name(row) in alive:
                    staying.append(row)
        self._check_disks(staying)
        names = {_name(row) for row in rows}
        hosts = {row["Labels"].get(docker_labels.HOST_LABEL, "") for row in rows}
        self._remove_stray_files(names, now)
        self._check_disk_at = {n: at for n, at in self._check_disk_at.items() if n in names}
        self._uncounted = {n: times for n, times in self._uncounted.items() if n in names}
        self._exited_since = {n: since for n, since in self._exited_since.items() if n in names}
        self._absent_since = {h: since for h, since in self._absent_since.items() if h in hosts}
        if now >= self._foreign_sweep_at:
            self._foreign_sweep_at = now + _FOREIGN_SWEEP_S
            self._end_overdue_of_other_scopes(now)
            self._remove_unused_volumes()
            self._remove_unused_networks()
        if rows or self._files.locks.has_hosts:
            self._idle_since = now
        return len(rows)

    @contextlib.contextmanager
    def _apart(self, row: dict[str, Any]) -> Iterator[None]:
        """Log a failure to handle a container, if it is new, and go on with the others."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError, LookupError) as exc:
            trouble = f"{type(exc).__name__}: {exc}"
            if trouble not in self._troubles | self._known_troubles:
                _log(f"{_name(row)}: {trouble}")
            self._troubles.add(trouble)

    @property
    def is_idle(self) -> bool:
        """Whether there has been neither a host nor a container for a while."""
        return self._now() - self._idle_since > IDLE_EXIT_S

    def _cause_to_end(self, row: dict[str, Any], now: float, alive: set[str]) -> str | None:
        """Return why a container must end now; "" for no particular cause, None if it may stay.

        An exited container ends, too: it is removed.
        """
        name, labels = _name(row), row["Labels"]
        if now >= self._files.deadline(name, labels[docker_labels.DEADLINE_LABEL]):
            return TTL_PASSED
        host = labels[docker_labels.HOST_LABEL]
        if self._files.locks.is_present(host):
            self._absent_since.pop(host, None)
        elif now - self._absent_since.setdefault(host, now) > self._grace_s:
            return HOST_GONE
        is_alone = docker_labels.SIDECAR_LABEL in labels and main_name(name) not in alive
        if row["State"] not in ("exited", "dead") and not is_alone:
            return None
        return "" if now - self._exited_since.setdefault(name, now) > REMOVAL_GRACE_S else None

    def _check_disks(self, rows: list[dict[str, Any]]) -> None:
        """End containers that wrote too much; begin with the one whose check is due for longest.

        When the time for checks is over, those that are left are the first of the next sweep.
        """
        checked = [row for row in rows if row["Labels"].get(docker_labels.STORAGE_LABEL)]
        began = self._now()
        for row in sorted(checked, key=lambda row: self._check_disk_at.get(_name(row), 0.0)):
            now = self._now()
            if now - began > CHECKS_S or now < self._check_disk_at.get(_name(row), 0.0):
                return
            with self._apart(row):
                cause = self._overflow(row, now)
                if cause is not None:
                    self._end(row, cause)

    def _overflow(self, row: dict[str, Any], now: float) -> str | None:
        """Return the cause to end a container that wrote more than it may; None if it did not."""
        limit, name = int(row["Labels"][docker_labels.STORAGE_LABEL]), _name(row)
        self._check_disk_at[name] = now  # behind the others, whatever happens
        earlier = self._uncounted.get(name, 0)
        within_s = _LAST_COUNT_S if earlier + 1 == COUNTS else _COUNT_S
        written = self._client.written_bytes(row["Id"], within_s)
        if written is None:
            self._uncounted[name] = earlier + 1
            if earlier + 1 < COUNTS:
                return None  # the disk may have been busy
            return f"its image's directories hold more files than can be counted in {within_s:g} s"
        self._uncounted.pop(name, None)
        if written > limit + STORAGE_SLACK_BYTES:
            return (
                f"it wrote {written >> 20} MiB to its image's directories (limit {limit >> 20} "
                "MiB: deployConfig.ephemeralStorage, or else AENV_DOCKER_DISK)"
            )
        pause_s = min(LONGEST_CHECK_S, max(0, limit - written) / FASTEST_WRITE)
        self._check_disk_at[name] = now + pause_s
        return None

    def _end(self, row: dict[str, Any], cause: str) -> None:
        name = _name(row)
        if cause and row["State"] == "running":
            with self._apart(row):  # it ends, whether or not its host can read why
                self._files.record_cause(name, cause)
        if not self._remove(row):
            return  # the next sweep tries again
        self._exited_since.pop(name, None)
        if not self._files.locks.is_present(row["Labels"][docker_labels.HOST_LABEL]):
            self._files.clean(name)  # otherwise its host reads the cause and cleans up

    def _remove(self, row: dict[str, Any]) -> bool:
        """Remove a container, and its volume if no other uses it; False if the daemon failed."""
        is_gone = self._client.remove(row["Id"])
        if is_gone and docker_labels.VOLUME_LABEL in row["Labels"]:
            self._client.remove_volume(volume_name(main_name(_name(row))))
        return is_gone

    def _remove_unused_volumes(self) -> None:
        """Remove volumes that two sweeps found unused; a new one is unused until it is mounted."""
        unused = self._client.unused_volumes(self._label)
        for name in unused & self._unused_volumes:
            self._client.remove_volume(name)
        self._unused_volumes = unused

    def _remove_unused_networks(self) -> None:
        """Remove the unused networks of allow-lists and their rules: a daemon has room for few."""
        for network in self._client.networks(self._label):
            chain = network["Labels"].get(docker_labels.CHAIN_LABEL)
            reservation = None if chain is None else self._files.locks.reserve_network(chain)
            if reservation is None:
                continue
            with reservation:
                if self._client.remove_network(network["Id"]):
                    firewall.remove_chains(chain)
                    self._files.locks.forget_network(chain)

    def _remove_stray_files(self, names: set[str], now: float) -> None:
        """Remove the files of containers and hosts that are gone."""
        stray = self._files.names() - names
        self._stray_since = {name: self._stray_since.get(name, now) for name in stray}
        for name, since in self._stray_since.items():
            # A container that is being created has files, and is not listed yet.
            if now - since > max(self._grace_s, IDLE_EXIT_S):
                self._files.clean(name)
        self._files.locks.forget_absent_hosts()

    def _end_overdue_of_other_scopes(self, now: float) -> None:
        for row in self._client.containers(docker_labels.SCOPE_LABEL):
            directory = Path(row["Labels"].get(docker_labels.DIRECTORY_LABEL, "/nowhere"))
            with self._apart(row):
                deadline = float(row["Labels"].get(docker_labels.DEADLINE_LABEL, "inf"))
                if now >= deadline and not is_locked(ScopeLocks(directory).janitor):
                    self._remove(row)

    def end_all(self) -> None:
        """Remove everything of this scope."""
        for row in self._client.containers(self._label):
            self._remove(row)
        for name in self._client.unused_volumes(self._label):
            self._client.remove_volume(name)
        for network in self._client.networks(self._label):
            self._client.remove_network(network["Id"])
        firewall.remove_rules(self._scope)


def disk_use(directories: Sequence[str], within_s: float) -> int | None:
    """Return the bytes that directories take on their disks; None if counting takes too long.

    Their content was written by a sandbox: any number of files, at any depth.
    """
    if not directories:
        return 0
    try:
        done = subprocess.run(
            ["du", "-skx", *directories], capture_output=True, check=False, timeout=within_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return sum(int(line.split()[0]) * 1024 for line in done.stdout.splitlines())


def _name(row: dict[str, Any]) -> str:
    return str(row["Names"][0]).lstrip("/")


# --- the process ---------------------------------------------------------------------------------


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the janitor's own log


def _open_owner(pid: int) -> int:
    """Return a descriptor that becomes readable when the owner is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.open(os.devnull, os.O_RDONLY)  # always readable: it is gone already


def main() -> None:
    """Run the janitor of a directory; a second one exits at once."""
    directory, scope, socket_path = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    owner_pid, grace_s = int(sys.argv[4]), float(sys.argv[5])
    files = DockerFiles(directory)
    files.prepare()
    detach(directory / "janitor.log")
    try:
        lock = FileLock.acquire(files.locks.janitor, _LOCK_DEADLINE_S)
    except TimeoutError:
        return
    with lock:
        janitor = ContainerJanitor(scope, files, JanitorClient(socket_path), grace_s=grace_s)
        _run(janitor, directory, _open_owner(owner_pid))


def _run(janitor: ContainerJanitor, directory: Path, owner: int) -> None:
    """Sweep until there is nothing left to look after, or a signal comes."""
    remove_stale(directory.parent)
    wake, wakes = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(wakes, b"x"))
    pause_s, trouble = 0.0, ""
    while not janitor.is_idle:
        ready, _, _ = select.select([owner, wake], [], [], pause_s)
        if wake in ready:
            return  # a host starts another janitor if one is still needed
        pause_s = SWEEP_S
        try:
            if owner in ready:
                janitor.end_all()
                remove_tree(directory)
                remove_stale(directory.parent)  # the hosts' records
                return
            pause_s = min(LONGEST_SWEEP_S, SWEEP_S + PAUSE_PER_CONTAINER_S * janitor.sweep())
            trouble = ""
        except (OSError, http.client.HTTPException) as exc:
            # The next sweep tries again; a repeated error is logged once.
            trouble, before = f"{type(exc).__name__}: {exc}", trouble
            if trouble != before:
                _log(trouble)
        if owner in ready:
            time.sleep(SWEEP_S)  # it stays readable: without the daemon, try again later


if __name__ == "__main__":
    main()
