"""The seccomp filter: a valid program that refuses the system calls of escapes."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from aenv_ray.runtime.fork import seccomp
from aenv_ray.runtime.system import linux

ALLOW = 0x7FFF0000
NUMBERS = {
    "x86_64": {
        "read": 0, "socket": 41, "clone": 56, "mount": 165, "unshare": 272, "setns": 308,
        "bpf": 321, "io_uring_setup": 425, "setsockopt": 54,
    },
    "aarch64": {
        "read": 63, "socket": 198, "clone": 220, "mount": 40, "unshare": 97, "setns": 268,
        "bpf": 280, "io_uring_setup": 425, "setsockopt": 208,
    },
}  # fmt: skip
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE3 = 435
CLONE_NEWUSER = 0x10000000
FORK_FLAGS = 0x01200011
machines = pytest.mark.parametrize("machine", sorted(NUMBERS))


def run(
    machine: str,
    number: int,
    first_argument: int = 0,
    *,
    second_argument: int | None = None,
    third_argument: int = 0,
    fourth_argument: int = 0,
    arch: int | None = None,
    for_template: bool = False,
    code: bytes = b"",
) -> int:
    """Return what the filter answers: a small BPF machine of the five instructions it uses."""
    program = code or seccomp.program(machine, for_template=for_template)
    instructions = list(struct.iter_unpack("=HBBI", program))
    actual = ARCHITECTURE[machine] if arch is None else arch
    second = first_argument if second_argument is None else second_argument
    arguments = (first_argument, second, third_argument, fourth_argument)
    data = struct.pack("=IIQ4Q", number, actual, 0, *arguments)
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = instructions[at]
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
@pytest.mark.parametrize("name", ["mount", "bpf", "unshare", "setns", "io_uring_setup"])
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
def test_the_size_of_a_send_queue_does_not_change(machine: str) -> None:
    """Invariant 7: unread data in sockets in transit is memory that no limit counts."""
    number = NUMBERS[machine]["setsockopt"]

    def answer(level: int, option: int) -> int:
        return run(machine, number, second_argument=level, third_argument=option)

    assert answer(socket.SOL_SOCKET, socket.SO_SNDBUF) == refused(0), "it seems to succeed"
    assert answer(socket.SOL_SOCKET, 32) == refused(0)
    assert answer(socket.SOL_SOCKET, socket.SO_RCVBUF) == ALLOW
    assert answer(socket.IPPROTO_TCP, socket.SO_SNDBUF) == ALLOW


@machines
def test_clone3_is_absent_so_that_libc_uses_clone(machine: str) -> None:
    assert run(machine, CLONE3) == refused(errno.ENOSYS)


@machines
def test_a_foreign_system_call_table_is_absent(machine: str) -> None:
    assert run(machine, NUMBERS[machine]["read"], arch=0x40000003) == refused(errno.ENOSYS)


def test_the_x32_table_is_absent() -> None:
    assert run("x86_64", 0x40000000) == refused(errno.ENOSYS)


@machines
def test_exactly_the_listed_calls_are_allowed_whatever_their_arguments(machine: str) -> None:
    """Invariant 7: no jump in the program skips one; what the list does not know is refused."""
    allowed = set(seccomp.allowed_calls(machine).values())
    allowed.add(NUMBERS[machine]["setsockopt"])  # but for two options
    assert len(allowed) > 200
    arguments = 0xFFFF_FFFE  # neither flags nor a family that any call accepts
    for number in range(max(allowed) + 200):
        answer = run(machine, number, arguments)
        assert (answer == ALLOW) == (number in allowed), number
        if number > max(allowed):
            assert answer == refused(errno.ENOSYS), "libc falls back to older calls"


@machines
@pytest.mark.parametrize("family", range(46))
def test_sockets_are_unix_ip_and_routes_only(machine: str, family: int) -> None:
    """Invariant 7: a vsock reaches the node from every network namespace."""
    number = NUMBERS[machine]["socket"]
    routes, others = run(machine, number, family), run(machine, number, family, third_argument=12)
    assert (routes == ALLOW) == (family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16))
    assert (others == ALLOW) == (family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6))


@machines
def test_a_template_may_do_what_its_jail_does_and_no_more(machine: str) -> None:
    """Invariant 13: a project's code is imported under this filter."""
    mount, unshare = NUMBERS[machine]["mount"], NUMBERS[machine]["unshare"]
    assert run(machine, unshare, linux.CLONE_NEWPID, for_template=True) == ALLOW
    for flags in (linux.CLONE_NEWNET, linux.CLONE_NEWUSER, linux.CLONE_NEWUSER | 0x20000):
        assert run(machine, unshare, flags, for_template=True) == refused(errno.EPERM)
    remount = 32
    for flags in (remount, remount | linux.MS_BIND, 8192, linux.MS_PRIVATE, 0):
        answer = run(machine, mount, fourth_argument=flags, for_template=True)
        assert answer == refused(errno.EPERM)
    assert run(machine, mount, fourth_argument=linux.MS_BIND, for_template=True) == ALLOW


@machines
def test_an_instance_takes_back_what_only_its_template_may_do(machine: str) -> None:
    """Invariant 7."""
    filters = seccomp.without_template_calls(machine)
    for name in ("mount", "unshare", "setns"):
        number = NUMBERS[machine][name]
        assert run(machine, number, linux.CLONE_NEWPID, code=filters) == refused(errno.EPERM)
    assert run(machine, NUMBERS[machine]["read"], code=filters) == ALLOW


def test_an_unknown_architecture_has_no_filter() -> None:
    assert not seccomp.is_supported("riscv64")
    assert all(seccomp.is_supported(machine) for machine in NUMBERS)
    with pytest.raises(KeyError):
        seccomp.program("riscv64")
