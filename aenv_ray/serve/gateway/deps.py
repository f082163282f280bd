"""What the gateway's routes work with: one object, made once in each replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import HTTPConnection

from aenv_ray.clock import Clock
from aenv_ray.errors import Forbidden, InstanceNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.hub.records import Lease, Role
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.instances import Instances
from aenv_ray.serve.gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Principal:
    """Who sends a request: what its token says."""

    role: Role | None
    """None: nobody, where no token is needed."""
    owner: str
    instance_id: str | None
    """Of an agent: the one instance whose tools it may use."""
    token_id: str

    @property
    def is_admin(self) -> bool:
        """Whether it may do everything."""
        return self.role is Role.ADMIN

    def check_not_agent(self) -> None:
        """Refuse an agent.

        Raises:
            Forbidden: It is one (invariant 8).
        """
        if self.role is Role.AGENT:
            raise Forbidden(
                "an agent's token lists and calls the tools of its instance, nothing else",
                hint="use the token of an owner",
            )

    def check_admin(self) -> None:
        """Refuse everybody but administrators.

        Raises:
            Forbidden: It is none.
        """
        if not self.is_admin:
            raise Forbidden("only an administrator's token may do this")

    def check_owns(self, lease: Lease) -> None:
        """Refuse who is neither the owner of an instance nor an administrator.

        Raises:
            Forbidden: An agent, on routes that are not its own.
            InstanceNotFound: Somebody else's: that it exists is not told.
        """
        self.check_not_agent()
        if not self.is_admin and lease.owner != self.owner:
            raise InstanceNotFound(f"there is no instance {lease.id}", instance_id=lease.id)


class Authenticator(Protocol):
    """Tells who sends a request."""

    async def __call__(self, request: HTTPConnection) -> Principal:
        """Return who sends it.

        Raises:
            Unauthorized: It carries no token, or one that does not hold.
            FabricUnavailable: The hub does not answer.
        """
        ...


class Resolver(Protocol):
    """Finds the project of a reference; its files are on this node afterwards."""

    async def __call__(self, reference: str) -> Project:
        """Return the project.

        Args:
            reference: ``name`` or ``name@version``; never a path.

        Raises:
            ConfigError: The reference is malformed.
            EnvironmentNotFound: There is no such environment.
        """
        ...


@dataclass(frozen=True)
class Deps:
    """Everything that routes need, and nothing that a request leaves behind."""

    hub: Hub
    fabric: Instances
    artifacts: ArtifactStore
    resolve: Resolver
    authenticate: Authenticator
    settings: GatewaySettings
    clock: Clock
