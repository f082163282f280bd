"""Isolates the instances of a template with Linux namespaces, without root and without a container.

The problem: the instances of an environment are forks of one template, a process that has imported
the project. Neither the project's code nor the agent's is trusted, and each instance must be
isolated from the node and from all other instances. A create takes only milliseconds, so no more
than necessary may be done for each instance. The work is therefore divided by how often it is
needed, and each step gives up what the steps after it do not need:

1. Once per template, before any code of the project runs (`aenv_ray.runtime.fork.jailer`):
   `limit_all_sandboxes` bounds what all sandboxes use together. `enter_root` moves the process to a
   root directory with a read-only view of the node's programs, and to a user namespace, in which
   the kernel locks these mounts. `lock_template` leaves only the rights to isolate forks.
2. Once per instance, in the template, before the fork: `build` creates mounts for the work
   directory and temporary files, and ipc, network and pid namespaces. The template does this
   because it is cheaper there: a new fork must copy each memory page that it changes.
3. Once per instance, in the fork (a *spare*, until the launcher makes it an instance): `enter`
   mounts /proc and creates the user and uts namespaces. Then `lock` sets the limits and gives up
   all privileges for good, before the fork accepts calls.

The fork is process 1 of its pid namespace: when it ends, the kernel kills all processes in it.
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
    MAX_INOTIFY_WATCHES,
    MAX_LOCKED_BYTES,
    MAX_PROCESSES,
    MAX_SIGNALS,
    MAX_TERMINALS,
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

    This function forks, and returns only in the child, which is process 1 of a new pid namespace.
    The parent waits for the child and exits with its code. If this process runs as root, it builds
    the root directory as root, because the interpreter may be below /root or in a private home
    directory; then the child becomes the user nobody for good.

    Args:
        scratch: An empty directory.
        spec: What the root directory shows, and the network mode.
        python: Path of the template's interpreter.
        hostname: Host name inside; sandboxes can neither change it nor see that of the node.

    Returns:
        `spec`, with the mounts that each instance must repeat in `views`.

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
        # A user namespace locks all mounts that it inherits: none can be removed or made writable.
        linux.unshare(linux.CLONE_NEWUSER | _namespaces(spec))
        map_ids(*((NOBODY, NOBODY) if is_root else (SANDBOX_ID, SANDBOX_ID)))
        linux.set_hostname(hostname)
        linux.die_with_parent()  # set again, because changing credentials clears it
    except OSError as exc:
        raise JailUnavailable(str(exc)) from exc
    return replace(spec, views=tuple(views))


def exit_like(pid: int) -> NoReturn:
    """Close all descriptors, wait for a child and exit with its code."""
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
    # setuid made the process undumpable, so root owns its files in /proc: undo that.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def _namespaces(spec: JailSpec) -> int:
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    return flags | linux.CLONE_NEWNET if spec.network == "none" else flags


# --- once for each instance ------------------------------------------------------------------


def build(spec: JailSpec, networks: NetworkNamespaces) -> int:
    """Create the namespaces and mounts of the next instance, in the template.

    The module's docstring says why the template does this. After the fork,
    `TemplateNamespaces.rejoin` moves the template back to its own namespaces.

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
        os.makedirs(spec.storage_path, exist_ok=True)  # below the mounts of this instance
        linux.mount(f"{STORAGE}/data", spec.storage_path, None, linux.MS_BIND | linux.MS_REC)
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, _DEVPTS)
    if spec.hide_source:
        hide(PROJECT)
    linux.unshare(linux.CLONE_NEWPID)
    return network


def map_ids(uid: int, gid: int) -> None:
    """Map `SANDBOX_ID` in this process's new user namespace to a user and group outside of it."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SANDBOX_ID} {uid} 1"),
        ("gid_map", f"{SANDBOX_ID} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def mount_proc() -> None:
    """Mount the /proc of this process's pid namespace over the inherited one."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags)


def enter(spec: JailSpec) -> None:
    """Finish the isolation of this fork, which is process 1 of the namespaces from `build`.

    Raises:
        OSError: The kernel refused a step; the process must end.
    """
    mount_proc()
    # The kernel counts processes by user namespace: with its own, a sandbox has its own limit.
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWUTS)
    map_ids(SANDBOX_ID, SANDBOX_ID)
    _limit_inotify()
    os.chdir(WORK)
    lock(spec, jailed=True, is_fork=True)


def _limit_inotify() -> None:
    """Limit the inotify instances and watches of this sandbox.

    The kernel counts them per user, and all sandboxes of a node run as the same user: one sandbox
    could take them all. The limits apply to the user namespace of this process, see
    user_namespaces(7).
    """
    for name, most in (("instances", MAX_INOTIFY), ("watches", MAX_INOTIFY_WATCHES)):
        with contextlib.suppress(OSError):  # the kernel has no inotify, or /proc/sys is read-only
            fd = os.open(f"/proc/sys/user/max_inotify_{name}", os.O_WRONLY)
            try:
                os.write(fd, str(most).encode())
            finally:
                os.close(fd)


class SourceCover:
    """Hides the project's files in an instance that loads the project itself (``hideSource``).

    Such an instance needs the files until it has loaded them, but that happens after `enter`, when
    it may no longer mount anything over them. Create this object before `enter`: it forks a helper
    process that keeps the right to mount, and waits for `hide`. Processes that the project starts
    while it is loaded are isolated like the instance.
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
        with contextlib.suppress(ChildProcessError):  # the SIGCHLD handler may have reaped it
            os.waitpid(self._pid, 0)


def _hide_when_told(channel: socket.socket) -> NoReturn:
    try:
        linux.die_with_parent()
        if channel.recv(1):
            hide(PROJECT)
            channel.sendall(b"!")
    finally:
        os._exit(0)  # if hiding failed, the channel closes without an answer


_LAST_FD: Final = 1 << 20
_BOX_VIEWS: Final = (("work", WORK), ("tmp", "/tmp"), ("tmp", "/var/tmp"), ("shm", "/dev/shm"))
# The node has one number of terminals for all, which one sandbox could take.
_DEVPTS: Final = f"newinstance,ptmxmode=0666,mode=620,max={MAX_TERMINALS}"


def lock(spec: JailSpec, *, jailed: bool, is_fork: bool = False) -> None:
    """Set limits and give up every privilege.

    Args:
        spec: The limits.
        jailed: Whether this process has entered a user namespace of its sandbox alone.
        is_fork: Whether it was forked from a process that `lock_template` has restricted, so that a
            short filter is enough.
    """
    set_limits(spec, jailed=jailed)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capabilities()
    # The agent's processes must not trace the runtime or read its memory: it contains the graders.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    _install(_filter(is_fork=is_fork))


def lock_template(spec: JailSpec) -> None:
    """Set limits, and give up all rights that a template does not need to isolate its forks.

    Call it before any code of a project runs. The process can still enter namespaces, create those
    of an instance, and mount in them, but only within its own user namespace.
    """
    if spec.memory_bytes:
        _limit(resource.RLIMIT_DATA, spec.memory_bytes)
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_CORE, 0)
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
    """Compute in the template what is the same for all its instances, so that no fork has to."""
    _filter(is_fork=jailed)
    limits_processes(jailed=jailed)


def limit_all_sandboxes() -> None:
    """Limit the process ids of all sandboxes together, so that some are left for the node.

    Call it before this process creates a user namespace. Since Linux 5.14, the kernel counts the
    processes in a user namespace for its creator, too, and applies the limit that the creator had
    when it created the namespace.
    """
    if not limits_processes(jailed=True):
        return
    _limit(resource.RLIMIT_NPROC, int(SANDBOXES_SHARE * node_process_ids()))
    for kind in (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MEMLOCK):
        # All sandboxes share these two. Without CAP_SYS_RESOURCE, the inherited limit stays.
        with contextlib.suppress(ValueError):
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def node_process_ids() -> int:
    """Return how many processes and threads the node's kernel allows."""
    names = ("pid_max", "threads-max")
    return min(int(Path("/proc/sys/kernel", name).read_text()) for name in names)


def set_limits(spec: JailSpec, *, jailed: bool) -> None:
    """Set the resource limits of this process and its children."""
    if spec.memory_bytes:
        # RLIMIT_DATA, not RLIMIT_AS: node, java and go reserve far more addresses than they use.
        _limit(resource.RLIMIT_DATA, spec.memory_bytes)
    if spec.cpu_cores and hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        count = max(1, min(len(available), -int(-spec.cpu_cores // 1)))
        # Chosen at random: the pid, which is the same in each sandbox, would not spread the load.
        first = os.urandom(1)[0] % len(available)
        chosen = [available[(first + i) % len(available)] for i in range(count)]
        os.sched_setaffinity(0, chosen)
    if limits_processes(jailed=jailed):
        _limit(resource.RLIMIT_NPROC, MAX_PROCESSES)
        # The kernel counts these for the node's user, too: one sandbox could take them all.
        _limit(resource.RLIMIT_SIGPENDING, MAX_SIGNALS)
        _limit(resource.RLIMIT_MEMLOCK, MAX_LOCKED_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    _limit(resource.RLIMIT_MSGQUEUE, 0)  # counted for the node's user, too
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
