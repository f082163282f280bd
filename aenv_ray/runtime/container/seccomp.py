"""A seccomp filter in addition to the profile of the container's engine.

A process changes no limits of others: with a limit of CPU time on process 1, the kernel would kill
the container for it, which looks like an end from outside.

Engines admit every socket family. Some reach beyond the container whatever its network is: vsock
has one space of ports for a machine, its hypervisor and all its containers. Unix, IPv4, IPv6 and
netlink, with which libc lists interfaces, remain; other families answer EAFNOSUPPORT, as if the
kernel lacked them. io_uring, which opens sockets past such filters, answers ENOSYS.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Final, NamedTuple

from aenv_ray.runtime.system import linux
from aenv_ray.runtime.system import seccomp_code as code

_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_IO_URING_SETUP: Final = 425


class _Table(NamedTuple):
    """A system-call table of the kernel."""

    architecture: int
    prlimit64: int
    socket: int
    socketcall: int | None = None
    """One call for all of sockets, with its arguments in memory; refused."""


_TABLES: Final = {
    "x86_64": (_Table(code.NATIVE["x86_64"], 302, 41), _Table(0x40000003, 340, 359, 102)),
    "aarch64": (_Table(code.NATIVE["aarch64"], 261, 198), _Table(0x40000028, 369, 281)),
}
"""For native programs, and for 32-bit ones."""


def restrict() -> None:
    """Restrict this process and its children; on other architectures, do nothing.

    Raises:
        OSError: The kernel has no seccomp filters, or this process may gain privileges.
    """
    found = program(os.uname().machine)
    if found:
        linux.SeccompFilter(found).install()


def program(machine: str) -> bytes:
    """Return the filter as an array of ``struct sock_filter``; empty for other architectures."""
    tables = _TABLES.get(machine, ())
    found = [code.LOAD_ARCHITECTURE]
    for table in tables:
        found += code.equals(table.architecture, _section(table))
    return b"".join([*found, code.ALLOW]) if tables else b""


def _section(table: _Table) -> list[bytes]:
    absent = code.refuse(errno.ENOSYS)
    found = [
        code.LOAD_NUMBER,
        *code.at_least(code.X32_BIT, absent),
        *code.equals(_IO_URING_SETUP, [absent]),
        *code.equals(table.prlimit64, code.one_of(0, [code.THIS_PROCESS])),
    ]
    if table.socketcall is not None:
        found += code.equals(table.socketcall, [absent])
    return [
        *found,
        *code.differs(table.socket, code.ALLOW),
        *code.one_of(0, _FAMILIES, errno.EAFNOSUPPORT),
    ]
