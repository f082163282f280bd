"""Files of a scope's instances on the node, shared by its hosts and its janitor.

The standard library and small modules alone, because the janitor imports it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from aenv_ray.engines.docker.locks import ScopeLocks
from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.engines.node.directory import remove_tree
from aenv_ray.files import write_atomically

ETC_FILES: Final = ("hostname", "hosts", "resolv.conf")


class DockerFiles:
    """The directory of a scope.

    Args:
        directory: From `node_directory`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.locks = ScopeLocks(directory)
        self.host_key = directory / "key"
        """Hosts derive the keys of containers with their own kernel from it."""
        self._runs = directory / "i"
        self._projects = directory / "projects"
        self._deadlines = directory / "deadlines"
        self._causes = directory / "causes"
        self._etc = directory / "etc"
        self._all = (self._runs, self._projects, self._deadlines, self._causes, self._etc)

    def prepare(self) -> None:
        """Create the directories."""
        self.directory.chmod(0o700)  # containers see single directories below it, by mounts
        for path in self._all:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.locks.prepare()

    def names(self) -> set[str]:
        """Return the containers that have files here, whether they exist or not."""
        return {path.name for directory in self._all for path in directory.glob("aenv-*")}

    def clean(self, name: str) -> None:
        """Remove the files of an instance and of its sidecar."""
        for container in (name, sidecar_name(name)):
            for directory in (self._deadlines, self._causes):
                (directory / container).unlink(missing_ok=True)
            for directory in (self._runs, self._projects, self._etc):
                if (directory / container).exists():
                    remove_tree(directory / container)

    # --- what a container mounts ----------------------------------------------------------------

    def run_directory(self, name: str) -> Path:
        """Return the directory that a container shares with its host: its sockets."""
        return self._runs / name

    def make_run_directory(self, name: str) -> None:
        """Create it, writable by everyone: the container's user is not known here."""
        path = self.run_directory(name)
        if path.exists():
            remove_tree(path)
        path.mkdir()
        path.chmod(0o777)

    def etc_directory(self, name: str) -> Path:
        """Return the directory of a container's `ETC_FILES`; each is mounted by itself."""
        return self._etc / name

    def write_etc(self, name: str, hostname: str) -> None:
        """Write the `ETC_FILES`, which the daemon writes only for containers with a network."""
        path = self.etc_directory(name)
        if path.exists():
            remove_tree(path)
        path.mkdir()
        texts = {
            "hostname": f"{hostname}\n",
            "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
            f"127.0.1.1\t{hostname}\n",
            "resolv.conf": "nameserver 127.0.0.1\n",  # nothing listens there: names fail at once
        }
        for file in ETC_FILES:
            (path / file).write_text(texts[file])
            # Without capabilities, root in the container may not write files of another user.
            (path / file).chmod(0o666)

    def copy_project(self, name: str, project: Path) -> Path:
        """Return a copy of a project for one container, for `empty_project` to remove."""
        path = self._projects / name
        if path.exists():
            remove_tree(path)
        shutil.copytree(project, path, symlinks=True)
        path.chmod(0o755)
        return path

    def empty_project(self, name: str) -> None:
        """Remove the files of a copied project; its mount stays, empty."""
        for path in (self._projects / name).iterdir():
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()

    def write_resolvers(self, addresses: Iterable[str]) -> Path:
        """Return a ``resolv.conf`` with these resolvers, for containers to mount."""
        path = self.directory / "resolv.conf"
        text = "".join(f"nameserver {address}\n" for address in addresses)
        write_atomically(path, text, mode=0o644)
        return path

    # --- deadlines and causes -------------------------------------------------------------------

    def set_deadline(self, name: str, deadline: float) -> None:
        """Override the deadline on a container's label; labels cannot be changed."""
        write_atomically(self._deadlines / name, repr(deadline))

    def deadline(self, name: str, labelled: str) -> float:
        """Return the deadline of a container, in seconds since the epoch.

        Args:
            name: The container's.
            labelled: The deadline on its label, valid unless `set_deadline` has overridden it.
        """
        with contextlib.suppress(OSError, ValueError):
            return float((self._deadlines / name).read_text())
        return float(labelled)

    def record_cause(self, name: str, cause: str) -> None:
        """Record why the janitor ends a container, for the host that sees it end."""
        write_atomically(self._causes / name, cause)

    def cause(self, name: str) -> str | None:
        """Return why the janitor ended a container; None if it did not."""
        with contextlib.suppress(OSError):
            return (self._causes / name).read_text()
        return None
