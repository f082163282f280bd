"""A control group (cgroup v2) for each sandbox, below a directory that the operator delegates.

With a control group, the kernel limits the memory of a sandbox as a whole, and ends the sandbox at
once if it needs more. Without one, `aenv_ray.engines.process.resource_watch` measures the memory.
The kernel's ``Documentation/admin-guide/cgroup-v2.rst`` describes the files and rules.

This module imports only the standard library, because the launcher imports it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CONTROLLERS: Final = ("memory", "pids")
_NEEDED: Final = "memory"


class CgroupUnavailable(Exception):
    """A directory cannot hold control groups of sandboxes; the message says why."""


class SandboxGroups:
    """The control groups of the sandboxes of one launcher.

    Args:
        delegated: A cgroup v2 directory without processes, which this user may change.
        name: The name of the launcher; its groups are in a subdirectory of this name.

    Raises:
        CgroupUnavailable: The kernel does not limit memory there, or this user may not change it.
    """

    def __init__(self, delegated: Path, name: str) -> None:
        self._directory = delegated / f"aenv-{name}"
        self._left: set[Path] = set()
        """Groups whose processes had not all ended."""
        try:
            self._has_pids = "pids" in _enable(delegated)
            with contextlib.suppress(FileExistsError):
                _make(self._directory)
            _enable(self._directory)
            for group in self._directory.iterdir():  # left by an earlier launcher that was killed
                if group.is_dir():
                    _write(group / "cgroup.kill", "1")
                    self.remove(group)
        except OSError as exc:
            raise CgroupUnavailable(f"{exc.filename or delegated}: {exc.strerror}") from exc

    def add(self, name: str, pid: int, *, memory_bytes: int, processes: int) -> SandboxGroup:
        """Create a group, and move a process without children into it.

        Args:
            name: The name of the group.
            pid: The id of the process.
            memory_bytes: Limit for all its processes and its files in memory; it gets no swap.
            processes: Limit for processes and threads; ignored if the kernel does not count them.

        Raises:
            OSError: The kernel refused a step; nothing is left of the group.
        """
        group = self._directory / name
        _make(group)
        try:
            _write(group / "memory.max", str(memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel without accounting of swap
                _write(group / "memory.swap.max", "0")
            _write(group / "memory.oom.group", "1")
            if self._has_pids:
                _write(group / "pids.max", str(processes))
            _write(group / "cgroup.procs", str(pid))
        except OSError:
            self.remove(group)
            raise
        return SandboxGroup(self, group)

    def remove(self, group: Path) -> None:
        """Remove a group now, or in a later `sweep` if a process in it has not quite ended."""
        try:
            _remove(group)
        except FileNotFoundError:
            self._left.discard(group)
        except OSError:
            self._left.add(group)
        else:
            self._left.discard(group)

    def sweep(self) -> None:
        """Remove groups whose processes have ended meanwhile."""
        for group in list(self._left):
            self.remove(group)

    def close(self) -> None:
        """Remove what is left."""
        self.sweep()
        with contextlib.suppress(OSError):
            _remove(self._directory)


@dataclass(frozen=True)
class SandboxGroup:
    """The control group of one sandbox."""

    groups: SandboxGroups
    path: Path

    def leave(self) -> bool:
        """Remove the group of a process that has ended or is about to.

        Returns:
            Whether the kernel ended it because the group reached its own limit of memory, and not
            because the node had none left.
        """
        try:
            rows = (line.split() for line in (self.path / "memory.events").read_text().splitlines())
            has_run_out = int(dict(rows).get("oom", 0)) > 0
        except (OSError, ValueError):
            has_run_out = False
        self.groups.remove(self.path)
        return has_run_out


def _enable(directory: Path) -> set[str]:
    """Enable the controllers for the children of a group; return those that are enabled.

    Raises:
        CgroupUnavailable: There is no control of memory there.
        OSError: This user may not change the directory, or processes are in it.
    """
    available = _words(directory / "cgroup.controllers")
    if _NEEDED not in available:
        raise CgroupUnavailable(
            f"{directory} does not limit memory: its controllers are "
            f"{' '.join(sorted(available)) or 'none'}"
        )
    wanted = [name for name in _CONTROLLERS if name in available]
    missing = set(wanted) - _words(directory / "cgroup.subtree_control")
    if missing:
        change = " ".join(f"+{name}" for name in sorted(missing))
        _write(directory / "cgroup.subtree_control", change)
    return set(wanted)


def _words(path: Path) -> set[str]:
    return set(path.read_text().split())


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # the kernel creates the files of a group
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _make(group: Path) -> None:
    group.mkdir(mode=0o755)


def _remove(group: Path) -> None:
    group.rmdir()
