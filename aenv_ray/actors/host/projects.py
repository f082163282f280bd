"""The projects on a host's node."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Final

from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.config import settings
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.node import caches
from aenv_ray.errors import ConfigError, InternalError, SandboxStartFailed
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.models import InstanceSpec
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig

_MOST_READ: Final = 1024
_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
"""Errors of a write that will not succeed later either."""


def collect_projects(directory: Path) -> None:
    """Delete unpacked projects that no instance of this machine uses, if they are too many.

    Raises:
        ConfigError: A limit is malformed.
    """
    given = settings()
    caches.collect(directory, *given.cache_limits, lambda: _digests_in_use(given.runtime_dir))


def _digests_in_use(runtime_dir: Path) -> set[str]:
    """Return the projects of all recorded instances, also those whose host is restarting."""
    records = [
        record
        for directory in runtime_dir.glob("*/records")
        for record in FileInstanceStore(directory).list()
    ]
    return {record.spec.digest for record in records}


class HostProjects:
    """Unpacked projects by digest, in a directory that all hosts of a node share."""

    def __init__(self, directory: Path, node_id: str) -> None:
        self._directory = directory
        self._node_id = node_id
        self._read: BoundedCache[str, project.Project] = BoundedCache(_MOST_READ)

    def has(self, digest: str) -> bool:
        """Whether the files of a project are on this node."""
        path = self._directory / digest
        if not path.is_dir():
            return False
        caches.note_use(path)
        return True

    async def put(self, digest: str, archive: bytes) -> None:
        """Unpack a project; idempotent.

        Raises:
            ConfigError: This user may not write to the directory.
            SandboxStartFailed: The directory cannot be written now, for example on a full disk.
        """
        try:
            await asyncio.to_thread(self._put, digest, archive)
        except OSError as exc:
            kind = ConfigError if exc.errno in _FORBIDDEN else SandboxStartFailed
            raise kind(
                f"cannot write to {self._directory} on node {self._node_id[:8]}: {exc.strerror}",
                hint="set AENV_DATA_DIR to another directory, or free disk space",
            ) from exc

    def _put(self, digest: str, archive: bytes) -> None:
        caches.note_use(project.unpack(archive, digest, self._directory))
        collect_projects(self._directory)

    def sandbox_spec(self, spec: InstanceSpec, now: float) -> SandboxSpec:
        """Return the spec of an instance's sandbox.

        Its TTL starts at `now`, in seconds since the epoch.

        Raises:
            InternalError: Its project is no longer on this node.
        """
        source = self.source(spec.digest)
        return SandboxSpec(
            instance_id=spec.instance_id,
            project_dir=source.path,
            config=spec.changes.made_to(source.config) if spec.changes else source.config,
            deadline=now + spec.ttl_s,
            environment_variables=spec.environment_variables,
            arguments=spec.arguments,
            labels=spec.labels,
            datasource=spec.datasource,
            storage=spec.storage,
        )

    def config(self, digest: str) -> EnvironmentConfig:
        """Return the configuration of a project.

        Raises:
            InternalError: The project is no longer on this node.
        """
        return self.source(digest).config

    def source(self, digest: str) -> project.Project:
        """Return a project.

        Raises:
            InternalError: It is no longer on this node.
        """
        found = self._read.get(digest)
        if found is None:
            path = self._directory / digest
            if not path.is_dir():
                raise InternalError(
                    f"project {digest[:12]} is not on node {self._node_id[:8]}",
                    hint="its files were deleted while in use; create the instance again",
                )
            config = project.read_config(path / project.CONFIG_NAME)
            found = project.Project(path, config, digest)
            self._read.put(digest, found)
        return found
