"""Seccomp filters: the system calls that environments need are allowed, all others are refused.

The list is what Docker's default profile allows a process without capabilities, except calls that
no environment needs (setting clocks, file handles, io_uring). A refused call returns EPERM. Three
kinds return ENOSYS, so that programs use another call instead: ``clone3``, because the filter can
see the flags of ``clone`` only; ``io_setup``, because the node has one number of asynchronous
requests for all (``fs.aio-max-nr``), which one sandbox could take; and calls that are newer than
the list.

Allowed sockets are Unix, IPv4, IPv6, and netlink for routes, with which libc lists the network
interfaces. All others bypass network namespaces (vsock) or reach kernel code that no environment
needs.

What a socket has sent and nobody has read is memory that no limit counts while the receiving socket
is itself in transit. So its queue keeps the size that the operator sets in
``net.core.wmem_default``: programs that set another are told that it worked, as for a size that the
kernel does not grant.

System V objects stay when the processes that made them end, and the kernel counts their memory for
no process. Up to 32,000 sets of semaphores and 4,096 segments may exist in a sandbox: small ones,
which database servers use as locks, are allowed. Queues of messages are refused.

A template may also enter namespaces and mount in them, because it isolates its forks. A fork gives
that up with a second filter. That one is short, because the kernel takes time for each instruction
of a filter, and every instance installs one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from functools import cache
from typing import Final

from aenv_ray.runtime.system import linux
from aenv_ray.runtime.system import seccomp_code as code

# name, x86_64, aarch64; - where the architecture lacks the call. Source: the kernel's tables.
_ALLOWED: Final = """
accept 43 202, accept4 288 242, access 21 -, alarm 37 -, arch_prctl 158 -, bind 49 200, brk 12 214,
cachestat 451 451, capget 125 90, capset 126 91, chdir 80 49, chmod 90 -, chown 92 -,
clock_getres 229 114, clock_gettime 228 113, clock_nanosleep 230 115, close 3 57,
close_range 436 436, connect 42 203, copy_file_range 326 285, creat 85 -, dup 32 23, dup2 33 -,
dup3 292 24, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22,
epoll_pwait2 441 441, epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, execve 59 221,
execveat 322 281, exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439,
fadvise64 221 223, fallocate 285 47, fchdir 81 50, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452,
fchown 93 55, fchownat 260 54, fcntl 72 25, fdatasync 75 83, fgetxattr 193 10, flistxattr 196 13,
flock 73 32, fork 57 -, fremovexattr 199 16, fsetxattr 190 7, fstat 5 80, fstatfs 138 44,
fsync 74 82, ftruncate 77 46, futex 202 98, futex_requeue 456 456, futex_wait 455 455,
futex_waitv 449 449, futex_wake 454 454, futimesat 261 -, get_robust_list 274 100,
get_thread_area 211 -, getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61,
getegid 108 177, geteuid 107 175, getgid 104 176, getgroups 115 158, getitimer 36 102,
getpeername 52 205, getpgid 121 155, getpgrp 111 -, getpid 39 172, getppid 110 173,
getpriority 140 141, getrandom 318 278, getresgid 120 150, getresuid 118 148, getrlimit 97 163,
getrusage 98 165, getsid 124 156, getsockname 51 204, getsockopt 55 209, gettid 186 178,
gettimeofday 96 169, getuid 102 174, getxattr 191 8, getxattrat 464 464, inotify_add_watch 254 27,
inotify_init 253 -, inotify_init1 294 26, inotify_rm_watch 255 28, io_cancel 210 3,
io_destroy 207 1, io_getevents 208 4, io_pgetevents 333 292, io_submit 209 2,
ioctl 16 29, ioprio_get 252 31, ioprio_set 251 30, kill 62 129, landlock_add_rule 445 445,
landlock_create_ruleset 444 444, landlock_restrict_self 446 446, lchown 94 -, lgetxattr 192 9,
link 86 -, linkat 265 37, listen 50 201, listxattr 194 11, listxattrat 465 465, llistxattr 195 12,
lremovexattr 198 15, lseek 8 62, lsetxattr 189 6, lstat 6 -, madvise 28 233,
map_shadow_stack 453 453, membarrier 324 283, memfd_create 319 279, mincore 27 232, mkdir 83 -,
mkdirat 258 34, mknod 133 -, mknodat 259 33, mlock 149 228, mlock2 325 284, mlockall 151 230,
mmap 9 222, mprotect 10 226, mq_getsetattr 245 185, mq_notify 244 184, mq_open 240 180,
mq_timedreceive 243 183, mq_timedsend 242 182, mq_unlink 241 181, mremap 25 216, mseal 462 462,
msgctl 71 187, msgrcv 70 188, msgsnd 69 189, msync 26 227, munlock 150 229,
munlockall 152 231, munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56,
openat2 437 437, pause 34 -, pidfd_open 434 434, pidfd_send_signal 424 424, pipe 22 -, pipe2 293 59,
pkey_alloc 330 289, pkey_free 331 290, pkey_mprotect 329 288, poll 7 -, ppoll 271 73, prctl 157 167,
pread64 17 67, preadv 295 69, preadv2 327 286, process_mrelease 448 448,
process_vm_readv 310 270, process_vm_writev 311 271, pselect6 270 72, ptrace 101 117,
pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0 63, readahead 187 213, readlink 89 -,
readlinkat 267 78, readv 19 65, recvfrom 45 207, recvmmsg 299 243, recvmsg 47 212,
remap_file_pages 216 234, removexattr 197 14, removexattrat 466 466, rename 82 -, renameat 264 38,
renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293, rt_sigaction 13 134,
rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigqueueinfo 129 138, rt_sigreturn 15 139,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, rt_tgsigqueueinfo 297 240,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_getaffinity 204 123,
sched_getattr 315 275, sched_getparam 143 121, sched_getscheduler 145 120,
sched_rr_get_interval 148 127, sched_setaffinity 203 122, sched_setattr 314 274,
sched_setparam 142 118, sched_setscheduler 144 119, sched_yield 24 124, seccomp 317 277,
select 23 -, semctl 66 191, semop 65 193, semtimedop 220 192, sendfile 40 71,
sendmmsg 307 269, sendmsg 46 211, sendto 44 206, set_robust_list 273 99, set_thread_area 205 -,
set_tid_address 218 96, setfsgid 123 152, setfsuid 122 151, setgid 106 144, setgroups 116 159,
setitimer 38 103, setpgid 109 154, setpriority 141 140, setregid 114 143, setresgid 119 149,
setresuid 117 147, setreuid 113 145, setrlimit 160 164, setsid 112 157,
setuid 105 146, setxattr 188 5, setxattrat 463 463, shmat 30 196, shmctl 31 195, shmdt 67 197,
shutdown 48 210, sigaltstack 131 132, signalfd 282 -, signalfd4 289 74,
splice 275 76, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -, symlinkat 266 36, sync 162 81,
sync_file_range 277 84, syncfs 306 267, sysinfo 99 179, tee 276 77, tgkill 234 131, time 201 -,
timer_create 222 107, timer_delete 226 111, timer_getoverrun 225 109, timer_gettime 224 108,
timer_settime 223 110, timerfd_create 283 85, timerfd_gettime 287 87, timerfd_settime 286 86,
times 100 153, tkill 200 130, truncate 76 45, umask 95 166, uname 63 160, unlink 87 -,
unlinkat 263 35, utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, vmsplice 278 75,
wait4 61 260, waitid 247 95, write 1 64, writev 20 66
"""
_CHECKED: Final = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "io_setup": (206, 0),
    "mount": (165, 40),
    "personality": (135, 92),
    "prlimit64": (302, 261),
    "setns": (308, 268),
    "socket": (41, 198),
    "semget": (64, 190),
    "setsockopt": (54, 208),
    "shmget": (29, 194),
    "socketpair": (53, 199),
    "unshare": (272, 97),
}
MAX_SET_SEMAPHORES: Final = 20
"""System V semaphores in a set."""
MAX_SEGMENT_BYTES: Final = 4096
"""Size of a segment of System V shared memory."""
_NAMESPACE_FLAGS: Final = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_PERSONALITIES: Final = (0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
"""Linux, Linux without 64 bits, with an old version number, without address randomization (gdb);
the last one asks."""
_AF_UNIX: Final = 1
_AF_INET: Final = 2
_AF_INET6: Final = 10
_AF_NETLINK: Final = 16
_NETLINK_ROUTE: Final = 0
_SOL_SOCKET: Final = 1
_SEND_QUEUES: Final = (7, 32)  # SO_SNDBUF, SO_SNDBUFFORCE

_TEMPLATE_UNSHARES: Final = (
    linux.CLONE_NEWNS | linux.CLONE_NEWIPC,
    linux.CLONE_NEWPID,
    linux.CLONE_NEWUSER | linux.CLONE_NEWUTS,
)
_TEMPLATE_ENTERS: Final = (
    linux.CLONE_NEWNS, linux.CLONE_NEWIPC, linux.CLONE_NEWNET, linux.CLONE_NEWPID,
)  # fmt: skip
_TEMPLATE_MOUNTS: Final = (
    linux.MS_BIND,
    linux.MS_BIND | linux.MS_REC,
    linux.MS_NOSUID | linux.MS_NODEV,
    linux.MS_NOSUID | linux.MS_NOEXEC,
    linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC,
    linux.MS_NOSUID | linux.MS_RDONLY,
)
"""The flags with which `aenv_ray.runtime.fork.jail` mounts. None changes an existing mount."""


def is_supported(machine: str | None = None) -> bool:
    """Whether this architecture has a filter."""
    return (machine or os.uname().machine) in code.NATIVE


def allowed_calls(machine: str) -> dict[str, int]:
    """Return the system calls that are allowed whatever their arguments, with their numbers."""
    column = _column(machine) + 1
    rows = [row.split() for row in _ALLOWED.replace("\n", " ").split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


@cache
def program(machine: str | None = None, *, for_template: bool = False) -> bytes:
    """Return the filter for `machine`, as an array of ``struct sock_filter``.

    Args:
        machine: As in `os.uname`; None for this one.
        for_template: Also allow what a spare needs to isolate itself.

    Raises:
        KeyError: The architecture is not supported; see `is_supported`.
    """
    machine = machine or os.uname().machine
    numbers = {name: both[_column(machine)] for name, both in _CHECKED.items()}
    found = _header(machine)
    for name in ("clone3", "io_setup"):
        found += code.equals(numbers[name], [code.refuse(errno.ENOSYS)])
    found += code.equals(numbers["clone"], code.without_bits(0, _NAMESPACE_FLAGS))
    found += code.equals(numbers["socket"], _socket_families())
    found += code.equals(numbers["socketpair"], code.one_of(0, [_AF_UNIX], errno.EAFNOSUPPORT))
    found += code.equals(numbers["setsockopt"], _without_larger_queues())
    found += code.equals(numbers["semget"], code.at_most(1, MAX_SET_SEMAPHORES))
    found += code.equals(numbers["shmget"], code.at_most(1, MAX_SEGMENT_BYTES, is_wide=True))
    found += code.equals(numbers["personality"], code.one_of(0, _PERSONALITIES))
    found += code.equals(numbers["prlimit64"], code.one_of(0, [code.THIS_PROCESS]))
    if for_template:
        found += code.equals(numbers["unshare"], code.one_of(0, _TEMPLATE_UNSHARES))
        found += code.equals(numbers["setns"], code.one_of(1, _TEMPLATE_ENTERS))
        found += code.equals(numbers["mount"], code.one_of(3, _TEMPLATE_MOUNTS))
    calls = allowed_calls(machine)
    for first, last in _runs(calls.values()):
        in_range = code.at_least(first, code.ALLOW)
        found += code.up_to(last, [*in_range, code.refuse(errno.EPERM)])
    return b"".join([*found, code.refuse(errno.ENOSYS)])


@cache
def without_template_calls(machine: str | None = None) -> bytes:
    """Return the filter that takes back what only the filter of a template allows."""
    machine = machine or os.uname().machine
    found = _header(machine)
    for name in ("mount", "setns", "unshare"):
        found += code.equals(_CHECKED[name][_column(machine)], [code.refuse(errno.EPERM)])
    return b"".join([*found, code.ALLOW])


def _column(machine: str) -> int:
    return {"x86_64": 0, "aarch64": 1}[machine]


def _header(machine: str) -> list[bytes]:
    """Refuse foreign system-call tables, such as that of 32-bit programs; load the number."""
    found = [
        code.LOAD_ARCHITECTURE,
        *code.differs(code.NATIVE[machine], code.refuse(errno.ENOSYS)),
        code.LOAD_NUMBER,
    ]
    if machine == "x86_64":
        found += code.at_least(code.X32_BIT, code.refuse(errno.ENOSYS))
    return found


def _socket_families() -> list[bytes]:
    netlink = code.one_of(2, [_NETLINK_ROUTE], errno.EPROTONOSUPPORT)
    return [
        code.load_argument(0),
        *code.equals(_AF_NETLINK, netlink),
        *code.one_of(0, [_AF_UNIX, _AF_INET, _AF_INET6], errno.EAFNOSUPPORT),
    ]


def _without_larger_queues() -> list[bytes]:
    """Return code with which setting the size of a send queue succeeds without any effect."""
    ignored = [code.load_argument(2)]
    for option in _SEND_QUEUES:
        ignored += code.equals(option, [code.refuse(0)])
    return [code.load_argument(1), *code.equals(_SOL_SOCKET, [*ignored, code.ALLOW]), code.ALLOW]


def _runs(numbers: Collection[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
