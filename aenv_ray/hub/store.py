"""The store of instance records: what a restarted host reads to find its instances again.

The contract is `InstanceStore`; `MemoryInstanceStore` is a full implementation for tests and for
engines whose sandboxes end with their host; `FileInstanceStore` keeps a node's records in a
directory. `aenv_ray.testing.store_contract` checks any implementation.
"""

from __future__ import annotations

import contextlib
import hashlib
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


class MemoryInstanceStore(InstanceStore):
    """Records in this process."""

    def __init__(self) -> None:
        self._records: dict[InstanceId, InstanceRecord] = {}

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


class FileInstanceStore(InstanceStore):
    """Records as one JSON file each, on one node.

    Args:
        directory: Made when missing.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory

    def put(self, records: Sequence[InstanceRecord]) -> None:  # noqa: D102
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for record in records:
            fd, partial = tempfile.mkstemp(dir=self._directory, prefix=".")
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(record.model_dump_json())
                os.replace(partial, self._path(record.id))
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

    def _path(self, instance_id: InstanceId) -> Path:
        # An id comes from a caller: its hash cannot name a file elsewhere.
        return self._directory / f"{hashlib.sha256(instance_id.encode()).hexdigest()[:32]}.json"

    @staticmethod
    def _read(path: Path) -> InstanceRecord | None:
        with contextlib.suppress(OSError, ValidationError):
            return InstanceRecord.model_validate_json(path.read_bytes())
        return None
