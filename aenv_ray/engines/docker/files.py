"""What the docker engine keeps on a node beside its containers: sockets, deadlines, presence.

All in one directory of the node's scope, shared by the hosts and the janitor of that scope, which
know of each other by locks only: who dies lets go of them, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from aenv_ray.engines.node.directory import remove_tree, short_name
from aenv_ray.files import is_locked

START_SLOTS: Final = 8
"""Containers that are made at once on a node; a daemon makes no more of them the faster."""

_SECOND: Final = "-second"
ETC_FILES: Final = ("hostname", "hosts", "resolv.conf")


def docker_scope(scope: str) -> str:
    """Return what tells the docker engine's things on a node, named `scope`, from others'."""
    return f"{scope}/docker"


def container_name(scope: str, instance_id: str) -> str:
    """Return the name of an instance's container; also that of its files."""
    return f"aenv-{short_name(f'{scope}/{instance_id}')}"


def second_name(name: str) -> str:
    """Return the name of the second container of an instance; also that of its files."""
    return f"{name}{_SECOND}"


def first_name(second: str) -> str:
    """Return the name of the container whose second one has a name."""
    return second.removesuffix(_SECOND)


def volume_name(name: str) -> str:
    """Return the name of the volume that the two containers of an instance share."""
    return f"{name}-shared"


class DockerFiles:
    """The directory of one scope.

    Args:
        directory: From `node_directory`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.janitor_lock = directory / "janitor.lock"
        self.network_lock = directory / "network.lock"
        self._instances = directory / "i"
        self._projects = directory / "projects"
        self._deadlines = directory / "deadlines"
        self._causes = directory / "causes"
        self._hosts = directory / "hosts"
        self._slots = directory / "slots"
        self._networks = directory / "networks"
        self._etc = directory / "etc"
        self._of_containers = (
            self._instances, self._projects, self._deadlines, self._causes, self._etc,
        )  # fmt: skip

    def prepare(self) -> None:
        """Make the directories."""
        self.directory.chmod(0o700)  # containers see single directories below it, by mounts
        for path in (*self._of_containers, self._hosts, self._slots, self._networks):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- instances --------------------------------------------------------------------------

    def make_run_directory(self, name: str) -> Path:
        """Make the directory that an instance's container shares; its user is not known here."""
        path = self.run_directory(name)
        if path.exists():
            remove_tree(path)
        path.mkdir()
        path.chmod(0o777)
        return path

    def write_etc(self, name: str, hostname: str) -> None:
        """Write what the daemon writes for containers with a network alone; see `etc_directory`."""
        path = self.etc_directory(name)
        if path.exists():
            remove_tree(path)
        path.mkdir()
        texts = {
            "hostname": f"{hostname}\n",
            "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
            f"127.0.1.1\t{hostname}\n",
            "resolv.conf": "nameserver 127.0.0.1\n",  # nobody is there: a name fails at once
        }
        for file in ETC_FILES:
            (path / file).write_text(texts[file])
            # Root inside may be nobody here, and has no right to what is another's.
            (path / file).chmod(0o666)

    def etc_directory(self, name: str) -> Path:
        """Return where a container's `ETC_FILES` are; it sees them, and not the directory."""
        return self._etc / name

    def run_directory(self, name: str) -> Path:
        """Return the directory that a container shares with this node."""
        return self._instances / name

    def copy_project(self, name: str, project: Path) -> Path:
        """Return a copy of a project for one container, which `empty_project` can take from it."""
        path = self._projects / name
        if path.exists():
            remove_tree(path)
        shutil.copytree(project, path, symlinks=True)
        path.chmod(0o755)
        return path

    def empty_project(self, name: str) -> None:
        """Take the files of a copied project from its container."""
        for path in (self._projects / name).iterdir():
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()

    def move_deadline(self, name: str, deadline: float) -> None:
        """Note a deadline that is not the one on the container's label any more."""
        partial = self._deadlines / f".{name}.{os.getpid()}"
        partial.write_text(repr(deadline))
        partial.replace(self._deadlines / name)

    def deadline(self, name: str, labelled: str) -> float:
        """Return when a container is due, in seconds since the epoch.

        Args:
            name: The container's.
            labelled: The deadline on its label, which counts unless it was moved.
        """
        with contextlib.suppress(OSError, ValueError):
            return float((self._deadlines / name).read_text())
        return float(labelled)

    def note_cause(self, name: str, cause: str) -> None:
        """Leave word why a container is ended, for the host that hears of it."""
        (self._causes / name).write_text(cause)

    def cause(self, name: str) -> str | None:
        """Return why a container was ended, when that was left; None otherwise."""
        with contextlib.suppress(OSError):
            return (self._causes / name).read_text()
        return None

    def clean(self, name: str) -> None:
        """Remove what an instance leaves, of its second container too."""
        for container in (name, second_name(name)):
            for directory in (self._deadlines, self._causes):
                (directory / container).unlink(missing_ok=True)
            for directory in (self._instances, self._projects, self._etc):
                if (directory / container).exists():
                    remove_tree(directory / container)

    def names(self) -> set[str]:
        """Return the containers that have files here, whether they exist or not."""
        return {path.name for directory in self._of_containers for path in directory.glob("aenv-*")}

    # --- presence ---------------------------------------------------------------------------

    def enter(self, host_id: str) -> int:
        """Say that a host is there for as long as the returned descriptor is open."""
        return _share(self._hosts / short_name(host_id))

    def is_present(self, host_id: str) -> bool:
        """Whether a host is there."""
        return is_locked(self._hosts / short_name(host_id))

    @property
    def has_hosts(self) -> bool:
        """Whether any host is there."""
        return any(is_locked(path) for path in self._hosts.iterdir())

    def forget_absent_hosts(self) -> None:
        """Remove the marks of hosts that are gone."""
        for path in self._hosts.iterdir():
            fd = _open(path)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            os.close(fd)

    # --- networks of allow-lists ------------------------------------------------------------

    def hold_network(self, chain: str) -> int:
        """Keep a network from being removed until the returned descriptor is closed; blocks."""
        return _share(self._networks / chain)

    def openings(self, chain: str) -> set[tuple[str, int]]:
        """Return the addresses and ports that a network's rules let through; it is held."""
        words = [line.split() for line in (self._networks / chain).read_text().splitlines()]
        return {(block, int(port)) for block, port in words}

    def note_openings(self, chain: str, openings: Iterable[tuple[str, int]]) -> None:
        """Note what a network's rules let through; it is held."""
        lines = "".join(f"{block} {port}\n" for block, port in sorted(openings))
        (self._networks / chain).write_text(lines)

    def note_resolvers(self, addresses: Iterable[str]) -> Path:
        """Return a file that names resolvers, for a container to have as its own."""
        text = "".join(f"nameserver {address}\n" for address in addresses)
        path = self.directory / "resolv.conf"
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        partial.write_text(text)
        partial.chmod(0o644)
        partial.replace(path)
        return path

    # --- keys -------------------------------------------------------------------------------

    @property
    def host_key(self) -> Path:
        """Of the key from which those of containers with a kernel of their own are made."""
        return self.directory / "key"

    @contextlib.contextmanager
    def unheld_network(self, chain: str) -> Iterator[bool]:
        """Keep hosts from holding a network within the block; False when one holds it."""
        fd = _open(self._networks / chain)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(fd)

    def forget_network(self, chain: str) -> None:
        """Remove what is noted of a network that is gone; it is kept unheld."""
        (self._networks / chain).unlink(missing_ok=True)

    # --- starting ---------------------------------------------------------------------------

    def take_slot(self) -> int | None:
        """Take one of the node's places for containers that are being made.

        Returns:
            A descriptor; closing it gives the slot back, as the end of this process does. None
            when all are taken.
        """
        first = os.urandom(1)[0] % START_SLOTS
        for number in range(START_SLOTS):
            fd = _open(self._slots / str((first + number) % START_SLOTS))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            os.close(fd)
        return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _share(path: Path) -> int:
    """Return a descriptor that holds the lock of a file with others; blocks."""
    while True:
        fd = _open(path)
        fcntl.flock(fd, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)  # the janitor removed the file between the two calls
