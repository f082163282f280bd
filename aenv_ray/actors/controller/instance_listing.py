"""What all hosts say that lives on them, and what is not known because one says nothing."""

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
class Survey:
    """The answers of some hosts.

    Attributes:
        found: The live instances of those that answered.
        unheard: Names of the others, whether they are gone or only say nothing.
        silent: Those of the others that are not known to have ended for good.
    """

    found: list[InstanceInfo]
    unheard: frozenset[str]
    silent: frozenset[str]

    def doubtful(self, ids: Iterable[str], where: Mapping[str, str]) -> set[str]:
        """Return which of these instances were not found and may live on a silent host.

        Args:
            ids: The instances.
            where: The hosts that they were last seen on, as far as known.
        """
        if not self.silent:
            return set()
        known = {info.id for info in self.found}
        return {i for i in ids if i not in known and where.get(i) in {None, *self.silent}}

    def vacant(self, names: Iterable[str]) -> set[str]:
        """Return which of these hosts said that nothing lives on them.

        Not those that are dead: something of theirs may live.
        """
        return set(names) - self.unheard - {info.host for info in self.found}


async def survey(ask: Ask, names: Collection[str]) -> Survey:
    """Ask hosts, by their names, what lives on them; one that does not answer delays no other."""
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
    return Survey(found, frozenset(errors), frozenset(silent))


async def _instances_on(ask: Ask, name: str) -> list[InstanceInfo] | AenvError:
    try:
        found: list[InstanceInfo] = await ask(name, "instances")
    except AenvError as exc:
        logger.warning("not listed: %s", exc)
        return exc
    return found
