"""Services' storage as the hub keeps it: whose each is, and where it lies."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from aenv_ray.hub.api import Hub
from aenv_ray.project.storage import StorageMount

_KIND: Final = "storage"
_FACTS: Final = ("machine", "made", "leaving")
"""What is noted of a storage besides, each for itself: by different processes, at any time."""
_CHOICE_S: Final = 86_400.0

Medium = Literal["directory", "claim"]


class StorageRecord(BaseModel):
    """A storage; it is there until somebody deletes it, whether a service has it or not."""

    model_config = ConfigDict(frozen=True)

    name: str
    uid: str
    """Another one each time a storage of this name is made."""
    owner: str
    service: str
    """The service that has it, or had it; services of other names never get it."""
    size_bytes: int
    engine: str
    """Of the service when it was made."""
    created_at: float
    """Seconds since the epoch."""
    machine: str = ""
    """Which has its directory; empty: not known yet, or all machines have it."""
    is_made: bool = False
    """A sandbox has had it."""
    is_leaving: bool = False
    """It is being deleted, and nobody gets it any more."""

    @property
    def medium(self) -> Medium:
        """What it is."""
        return medium_of(self.engine)

    def mount(self, mount_path: str, *, is_shared: bool) -> StorageMount:
        """Return it as a sandbox gets it."""
        return StorageMount(
            name=self.name, uid=self.uid, mount_path=mount_path, size_bytes=self.size_bytes,
            is_shared=is_shared,
        )  # fmt: skip


def medium_of(engine: str) -> Medium:
    """Return what an engine keeps storage on."""
    return "claim" if engine == "kubernetes" else "directory"


class StorageRecords:
    """The records of all storages.

    Args:
        hub: Keeps them.

    Methods raise FabricUnavailable when the hub does not answer.
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
        """Return one; None where there is none."""
        return (await self.all()).get(name)

    async def put(self, record: StorageRecord) -> None:
        """Keep a record, new or grown."""
        own = record.model_dump(mode="json", exclude={"machine", "is_made", "is_leaving"})
        await self._hub.put_document(_KIND, record.name, own)

    async def choose_machine(self, record: StorageRecord, machine: str) -> str:
        """Note which machine has a storage, unless that is noted; return which it is."""
        key = f"storage-machine:{record.name}:{record.uid}"
        chosen = await self._hub.remember(key, machine, _CHOICE_S)
        await self._note(record, "machine", chosen)
        return chosen

    async def note_made(self, record: StorageRecord) -> None:
        """Note that there is something in it: where it is not found, none is made."""
        await self._note(record, "made", "yes")

    async def note_leaving(self, record: StorageRecord) -> None:
        """Note that it is to be deleted, whatever becomes of who does that."""
        await self._note(record, "leaving", "yes")

    async def forget(self, record: StorageRecord) -> None:
        """Forget one that is deleted."""
        await self._hub.delete_document(_KIND, record.name)
        for fact in _FACTS:
            await self._hub.delete_document(f"{_KIND}-{fact}", record.name)

    async def _note(self, record: StorageRecord, fact: str, value: str) -> None:
        document = {"uid": record.uid, "value": value}
        await self._hub.put_document(f"{_KIND}-{fact}", record.name, document)
