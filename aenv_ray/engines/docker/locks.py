"""Locks of a scope, shared by its hosts and its janitor; a process that dies releases them.

The standard library and small modules alone, because the janitor imports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from aenv_ray.engines.node.directory import short_name
from aenv_ray.files import FileLock, is_locked

START_SLOTS: Final = 8
"""Containers that a node starts at once; a daemon starts no more per second with more."""
_LOCK_DEADLINE_S: Final = 180.0
"""The janitor may hold a lock for as long as it removes a network and its rules."""


class ScopeLocks:
    """The locks in the directory of a scope.

    Args:
        directory: From `node_directory`.
    """

    def __init__(self, directory: Path) -> None:
        self.janitor = directory / "janitor.lock"
        """Held by the janitor for as long as it runs."""
        self.network_rules = directory / "network.lock"
        """Held while a host changes the rules of the packet filter."""
        self._hosts = directory / "hosts"
        self._slots = directory / "slots"
        self._networks = directory / "networks"

    def prepare(self) -> None:
        """Create the directories."""
        for path in (self._hosts, self._slots, self._networks):
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
        for path in self._hosts.iterdir():
            lock = FileLock.try_acquire(path)
            if lock is not None:
                with lock:
                    path.unlink(missing_ok=True)

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

    def take_slot(self) -> FileLock | None:
        """Take one of the node's `START_SLOTS`; None if all are taken. Closing it gives it back."""
        first = os.urandom(1)[0] % START_SLOTS
        for number in range(START_SLOTS):
            lock = FileLock.try_acquire(self._slots / str((first + number) % START_SLOTS))
            if lock is not None:
                return lock
        return None
