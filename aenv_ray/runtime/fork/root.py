"""Builds the root directory that all instances of a template share.

It shows the node's programs, the interpreter and the project, read-only, and nothing else of the
node. Once the template has a user namespace of its own, the kernel locks these mounts: nothing in
the template can unmount one or make it writable.
"""

from __future__ import annotations

import os
import re
import site
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from aenv_ray.runtime.fork.jail_spec import (
    NOBODY,
    PROJECT,
    SANDBOX_ID,
    STORAGE,
    WORK,
    JailSpec,
    StorageUnavailable,
)
from aenv_ray.runtime.system import linux

BOX: Final = "/.box"
"""Where each instance mounts its own memory."""
_COVERED: Final = ("/tmp/", "/var/tmp/", f"{WORK}/")
_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_PASSWD: Final = (
    f"root:x:0:0:root:/root:/bin/sh\nagent:x:{SANDBOX_ID}:{SANDBOX_ID}:agent:{WORK}:/bin/bash\n"
    f"nobody:x:{NOBODY}:{NOBODY}:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_NEEDED_MOUNTS: Final = frozenset(
    f"/etc/{name}" for name in ("hosts", "hostname", "resolv.conf", "localtime")
)
"""Container runtimes mount them, some from memory."""
_CERTIFICATES: Final = ("/etc/ssl/", "/etc/pki/", "/etc/ca-certificates/")
_NIX_STATE: Final = "/nix/var"
"""Holds the socket of Nix's daemon, which builds what anybody asks for, with network."""
_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
"""How mountinfo writes spaces and the like."""
_GROUP: Final = f"root:x:0:\nagent:x:{SANDBOX_ID}:\nnogroup:x:{NOBODY}:\n"


def build_root(scratch: Path, spec: JailSpec, python: str) -> list[tuple[str, str]]:
    """Create the root directory on a tmpfs at `scratch` and make it the root of this process.

    The caller is process 1 of the pid namespace whose processes its /proc shows.

    Args:
        scratch: An empty directory.
        spec: What to show.
        python: Interpreter of the template.

    Returns:
        ``(view, path)`` of each directory that an instance covers with its own and mounts again.

    Raises:
        OSError: The kernel refused a step.
        StorageUnavailable: The storage cannot be mounted.
    """
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    root = str(scratch)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
    for name in _SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            os.symlink(os.readlink(source), f"{root}/{name}")
        elif source.is_dir():
            _show(root, str(source))
    views = _show_python(root, python)
    _show(root, spec.project, PROJECT)
    _show_further(root, spec)
    for name in (WORK[1:], "tmp", "var/tmp", "run", "root", BOX[1:], "dev/pts", "dev/shm", "proc"):
        os.makedirs(f"{root}/{name}", mode=0o755, exist_ok=True)
    _make_devices(root)
    _make_accounts(root)
    _show_resolver(root)
    hide(f"{root}{_package_dir()}/envs")
    if spec.storage:
        os.makedirs(f"{root}{STORAGE}/data")
        Path(f"{root}{STORAGE}/lock").touch()
        os.makedirs(f"{root}{spec.storage_path}", exist_ok=True)
    linux.make_read_only(root)
    _show_writable(root, spec)
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", f"{root}/proc", "proc", flags)
    os.chdir(root)
    # Stacks the old root on the new one; detaching the old one leaves only the new.
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")
    return views


def hide(target: str) -> None:
    """Mount an empty directory over `target`, if that exists."""
    if os.path.isdir(target):
        linux.mount("tmpfs", target, "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID, "size=4k")


@dataclass(frozen=True)
class _Mount:
    """A mount of the node."""

    target: str
    kind: str
    """The kind of its file system."""


@cache
def _mounts() -> tuple[_Mount, ...]:
    """Return the mounts of the node, as they were before this process mounted anything."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        words = line.split(" ")
        target = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), words[4])
        found.append(_Mount(target, words[words.index("-", 6) + 1]))
    return tuple(found)


@cache
def _sockets() -> tuple[str, ...]:
    """Return the paths of Unix sockets that processes of this network namespace have bound."""
    lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    # Number RefCount Protocol Flags Type St Inode Path; abstract names begin with @.
    found = (line.split(" ", 7)[-1] for line in lines)
    return tuple(path for path in found if path.startswith("/"))


def _is_private(mount: _Mount) -> bool:
    """Whether a mount below a directory that sandboxes see must be hidden from them.

    What someone mounts into a node's system directories may be a Secret, whose files every user of
    its container can read. Kubernetes and Docker keep secrets in memory. Other mounts may be
    programs (``/usr/local``, ``/opt/conda``, drivers), except in ``/etc``.
    """
    if mount.target in _NEEDED_MOUNTS:
        return False
    if mount.target.startswith("/etc/"):
        is_certificates = any(f"{mount.target}/".startswith(path) for path in _CERTIFICATES)
        return mount.kind in _MEMORY or not is_certificates
    return mount.kind in _MEMORY


def _cover(root: str, target: str) -> None:
    """Mount nothing readable over a file or directory, if it is not covered already."""
    if os.path.isdir(target):
        hide(target)
    elif os.path.lexists(target):
        empty = Path(f"{root}/run/covered")
        empty.parent.mkdir(exist_ok=True)
        empty.touch()
        linux.mount(str(empty), target, None, linux.MS_BIND)


def _show_python(root: str, python: str) -> list[tuple[str, str]]:
    views: list[tuple[str, str]] = []
    package = _package_dir()
    for path in _python_paths(python):
        _show(root, path)
        if path.startswith(_COVERED):
            view = f"/.shown/{len(views)}"
            _show(root, path, view)
            views.append((view, path))
            if package.startswith(f"{path}/"):
                hide(f"{root}{view}{package.removeprefix(path)}/envs")
            elif package == path:
                hide(f"{root}{view}/envs")
    return views


def _package_dir() -> str:
    return str(Path(__file__).resolve().parents[2])


def _python_paths(python: str) -> list[str]:
    """Return the directories that an interpreter needs, besides the system's."""
    # PYTHONPATH is that of the jailer: the directory of this package.
    wanted = [sys.base_prefix, _package_dir(), *os.environ.get("PYTHONPATH", "").split(":")]
    wanted.append(str(Path(os.path.realpath(sys.executable)).parent.parent))
    if python == sys.executable:
        wanted += [sys.prefix, sys.exec_prefix]
        wanted += [p for p in (*site.getsitepackages(), *sys.path) if os.path.isabs(p)]
    else:
        # A virtual environment, and the interpreter on which it is based.
        links = [python, os.path.realpath(python)]
        links += [os.readlink(python)] if os.path.islink(python) else []
        wanted += [str(Path(link).parent.parent) for link in links if os.path.isabs(link)]
    # In a source checkout the parent of the package is on sys.path: show only the package.
    excluded = {"/", str(Path(_package_dir()).parent), os.getcwd()}
    found: list[str] = []
    for path in sorted({os.path.abspath(p) for p in wanted if p}):
        covered = [*found, *(f"/{name}" for name in _SYSTEM)]
        if path in excluded or not os.path.exists(path):
            continue
        if not any(path == base or path.startswith(f"{base}/") for base in covered):
            found.append(path)
    return found


def _show(root: str, path: str, shown_at: str | None = None) -> None:
    """Bind-mount `path` at `shown_at` below `root` (default: the same path); follows symlinks.

    Mounts below `path` that `_is_private` are covered. So are sockets, since a read-only mount does
    not keep anybody from connecting. Devices cannot be opened.
    """
    target = f"{root}{shown_at or path}"
    real = os.path.realpath(path)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    linux.mount(real, target, None, linux.MS_BIND | linux.MS_REC)
    linux.deny_devices(target)
    private = [mount.target for mount in _mounts() if _is_private(mount)]
    for covered in (*private, *_sockets(), _NIX_STATE):
        if covered.startswith(f"{real}/"):
            _cover(root, f"{target}{covered.removeprefix(real)}")
    if shown_at is None and real != path and not os.path.exists(f"{root}{real}"):
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
