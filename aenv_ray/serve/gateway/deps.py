"""The objects that all routes of a replica use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.clock import Clock
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.policy import Policy
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.auth import HubAuthenticator
from aenv_ray.serve.gateway.settings import GatewaySettings
from aenv_ray.serve.gateway.signing import Signer

Resolver = Callable[[str], Awaitable[Project]]
"""Returns the project of ``name`` or ``name@version``, never of a path, with files on this node."""


@dataclass(frozen=True)
class Deps:
    """Created once per replica; holds no state of a request."""

    hub: Hub
    fabric: AsyncFabric
    calls: InstanceCalls
    artifacts: ArtifactStore
    resolve: Resolver
    authenticate: HubAuthenticator
    settings: GatewaySettings
    clock: Clock
    policy: Callable[[], Policy]
    """Returns what environments may request."""
    artifact_quota_bytes: int | None
    """Limit for the total size of the artifacts of one owner; None: no limit."""
    signer: Signer
