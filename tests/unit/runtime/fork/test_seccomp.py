"""The seccomp filter: a valid program that refuses the system calls of escapes."""

from __future__ import annotations

import errno
import struct

import pytest

from aenv_ray.runtime.fork import seccomp

ALLOW = 0x7FFF0000
NUMBERS = {
    "x86_64": {"read": 0, "clone": 56, "mount": 165, "bpf": 321, "unshare": 272},
    "aarch64": {"read": 63, "clone": 220, "mount": 40, "bpf": 280, "unshare": 97},
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE3 = 435
CLONE_NEWUSER = 0x10000000
FORK_FLAGS = 0x01200011
machines = pytest.mark.parametrize("machine", sorted(NUMBERS))


def run(machine: str, number: int, first_argument: int = 0, arch: int | None = None) -> int:
    """Return what the filter answers: a small BPF machine of the five instructions it uses."""
    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    actual = ARCHITECTURE[machine] if arch is None else arch
    data = struct.pack("=IIQQ", number, actual, 0, first_argument)
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x06:
            return int(value)
        else:
            holds = {
                0x15: accumulator == value,
                0x45: bool(accumulator & value),
                0x35: accumulator >= value,
            }[operation]
            at += if_true if holds else if_false


def refused(error: int) -> int:
    return 0x00050000 | error


@machines
def test_the_program_has_whole_instructions_within_the_kernels_limit(machine: str) -> None:
    length = len(seccomp.program(machine))
    assert length % 8 == 0
    assert 0 < length // 8 <= 4096


@machines
@pytest.mark.parametrize("name", ["mount", "bpf", "unshare"])
def test_system_calls_of_escapes_are_refused(machine: str, name: str) -> None:
    """Invariant 7."""
    assert run(machine, NUMBERS[machine][name]) == refused(errno.EPERM)


@machines
def test_ordinary_calls_and_forks_are_allowed(machine: str) -> None:
    assert run(machine, NUMBERS[machine]["read"]) == ALLOW
    assert run(machine, NUMBERS[machine]["clone"], FORK_FLAGS) == ALLOW


@machines
def test_new_namespaces_are_refused_by_clones_flags(machine: str) -> None:
    """Invariant 7."""
    clone = NUMBERS[machine]["clone"]
    assert run(machine, clone, FORK_FLAGS | CLONE_NEWUSER) == refused(errno.EPERM)


@machines
def test_clone3_is_absent_so_that_libc_uses_clone(machine: str) -> None:
    assert run(machine, CLONE3) == refused(errno.ENOSYS)


@machines
def test_a_foreign_system_call_table_is_absent(machine: str) -> None:
    assert run(machine, NUMBERS[machine]["read"], arch=0x40000003) == refused(errno.ENOSYS)


def test_the_x32_table_is_absent() -> None:
    assert run("x86_64", 0x40000000) == refused(errno.ENOSYS)


@machines
def test_every_listed_call_is_refused(machine: str) -> None:
    """Invariant 7: no jump in the program skips one."""
    column = sorted(NUMBERS, reverse=True).index(machine)
    numbers = [both[column] for both in seccomp._REFUSED.values() if both[column] >= 0]
    assert len(numbers) > 40
    assert len(set(numbers)) == len(numbers)
    for number in numbers:
        assert run(machine, number) == refused(errno.EPERM)


def test_an_unknown_architecture_has_no_filter() -> None:
    assert not seccomp.is_supported("riscv64")
    assert all(seccomp.is_supported(machine) for machine in NUMBERS)
    with pytest.raises(KeyError):
        seccomp.program("riscv64")
