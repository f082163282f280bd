"""Isolates the instances of a template with Linux namespaces, without root and without a container.

The jailer (`aenv_ray.runtime.fork.jailer`) has created what all instances of a template share: a
root directory with a read-only view of the node's programs and nothing else, a user namespace, and
a pid namespace, whose end kills every process in it. For each instance, `build` in the template and
`enter` in the forked process create what is not shared: mounts for work, temporary files and /proc;
pid, ipc, uts and network namespaces; and limits. Then the process gives up its privileges.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

from aenv_ray.runtime.fork import seccomp
from aenv_ray.runtime.fork.jail_spec import (
    DEFAULT_STORAGE_BYTES,
    MAX_FILES,
    MAX_INOTIFY,
    MAX_LOCKED_BYTES,
    MAX_PROCESSES,
    MAX_SIGNALS,
    NOBODY,
    PROJECT,
    SANDBOX_ID,
    SANDBOXES_SHARE,
    STORAGE,
    WORK,
    JailSpec,
    JailUnavailable,
    limits_processes,
    tmpfs_size,
)
from aenv_ray.runtime.fork.namespaces import NetworkNamespaces
from aenv_ray.runtime.fork.root import BOX, build_root, hide
from aenv_ray.runtime.system import linux

# --- once for each template ------------------------------------------------------------------


def enter_root(scratch: Path, spec: JailSpec, python: str, hostname: str) -> JailSpec:
    """Move this process to a new root directory and to the namespaces of a template.

    It forks: the caller goes on in the child, process 1 of a pid namespace; the parent waits and
    exits with the child's code. As root, the directory is built as root, since an interpreter may
    be below /root or in a private home directory; then the child is nobody permanently.

    Args:
        scratch: An empty directory.
        spec: What to show.
        python: Interpreter of the template.
        hostname: Host name in the sandbox, which cannot change it or see the node's.

    Returns:
        `spec` with what its instances must mount again.

    Raises:
        JailUnavailable: The kernel refused a step. The process must end, as its state is undefined.
        StorageUnavailable: The storage cannot be mounted.
    """
    uid, gid = os.geteuid(), os.getegid()
    is_root = uid == 0
    users = 0 if is_root else linux.CLONE_NEWUSER
    try:
        linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | users)
        if not is_root:
            map_ids(uid, gid)
        if (pid := os.fork()) != 0:
            exit_like(pid)
        linux.die_with_parent()
        views = build_root(scratch, spec, python)
        if is_root:
            _become_nobody()
        # In its own user namespace, the kernel locks all mounts of the root directory.
        linux.unshare(linux.CLONE_NEWUSER | _namespaces(spec))
        map_ids(*((NOBODY, NOBODY) if is_root else (SANDBOX_ID, SANDBOX_ID)))
        linux.set_hostname(hostname)
        linux.die_with_parent()  # again: changing credentials clears it
    except OSError as exc:
        raise JailUnavailable(str(exc)) from exc
    return replace(spec, views=tuple(views))


def exit_like(pid: int) -> NoReturn:
    """Wait for a child and exit with its code, holding no descriptor."""
    os.closerange(0, _LAST_FD)
    while True:
        with contextlib.suppress(InterruptedError):
            _, status = os.waitpid(pid, 0)
            os._exit(max(0, os.waitstatus_to_exitcode(status)) & 0xFF)


def _become_nobody() -> None:
    """Give up root for good, in the node's user namespace too."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # setuid made the process undumpable, so that root owns its files in /proc.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def _namespaces(spec: JailSpec) -> int:
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    return flags | linux.CLONE_NEWNET if spec.network == "none" else flags


# --- once for each instance ------------------------------------------------------------------


def build(spec: JailSpec, networks: NetworkNamespaces) -> int:
    """Create the namespaces and mounts of the next instance in this template process.

    The template does this because a forked process copies every page that it writes to, which costs
    more than the work. `TemplateNamespaces.rejoin` undoes it after the fork.

    Returns:
        The descriptor for `NetworkNamespaces.leave`; -1 without a network namespace.

    Raises:
        OSError: The kernel refused a step.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
    network = networks.enter() if spec.network == "none" else -1
    quiet = linux.MS_NOSUID | linux.MS_NODEV
    size = spec.storage_bytes or DEFAULT_STORAGE_BYTES
    linux.mount("tmpfs", BOX, "tmpfs", quiet, f"mode=755,{tmpfs_size(size)}")
    for name, mode in (("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(f"{BOX}/{name}")
        os.chmod(f"{BOX}/{name}", mode)  # regardless of the umask
    for name, target in _BOX_VIEWS:
        linux.mount(f"{BOX}/{name}", target, None, linux.MS_BIND)
    for view, path in spec.views:
        os.makedirs(path, exist_ok=True)
        linux.mount(view, path, None, linux.MS_BIND | linux.MS_REC)
    if spec.storage:
        os.makedirs(spec.storage_path, exist_ok=True)  # in the mounts of the instance
        linux.mount(f"{STORAGE}/data", spec.storage_path, None, linux.MS_BIND | linux.MS_REC)
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, _DEVPTS)
    if spec.hide_source:
        hide(PROJECT)
    linux.unshare(linux.CLONE_NEWPID)
    return network


def map_ids(uid: int, gid: int) -> None:
    """Map `SANDBOX_ID` of this process's new user namespace to a user and group outside it."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SANDBOX_ID} {uid} 1"),
        ("gid_map", f"{SANDBOX_ID} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def mount_proc() -> None:
    """Mount /proc of this process's pid namespace over the one that it was forked with."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags)


def enter(spec: JailSpec) -> None:
    """Finish the isolation of this process, pid 1 of the namespaces that `build` created.

    Raises:
        OSError: The kernel refused a step; the process must end.
    """
    mount_proc()
    # In its own user namespace, the kernel counts the processes of this sandbox separately.
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWUTS)
    map_ids(SANDBOX_ID, SANDBOX_ID)
    _limit_inotify()
    os.chdir(WORK)
    lock(spec, jailed=True, is_fork=True)


def _limit_inotify() -> None:
    """Limit what the kernel counts for each user, and all sandboxes of a node are the same user.

    The limit is that of the user namespace of this process, see user_namespaces(7).
    """
    with contextlib.suppress(OSError):  # a kernel without inotify, or with a read-only /proc/sys
        fd = os.open("/proc/sys/user/max_inotify_instances", os.O_WRONLY)
        try:
            os.write(fd, str(MAX_INOTIFY).encode())
        finally:
            os.close(fd)


class SourceCover:
    """Hides the project of an instance that loads it after `enter`, when it may no longer mount.

    Create it before `enter`: it forks a helper process that still may mount, and only waits to do
    so. Processes that the project starts while it is loaded are isolated like the instance.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _hide_when_told(theirs)
        theirs.close()
        self._channel = ours

    def hide(self) -> None:
        """Hide the project, and return when it is hidden.

        Raises:
            OSError: It could not be hidden; the process must end.
        """
        with self._channel as channel:
            channel.sendall(b"?")
            if not channel.recv(1):
                raise OSError(errno.EPERM, f"{PROJECT} could not be hidden")
        with contextlib.suppress(ChildProcessError):  # the SIGCHLD handler has reaped it
            os.waitpid(self._pid, 0)


def _hide_when_told(channel: socket.socket) -> NoReturn:
    try:
        linux.die_with_parent()
        if channel.recv(1):
            hide(PROJECT)
            channel.sendall(b"!")
    finally:
        os._exit(0)  # after a failure the channel closes without an answer


_LAST_FD: Final = 1 << 20
_BOX_VIEWS: Final = (("work", WORK), ("tmp", "/tmp"), ("tmp", "/var/tmp"), ("shm", "/dev/shm"))
_DEVPTS: Final = "newinstance,ptmxmode=0666,mode=620"


def lock(spec: JailSpec, *, jailed: bool, is_fork: bool = False) -> None:
    """Set limits and give up every privilege.

    Args:
        spec: The limits.
        jailed: Whether this process is in a user namespace that the sandbox has for itself.
        is_fork: Whether `lock_template` has restricted the process that it was forked from.
    """
    set_limits(spec, jailed=jailed)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capabilities()
    # Children cannot trace the runtime or read its memory, which contains the graders.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    _install(_filter(is_fork=is_fork))


def lock_template() -> None:
    """Give up what a template does not need to isolate its forks, before it runs a project's code.

    It can still enter namespaces, create those of an instance, and mount in them, all below its own
    user namespace.
    """
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.keep_capabilities(linux.CAP_SYS_ADMIN, linux.CAP_SYS_CHROOT)  # `setns` needs both
    if seccomp.is_supported():
        _install(linux.SeccompFilter(seccomp.program(for_template=True)))


@cache
def _filter(*, is_fork: bool) -> linux.SeccompFilter | None:
    if not seccomp.is_supported():
        return None
    return linux.SeccompFilter(seccomp.without_template_calls() if is_fork else seccomp.program())


def _install(seccomp_filter: linux.SeccompFilter | None) -> None:
    if seccomp_filter is not None:
        seccomp_filter.install()


def warm_up(*, jailed: bool) -> None:
    """Compute in the template what all its instances need."""
    _filter(is_fork=jailed)
    limits_processes(jailed=jailed)


def limit_all_sandboxes() -> None:
    """Limit the process ids of all sandboxes together, so that the node keeps some.

    To be called before this process creates user namespaces: the kernel counts the processes in
    them for the creator of each, too, up to the limit that the creator had (Linux 5.14).
    """
    if not limits_processes(jailed=True):
        return
    _limit(resource.RLIMIT_NPROC, int(SANDBOXES_SHARE * node_process_ids()))
    for kind in (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MEMLOCK):
        # What all sandboxes together get; without CAP_SYS_RESOURCE, what this process has.
        with contextlib.suppress(ValueError):
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def node_process_ids() -> int:
    """Return how many processes and threads the node's kernel allows."""
    names = ("pid_max", "threads-max")
    return min(int(Path("/proc/sys/kernel", name).read_text()) for name in names)


def set_limits(spec: JailSpec, *, jailed: bool) -> None:
    """Set the resource limits of this process and its children."""
    if spec.memory_bytes:
        # Data rather than address space: node, java and go reserve much more than they use.
        _limit(resource.RLIMIT_DATA, spec.memory_bytes)
    if spec.cpu_cores and hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        count = max(1, min(len(available), -int(-spec.cpu_cores // 1)))
        # Random, since every sandbox has the same pid in its namespace.
        first = os.urandom(1)[0] % len(available)
        chosen = [available[(first + i) % len(available)] for i in range(count)]
        os.sched_setaffinity(0, chosen)
    if limits_processes(jailed=jailed):
        _limit(resource.RLIMIT_NPROC, MAX_PROCESSES)
        # Counted for the user on the node, too: one sandbox could leave nothing to the others.
        _limit(resource.RLIMIT_SIGPENDING, MAX_SIGNALS)
        _limit(resource.RLIMIT_MEMLOCK, MAX_LOCKED_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
