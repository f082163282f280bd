"""A seccomp filter that refuses system calls which escapes use and environments do not need.

The list is close to Docker's default profile for a process without capabilities: loading code into
the kernel, changing mounts, namespaces, clocks, keys and devices, tracing the kernel, and
interfaces with a history of privilege escalation (io_uring, userfaultfd, bpf). A refused call
returns EPERM. ``clone3`` returns ENOSYS, so that libc falls back to ``clone``, whose flags the
filter can see.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Final

# name: (x86_64, aarch64); -1 where the architecture lacks the call. Source: the kernel's tables.
_REFUSED: Final[dict[str, tuple[int, int]]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_CLONE3: Final = 435
_ARCHITECTURE: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT: Final = 0x40000000
_NAMESPACE_FLAGS: Final = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15
_JUMP_SET: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_JUMP_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCHITECTURE: Final = 4
_OFFSET_FIRST_ARGUMENT: Final = 16


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def is_supported(machine: str | None = None) -> bool:
    """Whether this architecture has a filter."""
    return (machine or os.uname().machine) in _ARCHITECTURE


def program(machine: str | None = None) -> bytes:
    """Return the filter for `machine`, as an array of ``struct sock_filter``.

    Raises:
        KeyError: The architecture is not supported; see `is_supported`.
    """
    machine = machine or os.uname().machine
    column = 0 if machine == "x86_64" else 1
    refused = [numbers[column] for numbers in _REFUSED.values() if numbers[column] >= 0]
    refuse = _instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)
    absent = _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    code = [
        _instruction(_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        _instruction(_JUMP_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        absent,  # a foreign system-call table: 32-bit programs do not run here
        _instruction(_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_JUMP_AT_LEAST, 0, 1, _X32_BIT), absent]
    code += [_instruction(_JUMP_EQUAL, 0, 1, _CLONE3), absent]
    for number in refused:
        code += [_instruction(_JUMP_EQUAL, 0, 1, number), refuse]
    code += [
        _instruction(_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        _instruction(_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        _instruction(_JUMP_SET, 0, 1, _NAMESPACE_FLAGS),
        refuse,
        _instruction(_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(code)
