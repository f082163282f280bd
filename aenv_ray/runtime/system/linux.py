"""Linux system calls that Python does not offer.

Each function is named after its call, and raises `OSError` with the call's errno.
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
_PR_CAP_AMBIENT_RAISE: Final = 2
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
CAP_SYS_CHROOT: Final = 18
CAP_SYS_ADMIN: Final = 21
_SECCOMP_MODE_FILTER: Final = 2

_CAPABILITY_VERSION_3: Final = 0x20080522
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 1
_MOUNT_ATTR_NOSUID: Final = 2
_MOUNT_ATTR_NODEV: Final = 4
# The same number on all architectures.
_SYS_MOUNT_SETATTR: Final = 442
_SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_SYS_IOPRIO_GET: Final = {"x86_64": 252, "aarch64": 31}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_CLASS_SHIFT: Final = 13
IOPRIO_CLASS_IDLE: Final = 3

_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _function(name: str, *argument_types: Any) -> Any:
    """Return a function of libc with declared argument types.

    Otherwise every call creates ctypes objects for its arguments, which in a freshly forked process
    copies about 80 pages.
    """
    function = _libc[name]
    function.argtypes = argument_types
    return function


_INT: Final = ctypes.c_int
_LONG: Final = ctypes.c_long
_ULONG: Final = ctypes.c_ulong
_TEXT: Final = ctypes.c_char_p
_POINTER: Final = ctypes.c_void_p

_unshare: Final = _function("unshare", _INT)
_setns: Final = _function("setns", _INT, _INT)
_mount: Final = _function("mount", _TEXT, _TEXT, _TEXT, _ULONG, _TEXT)
_umount: Final = _function("umount2", _TEXT, _INT)
_sethostname: Final = _function("sethostname", _TEXT, ctypes.c_size_t)
_prctl: Final = _function("prctl", _INT, _ULONG, _ULONG, _ULONG, _ULONG)
_prctl_text: Final = _function("prctl", _INT, _TEXT, _ULONG, _ULONG, _ULONG)
_pivot_root: Final = _function("syscall", _LONG, _TEXT, _TEXT)
_capset: Final = _function("syscall", _LONG, _TEXT, _TEXT)
_ioprio_get: Final = _function("syscall", _LONG, _INT, _INT)
_mount_setattr: Final = _function(
    "syscall", _LONG, _INT, _TEXT, ctypes.c_uint, _POINTER, ctypes.c_size_t
)
_MACHINE: Final = os.uname().machine


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces of the kinds in `flags`."""
    _check(_unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Join the namespace of `fd`; a pid namespace applies to later children only."""
    _check(_setns(fd, kind), "setns")


def mount(
    source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None
) -> None:
    """Mount `source` on `target`."""
    _check(
        _mount(
            source.encode() if source else None,
            target.encode(),
            kind.encode() if kind else None,
            flags,
            data.encode() if data else None,
        ),
        f"mount {kind or source} on {target}",
    )


def unmount(target: str) -> None:
    """Detach the mount at `target`; the kernel removes it once it is unused."""
    _check(_umount(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root directory, and move the old one to `put_old`."""
    number = _SYS_PIVOT_ROOT[_MACHINE]
    _check(_pivot_root(number, new_root.encode(), put_old.encode()), "pivot_root")


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
    """Make the mount at `target` nosuid and nodev (Linux 5.12)."""
    _set_attributes(target, _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)


def _set_attributes(target: str, attributes_set: int) -> None:
    attributes = _MountAttr(attributes_set, 0, 0, 0)
    result = _mount_setattr(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.addressof(attributes),
        ctypes.sizeof(attributes),
    )
    _check(result, f"mount_setattr {target}")


def prctl(option: int, first: int = 0, second: int = 0) -> None:
    """Set an attribute of this process."""
    if _prctl(option, first, second, 0, 0) != 0:
        _check(-1, f"prctl({option})")


def set_process_name(name: str) -> None:
    """Set the name of this process in the process table; at most 15 bytes."""
    _check(_prctl_text(PR_SET_NAME, name.encode(), 0, 0, 0), "prctl(PR_SET_NAME)")


def die_with_parent(signal_number: int = 9) -> None:
    """Have the kernel send `signal_number` to this process when its parent thread ends."""
    prctl(PR_SET_PDEATHSIG, signal_number)


def set_oom_score(score: int) -> None:
    """Set how soon the kernel ends this process when the node has no memory left: 1000 is first.

    Every user may raise it; child processes inherit it.
    """
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    try:
        os.write(fd, str(score).encode())
    finally:
        os.close(fd)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can end them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


_CAPABILITY_HEADER: Final = struct.pack("=II", _CAPABILITY_VERSION_3, 0)
_NO_CAPABILITIES: Final = bytes(24)


def drop_capabilities() -> None:
    """Drop all capabilities, from all sets."""
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _check(_capset(_SYS_CAPSET[_MACHINE], _CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")


def keep_capabilities(*kept: int) -> None:
    """Drop all capabilities but some, which this process also has after it executes a program."""
    mask = sum(1 << number for number in kept)
    sets = struct.pack("=6I", mask, mask, mask, 0, 0, 0)  # effective, permitted, inheritable
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _check(_capset(_SYS_CAPSET[_MACHINE], _CAPABILITY_HEADER, sets), "capset")
    for number in kept:
        prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)


class SeccompFilter(ctypes.Structure):
    """A filter that is ready to be installed; creating it before a fork keeps the fork cheap."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    def __init__(self, program: bytes) -> None:
        """Copy `program`, an array of ``struct sock_filter``."""
        self._program = ctypes.create_string_buffer(program, len(program))
        address = ctypes.cast(self._program, ctypes.c_void_p).value
        super().__init__(len(program) // 8, address)
        self._address = ctypes.addressof(self)

    def install(self) -> None:
        """Install the filter for this process and its children; it cannot be removed."""
        prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._address)


def io_class(thread: int) -> int:
    """Return the class of a thread's disk accesses, such as `IOPRIO_CLASS_IDLE`."""
    found = int(_ioprio_get(_SYS_IOPRIO_GET[_MACHINE], _IOPRIO_WHO_PROCESS, thread))
    _check(min(found, 0), "ioprio_get")
    return found >> _IOPRIO_CLASS_SHIFT


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace; at most 64 bytes."""
    encoded = name.encode()[:64]
    _check(_sethostname(encoded, len(encoded)), "sethostname")


def raise_loopback() -> None:
    """Bring up ``lo``, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))
