"""Makes published versions available as projects on this node.

When a version is first used, it is unpacked into a directory named by its digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aenv_ray import ids
from aenv_ray.actors.host.projects import collect_projects
from aenv_ray.actors.ray_shell import ray_api, ray_start
from aenv_ray.actors.ray_shell.remote_tasks import on_the_head
from aenv_ray.config import Settings, settings
from aenv_ray.engines.node import caches
from aenv_ray.engines.node.singleflight import SingleFlight
from aenv_ray.errors import ArtifactNotFound, CatalogConflict, ConfigError, EnvironmentNotFound
from aenv_ray.hub import hub_actor
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore, open_artifact_store
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.records import EnvironmentStatus, EnvironmentVersion
from aenv_ray.project import project
from aenv_ray.project.project import Project

_HEAD_S: Final = 120.0
_UNPACKS: Final = 2
"""Archives that are unpacked at a time; each is in memory as a whole."""


def published(
    reference: str, connect: Callable[[], Any], otherwise: EnvironmentNotFound
) -> Project:
    """Return the project of a published version; blocks.

    Without a hub, `otherwise` is raised.

    Raises:
        AenvError: As `aenv_ray.actors.fabric.references.resolve_environment`.
    """
    given = settings()
    hub = _hub(given, connect)
    if hub is None:
        raise otherwise
    return blocking(_published(hub, given, reference, otherwise))


def _hub(given: Settings, connect: Callable[[], Any]) -> HubClient | None:
    """Return the hub; None if there is none yet, since a new hub would know no versions."""
    may_know = given.redis_url is not None or (given.data_dir / "hub").is_dir()
    if may_know:
        connect()
        return hub_actor.ensure_hub()
    has_ray = given.ray_address is not None or ray_api.is_connected()
    if not has_ray and ray_start.of_ray_start() is None:
        return None
    connect()
    return hub_actor.find_hub()


async def _published(
    hub: Hub, given: Settings, reference: str, otherwise: EnvironmentNotFound
) -> Project:
    store = open_artifact_store(given)
    try:
        return await Catalog(hub, store, given.data_dir)(reference)
    except EnvironmentNotFound as exc:
        hints = dict.fromkeys(filter(None, (exc.hint, otherwise.hint)))
        raise EnvironmentNotFound(exc.message, hint="; ".join(hints)) from None
    finally:
        store.close()


class Catalog:
    """Resolves references by name to projects on this node.

    Args:
        data_dir: Projects are unpacked into its subdirectory ``projects``.
    """

    def __init__(self, hub: Hub, store: ArtifactStore, data_dir: Path) -> None:
        self._hub = hub
        self._store = store
        self._projects = data_dir / "projects"
        self._loads: SingleFlight[Project] = SingleFlight()
        self._unpacking = asyncio.Semaphore(_UNPACKS)

    async def __call__(self, reference: str) -> Project:
        """Return the project of ``name`` or ``name@version``; built-in environments come first.

        Raises:
            EnvironmentNotFound: It does not exist.
            CatalogConflict: The version is Failed.
            ConfigError: The reference is malformed, or the version was published without source.
            FabricUnavailable: The hub or the store does not answer.
        """
        name, version = ids.split_reference(reference)
        if name in project.builtins():
            try:
                return project.resolve(reference)
            except EnvironmentNotFound as exc:
                otherwise = exc
            try:
                return await self.project_of(await self._hub.environment(name, version))
            except EnvironmentNotFound as exc:
                if not await self._hub.versions(name):
                    raise otherwise from None  # only built-in versions exist
                hint = f"{exc.hint}; built in: {otherwise.hint}"
                raise EnvironmentNotFound(exc.message, hint=hint) from None
        return await self.project_of(await self._hub.environment(name, version))

    async def project_of(self, entry: EnvironmentVersion) -> Project:
        """Return the project of a version; download and unpack it if necessary.

        Raises:
            CatalogConflict: The version is Failed.
            ConfigError: It was published without source.
            ArtifactNotFound: The store does not have its archive.
        """
        if entry.status is EnvironmentStatus.FAILED:
            raise CatalogConflict(
                f"{entry.reference} has status Failed, so no instance can be created from it",
                hint="publish a new version, or change the status of this one once it works",
            )
        if not entry.archive:
            raise ConfigError(
                f"{entry.reference} was published without its source",
                hint="publish it with aenv push",
            )
        # Many creates of a version begin at the same time, and their first load takes long.
        return await self._loads.run(entry.digest, lambda: self._load(entry))

    async def _load(self, entry: EnvironmentVersion) -> Project:
        directory = self._projects / entry.digest
        if not directory.is_dir():
            async with self._unpacking:
                archive = self._archive(entry.archive)
                await asyncio.to_thread(project.unpack, await archive, entry.digest, self._projects)
            caches.note_use(directory)
            await asyncio.to_thread(collect_projects, self._projects)
        caches.note_use(directory)
        found = await asyncio.to_thread(project.load, directory)
        if found.digest != entry.digest:
            raise ConfigError(
                f"the copy of {entry.reference} in {directory} was edited",
                hint=f"delete it, so that it is downloaded again: rm -r {directory}",
            )
        return found

    async def _archive(self, digest: str) -> bytes:
        """Return an archive from this node's store, or else from the store of the head.

        If the store is a directory that the nodes do not share, only the head has the archive: its
        gateway wrote it.

        Raises:
            ArtifactNotFound: Neither has it.
        """
        try:
            return await self._store.read(digest)
        except ArtifactNotFound:
            if not (self._store.is_directory and ray_api.is_connected()) or ray_api.is_on_head():
                raise
        what = f"archive {digest[:12]} of the head"
        return await asyncio.to_thread(
            on_the_head, _read_here, digest, what=what, timeout_s=_HEAD_S
        )


def _read_here(digest: str) -> bytes:
    """Return an archive from the store of this node."""

    async def read() -> bytes:
        store = open_artifact_store(settings())
        try:
            return await store.read(digest)
        finally:
            store.close()

    return asyncio.run(read())
