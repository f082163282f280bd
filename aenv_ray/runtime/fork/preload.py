"""Loads a project in its template, and detects what its forks could not share."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.system.reaper import children_of_main_thread


class TrackingEnviron(os._Environ):  # type: ignore[type-arg]  # generic only in the stubs
    """`os.environ` and `os.environb` that record which variables the project reads."""

    reads: set[str] = set()  # noqa: RUF012  # one process, one environment

    def __getitem__(self, key: str | bytes) -> Any:
        self.reads.add(os.fsdecode(key))
        return super().__getitem__(key)  # raises for the wrong type of key

    def __iter__(self) -> Any:
        self.reads.add("*")
        return super().__iter__()


def preload(project: str) -> dict[str, Any]:
    """Load a project, and report whether instances can be forked from this process.

    Returns:
        ``bare_reason``: why they cannot, or empty; and ``env_reads``, see `variables_read`.

    Raises:
        ProjectLoadError: The code does not load.
    """
    before = _special_fds()
    TrackingEnviron.reads.clear()
    for environ in (os.environ, os.environb):
        environ.__class__ = TrackingEnviron
    try:
        load_project(project)
    finally:
        for environ in (os.environ, os.environb):
            environ.__class__ = os._Environ
    reason = ""
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        reason = "its code starts threads when it is imported"
    elif children_of_main_thread():
        reason = "its code starts processes when it is imported"
    elif opened := _special_fds() - before:
        kinds = sorted({target.partition(":")[0] for target in opened})
        reason = f"its code opens {', '.join(kinds)} when it is imported"
    return {"bare_reason": reason, "env_reads": variables_read()}


def variables_read() -> list[str]:
    """Return the variables that the project read while it was loaded; ``*`` stands for all."""
    return sorted(TrackingEnviron.reads)


def opened_files() -> set[int]:
    """Return the descriptors of this process that are files, directories or devices.

    Sockets, pipes and namespaces are none, so an instance does not get those of its template.
    """
    return {fd for fd, target in _descriptors().items() if target.startswith(("/", "memfd:"))}


def _special_fds() -> set[str]:
    """Return the open sockets and pipes, identified by their inode numbers."""
    return {found for found in _descriptors().values() if found.startswith(("socket:", "pipe:"))}


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
