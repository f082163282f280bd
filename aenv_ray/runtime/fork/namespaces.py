"""The namespaces that a template keeps between its forks: its own, and networks to use again.

They are kept on descriptors from `_FIRST_HIGH_FD` on, so that a forked process closes them all by
one system call.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from aenv_ray.runtime.fork.jail_spec import JailSpec, JailUnavailable
from aenv_ray.runtime.system import linux


class Networks:
    """The network namespaces of a template's instances; a clean one is used again.

    Making one costs 0.4 ms and the kernel more than that to take it down again; joining one costs
    3 µs. An instance cannot configure its network, so what it leaves behind is sockets only: a
    namespace that still has any, if only in TIME_WAIT, is not used again.
    """

    def __init__(self) -> None:
        self._free: list[int] = []

    def enter(self) -> int:
        """Move this process into the network namespace of the next instance.

        Returns:
            A descriptor of it, for `leave`; -1 when there was none to spare.
        """
        while self._free:
            fd = self._free.pop()
            linux.setns(fd, linux.CLONE_NEWNET)
            if _has_no_sockets():
                return fd
            os.close(fd)
        linux.unshare(linux.CLONE_NEWNET)
        linux.raise_loopback()
        return open_high("/proc/self/ns/net")

    def leave(self, fd: int) -> None:
        """Note that the instance in the namespace behind `fd` ended."""
        if fd >= 0 and len(self._free) < _MAX_FREE_NETWORKS:
            self._free.append(fd)
        elif fd >= 0:
            os.close(fd)


def open_high(path: str) -> int:
    """Open a file on a descriptor that `close_high` closes; -1 when none is to be had."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return move_high(fd)
    except OSError:
        return -1
    finally:
        os.close(fd)


def move_high(fd: int) -> int:
    """Return a copy of `fd` on a descriptor that `close_high` closes.

    Raises:
        OSError: The limit of open files is reached.
    """
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD)


def close_high() -> None:
    """Close, in a forked process, all that the template keeps: one system call."""
    os.closerange(_FIRST_HIGH_FD, _LAST_FD)


_FIRST_HIGH_FD: Final = 1000
_LAST_FD: Final = 1 << 20
_MAX_FREE_NETWORKS: Final = 1024


def _has_no_sockets() -> bool:
    with open("/proc/net/sockstat", "rb") as file:
        words = file.read().split()
    in_use = [int(words[i + 1]) for i, word in enumerate(words) if word in (b"inuse", b"tw")]
    return not any(in_use)


class Home:
    """The template's own namespaces, to come back to after each fork.

    Raises:
        JailUnavailable: There are too few descriptors for them.
    """

    def __init__(self, spec: JailSpec) -> None:
        kinds = {"mnt": linux.CLONE_NEWNS, "ipc": linux.CLONE_NEWIPC}
        if spec.network == "none":
            kinds["net"] = linux.CLONE_NEWNET
        kinds["pid"] = linux.CLONE_NEWPID
        self._fds = [(open_high(f"/proc/self/ns/{name}"), kind) for name, kind in kinds.items()]
        if any(fd < 0 for fd, _ in self._fds):
            raise JailUnavailable(f"the limit of open files is below {_FIRST_HIGH_FD + len(kinds)}")

    def come_back(self) -> None:
        """Return to the template's namespaces."""
        for fd, kind in self._fds:
            linux.setns(fd, kind)
