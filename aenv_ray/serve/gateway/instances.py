"""The gateway's view of the fabric: asynchronous, by instance id, with cached handles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project.project import Project


class Made(NamedTuple):
    """A new instance."""

    handle: EnvHandle
    """Under the id that was asked for."""
    info: InstanceInfo


class Instances(ABC):
    """The fabric, seen from an event loop. No method holds a thread while a sandbox starts."""

    @abstractmethod
    async def create(
        self, source: Project, specs: Sequence[InstanceSpec], density: ActorDensity
    ) -> list[Made]:
        """Make instances under the ids of their specs, all or none.

        A cancelled create leaves nothing behind.

        Raises:
            AenvError: As `aenv_ray.create`; nothing is left then.
        """

    @abstractmethod
    async def handle(self, instance_id: str) -> EnvHandle:
        """Return a handle to an instance; calls to one that has ended say why it did.

        Raises:
            InstanceNotFound: No host knows it.
            FabricUnavailable: The fabric does not answer.
        """

    @abstractmethod
    async def info(self, instance_id: str) -> InstanceInfo:
        """Return what its host knows of an instance, also a while after its end.

        Raises:
            InstanceNotFound: No host knows it.
            FabricUnavailable: The fabric does not answer.
        """

    @abstractmethod
    def forget(self, instance_id: str) -> None:
        """Look the instance up anew next time: its host is gone."""

    @abstractmethod
    async def release(self, instance_ids: Sequence[str]) -> None:
        """End instances; from every state, any number of times."""

    @abstractmethod
    async def list_instances(self) -> list[InstanceInfo]:
        """Return all live instances of the cluster, of every owner.

        Raises:
            FabricUnavailable: The fabric does not answer.
        """

    @abstractmethod
    async def pools(self) -> dict[str, int]:
        """Return how many sandboxes are kept ready, by the reference of their environment.

        Raises:
            FabricUnavailable: No host answers.
        """
