"""Code of seccomp filters: classic BPF, which looks at the number and arguments of a system call.

Fragments are lists of ``struct sock_filter``. Those that decide end with a return.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import Final

NATIVE: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The system-call table of native programs, by machine as in `os.uname`."""
X32_BIT: Final = 0x40000000
"""In the numbers of x86-64's table for programs with 32-bit pointers."""
THIS_PROCESS: Final = 0

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15
_JUMP_SET: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_JUMP_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCHITECTURE: Final = 4
_OFFSET_ARGUMENTS: Final = 16


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


ALLOW: Final = _instruction(_RETURN, 0, 0, _ALLOW)
LOAD_ARCHITECTURE: Final = _instruction(_LOAD, 0, 0, _OFFSET_ARCHITECTURE)
LOAD_NUMBER: Final = _instruction(_LOAD, 0, 0, _OFFSET_NUMBER)


def load_argument(index: int) -> bytes:
    """Load the low half of an argument: all those that are checked have 32 bits."""
    return _instruction(_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * index)


def refuse(error: int) -> bytes:
    """Return from the filter: the call fails with an error; 0 makes it succeed without effect."""
    return _instruction(_RETURN, 0, 0, _ERRNO | error)


def equals(value: int, then: Sequence[bytes]) -> list[bytes]:
    """Run `then`, which must return, if the loaded value is `value`."""
    return [_instruction(_JUMP_EQUAL, 0, len(then), value), *then]


def differs(value: int, then: bytes) -> list[bytes]:
    """Run the one instruction `then`, which must return, if the loaded value is not `value`."""
    return [_instruction(_JUMP_EQUAL, 1, 0, value), then]


def at_least(value: int, then: bytes) -> list[bytes]:
    """Run the one instruction `then`, which must return, if the loaded value is not smaller."""
    return [_instruction(_JUMP_AT_LEAST, 0, 1, value), then]


def up_to(value: int, then: Sequence[bytes]) -> list[bytes]:
    """Run `then`, which must return, if the loaded value is not larger than `value`."""
    return [_instruction(_JUMP_AT_LEAST, len(then), 0, value + 1), *then]


def one_of(index: int, values: Sequence[int], error: int = errno.EPERM) -> list[bytes]:
    """Allow a call whose argument has one of these values, and refuse others."""
    code = [load_argument(index)]
    for value in values:
        code += equals(value, [ALLOW])
    return [*code, refuse(error)]


def at_most(index: int, most: int, *, is_wide: bool = False) -> list[bytes]:
    """Refuse larger values of an argument; `is_wide`: it has 64 bits."""
    code = []
    if is_wide:  # both architectures have the low half first
        high = _instruction(_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * index + 4)
        code = [high, *differs(0, refuse(errno.EINVAL))]
    return [*code, load_argument(index), *at_least(most + 1, refuse(errno.EINVAL)), ALLOW]


def without_bits(index: int, bits: int) -> list[bytes]:
    """Refuse an argument that has one of these bits."""
    return [
        load_argument(index), _instruction(_JUMP_SET, 0, 1, bits), refuse(errno.EPERM), ALLOW,
    ]  # fmt: skip
