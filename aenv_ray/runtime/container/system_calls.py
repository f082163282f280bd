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
import struct
from typing import Final, NamedTuple

from aenv_ray.runtime.system import linux

_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_IO_URING_SETUP: Final = 425
_THIS_PROCESS: Final = 0
_X32_BIT: Final = 0x40000000
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCHITECTURE: Final = 4
_OFFSET_FIRST_ARGUMENT: Final = 16


class _Table(NamedTuple):
    """A system-call table of the kernel."""

    architecture: int
    prlimit64: int
    socket: int
    socketcall: int | None = None
    """One call for all of sockets, with its arguments in memory; refused."""


_TABLES: Final = {
    "x86_64": (_Table(0xC000003E, 302, 41), _Table(0x40000003, 340, 359, 102)),
    "aarch64": (_Table(0xC00000B7, 261, 198), _Table(0x40000028, 369, 281)),
}
"""For native programs, and for 32-bit ones."""


def restrict() -> None:
    """Restrict this process and its children; on other architectures, do nothing.

    Raises:
        OSError: The kernel has no seccomp filters, or this process may gain privileges.
    """
    code = program(os.uname().machine)
    if code:
        linux.SeccompFilter(code).install()


def program(machine: str) -> bytes:
    """Return the filter as an array of ``struct sock_filter``; empty for other architectures."""
    tables = _TABLES.get(machine, ())
    code = [_instruction(_LOAD, 0, 0, _OFFSET_ARCHITECTURE)]
    for table in tables:
        section = _section(table)
        code += [_instruction(_JUMP_EQUAL, 0, len(section), table.architecture), *section]
    return b"".join([*code, _return(_ALLOW)]) if tables else b""


def _section(table: _Table) -> list[bytes]:
    absent = _return(_ERRNO | errno.ENOSYS)
    code = [
        _instruction(_LOAD, 0, 0, _OFFSET_NUMBER),
        *(_instruction(_JUMP_AT_LEAST, 0, 1, _X32_BIT), absent),
        *(_instruction(_JUMP_EQUAL, 0, 1, _IO_URING_SETUP), absent),
    ]
    limits = [
        _instruction(_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        *(_instruction(_JUMP_EQUAL, 0, 1, _THIS_PROCESS), _return(_ALLOW)),
        _return(_ERRNO | errno.EPERM),
    ]
    code += [_instruction(_JUMP_EQUAL, 0, len(limits), table.prlimit64), *limits]
    if table.socketcall is not None:
        code += [_instruction(_JUMP_EQUAL, 0, 1, table.socketcall), absent]
    code += [
        *(_instruction(_JUMP_EQUAL, 1, 0, table.socket), _return(_ALLOW)),
        _instruction(_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
    ]
    for family in _FAMILIES:
        code += [_instruction(_JUMP_EQUAL, 0, 1, family), _return(_ALLOW)]
    return [*code, _return(_ERRNO | errno.EAFNOSUPPORT)]


def _return(value: int) -> bytes:
    return _instruction(_RETURN, 0, 0, value)


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
