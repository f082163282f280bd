"""The projects whose files are on a host's node."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Final

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.errors import ConfigError, InternalError, SandboxStartFailed
from aenv_ray.models import InstanceSpec
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig

_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
"""Of a write that no waiting makes possible."""


class HostProjects:
    """Projects by digest, in a directory that all hosts of a node share.

    Args:
        directory: Where projects are unpacked.
        node_id: For messages.
    """

    def __init__(self, directory: Path, node_id: str) -> None:
        self._directory = directory
        self._node_id = node_id
        self._read: dict[str, project.Project] = {}

    def has(self, digest: str) -> bool:
        """Whether the project's files are on this node."""
        return (self._directory / digest).is_dir()

    async def put(self, digest: str, archive: bytes) -> None:
        """Unpack a project; a second time does nothing.

        Raises:
            ConfigError: The directory is not this user's to write.
            SandboxStartFailed: It cannot be written for now: the disk is full, say.
        """
        try:
            await asyncio.to_thread(project.unpack, archive, digest, self._directory)
        except OSError as exc:
            kind = ConfigError if exc.errno in _FORBIDDEN else SandboxStartFailed
            raise kind(
                f"{self._directory} on node {self._node_id[:8]} cannot be written: {exc.strerror}",
                hint="name another directory in AENV_DATA_DIR, or make room",
            ) from exc

    def sandbox_spec(self, spec: InstanceSpec, now: float) -> SandboxSpec:
        """Return what an engine is asked for.

        Args:
            spec: The instance.
            now: Seconds since the epoch, from which its TTL counts.

        Raises:
            InternalError: Its project is not there any more.
        """
        source = self._get(spec.digest)
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
        """Return a project's configuration.

        Raises:
            InternalError: The project is not there any more.
        """
        return self._get(digest).config

    def _get(self, digest: str) -> project.Project:
        if digest not in self._read:
            path = self._directory / digest
            if not path.is_dir():
                raise InternalError(
                    f"project {digest[:12]} is not on node {self._node_id[:8]}",
                    hint="its cache was deleted while in use; create again",
                )
            config = project.read_config(path / project.CONFIG_NAME)
            self._read[digest] = project.Project(path, config, digest)
        return self._read[digest]
