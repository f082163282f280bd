"""The store of instance records: what a restarted host reads to find its instances again.

The contract is `InstanceStore`; `MemoryInstanceStore` is a full implementation for tests and for
engines whose sandboxes end with their host; `FileInstanceStore` keeps a node's records in a
directory. `tests.contract.hub.store_contract` checks any implementation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import InstanceRecord


class InstanceStore(ABC):
    """Records of live instances, by id.

    A write that returned survives the death of the writing process. Methods block for microseconds
    to milliseconds; hosts call them in their event loop only where that is acceptable.
    """

    @abstractmethod
    def put(self, records: Sequence[InstanceRecord]) -> None:
        """Write records, replacing those of the same id; each is written whole or not at all."""

    @abstractmethod
    def get(self, instance_id: InstanceId) -> InstanceRecord | None:
        """Return a record; None when there is none."""

    @abstractmethod
    def delete(self, instance_ids: Sequence[InstanceId]) -> None:
        """Forget records; unknown ids do nothing."""

    @abstractmethod
    def list(self, host_id: HostId | None = None) -> list[InstanceRecord]:
        """Return the records of a host, or all of them, oldest first.

        A record that cannot be read, for example of another version of this software, is skipped:
        its sandbox is then ended as nobody's.
        """

    @abstractmethod
    def note_engine(self, host_id: HostId, engine: str) -> None:
        """Remember that a host is about to use an engine; a second time does nothing.

        A host that dies between making a sandbox and recording it has left this: where to look.
        """

    @abstractmethod
    def engines_used(self) -> dict[HostId, frozenset[str]]:
        """Return the engines of each host that `note_engine` named and nobody forgot."""

    @abstractmethod
    def forget_host(self, host_id: HostId) -> None:
        """Forget which engines a host used: it is gone and has left nothing. Any number of times.

        Records are not touched.
        """


class MemoryInstanceStore(InstanceStore):
    """Records in this process."""

    def __init__(self) -> None:
        self._records: dict[InstanceId, InstanceRecord] = {}
        self._engines: dict[HostId, frozenset[str]] = {}

    def put(self, records: Sequence[InstanceRecord]) -> None:  # noqa: D102
        self._records |= {record.id: record for record in records}

    def get(self, instance_id: InstanceId) -> InstanceRecord | None:  # noqa: D102
        return self._records.get(instance_id)

    def delete(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        for instance_id in instance_ids:
            self._records.pop(instance_id, None)

    def list(self, host_id: HostId | None = None) -> list[InstanceRecord]:  # noqa: D102
        found = [r for r in self._records.values() if host_id in (None, r.host_id)]
        return sorted(found, key=lambda r: r.created_at)

    def note_engine(self, host_id: HostId, engine: str) -> None:  # noqa: D102
        self._engines[host_id] = self._engines.get(host_id, frozenset()) | {engine}

    def engines_used(self) -> dict[HostId, frozenset[str]]:  # noqa: D102
        return dict(self._engines)

    def forget_host(self, host_id: HostId) -> None:  # noqa: D102
        self._engines.pop(host_id, None)


class FileInstanceStore(InstanceStore):
    """Records as one JSON file each, on one node; a host's engines as another.

    Args:
        directory: Made when missing.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory

    def put(self, records: Sequence[InstanceRecord]) -> None:  # noqa: D102
        for record in records:
            self._write(self._path(record.id), record.model_dump_json())

    def _write(self, path: Path, text: str) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=self._directory, prefix=".")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

    def get(self, instance_id: InstanceId) -> InstanceRecord | None:  # noqa: D102
        return self._read(self._path(instance_id))

    def delete(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        for instance_id in instance_ids:
            self._path(instance_id).unlink(missing_ok=True)

    def list(self, host_id: HostId | None = None) -> list[InstanceRecord]:  # noqa: D102
        records = [self._read(path) for path in self._directory.glob("*.json")]
        found = [r for r in records if r is not None and host_id in (None, r.host_id)]
        return sorted(found, key=lambda r: r.created_at)

    def note_engine(self, host_id: HostId, engine: str) -> None:  # noqa: D102
        # Only the host itself writes its file.
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
        """Return a host's engines; empty when there is no such file, or none that can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_bytes())
            return {HostId(data["host_id"]): frozenset(map(str, data["engines"]))}
        return {}

    def _path(self, name: str, kind: str = "json") -> Path:
        # An id comes from a caller: its hash cannot name a file elsewhere.
        return self._directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.{kind}"

    @staticmethod
    def _read(path: Path) -> InstanceRecord | None:
        with contextlib.suppress(OSError, ValidationError):
            return InstanceRecord.model_validate_json(path.read_bytes())
        return None
