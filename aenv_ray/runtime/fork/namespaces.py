"""The namespaces that a template holds open: its own, and network namespaces for reuse.

A template may enter namespaces but not configure a network, so its jailer creates the network
namespaces (`serve_networks`), in the template's user namespace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Final

from aenv_ray.runtime.fork.jail_spec import JailSpec
from aenv_ray.runtime.system import linux


class NetworkNamespaces:
    """The network namespaces of a template's instances, which are reused.

    Creating one costs 0.4 ms, and removing it costs the kernel more; joining one costs 3 µs. An
    instance cannot configure its network, so it can leave behind only sockets: a namespace that
    still has any, even in TIME_WAIT, is not reused.

    Args:
        jailer: Socket on which the jailer answers with new ones; None if they are not needed.
    """

    def __init__(self, jailer: socket.socket | None) -> None:
        self._jailer = jailer
        self._free: list[int] = []

    def enter(self) -> int:
        """Move this process into the network namespace of the next instance.

        Returns:
            A descriptor for `leave`.

        Raises:
            OSError: The jailer could not create one.
        """
        while self._free:
            fd = self._free.pop()
            linux.setns(fd, linux.CLONE_NEWNET)
            if _has_no_sockets():
                return fd
            os.close(fd)
        fd = self._create()
        linux.setns(fd, linux.CLONE_NEWNET)
        return fd

    def _create(self) -> int:
        assert self._jailer is not None
        self._jailer.sendall(b"?")
        answer, fds, _, _ = socket.recv_fds(self._jailer, _ANSWER_BYTES, 1)
        if not fds:
            raise OSError(errno.EMFILE, answer.decode() or "no network namespace for it")
        return fds[0]

    def leave(self, fd: int) -> None:
        """Take back a namespace whose instance has ended."""
        if fd >= 0 and len(self._free) < _MAX_FREE_NETWORKS:
            self._free.append(fd)
        elif fd >= 0:
            os.close(fd)


_ANSWER_BYTES: Final = 4096
_MAX_FREE_NETWORKS: Final = 1024


def _has_no_sockets() -> bool:
    with open("/proc/net/sockstat", "rb") as file:
        words = file.read().split()
    in_use = [int(words[i + 1]) for i, word in enumerate(words) if word in (b"inuse", b"tw")]
    return not any(in_use)


class TemplateNamespaces:
    """The template's own namespaces, which it rejoins after each fork."""

    def __init__(self, spec: JailSpec) -> None:
        kinds = {"mnt": linux.CLONE_NEWNS, "ipc": linux.CLONE_NEWIPC}
        if spec.network == "none":
            kinds["net"] = linux.CLONE_NEWNET
        kinds["pid"] = linux.CLONE_NEWPID
        self._fds = [(_open(f"/proc/self/ns/{name}"), kind) for name, kind in kinds.items()]

    def rejoin(self) -> None:
        """Move this process back to the template's namespaces."""
        for fd, kind in self._fds:
            linux.setns(fd, kind)


def serve_networks(template: socket.socket, proc: int) -> None:
    """Create network namespaces for a template until it is gone; called by its jailer.

    Args:
        template: The template's socket. A request is one byte; the answer is a descriptor, or the
            text of an error.
        proc: Descriptor of a /proc that shows this process.
    """
    with contextlib.suppress(ConnectionError):  # it is gone
        while template.recv(1):
            try:
                linux.unshare(linux.CLONE_NEWNET)
                linux.raise_loopback()
                fd = os.open("self/ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            except OSError as exc:
                template.sendall(str(exc).encode())
                continue
            socket.send_fds(template, [b"!"], [fd])
            os.close(fd)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
