"""The instances that all hosts report, and what is unknown because a host does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from aenv_ray.actors.controller.sandbox_counts import Ask
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.models import InstanceInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InstanceListing:
    """The instances that some hosts reported.

    Attributes:
        found: The live instances of the hosts that answered.
        unheard: Names of the hosts that did not, dead or alive.
        silent: Names of those among them that may be alive.
    """

    found: list[InstanceInfo]
    unheard: frozenset[str]
    silent: frozenset[str]

    def doubtful(self, ids: Iterable[str], where: Mapping[str, str]) -> set[str]:
        """Return which instances were not found but may be on a silent host.

        Args:
            ids: The instances.
            where: The host on which each was last seen, as far as known.
        """
        if not self.silent:
            return set()
        known = {info.id for info in self.found}
        return {i for i in ids if i not in known and where.get(i) in {None, *self.silent}}

    def vacant(self, names: Iterable[str]) -> set[str]:
        """Return which of these hosts reported that they have no instances.

        Dead hosts are not among them: their sandboxes may still run.
        """
        return set(names) - self.unheard - {info.host for info in self.found}


async def list_instances_on(ask: Ask, names: Collection[str]) -> InstanceListing:
    """Ask hosts, by name, for their instances, all at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_instances_on(ask, name)) for name in names}
    found: list[InstanceInfo] = []
    errors: dict[str, AenvError] = {}
    for name, task in tasks.items():
        answer = task.result()
        if isinstance(answer, AenvError):
            errors[name] = answer
        else:
            found += answer
    silent = {
        name
        for name, error in errors.items()
        if isinstance(error, FabricUnavailable) and not ray_api.is_of_a_dead_actor(error)
    }
    return InstanceListing(found, frozenset(errors), frozenset(silent))


async def _instances_on(ask: Ask, name: str) -> list[InstanceInfo] | AenvError:
    try:
        found: list[InstanceInfo] = await ask(name, "instances")
    except AenvError as exc:
        logger.warning("the instances of host %s are not listed: %s", name, exc)
        return exc
    return found
