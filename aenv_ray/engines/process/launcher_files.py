"""The files of a launcher's instances: sockets, logs and, without namespaces, work directories."""

from __future__ import annotations

import socket
from pathlib import Path

from aenv_ray.engines.node.directory import remove_tree, short_name


class InstanceFiles:
    """What a launcher keeps for its instances.

    Args:
        directory: The launcher's.
    """

    def __init__(self, directory: Path) -> None:
        self._sockets = directory / "s"
        self._logs = directory / "log"
        self._work = directory / "work"
        self._root = directory / "root"

    def prepare(self) -> None:
        """Make the directories."""
        for path in (self._sockets, self._logs, self._work, self._root):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove what an earlier launcher left that was killed: its instances died with it."""
        for path in (self._sockets, self._logs, self._work):
            for entry in path.iterdir():
                if entry.is_dir():
                    remove_tree(entry)
                else:
                    entry.unlink(missing_ok=True)

    def listen(self, instance_id: str) -> socket.socket:
        """Return a listening socket for an instance; it can be connected to at once."""
        path = self._sockets / short_name(instance_id)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(16)
        except OSError:
            listener.close()
            raise
        return listener

    def make_work_dir(self, instance_id: str) -> Path:
        """Make the work directory of an instance that has no mounts of its own."""
        path = self._work / short_name(instance_id)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def clean(self, instance_id: str) -> None:
        """Remove what an instance leaves."""
        name = short_name(instance_id)
        (self._sockets / name).unlink(missing_ok=True)
        work = self._work / name
        if work.exists():
            remove_tree(work)
