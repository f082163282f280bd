"""Questions to all hosts at once: their instances, running sandboxes and warm sandboxes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.controller.placement import SHARED_PREFIX, shared_host_names, usable
from aenv_ray.actors.host.environment_relay import OUTER_LABEL
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceInfo

logger = logging.getLogger(__name__)

Ask = Callable[..., Awaitable[Any]]
"""Runs an operation of a host, ``(host, operation, *arguments)``, and returns the answer; raises
AenvError."""


@dataclass(frozen=True)
class InstanceListing:
    """The instances that some hosts reported."""

    found: list[InstanceInfo]
    """The live instances of the hosts that answered."""
    unheard: frozenset[str]
    """Names of all hosts that did not answer, dead or alive."""
    silent: frozenset[str]
    """Names of the hosts in `unheard` that may still be alive."""

    def doubtful(self, ids: Iterable[str], where: Mapping[str, str]) -> set[str]:
        """Return the instances that were not found but may be on a silent host.

        Args:
            ids: The instances.
            where: The host on which each was last seen, as far as known.
        """
        if not self.silent:
            return set()
        known = {info.id for info in self.found}
        return {i for i in ids if i not in known and where.get(i) in {None, *self.silent}}

    def vacant(self, names: Iterable[str]) -> set[str]:
        """Return the hosts among these that reported that they have no instances.

        Dead hosts are never included: their sandboxes may still run.
        """
        return set(names) - self.unheard - {info.host for info in self.found}

    def located(self, names: Iterable[str], where: Mapping[str, str]) -> dict[str, str]:
        """Return the host of each instance, given what was known and the hosts that were asked.

        Instances that a shared host no longer has are left out: their callers have released them
        at the host directly.
        """
        heard = {n for n in names if n.startswith(SHARED_PREFIX)} - self.unheard
        known = {i: name for i, name in where.items() if name not in heard}
        return known | {info.id: info.host for info in self.found}


def without_outer(found: Collection[InstanceInfo], doubtful: Collection[str]) -> list[InstanceId]:
    """Return the inner instances whose outer one is gone.

    Args:
        found: All instances that were found.
        doubtful: Ids of instances that were not found and may live.
    """
    present = {i for info in found for i in (info.id, info.requested_id)} | set(doubtful)
    inner = [info for info in found if OUTER_LABEL in info.labels]
    return [info.id for info in inner if info.labels[OUTER_LABEL] not in present]


async def list_instances_on(ask: Ask, names: Collection[str]) -> InstanceListing:
    """Ask hosts, by name, for their instances, all at the same time."""
    answers, errors = await _ask_each(ask, "instances", names)
    found: list[InstanceInfo] = [info for infos in answers.values() for info in infos]
    return InstanceListing(found, frozenset(errors), frozenset(_silent(errors)))


async def count_instances_on(ask: Ask, names: Collection[str]) -> tuple[dict[str, int], set[str]]:
    """Ask hosts, by name, how many instances run or start there.

    Hosts of an earlier version of aenv-ray know only those that run.

    Returns:
        The answers, and the names of the hosts that do not answer but may be alive.
    """

    async def count(name: str, operation: str) -> int:
        try:
            return int(await ask(name, operation, True))
        except FabricUnavailable as exc:
            if not isinstance(exc.__cause__, TypeError):
                raise
            return len(await ask(name, operation))

    answers, errors = await _ask_each(count, "instances", names)
    return answers, _silent(errors)


async def _ask_each(
    ask: Ask, operation: str, names: Collection[str]
) -> tuple[dict[str, Any], dict[str, AenvError]]:
    """Return the answers of hosts that are asked at the same time, and the errors of the others."""
    answers: dict[str, Any] = {}
    errors: dict[str, AenvError] = {}

    async def ask_one(name: str) -> None:
        try:
            answers[name] = await ask(name, operation)
        except AenvError as exc:
            logger.warning("host %s is left out: %s", name, exc)
            errors[name] = exc

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(ask_one(name))
    return answers, errors


def _silent(errors: Mapping[str, AenvError]) -> set[str]:
    """Return the hosts that may still be alive."""
    return {
        name
        for name, error in errors.items()
        if isinstance(error, FabricUnavailable) and not ray_api.is_of_a_dead_actor(error)
    }


async def count_processes(hosts: HostDirectory, ask: Ask) -> int:
    """Return how many processes, containers and pods of sandboxes run on all nodes.

    An elastic node without a host has no sandboxes.

    Raises:
        FabricUnavailable: A live node, or the daemon or API of its sandboxes, does not answer.
    """
    nodes = await asyncio.to_thread(ray_api.alive_nodes)
    names, taking = set(await asyncio.to_thread(ray_api.actor_names)), usable(nodes)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for node, facts in nodes.items():
            every = replace(facts, is_draining=False)  # a draining node may have sandboxes
            for name, capacity in list(shared_host_names(node, every).items())[:1]:
                if name in names or (node in taking and not facts.is_elastic):
                    slots = capacity if facts.is_elastic else None
                    tasks.append(group.create_task(_count_on(hosts, ask, node, name, slots)))
    total = 0
    for task in tasks:
        count = task.result()
        if isinstance(count, AenvError):
            raise count
        total += count
    return total


async def _count_on(
    hosts: HostDirectory, ask: Ask, node: str, name: str, slots: int | None
) -> int | AenvError:
    for is_last in (False, True):
        try:
            await hosts.shared(name, node, slots)
            return int(await ask(name, "count_processes"))
        except AenvError as exc:
            if node not in await asyncio.to_thread(ray_api.alive_nodes):
                return 0  # the node died, with all its sandboxes
            if is_last:
                return exc
            hosts.forget(name)  # it may have ended for good: start a new one on the node
    raise AssertionError


async def count_pools(hosts: HostDirectory, ask: Ask) -> dict[str, int]:
    """Return how many warm sandboxes all hosts have, by environment reference.

    Hosts that do not answer are left out.
    """
    names = await asyncio.to_thread(ray_api.actor_names)
    shared = await hosts.find(name for name in names if name.startswith(SHARED_PREFIX))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_pools_on(ask, name)) for name in shared]
    ready: Counter[str] = Counter()
    for task in tasks:
        ready.update(task.result())
    return dict(ready)


async def _pools_on(ask: Ask, name: str) -> dict[str, int]:
    try:
        found: dict[str, int] = await ask(name, "pools")
    except AenvError as exc:
        logger.warning("the warm pools of host %s are not counted: %s", name, exc)
        return {}
    return found
