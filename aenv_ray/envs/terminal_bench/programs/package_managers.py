"""Files that package managers execute or obey: test scripts install what they need.

The agent may use package managers, and so change these files. Before the tests run they are as they
were before the agent acted: a hook or a source of packages that the agent added would otherwise run
with the rights of the tests. The agent's are put back when pytest starts, since they may be what is
tested. Files by which any program loads libraries are restored, too, and stay so.
"""

from __future__ import annotations

import base64
import glob
import os
import shutil
import stat
from typing import Any

DIRECTORIES = ("/etc/apt", "/etc/dpkg", "/etc/apk", "/etc/dnf", "/etc/yum", "/etc/yum.repos.d")
"""Settings: everything in them is restored, and what was added is removed."""
OF_PACKAGES = (
    *("/etc/ca-certificates", "/etc/ca-certificates.conf", "/etc/debconf.conf", "/etc/default"),
    *("/etc/kernel", "/etc/perl"),
)
"""Settings that the scripts of packages obey, restored if the tests use a package manager."""
LOADING = ("/etc/nsswitch.conf", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf")
"""Files by which libraries get into any process, and so into that of pytest."""
SCRIPTS = (
    *(f"/var/lib/dpkg/info/*.{kind}" for kind in ("preinst", "postinst", "prerm", "postrm")),
    *("/var/lib/dpkg/triggers/*", "/etc/yum.conf", "/etc/wgetrc"),
    *LOADING,
)
"""Files that are restored; those of packages that the agent installed stay."""
MAX_BYTES = 4 << 20
"""Maximum size of their content in base64. In images with more, the files are not restored."""
_SETTLED = ("install ok installed", "hold ok installed", "deinstall ok config-files")

Saved = dict[str, list[Any]]
"""Kind (``d``, ``l``, ``f``), mode, and target or content, by path."""
Changes = dict[str, tuple[list[Any] | None, list[Any] | None]]
"""What the agent had at a path, and what was restored; None is nothing."""


def save() -> Saved | None:
    """Return all of these files; None if they are too large."""
    found: Saved = {}
    for root in (*DIRECTORIES, *OF_PACKAGES):
        found.update(_tree(root))
    for path in sorted(path for pattern in SCRIPTS for path in glob.glob(pattern)):
        found.update(entry(path))
    size = sum(len(content) for _, _, content in found.values())
    return found if size <= MAX_BYTES else None


def restore(saved: Saved | None, *, uses_packages: bool) -> tuple[list[str], Changes]:
    """Restore the files; return the paths that the agent had changed, and how.

    Args:
        saved: What `save` returned.
        uses_packages: Whether the tests use a package manager.

    Raises:
        OSError: One cannot be restored.
    """
    if saved is None:
        return [], {}
    restored, changes = [], Changes()
    roots = (*DIRECTORIES, *(OF_PACKAGES if uses_packages else ()))
    for root in roots:
        below = {path: one for path, one in saved.items() if _is_below(path, root)}
        now = _tree(root)
        if now != below:
            restored.append(root)
            paths = sorted({*now, *below})
            found = {path: (now.get(path), below.get(path)) for path in paths}
            changes.update({path: one for path, one in found.items() if one[0] != one[1]})
            _remove(root)
            for path, one in below.items():  # a directory comes before its content
                write(path, one)
    for path, one in saved.items():
        is_script = not any(_is_below(path, root) for root in (*DIRECTORIES, *OF_PACKAGES))
        changed = entry(path).get(path)
        if is_script and changed != one:
            restored.append(path)
            if path not in LOADING:
                changes[path] = (changed, one)
            _remove(path)
            write(path, one)
    return restored, changes


def put_back(changes: Changes) -> None:
    """Put back what the agent had, except where the tests have written since.

    Raises:
        OSError: A file cannot be written.
    """
    for path, (before, restored) in changes.items():
        parent = os.path.dirname(path)
        if entry(path).get(path) == restored and entry(parent).get(parent, "")[:1] == ["d"]:
            if before is None or restored is None or before[0] != "d" or restored[0] != "d":
                _remove(path)
            if before is not None:
                write(path, before)


def forget(paths: list[str], root: str = "/var/lib/dpkg") -> None:
    """Let dpkg forget packages before the tests install others.

    Those of programs that were set aside, so that tests install them; and those that were not
    configured, whose scripts it would run.

    Args:
        paths: The programs.
        root: Dpkg's directory.

    Raises:
        OSError: Its file cannot be read or written.
    """
    if not os.path.isfile(f"{root}/status"):
        return
    with open(f"{root}/status", encoding="utf-8", errors="replace") as file:
        stanzas = file.read().split("\n\n")
    names = _owners(paths, f"{root}/info")
    kept = [
        one
        for one in stanzas
        if _field(one, "Package") not in names and _field(one, "Status") in ("", *_SETTLED)
    ]
    if len(kept) < len(stanzas):
        with open(f"{root}/status", "w", encoding="utf-8") as file:
            file.write("\n\n".join(kept))


def _owners(paths: list[str], lists: str) -> set[str]:
    """Return the names of the packages of these files."""
    wanted, names = {f"{path}\n" for path in paths}, set()
    for entry in os.scandir(lists) if paths and os.path.isdir(lists) else ():
        if entry.name.endswith(".list"):
            with open(entry.path, encoding="utf-8", errors="replace") as file:
                if wanted.intersection(file):
                    names.add(entry.name[: -len(".list")].partition(":")[0])
    return names


def _field(stanza: str, name: str) -> str:
    for line in stanza.splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _tree(root: str) -> Saved:
    found = entry(root)
    if found.get(root, [""])[0] == "d":
        for name in sorted(os.listdir(root)):
            found.update(_tree(os.path.join(root, name)))
    return found


def entry(path: str) -> Saved:
    """Return what is at a path, without what is in it; nothing for what is no file."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            return {path: ["d", stat.S_IMODE(mode), ""]}
        if stat.S_ISLNK(mode):
            return {path: ["l", 0, os.readlink(path)]}
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                content = base64.b64encode(file.read(MAX_BYTES)).decode()
            return {path: ["f", stat.S_IMODE(mode), content]}
    except OSError:
        return {}
    return {path: ["?", 0, ""]}


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def write(path: str, one: list[Any]) -> None:
    """Make what `entry` has returned.

    Raises:
        OSError: It cannot be made.
    """
    kind, mode, content = one
    if kind == "d":
        os.makedirs(path, exist_ok=True)
    elif kind == "l":
        os.symlink(content, path)
        return
    elif kind == "f":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    else:
        return
    os.chmod(path, mode)
