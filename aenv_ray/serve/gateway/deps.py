"""What all routes of a replica work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.clock import Clock
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.auth import HubAuthenticator
from aenv_ray.serve.gateway.settings import GatewaySettings


class Resolver(Protocol):
    """Finds the project of an environment reference, and brings its files to this node."""

    async def __call__(self, reference: str) -> Project:
        """Return the project.

        Args:
            reference: ``name`` or ``name@version``; never a path.

        Raises:
            ConfigError: The reference is malformed.
            EnvironmentNotFound: The environment does not exist.
        """
        ...


@dataclass(frozen=True)
class Deps:
    """Created once per replica; holds no state of a request."""

    hub: Hub
    fabric: AsyncFabric
    artifacts: ArtifactStore
    resolve: Resolver
    authenticate: HubAuthenticator
    settings: GatewaySettings
    clock: Clock
