"""The namespaces that a template holds open: its own, and network namespaces for reuse.

Their descriptors start at `_FIRST_HIGH_FD`, so that a forked process closes all of them with one
system call.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from aenv_ray.runtime.fork.jail_spec import JailSpec, JailUnavailable
from aenv_ray.runtime.system import linux


class NetworkNamespaces:
    """The network namespaces of a template's instances, which are reused.

    Creating one costs 0.4 ms, and removing it costs the kernel more; joining one costs 3 µs. An
    instance cannot configure its network, so it can leave behind only sockets: a namespace that
    still has any, even in TIME_WAIT, is not reused.
    """

    def __init__(self) -> None:
        self._free: list[int] = []

    def enter(self) -> int:
        """Move this process into the network namespace of the next instance.

        Returns:
            A descriptor for `leave`; -1 when no descriptor was free.
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
        """Take back a namespace whose instance has ended."""
        if fd >= 0 and len(self._free) < _MAX_FREE_NETWORKS:
            self._free.append(fd)
        elif fd >= 0:
            os.close(fd)


def open_high(path: str) -> int:
    """Open a file on a descriptor that `close_high` closes; -1 when none is free."""
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
    """Close, in a forked process, all descriptors from `open_high` and `move_high`."""
    os.closerange(_FIRST_HIGH_FD, _LAST_FD)


_FIRST_HIGH_FD: Final = 1000
_LAST_FD: Final = 1 << 20
_MAX_FREE_NETWORKS: Final = 1024


def _has_no_sockets() -> bool:
    with open("/proc/net/sockstat", "rb") as file:
        words = file.read().split()
    in_use = [int(words[i + 1]) for i, word in enumerate(words) if word in (b"inuse", b"tw")]
    return not any(in_use)


class TemplateNamespaces:
    """The template's own namespaces, which it rejoins after each fork.

    Raises:
        JailUnavailable: The limit of open files is too low.
    """

    def __init__(self, spec: JailSpec) -> None:
        kinds = {"mnt": linux.CLONE_NEWNS, "ipc": linux.CLONE_NEWIPC}
        if spec.network == "none":
            kinds["net"] = linux.CLONE_NEWNET
        kinds["pid"] = linux.CLONE_NEWPID
        self._fds = [(open_high(f"/proc/self/ns/{name}"), kind) for name, kind in kinds.items()]
        if any(fd < 0 for fd, _ in self._fds):
            raise JailUnavailable(f"the limit of open files is below {_FIRST_HIGH_FD + len(kinds)}")

    def rejoin(self) -> None:
        """Move this process back to the template's namespaces."""
        for fd, kind in self._fds:
            linux.setns(fd, kind)
