"""Records of the storage of services: its owner and its location."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from aenv_ray.hub.api import Hub
from aenv_ray.project.storage import StorageMount

_KIND: Final = "storage"
_FACTS: Final = ("machine", "made", "leaving")
"""Facts in separate documents, because different processes write them at any time."""
_CHOICE_S: Final = 86_400.0

Medium = Literal["directory", "claim"]


class StorageRecord(BaseModel):
    """A storage volume, which exists until it is deleted, with or without a service."""

    model_config = ConfigDict(frozen=True)

    name: str
    uid: str
    """New each time a storage volume with this name is created."""
    owner: str
    service: str
    """The service that uses or used it; only services with this name can use it."""
    size_bytes: int
    engine: str
    """Engine of the service when the storage was created."""
    created_at: float
    """Seconds since the epoch."""
    machine: str = ""
    """The machine with its directory; empty if not known yet, or if all machines have it."""
    is_made: bool = False
    """A sandbox has used it."""
    is_leaving: bool = False
    """It is being deleted and cannot be used any more."""

    @property
    def medium(self) -> Medium:
        """The kind of storage."""
        return medium_of(self.engine)

    def mount(self, mount_path: str, *, is_shared: bool) -> StorageMount:
        """Return the mount for a sandbox."""
        return StorageMount(
            name=self.name, uid=self.uid, mount_path=mount_path, size_bytes=self.size_bytes,
            is_shared=is_shared,
        )  # fmt: skip


def medium_of(engine: str) -> Medium:
    """Return the kind of storage of an engine."""
    return "claim" if engine == "kubernetes" else "directory"


class StorageRecords:
    """The records of all storage volumes.

    Methods raise FabricUnavailable if the hub does not answer.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def all(self) -> dict[str, StorageRecord]:
        """Return the records by name."""
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._hub.documents(_KIND))
            facts = {
                fact: group.create_task(self._hub.documents(f"{_KIND}-{fact}")) for fact in _FACTS
            }
        found = {}
        for name, data in reading.result().items():
            known = {
                fact: task.result()[name]["value"]
                for fact, task in facts.items()
                if task.result().get(name, {}).get("uid") == data["uid"]
            }
            found[name] = StorageRecord.model_validate(
                data | {
                    "machine": known.get("machine", ""),
                    "is_made": "made" in known,
                    "is_leaving": "leaving" in known,
                }
            )  # fmt: skip
        return found

    async def get(self, name: str) -> StorageRecord | None:
        """Return a record, or None."""
        return (await self.all()).get(name)

    async def put(self, record: StorageRecord) -> None:
        """Store a new or resized record."""
        own = record.model_dump(mode="json", exclude={"machine", "is_made", "is_leaving"})
        await self._hub.put_document(_KIND, record.name, own)

    async def choose_machine(self, record: StorageRecord, machine: str) -> str:
        """Assign a storage volume to a machine, unless it has one; return its machine."""
        key = f"storage-machine:{record.name}:{record.uid}"
        chosen = await self._hub.remember(key, machine, _CHOICE_S)
        await self._note(record, "machine", chosen)
        return chosen

    async def note_made(self, record: StorageRecord) -> None:
        """Note that a storage volume has content, so that it is not made anew if missing."""
        await self._note(record, "made", "yes")

    async def note_leaving(self, record: StorageRecord) -> None:
        """Note that a storage volume is being deleted, so that the deletion can be resumed."""
        await self._note(record, "leaving", "yes")

    async def forget(self, record: StorageRecord) -> None:
        """Delete the record of a deleted storage."""
        await self._hub.delete_document(_KIND, record.name)
        for fact in _FACTS:
            await self._hub.delete_document(f"{_KIND}-{fact}", record.name)

    async def _note(self, record: StorageRecord, fact: str, value: str) -> None:
        document = {"uid": record.uid, "value": value}
        await self._hub.put_document(f"{_KIND}-{fact}", record.name, document)
