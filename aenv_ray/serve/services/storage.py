"""Storage of services: what may be had, on which machine it lies, how it is deleted.

A storage belongs to an owner and a service's name, and stays when the service goes, unless it is
deleted with it. One replica has it at a time, unless the operator says that many may.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from typing import Final

from pydantic import BaseModel, ConfigDict

from aenv_ray.actors.controller.placement import usable
from aenv_ray.actors.fabric import entrance
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.clock import Clock
from aenv_ray.config import settings
from aenv_ray.engines.node.local_storage import DELETE_S
from aenv_ray.errors import AenvError, CatalogConflict, ConfigError, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.services import ServiceRecord, is_alone
from aenv_ray.hub.storages import StorageRecord, StorageRecords, medium_of
from aenv_ray.project.config import ServiceConfig
from aenv_ray.project.storage import (
    StorageMount,
    check_mount_path,
    parse_size,
    shown_size,
    storage_name,
)

logger = logging.getLogger(__name__)

_GRACE_S: Final = 60.0
_MAX_LABEL: Final = 200


class StorageWish(BaseModel):
    """What is asked for; None is as the environment, or the service as it is, has it."""

    model_config = ConfigDict(frozen=True)

    is_wanted: bool | None = None
    size: str | None = None
    mount_path: str | None = None
    label: str | None = None
    """Tells storages of one service apart."""

    def wants(self, environment: ServiceConfig) -> bool:
        """Whether a new service gets a storage.

        Raises:
            ConfigError: It says both.
        """
        details = [self.size, self.mount_path, self.label]
        if self.is_wanted is not None:
            is_wanted = self.is_wanted
        else:
            is_wanted = environment.enable_storage or bool(self.size or self.label)
        if any(details) and not is_wanted:
            raise ConfigError(
                "a storage's size, mount path or name is given, and no storage is asked for",
                hint="enable the storage (--enable-storage), or leave them out",
            )
        return is_wanted


class Sites(ABC):
    """Where storages are."""

    @abstractmethod
    async def delete(self, record: StorageRecord) -> None:
        """Delete what a storage holds; returns once it is gone.

        Raises:
            FabricUnavailable: A sandbox has it still, or the machine that has it is away.
        """


class RaySites(Sites):
    """Those of the Ray cluster that this process is connected to."""

    async def delete(self, record: StorageRecord) -> None:  # noqa: D102
        await asyncio.to_thread(_delete, record)


def _delete(record: StorageRecord) -> None:
    fabric = entrance.init()
    hosts = fabric.shared_hosts(1)
    if record.machine:
        nodes = _nodes_of(record.machine)
        hosts = [(load, host) for load, host in hosts if load.node_id in nodes]
    if not hosts:
        raise _away(record.name, record.machine)
    mount = record.mount("/", is_shared=False)
    asked = hosts[0][1].delete_storage.remote(record.engine, mount)
    fabric.wait(asked, f"deleting storage {record.name}", DELETE_S + _GRACE_S)


class Storages:
    """Storages of the services of one cluster.

    Args:
        hub: Keeps the records.
        clock: For times.
        sites: Where they are.
    """

    def __init__(self, hub: Hub, clock: Clock, sites: Sites) -> None:
        self._records = StorageRecords(hub)
        self._clock = clock
        self._sites = sites
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def of_new(
        self, wish: StorageWish, environment: ServiceConfig, service: str, owner: str, engine: str
    ) -> tuple[StorageRecord, StorageMount]:
        """Return the storage that a service is to get: what it had before, or a new one.

        Nothing is kept yet.

        Raises:
            ConfigError: It cannot be.
            CatalogConflict: The one that it had is being deleted.
        """
        path = check_mount_path(wish.mount_path or environment.mount_path)
        label = wish.label or ""
        if len(label) > _MAX_LABEL or not label.isprintable():
            raise ConfigError(f"storage name {label[:80]!r} is not 1-{_MAX_LABEL} characters")
        known = await self._records.get(storage_name(owner, service, label))
        if known is not None:
            if known.is_leaving:
                self.finish_soon(known)
                raise CatalogConflict(
                    f"the storage of service {service} is being deleted",
                    hint="try again in a moment",
                )
            record = grown(known, wish.size)
        else:
            record = StorageRecord(
                name=storage_name(owner, service, label), uid=secrets.token_hex(8), owner=owner,
                service=service, size_bytes=parse_size(wish.size or environment.storage_size),
                engine=engine, created_at=self._clock.now(),
            )  # fmt: skip
        _check_medium(record, engine)
        return record, record.mount(path, is_shared=is_shared())

    async def of_changed(
        self, mount: StorageMount, wish: StorageWish, engine: str
    ) -> tuple[StorageRecord, StorageMount]:
        """Return the storage that a service is to have from now on; nothing is kept yet.

        Raises:
            ConfigError: It cannot be.
            CatalogConflict: It is being deleted.
        """
        if wish.is_wanted is False:
            raise ConfigError(
                "a service does not give its storage up",
                hint="delete the service (--delete-storage deletes that too), and make another",
            )
        if wish.label:
            raise ConfigError("a service's storage keeps its name", hint="make another service")
        record = grown(await _there(self._records, mount), wish.size)
        _check_medium(record, engine)
        path = check_mount_path(wish.mount_path) if wish.mount_path else mount.mount_path
        return record, record.mount(path, is_shared=is_shared())

    async def keep(self, record: StorageRecord) -> None:
        """Keep a new or grown storage's record."""
        await self._records.put(record)

    # --- deletion ---------------------------------------------------------------------------

    async def leave(self, mount: StorageMount) -> StorageRecord | None:
        """Note that a storage is to be deleted; from now on nobody gets it.

        Returns:
            What is to be deleted; None: it is gone already.
        """
        record = await self._records.get(mount.name)
        if record is None or record.uid != mount.uid:
            return None
        await self._records.note_leaving(record)
        return record

    async def finish(self, record: StorageRecord) -> None:
        """Delete a storage once no sandbox has it.

        Raises:
            FabricUnavailable: That cannot be now; it is tried again when a gateway starts.
        """
        await self._sites.delete(record)
        await self._records.forget(record)

    def finish_soon(self, record: StorageRecord) -> None:
        """Delete a storage in the background; a failure is logged, and tried again later."""
        if record.name not in self._leaving:
            task = asyncio.create_task(self._try_to_finish(record))
            self._leaving[record.name] = task
            task.add_done_callback(lambda _: self._leaving.pop(record.name, None))

    async def finish_left(self) -> None:
        """Go on with the deletions that somebody else began and did not finish."""
        for record in (await self._records.all()).values():
            if record.is_leaving:
                self.finish_soon(record)

    async def close(self) -> None:
        """Leave the rest to the next that starts."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _try_to_finish(self, record: StorageRecord) -> None:
        try:
            await self.finish(record)
        except AenvError as exc:
            logger.warning("storage %s is not deleted yet: %s", record.name, exc.message)


# --- for a replica -------------------------------------------------------------------------------


async def placed(
    records: StorageRecords, mount: StorageMount, engine: str
) -> tuple[StorageMount, tuple[str, ...]]:
    """Return a service's storage as its next sandbox gets it, and on which nodes that may be.

    Args:
        records: The hub's.
        mount: The service's.
        engine: Which makes the sandbox.

    Raises:
        CatalogConflict: It is being deleted.
        ConfigError: What is on this node's disk would not stay.
        FabricUnavailable: The machine that has it is away.
    """
    record = await _there(records, mount)
    mount = mount.model_copy(update={"is_made": record.is_made})
    own = settings()
    if medium_of(engine) == "claim" or own.storage_dir is not None:
        return mount, ()
    if own.pod_name is not None or own.is_in_kuberay:
        raise ConfigError(
            "the disk of a Ray pod ends with the pod, and a service's storage with it",
            hint='use engine "kubernetes", or set AENV_STORAGE_DIR to a directory that all pods '
            "have mounted",
        )
    machine = record.machine
    if not machine:
        nodes = usable(ray_api.alive_nodes())
        if not nodes:
            raise FabricUnavailable(
                f"no node takes the sandbox that is to have storage {mount.name}",
                hint="aenv doctor tells what the cluster has",
            )
        here = ray_api.node_id()
        chosen = nodes[here if here in nodes else min(nodes)].machine
        machine = await records.choose_machine(record, chosen)
    nodes_of = _nodes_of(machine)
    if not nodes_of:
        raise _away(mount.name, machine)
    return mount, nodes_of


async def note_made(records: StorageRecords, mount: StorageMount) -> None:
    """Note that a sandbox has had a storage."""
    record = await records.get(mount.name)
    if record is not None and record.uid == mount.uid and not record.is_made:
        await records.note_made(record)


# --- rules ---------------------------------------------------------------------------------------


def is_shared() -> bool:
    """Whether several sandboxes may have a storage at once, by this process's settings."""
    return settings().storage_access == "many"


def check_writers(record: ServiceRecord) -> None:
    """Refuse more replicas than a storage has writers.

    Raises:
        ConfigError: There are more.
    """
    scale = record.autoscale
    most = record.replicas if scale is None else scale.max_replicas
    if is_alone(record) and most > 1:
        raise ConfigError(
            f"service {record.id} has a storage with one writer, and {most} replicas",
            hint="use one replica, or set AENV_STORAGE_ACCESS=many where the filesystem or the "
            "storage class lets many write",
        )


def grown(record: StorageRecord, size: str | None) -> StorageRecord:
    """Return a storage with the size that is asked for; None: as it is.

    Raises:
        ConfigError: It would shrink.
    """
    if not size:
        return record
    size_bytes = parse_size(size)
    if size_bytes < record.size_bytes:
        raise ConfigError(
            f"the storage of service {record.service} has {shown_size(record.size_bytes)}, and "
            f"does not shrink to {size}",
            hint="leave the size out, or delete the storage and make another",
        )
    return record.model_copy(update={"size_bytes": size_bytes})


async def _there(records: StorageRecords, mount: StorageMount) -> StorageRecord:
    record = await records.get(mount.name)
    if record is None or record.uid != mount.uid or record.is_leaving:
        raise CatalogConflict(
            f"storage {mount.name} is deleted, or being so",
            hint="delete the service that had it, and make it anew",
        )
    return record


def _check_medium(record: StorageRecord, engine: str) -> None:
    if medium_of(engine) != record.medium:
        raise ConfigError(
            f"the storage of service {record.service} is a {record.medium}, and the {engine} "
            f"engine keeps a {medium_of(engine)}",
            hint=f"use engine {record.engine}, or delete the storage and make another",
        )


def _nodes_of(machine: str) -> tuple[str, ...]:
    nodes = usable(ray_api.alive_nodes())
    return tuple(sorted(node for node, facts in nodes.items() if facts.machine == machine))


def _away(name: str, machine: str) -> FabricUnavailable:
    where = f"machine {machine}, which has storage {name}," if machine else "every host"
    return FabricUnavailable(
        f"{where} is away",
        hint="bring it back: what is kept is on its disk; AENV_STORAGE_DIR names a directory that "
        "all machines have",
    )
