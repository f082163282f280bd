"""The host actors that the controller knows: it starts them, finds them and asks for their load.

Hosts of different nodes are started at the same time, each only once however many creates wait for
it. A host that does not start or answer does not hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from aenv_ray.actors.controller.placement import HostLoad, shared_host_names
from aenv_ray.actors.host.environment_relay import ConnectInner
from aenv_ray.actors.host.host_actor import host_actor
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.actors.ray_shell.versions import check_version
from aenv_ray.background_tasks import start_shared
from aenv_ray.errors import AenvError, DeadlineExceeded, FabricUnavailable
from aenv_ray.ids import HostId
from aenv_ray.models import ActorDensity

logger = logging.getLogger(__name__)

HOST_START_DEADLINE_S: Final = 120.0
"""A new Ray worker takes seconds on a busy machine; Ray itself allows a minute."""
TRY_AGAIN_S: Final = 10.0
"""A node whose host did not start is not used for this long."""


class HostDirectory:
    """Host actors by name.

    Args:
        inner_instances: Passed on to each host.

    Attributes:
        actors: The host actors that were started or found.
        nodes: Node ids of the hosts whose node is known.
        engines: The engines that the hosts of a node can run, by node id; only nodes that declare
            none are asked.
    """

    def __init__(self, inner_instances: ConnectInner | None = None) -> None:
        self._inner_instances = inner_instances
        self.actors: dict[str, RemoteHost] = {}
        self.nodes: dict[str, str] = {}
        self.engines: dict[str, tuple[str, ...]] = {}
        self._making: dict[str, asyncio.Task[RemoteHost | FabricUnavailable]] = {}
        self._refused: dict[str, tuple[float, FabricUnavailable]] = {}
        self._checked: set[str] = set()
        """Hosts whose version is known to be compatible."""

    def forget(self, name: str) -> None:
        """Forget a host that seems to be gone; `find` finds it again if it lives."""
        self.actors.pop(name, None)
        self.nodes.pop(name, None)
        self._checked.discard(name)

    def name_of(self, actor_id: str) -> str:
        """Return the name of a known host, by the id of its actor; "" if there is none."""
        for name, actor in self.actors.items():
            if ray_api.actor_id(actor) == actor_id:
                return name
        return ""

    async def find(self, names: Iterable[str]) -> list[str]:
        """Return which of these names belong to live hosts, and look up their actors."""
        found = []
        for name in names:
            if name not in self.actors:
                actor = await asyncio.to_thread(ray_api.find_actor, name)
                if actor is None or not hasattr(actor, "exchange"):
                    continue  # it has just ended, or it is a user's actor in our namespace
                self.actors[name] = actor
            found.append(name)
        return found

    def add(self, name: str, node: str, actor: RemoteHost) -> None:
        """Note a host that runs."""
        self.actors[name] = actor
        self.nodes[name] = node

    async def make(
        self, name: str, node: str, density: ActorDensity, slots: int | None = None
    ) -> RemoteHost:
        """Return the host with this name; start it if there is none.

        A host with `slots` reserves that many slots of its node in Ray, so that Ray adds nodes when
        more are needed; it ends when it has no instances. A host without `slots` stays.

        Raises:
            FabricUnavailable: It did not start; the node is not used for `TRY_AGAIN_S`.
        """
        self.nodes[name] = node
        try:
            self.actors[name] = await self._start(name, node, density, slots)
        except BaseException:
            self.nodes.pop(name, None)
            raise
        return self.actors[name]

    async def start_spare_host(self, name: str, node: str, spare_s: float) -> RemoteHost:
        """Start a dedicated host that ends unless an instance claims it within `spare_s`.

        It is not in `actors` until it is passed to `add`.

        Raises:
            FabricUnavailable: As `make`.
        """
        return await self._start(name, node, ActorDensity.DEDICATED, None, spare_s)

    async def _start(
        self,
        name: str,
        node: str,
        density: ActorDensity,
        slots: int | None,
        spare_s: float | None = None,
    ) -> RemoteHost:
        options: dict[str, Any] = {
            "name": name,
            "namespace": ray_api.NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,  # Ray may repeat this after the controller died
            # Pinned, so that a restarted host finds its sandboxes on that node.
            "scheduling_strategy": ray_api.pinned(node),
            **ray_api.hosting(slots),
        }
        actor = (
            host_actor()
            .options(**options)
            .remote(HostId(name), density.value, slots, spare_s, self._inner_instances)
        )
        await self._check(name, node, actor, is_new=True)
        host: RemoteHost = actor
        return host

    async def _check(self, name: str, node: str, actor: Any, *, is_new: bool) -> None:
        """Wait until a host is ready, and check its version.

        An incompatible host that another controller started may have instances, which continue.

        Args:
            name: The name of the host.
            node: Its node.
            actor: The host actor.
            is_new: Whether it was started just now, so that it may be killed.

        Raises:
            FabricUnavailable: It is not usable; the node is not used for `TRY_AGAIN_S`.
        """
        try:
            async with asyncio.timeout(HOST_START_DEADLINE_S):
                with ray_api.translated(f"starting host {name}"):
                    version = await actor.ready.remote()
            check_version(
                version,
                f"the worker on node {node[:8]}",
                "replace the worker by one of this version",
            )
        except Exception as exc:
            if is_new and not isinstance(exc, FabricUnavailable):
                ray_api.kill(actor)  # it will never be ready; the next attempt creates a new actor
            if isinstance(exc, AenvError):
                why = exc.message
            elif isinstance(exc, TimeoutError):
                why = f"{name} did not start within {HOST_START_DEADLINE_S:g} s"
            else:
                why = str(exc).strip().splitlines()[-1]
            # Whatever the cause, a host may start on another node.
            refusal = FabricUnavailable(
                f"no host started on node {node[:8]}: {why}",
                hint=f"the node is tried again after {TRY_AGAIN_S:g} s; its Ray logs have details",
            )
            self._refused[node] = (asyncio.get_running_loop().time() + TRY_AGAIN_S, refusal)
            logger.warning("node %s is not used for %g s: %s", node[:8], TRY_AGAIN_S, why)
            raise refusal from exc
        self._refused.pop(node, None)
        self._checked.add(name)

    async def shared(self, name: str, node: str, slots: int | None) -> RemoteHost:
        """Return a shared host; start it if there is none, once for all concurrent calls.

        The arguments are those of `make`.

        Raises:
            FabricUnavailable: It did not start, or was found to be incompatible, now or within the
                last `TRY_AGAIN_S`.
        """
        if name in self.actors and name in self._checked:
            return self.actors[name]
        if (refusal := self.refusal(node)) is not None:
            raise refusal
        if name not in self._making:
            self._making[name] = start_shared(self._make_shared(name, node, slots))
        outcome = await asyncio.shield(self._making[name])
        if isinstance(outcome, FabricUnavailable):
            raise outcome
        return outcome

    async def _make_shared(
        self, name: str, node: str, slots: int | None
    ) -> RemoteHost | FabricUnavailable:
        try:
            if await self.find([name]):
                host = self.actors[name]  # a failed request may make others forget it meanwhile
                if await self._is_checked(name, node, host):
                    return host
            return await self.make(name, node, ActorDensity.SHARED, slots)
        except FabricUnavailable as exc:
            return exc
        finally:
            del self._making[name]

    async def _is_checked(self, name: str, node: str, host: RemoteHost) -> bool:
        """Check a host that an earlier controller started; return False if it has ended for good.

        Raises:
            FabricUnavailable: As `_check`.
        """
        try:
            await self._check(name, node, host, is_new=False)
        except FabricUnavailable as exc:
            cause = exc.__cause__
            if not (isinstance(cause, AenvError) and ray_api.is_of_a_dead_actor(cause)):
                raise
            self._refused.pop(node, None)
            self.forget(name)
            return False
        self.add(name, node, host)
        return True

    def refusal(self, node: str) -> FabricUnavailable | None:
        """Return why a node is not used at present; None if it may be used."""
        until, refusal = self._refused.get(node, (0.0, None))
        return refusal if asyncio.get_running_loop().time() < until else None

    async def loads(
        self, nodes: Mapping[str, NodeFacts], *, patience_s: float
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Return the shared hosts of nodes with their load; start missing ones.

        Wait for `patience_s` after the first answer. Hosts that answer later are not returned, but
        continue to start in the background.

        Raises:
            FabricUnavailable: No host answers; the message contains the causes.
        """
        asked = [
            asyncio.create_task(self._load(name, node, capacity, facts))
            for node, facts in nodes.items()
            for name, capacity in shared_host_names(node, facts).items()
        ]
        answers, causes = await _answers(asked, patience_s)
        if not answers:
            why = "; ".join(sorted({exc.message for exc in causes})) or "the cluster has no node"
            raise FabricUnavailable(
                f"no host runs on any node: {why}", hint="check the nodes with: ray status"
            )
        return sorted(answers, key=lambda answer: answer[0].name)

    async def _load(
        self, name: str, node: str, capacity: int, facts: NodeFacts
    ) -> tuple[HostLoad, RemoteHost]:
        slots = capacity if facts.is_elastic else None
        async with asyncio.timeout(HOST_START_DEADLINE_S):
            was_known = name in self.actors
            host = await self.shared(name, node, slots)
            try:
                load = await self._ask_load(name, node, host, facts)
            except FabricUnavailable:
                self.forget(name)
                if not was_known:
                    raise
                # It ended for good since it was last used: the node gets a new one.
                host = await self.shared(name, node, slots)
                load = await self._ask_load(name, node, host, facts)
        return load, host

    async def _ask_load(self, name: str, node: str, host: RemoteHost, facts: NodeFacts) -> HostLoad:
        with ray_api.translated(f"asking host {name}"):
            count, capacity = await host.load.remote()
            if facts.engine is None:
                self.engines[node] = await host.engines.remote()
        engines = (facts.engine,) if facts.engine else self.engines[node]
        return HostLoad(name, node, count, capacity, engines)

    def may_run(self, node: str, facts: NodeFacts, engines: Collection[str]) -> bool:
        """Whether a node may run one of these engines, as far as is known."""
        known = self.engines.get(node)
        if facts.engine is not None or known is None:
            return facts.may_run(engines)
        return not set(known).isdisjoint(engines)


async def _answers(
    asked: list[asyncio.Task[tuple[HostLoad, RemoteHost]]], patience_s: float
) -> tuple[list[tuple[HostLoad, RemoteHost]], list[AenvError]]:
    """Return results and errors of tasks; stop waiting `patience_s` after the first result."""
    answers: list[tuple[HostLoad, RemoteHost]] = []
    causes: list[AenvError] = []
    loop, pending = asyncio.get_running_loop(), set(asked)
    ends: float | None = None
    try:
        while pending and (ends is None or loop.time() < ends):
            timeout_s = None if ends is None else ends - loop.time()
            done, pending = await asyncio.wait(
                pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                try:
                    answers.append(task.result())
                except AenvError as exc:
                    causes.append(exc)
                except TimeoutError:
                    why = f"a host did not answer within {HOST_START_DEADLINE_S:g} s"
                    causes.append(DeadlineExceeded(why))
            if answers and ends is None:
                ends = loop.time() + patience_s
    finally:
        for task in pending:
            task.cancel()
    return answers, causes
