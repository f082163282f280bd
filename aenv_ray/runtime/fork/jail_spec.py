"""The specification of a jail, and the facts about it that users see."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final

from aenv_ray.runtime.fork import seccomp

WORK: Final = "/home/agent"
"""Work directory and HOME inside a jail."""
PROJECT: Final = "/project"
"""Read-only mount of the project inside a jail."""
SANDBOX_ID: Final = 1000
"""User and group id of a sandbox, inside it."""
NOBODY: Final = 65534
"""User and group id of a sandbox on the node, if the launcher runs as root."""
STORAGE: Final = "/.storage"
"""Mount of the storage and its lock inside a jail, in addition to the instance's path."""
DEFAULT_STORAGE_BYTES: Final = 1024**3
MAX_PROCESSES: Final = 1024
"""Processes and threads of one sandbox; see `limits_processes`."""
SANDBOXES_SHARE: Final = 0.75
"""The share of the node's process ids (kernel.pid_max, kernel.threads-max) that all sandboxes
together may use."""
MAX_FILES: Final = 4096
MAX_SIGNALS: Final = 1024
"""Timers and queued signals of one sandbox."""
MAX_LOCKED_BYTES: Final = 64 << 10
"""Memory of one sandbox that cannot be swapped out."""
MAX_INOTIFY: Final = 8
"""Inotify instances of one sandbox."""
MAX_INOTIFY_WATCHES: Final = 16_384
"""Files and directories that they watch together."""
MAX_TERMINALS: Final = 64
"""Pseudo-terminals of one sandbox."""
BYTES_PER_INODE: Final = 16_384
"""Bytes per inode of a tmpfs: the usual ratio of file systems on disks."""
LEAST_INODES: Final = 1024


def tmpfs_size(size_bytes: int) -> str:
    """Return the mount options that limit a tmpfs, its number of files included.

    An empty file costs the node about 1 KiB that `size_bytes` does not count.
    """
    return f"size={size_bytes},nr_inodes={max(LEAST_INODES, size_bytes // BYTES_PER_INODE)}"


@dataclass(frozen=True)
class JailSpec:
    """What the instances of a template get; JSON data from the launcher."""

    project: str
    """Unpacked project directory."""
    network: str = "none"
    """``none`` or ``host``."""
    hide_source: bool = False
    storage_bytes: int | None = None
    memory_bytes: int | None = None
    cpu_cores: float | None = None
    has_cgroup: bool = False
    """The launcher puts each instance in a control group that limits its memory."""
    cgroup_problem: str = ""
    """Why it does not, although the operator delegated a directory for it."""
    storage: str = ""
    """Directory of the storage; empty: none."""
    storage_lock: str = ""
    """File that the instance locks while it uses the storage."""
    storage_is_shared: bool = False
    storage_path: str = ""
    """Path of the storage inside the sandbox."""
    storage_size: str = ""
    """Requested size; not enforced."""
    shown: tuple[str, ...] = ()
    """Further paths of the node that can be read at the same place."""
    writable: str = ""
    """Directory of the node that can be written to at the same place; empty: none."""
    views: tuple[tuple[str, str], ...] = ()
    """``(view, path)`` of directories that an instance covers and mounts again; from the jailer."""


@dataclass(frozen=True)
class Facts:
    """How the instances of a template are isolated from the node."""

    kind: str
    namespaces: tuple[str, ...] = ()
    network: str = "host"
    read_only_host: bool = False
    seccomp: bool = False
    no_new_privileges: bool = False
    limits: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return them as JSON data."""
        return asdict(self)


class JailUnavailable(Exception):
    """The kernel refuses a system call that a jail needs; the message says which and why."""


class StorageUnavailable(Exception):
    """The storage cannot be mounted; the message says why."""


@cache
def limits_processes(*, jailed: bool) -> bool:
    """Whether `MAX_PROCESSES` can be enforced for each sandbox.

    Linux counts processes per user namespace since 5.14. Without a namespace of the sandbox, or on
    an older kernel, RLIMIT_NPROC counts every thread of the user on the whole node, in other
    containers too: a sandbox could then be unable to fork because of what others run.
    """
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return jailed and version is not None and (int(version[1]), int(version[2])) >= (5, 14)


def facts(spec: JailSpec, *, jailed: bool, reason: str = "") -> Facts:
    """Return the facts about the instances of a template.

    Args:
        spec: What was requested.
        jailed: Whether they have namespaces.
        reason: Why they have none.
    """
    limits = {"open files": str(MAX_FILES)}
    if limits_processes(jailed=jailed):
        limits["processes"] = f"{MAX_PROCESSES} per sandbox"
        unlimited: tuple[str, ...] = ()
    else:
        unlimited = ("processes: no limit per sandbox",)
    if spec.memory_bytes:
        mib = spec.memory_bytes >> 20
        by = "cgroup" if spec.has_cgroup else "the launcher looks"
        limits["memory"] = f"{mib} MiB in total ({by}), {mib} MiB per process (rlimit)"
    elif spec.has_cgroup:
        limits["memory"] = "half of the node's memory in total (cgroup)"
    if spec.cgroup_problem:
        unlimited += (f"memory: measured, not limited by a cgroup: {spec.cgroup_problem}",)
    if spec.cpu_cores:
        limits["cpu"] = f"{spec.cpu_cores:g} cores (affinity, rounded up)"
    if not jailed:
        unjailed = (f"no namespaces: {reason}", "the node's files are readable", "network: host")
        return Facts(
            "none", network="host", seccomp=seccomp.is_supported() and sys.platform == "linux",
            no_new_privileges=sys.platform == "linux", limits=limits, missing=unjailed + unlimited,
        )  # fmt: skip
    limits["storage"] = f"{(spec.storage_bytes or DEFAULT_STORAGE_BYTES) >> 20} MiB (tmpfs)"
    namespaces = ["user", "mount", "pid", "ipc", "uts"]
    missing: tuple[str, ...] = unlimited
    if spec.network == "none":
        namespaces.append("net")
    else:
        missing += ("network: host, so it reaches the node's services, Ray included",)
    if spec.storage:
        missing += (unlimited_storage(spec.storage_path, spec.storage_size),)
    return Facts(
        "namespaces", tuple(namespaces), spec.network, read_only_host=True,
        seccomp=seccomp.is_supported(), no_new_privileges=True, limits=limits, missing=missing,
    )  # fmt: skip


def unlimited_storage(path: str, size: str) -> str:
    """Return the fact about a storage volume that is a directory: no quota enforces its size."""
    return f"storage: {path} is limited by the disk only, not to {size}"
