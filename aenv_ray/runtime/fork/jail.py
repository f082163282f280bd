"""Isolates a sandbox with Linux namespaces, without root and without a container.

`unshare_template` and `settle_template` run once in a template process and create what all its
instances share: a user namespace, a root directory with a read-only view of the node's programs and
nothing else, and a pid namespace, whose end kills every process in it. For each instance, `build`
in the template and `enter` in the forked process create what is not shared: mounts for work,
temporary files and /proc; pid, ipc, uts and network namespaces; and limits. Then the process gives
up its privileges.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import site
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

from aenv_ray.runtime.fork import seccomp
from aenv_ray.runtime.fork.jail_spec import (
    DEFAULT_STORAGE_BYTES,
    MAX_FILES,
    MAX_PROCESSES,
    NOBODY,
    PROJECT,
    SANDBOX_ID,
    STORAGE,
    WORK,
    JailSpec,
    JailUnavailable,
    StorageUnavailable,
    limits_processes,
    tmpfs_size,
)
from aenv_ray.runtime.fork.namespaces import NetworkNamespaces, close_high
from aenv_ray.runtime.system import linux

_BOX: Final = "/.box"
_COVERED: Final = ("/tmp/", "/var/tmp/", f"{WORK}/")
_second_views: list[tuple[str, str]] = []
_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_PASSWD: Final = (
    f"root:x:0:0:root:/root:/bin/sh\nagent:x:{SANDBOX_ID}:{SANDBOX_ID}:agent:{WORK}:/bin/bash\n"
    f"nobody:x:{NOBODY}:{NOBODY}:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_GROUP: Final = f"root:x:0:\nagent:x:{SANDBOX_ID}:\nnogroup:x:{NOBODY}:\n"


# --- once for each template ------------------------------------------------------------------


def unshare_template(scratch: Path, spec: JailSpec) -> None:
    """Enter the namespaces that all instances of a template share. The next child is pid 1 there.

    If this process is root, it builds the shared root directory as root, since an interpreter may
    be below /root or in a private home directory; then it becomes nobody permanently.

    Raises:
        JailUnavailable: The kernel refused a step. The process must end, as its state is undefined.
    """
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWPID | _namespaces(spec)
    try:
        if os.geteuid() == 0:
            linux.unshare(linux.CLONE_NEWNS)
            _build_root(scratch, spec)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            # setuid made the process undumpable, so that root owns its files in /proc.
            linux.prctl(linux.PR_SET_DUMPABLE, 1)
            linux.unshare(flags)
            _map_ids(NOBODY, NOBODY)
        else:
            uid, gid = os.geteuid(), os.getegid()
            linux.unshare(flags)
            _map_ids(uid, gid)
            _build_root(scratch, spec)
    except OSError as exc:
        raise JailUnavailable(str(exc)) from exc


def settle_template(hostname: str) -> None:
    """Set the host name and mount /proc, as pid 1 of the template's pid namespace.

    Args:
        hostname: Host name in the sandbox, which cannot change it or see the node's.

    Raises:
        JailUnavailable: The kernel refused a step, for example in a container that masks /proc.
    """
    try:
        linux.set_hostname(hostname)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except OSError as exc:
        raise JailUnavailable(str(exc)) from exc


def _map_ids(uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SANDBOX_ID} {uid} 1"),
        ("gid_map", f"{SANDBOX_ID} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def _build_root(scratch: Path, spec: JailSpec) -> None:
    """Create the shared root directory on a tmpfs at `scratch` and make it the root."""
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    root = str(scratch)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
    for name in _SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            os.symlink(os.readlink(source), f"{root}/{name}")
        elif source.is_dir():
            _show(root, str(source))
    for path in _python_paths():
        _show(root, path)
        if path.startswith(_COVERED):
            # An instance mounts its own /tmp over this path: bind it again from a second view.
            view = f"/.shown/{len(_second_views)}"
            _show(root, path, view)
            _second_views.append((view, path))
            if _package_dir().startswith(f"{path}/"):
                _hide(f"{root}{view}{_package_dir().removeprefix(path)}/envs")
            elif _package_dir() == path:
                _hide(f"{root}{view}/envs")
    _show(root, spec.project, PROJECT)
    _show_further(root, spec)
    for name in (WORK[1:], "tmp", "var/tmp", "run", "root", ".box", "dev/pts", "dev/shm", "proc"):
        os.makedirs(f"{root}/{name}", mode=0o755, exist_ok=True)
    _make_devices(root)
    _make_accounts(root)
    _show_resolver(root)
    _hide(f"{root}{_package_dir()}/envs")
    if spec.storage:
        os.makedirs(f"{root}{STORAGE}/data")
        Path(f"{root}{STORAGE}/lock").touch()
        os.makedirs(f"{root}{spec.storage_path}", exist_ok=True)
    linux.make_read_only(root)
    _show_writable(root, spec)
    # The kernel allows a new /proc only while an unmasked one is visible (mnt_already_visible).
    linux.mount("/proc", f"{root}/proc", None, linux.MS_BIND | linux.MS_REC)
    os.chdir(root)
    # Stacks the old root on the new one; detaching the old one leaves only the new.
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")


def _package_dir() -> str:
    return str(Path(__file__).resolve().parents[2])


def _python_paths() -> list[str]:
    """Return the directories that this interpreter needs, besides the system's."""
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, _package_dir()]
    wanted.append(str(Path(os.path.realpath(sys.executable)).parent.parent))
    wanted += [p for p in (*site.getsitepackages(), *sys.path) if os.path.isabs(p)]
    # In a source checkout the parent of the package is on sys.path: show only the package.
    excluded = {"/", str(Path(_package_dir()).parent), os.getcwd()}
    found: list[str] = []
    for path in sorted({os.path.abspath(p) for p in wanted}):
        covered = [*found, *(f"/{name}" for name in _SYSTEM)]
        if path in excluded or not os.path.exists(path):
            continue
        if not any(path == base or path.startswith(f"{base}/") for base in covered):
            found.append(path)
    return found


def _show(root: str, path: str, place: str | None = None) -> None:
    """Bind-mount `path` at `place` below `root` (default: the same path); follows symlinks."""
    target = f"{root}{place or path}"
    real = os.path.realpath(path)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    linux.mount(real, target, None, linux.MS_BIND | linux.MS_REC)
    if place is None and real != path and not os.path.exists(f"{root}{real}"):
        _show(root, real)


def _show_further(root: str, spec: JailSpec) -> None:
    for path in spec.shown:
        if not os.path.exists(f"{root}{path}"):
            _show(root, path)
    if spec.writable:
        os.makedirs(f"{root}{spec.writable}", exist_ok=True)


def _show_writable(root: str, spec: JailSpec) -> None:
    if spec.writable:
        linux.mount(spec.writable, f"{root}{spec.writable}", None, linux.MS_BIND)
        linux.deny_devices(f"{root}{spec.writable}")
    if spec.storage:
        _show_storage(f"{root}{STORAGE}", spec)


def _hide(target: str) -> None:
    """Mount an empty directory over `target`, if that exists."""
    if os.path.isdir(target):
        linux.mount("tmpfs", target, "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID, "size=4k")


def _show_storage(target: str, spec: JailSpec) -> None:
    """Mount the storage, the only part of the node's disk that a sandbox can write to.

    Raises:
        StorageUnavailable: It does not exist, or cannot be mounted.
    """
    try:
        linux.mount(spec.storage, f"{target}/data", None, linux.MS_BIND)
        linux.deny_devices(f"{target}/data")
        linux.mount(spec.storage_lock, f"{target}/lock", None, linux.MS_BIND)
    except OSError as exc:  # the jail itself works, for other instances
        raise StorageUnavailable(f"its storage cannot be mounted: {exc}") from exc


def _make_devices(root: str) -> None:
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            Path(f"{root}/dev/{name}").touch()
            linux.mount(f"/dev/{name}", f"{root}/dev/{name}", None, linux.MS_BIND)
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")


def _make_accounts(root: str) -> None:
    for name, text in (("passwd", _PASSWD), ("group", _GROUP)):
        if os.path.exists(f"{root}/etc/{name}"):
            own = Path(f"{root}/run/{name}")
            own.write_text(text)
            linux.mount(str(own), f"{root}/etc/{name}", None, linux.MS_BIND)


def _show_resolver(root: str) -> None:
    """Show the file that /etc/resolv.conf links to, if it is outside /etc."""
    real = os.path.realpath("/etc/resolv.conf")
    if os.path.isfile(real) and not real.startswith("/etc/"):
        _show(root, real)


# --- once for each instance ------------------------------------------------------------------


def _namespaces(spec: JailSpec) -> int:
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    return flags | linux.CLONE_NEWNET if spec.network == "none" else flags


def build(spec: JailSpec, networks: NetworkNamespaces) -> int:
    """Create the namespaces and mounts of the next instance in this template process.

    The template does this because a forked process copies every page that it writes to, which costs
    more than the work. `TemplateNamespaces.rejoin` undoes it after the fork.

    Returns:
        The descriptor for `Networks.leave`; -1 without a network namespace.

    Raises:
        OSError: The kernel refused a step.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
    network = networks.enter() if spec.network == "none" else -1
    quiet = linux.MS_NOSUID | linux.MS_NODEV
    size = spec.storage_bytes or DEFAULT_STORAGE_BYTES
    linux.mount("tmpfs", _BOX, "tmpfs", quiet, f"mode=755,{tmpfs_size(size)}")
    for name, mode in (("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(f"{_BOX}/{name}")
        os.chmod(f"{_BOX}/{name}", mode)  # regardless of the umask
    for name, target in _BOX_VIEWS:
        linux.mount(f"{_BOX}/{name}", target, None, linux.MS_BIND)
    for view, path in _second_views:
        os.makedirs(path, exist_ok=True)
        linux.mount(view, path, None, linux.MS_BIND | linux.MS_REC)
    if spec.storage:
        os.makedirs(spec.storage_path, exist_ok=True)  # in the mounts of the instance
        linux.mount(f"{STORAGE}/data", spec.storage_path, None, linux.MS_BIND | linux.MS_REC)
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, _DEVPTS)
    if spec.hide_source:
        _hide(PROJECT)
    linux.unshare(linux.CLONE_NEWPID)
    return network


def enter(spec: JailSpec) -> None:
    """Finish the isolation of this process, pid 1 of the namespaces that `build` created.

    Raises:
        OSError: The kernel refused a step; the process must end.
    """
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags)
    # In its own user namespace, the kernel counts the processes of this sandbox separately.
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWUTS)
    _map_ids(SANDBOX_ID, SANDBOX_ID)
    os.chdir(WORK)
    lock(spec, jailed=True)


class SourceCover:
    """Hides the project of an instance that loads it after `enter`, when it may not mount any more.

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
        close_high()
        linux.die_with_parent()
        if channel.recv(1):
            _hide(PROJECT)
            channel.sendall(b"!")
    finally:
        os._exit(0)  # after a failure the channel closes without an answer


_BOX_VIEWS: Final = (("work", WORK), ("tmp", "/tmp"), ("tmp", "/var/tmp"), ("shm", "/dev/shm"))
_DEVPTS: Final = "newinstance,ptmxmode=0666,mode=620"


def lock(spec: JailSpec, *, jailed: bool) -> None:
    """Set limits and give up every privilege.

    Args:
        spec: The limits.
        jailed: Whether this process is in a user namespace that the sandbox has for itself.
    """
    set_limits(spec, jailed=jailed)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capabilities()
    # Children cannot trace the runtime or read its memory, which contains the graders.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    seccomp_filter = _seccomp_filter()
    if seccomp_filter is not None:
        seccomp_filter.install()


@cache
def _seccomp_filter() -> linux.SeccompFilter | None:
    return linux.SeccompFilter(seccomp.program()) if seccomp.is_supported() else None


def warm_up() -> None:
    """Compute in the template what all its instances need."""
    _seccomp_filter()
    limits_processes(jailed=True)


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
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
