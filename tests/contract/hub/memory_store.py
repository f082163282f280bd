"""Instance records in memory, for tests and engines whose sandboxes end with their host."""

from __future__ import annotations

from collections.abc import Sequence

from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import InstanceRecord


class MemoryInstanceStore(InstanceStore):
    """Records in the memory of this process."""

    def __init__(self) -> None:
        self._records: dict[InstanceId, InstanceRecord] = {}
        self._engines: dict[HostId, frozenset[str]] = {}

    def put(self, records: Sequence[InstanceRecord]) -> None:
        self._records |= {record.id: record for record in records}

    def get(self, instance_id: InstanceId) -> InstanceRecord | None:
        return self._records.get(instance_id)

    def delete(self, instance_ids: Sequence[InstanceId]) -> None:
        for instance_id in instance_ids:
            self._records.pop(instance_id, None)

    def list(self, host_id: HostId | None = None) -> list[InstanceRecord]:
        found = [r for r in self._records.values() if host_id in (None, r.host_id)]
        return sorted(found, key=lambda r: r.created_at)

    def note_engine(self, host_id: HostId, engine: str) -> None:
        self._engines[host_id] = self._engines.get(host_id, frozenset()) | {engine}

    def engines_used(self) -> dict[HostId, frozenset[str]]:
        return dict(self._engines)

    def forget_host(self, host_id: HostId) -> None:
        self._engines.pop(host_id, None)
