"""Storage of services: creation, growth, placement on machines, deletion.

A storage volume belongs to an owner and a service name. It outlives the service, unless it is
deleted with it. One replica uses it at a time, unless the operator allows several writers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from pydantic import BaseModel, ConfigDict

from aenv_ray.actors.controller.placement import usable
from aenv_ray.actors.fabric import driver_api
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
MAX_STORAGES: Final = 100
"""Number of storage volumes of one owner."""


class StorageRequest(BaseModel):
    """A requested storage; None means the current value of the service, or the environment's."""

    model_config = ConfigDict(frozen=True)

    is_wanted: bool | None = None
    size: str | None = None
    mount_path: str | None = None
    label: str | None = None
    """Distinguishes storage volumes of one service name."""

    def wants(self, environment: ServiceConfig) -> bool:
        """Whether a new service gets a storage volume.

        Raises:
            ConfigError: Details of a storage volume are given, but no storage is requested.
        """
        details = [self.size, self.mount_path, self.label]
        if self.is_wanted is not None:
            is_wanted = self.is_wanted
        else:
            is_wanted = environment.enable_storage or bool(self.size or self.label)
        if any(details) and not is_wanted:
            raise ConfigError(
                "the size, mount path or name of a volume is given, but no storage is requested",
                hint="request the storage with --enable-storage, or leave them out",
            )
        return is_wanted


DeleteData = Callable[[StorageRecord], Awaitable[None]]
"""Deletes the data of a storage volume, and returns once it is gone.

Raises FabricUnavailable if a sandbox still uses it, or its machine is not in the cluster."""


async def delete_data(record: StorageRecord) -> None:
    """Delete the data of a storage volume of the Ray cluster that this process is connected to."""
    await asyncio.to_thread(_delete, record)


def _delete(record: StorageRecord) -> None:
    fabric = driver_api.init()
    hosts = fabric.shared_hosts(1, (record.engine,))
    if record.machine:
        nodes = _nodes_of(record.machine)
        hosts = [(load, host) for load, host in hosts if load.node_id in nodes]
    if not hosts:
        raise _unavailable(record.name, record.machine)
    mount = record.mount("/", is_shared=False)
    asked = hosts[0][1].delete_storage.remote(record.engine, mount)
    fabric.wait(asked, f"deleting storage {record.name}", DELETE_S + _GRACE_S)


class Storages:
    """The storage volumes of one cluster's services.

    Args:
        hub: Stores the records.
        clock: Clock for times in records.
        delete: Deletes the data of a storage volume.
    """

    def __init__(self, hub: Hub, clock: Clock, delete: DeleteData) -> None:
        self._records = StorageRecords(hub)
        self._clock = clock
        self._delete_data = delete
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def of_new(
        self,
        request: StorageRequest,
        environment: ServiceConfig,
        service: str,
        owner: str,
        engine: str,
    ) -> tuple[StorageRecord, StorageMount]:
        """Return the storage for a new service: that of an earlier service, or a new one.

        `keep` stores it.

        Raises:
            ConfigError: The request is invalid.
            CatalogConflict: The existing storage is being deleted, or the owner has as many as it
                may.
        """
        path = check_mount_path(request.mount_path or environment.mount_path)
        label = request.label or ""
        if len(label) > _MAX_LABEL or not label.isprintable():
            raise ConfigError(
                f"invalid storage name {label[:80]!r}: expected up to {_MAX_LABEL} characters",
                hint="choose a shorter name",
            )
        records = await self._records.all()
        known = records.get(storage_name(owner, service, label))
        if known is None:
            number = sum(one.owner == owner for one in records.values())
            if number >= MAX_STORAGES:
                raise CatalogConflict(
                    f"{owner!r} has {number} storage volumes, as many as an owner may",
                    hint="delete unused ones with their services: aenv service delete "
                    "--delete-storage",
                )
        if known is not None:
            if known.is_leaving:
                self.finish_soon(known)
                raise CatalogConflict(
                    f"the storage of service {service} is being deleted",
                    hint="try again in a few seconds",
                )
            record = grown(known, request.size)
        else:
            record = StorageRecord(
                name=storage_name(owner, service, label), uid=secrets.token_hex(8), owner=owner,
                service=service, size_bytes=parse_size(request.size or environment.storage_size),
                engine=engine, created_at=self._clock.now(),
            )  # fmt: skip
        _check_medium(record, engine)
        return record, record.mount(path, is_shared=is_shared())

    async def of_changed(
        self, mount: StorageMount, request: StorageRequest, engine: str
    ) -> tuple[StorageRecord, StorageMount]:
        """Return the changed storage of a service; `keep` stores it.

        Raises:
            ConfigError: The request is invalid.
            CatalogConflict: The storage is being deleted.
        """
        if request.is_wanted is False:
            raise ConfigError(
                "a service cannot give up its storage",
                hint="delete it (--delete-storage deletes the data too) and create another service",
            )
        if request.label:
            raise ConfigError(
                "the storage of a service cannot be renamed", hint="create another service"
            )
        record = grown(await _usable_record(self._records, mount), request.size)
        _check_medium(record, engine)
        path = check_mount_path(request.mount_path) if request.mount_path else mount.mount_path
        return record, record.mount(path, is_shared=is_shared())

    async def keep(self, record: StorageRecord) -> None:
        """Store the record of a new or grown storage."""
        await self._records.put(record)

    # --- deletion ---------------------------------------------------------------------------

    async def leave(self, mount: StorageMount) -> StorageRecord | None:
        """Mark a storage volume as being deleted; no service can use it any more.

        Returns:
            The record; None if the storage is already deleted.
        """
        record = await self._records.get(mount.name)
        if record is None or record.uid != mount.uid:
            return None
        await self._records.note_leaving(record)
        return record

    async def finish(self, record: StorageRecord) -> None:
        """Delete a storage volume once no sandbox uses it.

        Raises:
            FabricUnavailable: It cannot be deleted now; a gateway tries again when it starts.
        """
        await self._delete_data(record)
        await self._records.forget(record)

    def finish_soon(self, record: StorageRecord) -> None:
        """Delete a storage volume in the background; a failure is logged, and retried later."""
        if record.name not in self._leaving:
            task = asyncio.create_task(self._try_to_finish(record))
            self._leaving[record.name] = task
            task.add_done_callback(lambda _: self._leaving.pop(record.name, None))

    async def finish_left(self) -> None:
        """Continue deletions that another process began and did not finish."""
        for record in (await self._records.all()).values():
            if record.is_leaving:
                self.finish_soon(record)

    async def close(self) -> None:
        """Stop deleting; the next process that starts continues."""
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
    """Return a service's storage for its next sandbox, and the nodes on which that can run.

    Args:
        records: The hub's records.
        mount: The service's storage mount.
        engine: The engine of the sandbox.

    Returns:
        The storage, and node ids; no node ids if any node will do.

    Raises:
        CatalogConflict: The storage is being deleted.
        ConfigError: Data on this node's disk would be lost with the node.
        FabricUnavailable: The machine with the storage is not in the cluster.
    """
    record = await _usable_record(records, mount)
    mount = mount.model_copy(update={"is_made": record.is_made})
    own = settings()
    if medium_of(engine) == "claim" or own.storage_dir is not None:
        return mount, ()
    if own.pod_name is not None or own.is_in_kuberay:
        raise ConfigError(
            "the disk of a Ray pod is deleted with the pod, and a volume on it would be too",
            hint='use engine "kubernetes", or set AENV_STORAGE_DIR to a directory that all pods '
            "mount",
        )
    machine = record.machine
    if not machine:
        nodes = usable(ray_api.alive_nodes())
        if not nodes:
            raise FabricUnavailable(
                f"no node can run the sandbox with storage {mount.name}",
                hint="see the nodes with: aenv cluster nodes",
            )
        here = ray_api.node_id()
        chosen = nodes[here if here in nodes else min(nodes)].machine
        machine = await records.choose_machine(record, chosen)
    nodes_of = _nodes_of(machine)
    if not nodes_of:
        raise _unavailable(mount.name, machine)
    return mount, nodes_of


async def note_made(records: StorageRecords, mount: StorageMount) -> None:
    """Record that the data of a storage volume exists, because a sandbox has used it."""
    record = await records.get(mount.name)
    if record is not None and record.uid == mount.uid and not record.is_made:
        await records.note_made(record)


# --- rules ---------------------------------------------------------------------------------------


def is_shared() -> bool:
    """Whether the settings of this process allow several sandboxes to use a volume at once."""
    return settings().storage_access == "many"


def check_writers(record: ServiceRecord) -> None:
    """Reject more replicas than a storage volume allows writers.

    Raises:
        ConfigError: There are more replicas.
    """
    scale = record.autoscale
    most = record.replicas if scale is None else scale.max_replicas
    if is_alone(record) and most > 1:
        raise ConfigError(
            f"service {record.id} has a storage volume with a single writer, but {most} replicas",
            hint="use one replica, or set AENV_STORAGE_ACCESS=many if the filesystem or storage "
            "class supports several writers",
        )


def grown(record: StorageRecord, size: str | None) -> StorageRecord:
    """Return a storage volume with the requested size; None leaves the size unchanged.

    Raises:
        ConfigError: The requested size is smaller.
    """
    if not size:
        return record
    size_bytes = parse_size(size)
    if size_bytes < record.size_bytes:
        raise ConfigError(
            f"the storage of service {record.service} has {shown_size(record.size_bytes)} and "
            f"cannot shrink to {size}",
            hint="leave the size out, or delete the storage and create another one",
        )
    return record.model_copy(update={"size_bytes": size_bytes})


async def _usable_record(records: StorageRecords, mount: StorageMount) -> StorageRecord:
    record = await records.get(mount.name)
    if record is None or record.uid != mount.uid or record.is_leaving:
        raise CatalogConflict(
            f"storage {mount.name} was deleted, or is being deleted",
            hint="delete the service that used it, and create it again",
        )
    return record


def _check_medium(record: StorageRecord, engine: str) -> None:
    if medium_of(engine) != record.medium:
        raise ConfigError(
            f"the storage of service {record.service} is a {record.medium}, but engine {engine} "
            f"uses a {medium_of(engine)}",
            hint=f"use engine {record.engine}, or delete the storage and create another one",
        )


def _nodes_of(machine: str) -> tuple[str, ...]:
    nodes = usable(ray_api.alive_nodes())
    return tuple(sorted(node for node, facts in nodes.items() if facts.machine == machine))


def _unavailable(name: str, machine: str) -> FabricUnavailable:
    problem = (
        f"machine {machine}, which holds storage {name}, is not in the cluster"
        if machine
        else f"no host of the cluster answers, so storage {name} cannot be reached"
    )
    return FabricUnavailable(
        problem,
        hint="start the machine again: the data is on its disk. To be independent of one machine, "
        "set AENV_STORAGE_DIR to a directory that all machines mount",
    )
