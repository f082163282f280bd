"""Files of a scope's instances on the node, shared by its hosts and its janitor.

This module imports only the standard library and small modules, because the janitor imports it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.engines.node.directory import remove_tree, short_name
from aenv_ray.files import FileLock, is_locked, remove_unlocked, write_atomically

ETC_FILES: Final = ("hostname", "hosts", "resolv.conf")
"""Mounted read-only over those of the daemon, which are files of the node without a limit."""
START_PERMITS: Final = 8
"""Containers that a node starts at once; a daemon starts no more per second with more."""
_LOCK_DEADLINE_S: Final = 180.0
"""The janitor may hold a lock for as long as it removes a network and its rules."""


class DockerFiles:
    """The directory of a scope, from `node_directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.locks = ScopeLocks(directory)
        self.host_key = directory / "key"
        """Hosts derive the keys of containers with their own kernel from it."""
        self._runs = directory / "i"
        self._doors = directory / "d"
        self._projects = directory / "projects"
        self._deadlines = directory / "deadlines"
        self._causes = directory / "causes"
        self._etc = directory / "etc"
        self._all = (
            self._runs, self._doors, self._projects, self._deadlines, self._causes, self._etc
        )  # fmt: skip

    def prepare(self) -> None:
        """Create the directories."""
        self.directory.chmod(0o700)  # containers see single directories below it, by mounts
        for path in self._all:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.locks.prepare()

    def names(self) -> set[str]:
        """Return the containers that have files here, whether they exist or not."""
        return {path.name for directory in self._all for path in directory.glob("aenv-*")}

    def clean(self, name: str) -> None:
        """Remove the files of an instance and of its sidecar."""
        for container in (name, sidecar_name(name)):
            for directory in (self._doors, self._deadlines, self._causes):
                (directory / container).unlink(missing_ok=True)
            for directory in (self._runs, self._projects, self._etc):
                if (directory / container).exists():
                    remove_tree(directory / container)

    # --- what a container mounts ----------------------------------------------------------------

    def run_directory(self, name: str) -> Path:
        """Return the directory in which process 1 of a container finds its host."""
        return self._runs / name

    def door(self, name: str) -> Path:
        """Return the socket of a container's door, which the container does not see."""
        return self._doors / name

    def etc_directory(self, name: str) -> Path:
        """Return the directory of a container's `ETC_FILES`; each is mounted by itself."""
        return self._etc / name

    def make_directories(self, name: str, etc: Mapping[str, str]) -> None:
        """Create a container's run directory, and its `ETC_FILES` with these texts."""
        self._doors.joinpath(name).unlink(missing_ok=True)
        for path in (self.run_directory(name), self.etc_directory(name)):
            if path.exists():
                remove_tree(path)
            path.mkdir()
            path.chmod(0o755)
        for file, text in etc.items():
            path = self.etc_directory(name) / file
            path.write_text(text)
            path.chmod(0o644)

    def copy_project(self, name: str, project: Path) -> Path:
        """Return a copy of a project for one container, for `empty_project` to remove."""
        path = self._projects / name
        if path.exists():
            remove_tree(path)
        shutil.copytree(project, path, symlinks=True)
        path.chmod(0o755)
        return path

    def empty_project(self, name: str) -> None:
        """Remove the files of a copied project; its mount stays, empty."""
        for path in (self._projects / name).iterdir():
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()

    # --- deadlines and causes -------------------------------------------------------------------

    def set_deadline(self, name: str, deadline: float) -> None:
        """Override the deadline on a container's label; labels cannot be changed."""
        write_atomically(self._deadlines / name, repr(deadline))

    def deadline(self, name: str, labelled: str) -> float:
        """Return the deadline of a container, in seconds since the epoch.

        Args:
            name: The name of the container.
            labelled: The deadline on its label, valid unless `set_deadline` has overridden it.
        """
        with contextlib.suppress(OSError, ValueError):
            return float((self._deadlines / name).read_text())
        return float(labelled)

    def record_cause(self, name: str, cause: str) -> None:
        """Record why the janitor ends a container, for the host that sees it end."""
        write_atomically(self._causes / name, cause)

    def cause(self, name: str) -> str | None:
        """Return why the janitor ended a container; None if it did not."""
        with contextlib.suppress(OSError):
            return (self._causes / name).read_text()
        return None


class ScopeLocks:
    """The locks in the directory of a scope, shared by its hosts and its janitor.

    A process that dies releases them.
    """

    def __init__(self, directory: Path) -> None:
        self.janitor = directory / "janitor.lock"
        """Held by the janitor for as long as it runs."""
        self.network_rules = directory / "network.lock"
        """Held while a host changes the rules of the packet filter."""
        self._hosts = directory / "hosts"
        self._permits = directory / "permits"
        self._networks = directory / "networks"

    def prepare(self) -> None:
        """Create the directories."""
        for path in (self._hosts, self._permits, self._networks):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- hosts ----------------------------------------------------------------------------------

    async def enter_host(self, host_id: str) -> FileLock:
        """Mark a host as present for as long as the returned lock is held.

        Raises:
            TimeoutError: Another process holds the lock exclusively.
        """
        path = self._hosts / short_name(host_id)
        return await FileLock.acquire_async(path, _LOCK_DEADLINE_S, shared=True)

    def is_present(self, host_id: str) -> bool:
        """Return whether a host is present."""
        return is_locked(self._hosts / short_name(host_id))

    @property
    def has_hosts(self) -> bool:
        """Whether any host is present."""
        return any(is_locked(path) for path in self._hosts.iterdir())

    def forget_absent_hosts(self) -> None:
        """Remove the lock files of hosts that are gone."""
        remove_unlocked(self._hosts)

    # --- networks of allow-lists ----------------------------------------------------------------

    async def use_network(self, chain: str) -> FileLock:
        """Keep the janitor from removing a network for as long as the returned lock is held.

        Raises:
            TimeoutError: The janitor has been removing it for too long.
        """
        path = self._networks / chain
        return await FileLock.acquire_async(path, _LOCK_DEADLINE_S, shared=True)

    def reserve_network(self, chain: str) -> FileLock | None:
        """Keep hosts from using a network; None if one uses it now."""
        return FileLock.try_acquire(self._networks / chain)

    def openings(self, chain: str) -> set[tuple[str, int]]:
        """Return the addresses and ports that a network's rules allow; its lock is held."""
        words = [line.split() for line in (self._networks / chain).read_text().splitlines()]
        return {(block, int(port)) for block, port in words}

    def write_openings(self, chain: str, openings: Iterable[tuple[str, int]]) -> None:
        """Record what a network's rules allow; its lock is held."""
        lines = "".join(f"{block} {port}\n" for block, port in sorted(openings))
        (self._networks / chain).write_text(lines)  # not replaced: the file is the lock

    def forget_network(self, chain: str) -> None:
        """Remove the record of a network that was removed; it is reserved."""
        (self._networks / chain).unlink(missing_ok=True)

    # --- starts ---------------------------------------------------------------------------------

    def take_permit(self) -> FileLock | None:
        """Take one of `START_PERMITS` of the node; None if all are taken. Close it to return it."""
        first = os.urandom(1)[0] % START_PERMITS
        for number in range(START_PERMITS):
            lock = FileLock.try_acquire(self._permits / str((first + number) % START_PERMITS))
            if lock is not None:
                return lock
        return None
