"""The few Linux system calls that Python does not offer, each by its own name.

Every function raises `OSError` with the call's errno. Nothing here decides anything.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from typing import Any, Final

CLONE_FS: Final = 0x00000200
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_SET_SECCOMP: Final = 22
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_SECCOMP_MODE_FILTER: Final = 2

_CAPABILITY_VERSION_3: Final = 0x20080522
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 1
_MOUNT_ATTR_NOSUID: Final = 2
_MOUNT_ATTR_NODEV: Final = 4
# One number on every architecture that has the new system-call table.
_SYS_MOUNT_SETATTR: Final = 442
_SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET: Final = {"x86_64": 126, "aarch64": 91}

_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p,
)  # fmt: skip


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` for new ones."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind `fd`; for pids, it is where later children are born."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(
    source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None
) -> None:
    """Mount `source` on `target`."""
    _check(
        _libc.mount(
            source.encode() if source else None,
            target.encode(),
            kind.encode() if kind else None,
            flags,
            data.encode() if data else None,
        ),
        f"mount {kind or source} on {target}",
    )


def unmount(target: str) -> None:
    """Detach what is mounted on `target`; it goes when nobody uses it any more."""
    _check(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root; the old one is then below `put_old`."""
    number = ctypes.c_long(_SYS_PIVOT_ROOT[os.uname().machine])
    _check(_libc.syscall(number, new_root.encode(), put_old.encode()), "pivot_root")


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def make_read_only(target: str) -> None:
    """Make the mount at `target` and every mount below it read-only and nosuid (Linux 5.12)."""
    _set_attributes(target, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)


def deny_devices(target: str) -> None:
    """Make the mount at `target` nosuid, and devices below it useless (Linux 5.12)."""
    _set_attributes(target, _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)


def _set_attributes(target: str, attributes_set: int) -> None:
    attributes = _MountAttr(attributes_set, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"mount_setattr {target}")


def prctl(option: int, first: Any = 0, second: Any = 0) -> None:
    """Set an attribute of this process."""
    to_long = ctypes.c_ulong
    second_argument = second if isinstance(second, ctypes._Pointer) else to_long(second)
    _check(
        _libc.prctl(ctypes.c_int(option), to_long(first), second_argument, to_long(0), to_long(0)),
        f"prctl({option})",
    )


def set_process_name(name: str) -> None:
    """Set what the process table calls this process; at most 15 bytes."""
    result = _libc.prctl(ctypes.c_int(PR_SET_NAME), ctypes.c_char_p(name.encode()), 0, 0, 0)
    _check(result, "prctl(PR_SET_NAME)")


def die_with_parent(signal_number: int = 9) -> None:
    """Have the kernel send `signal_number` to this process when its parent thread ends."""
    prctl(PR_SET_PDEATHSIG, signal_number)


def become_subreaper() -> None:
    """Adopt orphans among this process's descendants, so that they can be found and ended."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Give up every capability, in every set that an exec could draw on."""
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=II", _CAPABILITY_VERSION_3, 0)
    nothing = bytes(24)
    number = ctypes.c_long(_SYS_CAPSET[os.uname().machine])
    _check(_libc.syscall(number, header, nothing), "capset")


class SeccompFilter(ctypes.Structure):
    """A filter, ready to be installed: built before a fork, it costs the fork nothing."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    def __init__(self, program: bytes) -> None:
        """Hold a copy of `program`, an array of ``struct sock_filter``."""
        self._program = ctypes.create_string_buffer(program, len(program))
        address = ctypes.cast(self._program, ctypes.c_void_p).value
        super().__init__(len(program) // 8, address)
        self._pointer = ctypes.pointer(self)

    def install(self) -> None:
        """Install it for this process and its children; it cannot be taken back."""
        prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._pointer)


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace; at most 64 bytes."""
    encoded = name.encode()[:64]
    _check(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))), "sethostname")


def raise_loopback() -> None:
    """Bring ``lo`` up in a new network namespace, where it starts down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))
