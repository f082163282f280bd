"""Instance records, from which a restarted host finds its instances again.

`InstanceStore` is the contract; `tests.contract.hub.store_contract` checks any implementation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from aenv_ray.errors import FabricUnavailable
from aenv_ray.files import write_atomically
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import InstanceRecord

logger = logging.getLogger(__name__)


class InstanceStore(ABC):
    """Records of live instances, by id.

    A completed write survives the death of the process. Methods block for microseconds to
    milliseconds.
    """

    @abstractmethod
    def put(self, records: Sequence[InstanceRecord]) -> None:
        """Write records, replacing those with the same id; each write is atomic.

        Raises:
            FabricUnavailable: They cannot be written, or only some; an earlier record stays.
        """

    @abstractmethod
    def get(self, instance_id: InstanceId) -> InstanceRecord | None:
        """Return a record, or None."""

    @abstractmethod
    def delete(self, instance_ids: Sequence[InstanceId]) -> None:
        """Delete records; unknown ids are ignored.

        A record that cannot be deleted is logged. It names a sandbox that does not run, so it is
        enough that the next host with its id finds that out.
        """

    @abstractmethod
    def list(self, host_id: HostId | None = None) -> list[InstanceRecord]:
        """Return the records of a host, or of all hosts, oldest first.

        A record that cannot be read, for example because another version wrote it, is skipped; its
        sandbox is then ended as an orphan.
        """

    @abstractmethod
    def note_engine(self, host_id: HostId, engine: str) -> None:
        """Note that a host is about to use an engine; idempotent.

        If the host dies after it made a sandbox and before it recorded it, this tells its successor
        where to look.

        Raises:
            FabricUnavailable: It cannot be noted.
        """

    @abstractmethod
    def engines_used(self) -> dict[HostId, frozenset[str]]:
        """Return the engines that `note_engine` recorded, by host."""

    @abstractmethod
    def forget_host(self, host_id: HostId) -> None:
        """Delete the engines noted for a host that is gone and left nothing; idempotent.

        Its records are not touched.
        """


class FileInstanceStore(InstanceStore):
    """Records of one node: a JSON file for each instance, and one for the engines of each host."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory

    def put(self, records: Sequence[InstanceRecord]) -> None:  # noqa: D102
        for record in records:
            self._write(self._path(record.id), record.model_dump_json())

    def _write(self, path: Path, text: str) -> None:
        try:
            try:
                write_atomically(path, text)
            except FileNotFoundError:  # the directory was deleted
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(path, text)
        except OSError as exc:
            raise FabricUnavailable(
                f"the records of instances in {self._directory} cannot be written: {exc.strerror}",
                hint="make AENV_RUNTIME_DIR writable, with free space",
            ) from exc

    def get(self, instance_id: InstanceId) -> InstanceRecord | None:  # noqa: D102
        return self._read(self._path(instance_id))

    def delete(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        for instance_id in instance_ids:
            try:
                self._path(instance_id).unlink(missing_ok=True)
            except OSError as exc:
                logger.warning("the record of %s cannot be deleted: %s", instance_id, exc)

    def list(self, host_id: HostId | None = None) -> list[InstanceRecord]:  # noqa: D102
        records = [self._read(path) for path in self._directory.glob("*.json")]
        found = [r for r in records if r is not None and host_id in (None, r.host_id)]
        return sorted(found, key=lambda r: r.created_at)

    def note_engine(self, host_id: HostId, engine: str) -> None:  # noqa: D102
        # Only the host itself writes this file.
        path = self._path(host_id, "engines")
        known = self._read_engines(path).get(host_id, frozenset())
        if engine not in known:
            engines = sorted(known | {engine})
            self._write(path, json.dumps({"host_id": host_id, "engines": engines}))

    def engines_used(self) -> dict[HostId, frozenset[str]]:  # noqa: D102
        found: dict[HostId, frozenset[str]] = {}
        for path in self._directory.glob("*.engines"):
            found |= self._read_engines(path)
        return found

    def forget_host(self, host_id: HostId) -> None:  # noqa: D102
        self._path(host_id, "engines").unlink(missing_ok=True)

    @staticmethod
    def _read_engines(path: Path) -> dict[HostId, frozenset[str]]:
        """Return the engines of a host; empty if the file is missing or cannot be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_bytes())
            return {HostId(data["host_id"]): frozenset(map(str, data["engines"]))}
        return {}

    def _path(self, name: str, kind: str = "json") -> Path:
        # Ids come from callers: a hash cannot point outside of the directory.
        return self._directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.{kind}"

    @staticmethod
    def _read(path: Path) -> InstanceRecord | None:
        with contextlib.suppress(OSError, ValidationError):
            return InstanceRecord.model_validate_json(path.read_bytes())
        return None
