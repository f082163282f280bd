"""The controller: one detached actor that starts hosts, finds instances and ends orphans.

It may die at any time: Ray restarts it, and it finds all its state again, because hosts are named
actors, and hosts know their instances. Calls continue without it: they do not pass through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import aenv_ray
from aenv_ray import logs
from aenv_ray.actors.controller.admission import Admission, Reservation, by_node
from aenv_ray.actors.controller.draining import NodeState
from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.controller.host_queries import (
    count_instances_on,
    count_pools,
    count_processes,
    list_instances_on,
    without_outer,
)
from aenv_ray.actors.controller.metrics import ClusterMetrics
from aenv_ray.actors.controller.node_drains import NodeDrains
from aenv_ray.actors.controller.orphan_cleanup import (
    OrphanCleanup,
    forget_orphans_task,
    orphan_cleanup_task,
)
from aenv_ray.actors.controller.placement import (
    SHARED_PREFIX,
    HostLoad,
    Need,
    node_for,
    usable,
)
from aenv_ray.actors.controller.remote_controller import RemoteController
from aenv_ray.actors.controller.spare_hosts import SpareHostKind, SpareHosts
from aenv_ray.actors.host.environment_relay import OUTER_LABEL, ConnectInner
from aenv_ray.actors.host.host_counters import ANY_ENGINE, EngineOutcome, HostMeasures, outcome_of
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.host.start_messages import ProjectMissing, decode_answer, encode_specs
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.config import settings
from aenv_ray.daemon import protect_from_oom_killer
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    FabricUnavailable,
    InstanceNotFound,
    InstanceReleased,
)
from aenv_ray.ids import InstanceId, environment_part
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec

logger = logging.getLogger(__name__)

_NO_HOSTS: Final = frozenset({ray_api.CONTROLLER_NAME, ray_api.HUB_NAME})
MEASURE_S: Final = 15.0
"""Interval at which the metrics are set."""
LOOK_S: Final = 1.0
"""Interval of the watch for ended Ray jobs and dead hosts, whose instances then end."""
JOB_RETELL_S: Final = 120.0
"""How long hosts are repeatedly told that a job has ended; longer than a start takes."""
CONTROL_DEADLINE_S: Final = 30.0
"""A restarted host answers within this; Ray notices a dead node after up to twenty seconds."""
LEARN_S: Final = 10.0
"""How long to wait for slow nodes when they are asked which engines they can run."""
_ANYWHERE: Final = frozenset({"process", "fake"})
"""Engines that every node can run, except nodes that declare another engine."""
DEDICATED_TRIES: Final = 2
"""Nodes tried for a dedicated host: Ray may not know yet that one has died."""


DedicatedAnswer = tuple[RemoteHost | None, InstanceInfo | AenvError | ProjectMissing]
"""A dedicated host actor, if one was created, and its answer to the start of its instance."""


class Controller:
    """Starts hosts, finds instances, ends orphans.

    Args:
        inner_instances: Passed on to each host, see `aenv_ray.actors.fabric.inner_instances`.
    """

    def __init__(self, inner_instances: ConnectInner | None = None) -> None:
        protect_from_oom_killer()
        logs.configure("controller")
        self._hosts = HostDirectory(inner_instances)
        self._orphans = OrphanCleanup(
            self._end_orphans_on, lambda: asyncio.to_thread(ray_api.alive_nodes)
        )
        self._where: dict[str, str] = {}
        self._requested: dict[str, str] = {}
        """By claimed spare host: the instance id that was requested, a key of `_where`."""
        self._spare_hosts = SpareHosts(
            self._hosts, lambda: bool(self._creating), settings().spare_hosts
        )
        self._taken_over = asyncio.Event()
        """Set once this controller knows the hosts of an earlier controller."""
        self._creating: set[str] = set()
        self._doomed: set[str] = set()
        self._drains = NodeDrains(
            self._hosts, self._ask, self._instances_by_node, self._note_draining
        )
        self._dedicated: dict[str, str | None] = {}  # watched dedicated hosts, with their nodes
        self._places: dict[str, int] = {}
        """`InstanceSpec.places` of the instances of dedicated hosts, by host; if missing: 1."""
        self._admission = Admission(
            self._hosts,
            lambda: by_node(self._dedicated, self._places),
            joining=settings().joining_engines,
        )
        self._seen_dead: set[str] = set()
        self._dead_since: dict[str, float] = {}
        self._live_nodes: set[str] = set()
        # Nodes that were lost while there was no controller are unknown.
        self._lost_nodes: set[str] = {"before"} if ray_api.was_restarted() else set()
        """Lost nodes whose inner instances have not all been ended yet."""
        self._metrics = ClusterMetrics(is_continued=ray_api.was_restarted())
        # Ray runs the constructor on the actor's loop, also after a restart that nobody notices.
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch_for_ever())
        self._measurer = loop.create_task(self._measure_for_ever())

    async def ping(self) -> str:
        """Return the version of aenv-ray on the head; an answer means that the fabric is up."""
        return aenv_ray.__version__

    # --- creating ---------------------------------------------------------------------------

    async def shared_hosts(
        self, patience_s: float, wanted: int, need: Need
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """See `Admission.shared_hosts`."""
        return await self._admission.shared_hosts(patience_s, wanted, need)

    async def reserve(
        self,
        ids: Sequence[InstanceId],
        owner: str,
        job_id: str | None,
        wait_s: float,
        is_divisible: bool,
        need: Need,
    ) -> list[Reservation]:
        """See `Admission.wait`."""
        # A divisible create that is refused asks again, so it is not counted.
        with self._counting_refusals(0 if is_divisible else len(ids)):
            return await self._admission.wait(ids, owner, job_id, wait_s, is_divisible, need)

    @contextlib.contextmanager
    def _counting_refusals(self, creates: int) -> Iterator[None]:
        try:
            yield
        except CapacityExceeded as exc:
            self._metrics.created(EngineOutcome(ANY_ENGINE, exc.code), creates)
            raise

    async def queue_reason(self) -> str:
        """See `Admission.reason`."""
        return self._admission.reason()

    async def is_queued(self, ids: Sequence[InstanceId]) -> bool:
        """See `Admission.is_waiting`."""
        return self._admission.is_waiting(ids)

    async def create_dedicated(
        self, specs: Sequence[InstanceSpec], wait_s: float
    ) -> list[DedicatedAnswer]:
        """Create a host and an instance for each spec; wait for room in a full cluster.

        Raises:
            CapacityExceeded: There was no room within `wait_s`.
        """
        await self._taken_over.wait()  # Ray repeats this call after the controller was restarted
        with self._counting_refusals(len(specs)):
            reserved = await self._admission.wait_for_dedicated(specs, wait_s)
        nodes = {i: self._hosts.nodes.get(name) for name, _, ids in reserved for i in ids}
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._create_one(spec, nodes.get(spec.instance_id)))
                for spec in specs
            ]
        for _, host, ids in reserved:
            host.reserve.remote(ids, 0.0, 1)  # they count as dedicated from now on
        return self._counted(specs, [task.result() for task in tasks])

    async def start_dedicated(self, specs: Sequence[InstanceSpec]) -> list[DedicatedAnswer]:
        """Start instances on the hosts that `create_dedicated` made and that lacked the project."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._start_one(spec)) for spec in specs]
        return self._counted(specs, [task.result() for task in tasks])

    def _counted(
        self, specs: Sequence[InstanceSpec], answers: list[DedicatedAnswer]
    ) -> list[DedicatedAnswer]:
        for spec, (_, answer) in zip(specs, answers, strict=True):
            if not isinstance(answer, ProjectMissing):
                self._metrics.created(outcome_of(spec, answer))
        return answers

    async def _create_one(self, spec: InstanceSpec, node: str | None) -> DedicatedAnswer:
        is_spare_host, host, answer = await self._create_on(spec, node, may_be_spare_host=True)
        if is_spare_host and isinstance(answer, FabricUnavailable):
            # It has died. If it started a sandbox, that is ended as an orphan of this spare host.
            _, host, answer = await self._create_on(spec, node, may_be_spare_host=False)
        return host, answer

    async def _create_on(
        self, spec: InstanceSpec, node: str | None, *, may_be_spare_host: bool
    ) -> tuple[bool, RemoteHost | None, InstanceInfo | AenvError | ProjectMissing]:
        """Create an instance on its own host; return whether it is a spare host, and its answer."""
        self._creating.add(spec.instance_id)
        try:
            is_spare_host = await self._dedicated_host(
                spec, node, may_be_spare_host=may_be_spare_host
            )
        except BaseException as exc:
            self._note_created(spec.instance_id)
            if isinstance(exc, AenvError):
                return False, None, exc
            raise
        return is_spare_host, *await self._start_one(spec)

    async def _start_one(self, spec: InstanceSpec) -> DedicatedAnswer:
        """Start an instance on its own host. If the instance does not start, end the host."""
        answer: InstanceInfo | AenvError | ProjectMissing | None = None
        name = self._own_host(spec.instance_id)
        host = self._hosts.actors.get(name)
        try:
            if host is None:
                raise FabricUnavailable(
                    f"the host of {spec.instance_id} is gone", hint="create the instance again"
                )
            with ray_api.translated(f"creating {spec.instance_id}"):
                answers = decode_answer(await host.start.remote(encode_specs([spec]), ""))
            answer = answers if isinstance(answers, ProjectMissing) else answers[0][0]
            if spec.instance_id in self._doomed:
                await self._release_on(name, [spec.instance_id])
                answer = InstanceReleased(
                    f"{spec.instance_id} was released while it started",
                    instance_id=spec.instance_id,
                    hint="create another instance",
                )
        except AenvError as exc:
            answer = exc
        finally:
            if not isinstance(answer, ProjectMissing):  # otherwise the create is still in progress
                self._note_created(spec.instance_id)
        if isinstance(answer, AenvError) and host is not None:
            self._hosts.actors.pop(name, None)
            ray_api.kill(host)  # the watch ends any sandbox that it left
            if name != spec.instance_id:
                self._where.pop(spec.instance_id, None)
        if isinstance(answer, InstanceInfo):
            kind = SpareHostKind(answer.node_id, environment_part(spec.instance_id))
            self._spare_hosts.created(kind, answer.engine)
        return host, answer

    def _own_host(self, instance_id: str) -> str:
        """Return the name that the dedicated host of an instance has, if there is one."""
        return self._where.get(instance_id, instance_id)

    def _note_created(self, instance_id: str) -> None:
        """Note that a create has ended, successfully or not."""
        self._creating.discard(instance_id)
        self._doomed.discard(instance_id)

    async def _dedicated_host(
        self, spec: InstanceSpec, node: str | None, *, may_be_spare_host: bool
    ) -> bool:
        """Claim a spare host for an instance, or start a host that is named after it.

        The host runs on `node`, where the instance's slot was reserved. None: on the node that the
        spec prefers, else on the one with the fewest hosts.

        Returns:
            Whether it is a spare host.

        Raises:
            FabricUnavailable: No node starts a host, or none can run the instance's engine.
        """
        instance_id = spec.instance_id
        if may_be_spare_host and self._own_host(instance_id) != instance_id:
            return True  # claimed for this instance before this controller was restarted
        refusals: list[FabricUnavailable] = []
        for _ in range(DEDICATED_TRIES):
            nodes = await self._nodes_for(spec.possible_engines)
            willing = [candidate for candidate in nodes if self._hosts.refusal(candidate) is None]
            chosen = node or node_for(spec, willing or nodes, self._hosts.nodes.values())
            if chosen is None:
                break
            if may_be_spare_host and await self._claim_spare_host(spec, chosen):
                return True
            try:
                # If the host does not start, no sandbox has this id: another node may use it.
                await self._hosts.make(instance_id, chosen, ActorDensity.DEDICATED)
            except FabricUnavailable as exc:
                refusals.append(exc)
                continue
            self._where[instance_id] = instance_id
            self._dedicated[instance_id] = chosen
            self._places[instance_id] = spec.places
            return False
        why = "; ".join(exc.message for exc in refusals) or "the cluster has no node"
        raise FabricUnavailable(
            f"no node starts a host for {instance_id}: {why}",
            hint="check the nodes with: ray status",
        )

    async def _nodes_for(self, engines: Sequence[str]) -> dict[str, NodeFacts]:
        """Return the nodes that can run one of these engines.

        Raises:
            FabricUnavailable: None can; the message names the engines that the nodes have.
        """
        nodes = usable(await asyncio.to_thread(ray_api.alive_nodes))

        def able() -> dict[str, NodeFacts]:
            return {n: f for n, f in nodes.items() if self._hosts.may_run(n, f, engines)}

        unknown = [n for n, f in nodes.items() if f.engine is None and n not in self._hosts.engines]
        has_choice = len(nodes) > 1 and _ANYWHERE.isdisjoint(engines)
        if nodes and (not able() or (unknown and has_choice)):
            # Ask again: the engines of a node can change, for example if its Docker daemon starts.
            await self._admission.shared_hosts(LEARN_S, 0, Need(tuple(engines)))
        return able()

    async def _claim_spare_host(self, spec: InstanceSpec, node: str) -> bool:
        kind = SpareHostKind(node, environment_part(spec.instance_id))
        name = await self._spare_hosts.claim(kind, spec.instance_id)
        if name is None:
            return False
        self._note_claimed(name, spec.instance_id)
        self._dedicated[name] = node
        self._places[name] = spec.places
        return True

    def _note_claimed(self, name: str, instance_id: str) -> None:
        self._where |= {name: name, instance_id: name}
        self._requested[name] = instance_id

    # --- finding ----------------------------------------------------------------------------

    async def locate(self, instance_id: InstanceId) -> tuple[RemoteHost, InstanceInfo]:
        """Return the host of an instance, and its info.

        Raises:
            InstanceNotFound: No host has it.
            FabricUnavailable: A live host that may have it does not answer.
        """
        names = await self._hosts.find(await self._may_have(instance_id))
        known = self._where.get(instance_id)
        first = [name for name in names if name == known]
        silent: dict[str, FabricUnavailable] = {}
        for group in (first, [name for name in names if name not in first]):
            asked = {
                asyncio.create_task(self._info_on(name, instance_id, silent)) for name in group
            }
            for task in asyncio.as_completed(asked):
                found = await task
                if found is not None:
                    for other in asked:
                        other.cancel()
                    self._where[instance_id] = found[1].host
                    return found
        for name, error in silent.items():
            raise FabricUnavailable(
                f"{instance_id} may be on host {name}, which does not answer: {error.message}",
                hint="try again: a dead host is replaced",
            )
        raise InstanceNotFound(
            f"there is no instance {instance_id}",
            instance_id=instance_id,
            hint="aenv_ray.list_instances() lists the live instances",
        )

    async def _info_on(
        self, name: str, instance_id: str, silent: dict[str, FabricUnavailable]
    ) -> tuple[RemoteHost, InstanceInfo] | None:
        try:
            info = await self._ask(name, "info", instance_id)
        except AenvError as exc:
            # A host that ended for good has no instances; a busy or hanging one may have this one.
            if isinstance(exc, FabricUnavailable) and not ray_api.is_of_a_dead_actor(exc):
                silent[name] = exc
            return None
        host = self._hosts.actors.get(name)
        return None if host is None else (host, info)  # None: it ended after it had answered

    async def _ask(self, name: str, operation: str, *args: Any) -> Any:
        """Run an operation of a host.

        Raises:
            AenvError: What the host raised.
            FabricUnavailable: It is gone, does not answer, or failed otherwise.
        """
        host = self._hosts.actors.get(name)
        try:
            with ray_api.translated(f"{operation} on host {name}"):
                async with asyncio.timeout(CONTROL_DEADLINE_S):
                    if host is not None:
                        return await getattr(host, operation).remote(*args)
        except AenvError:
            raise
        except Exception as exc:  # one failing host must not fail the others
            raise FabricUnavailable(f"{operation} on host {name}: {exc!r}") from exc
        raise FabricUnavailable(f"{operation} on host {name}: the host is gone")

    async def _may_have(self, instance_id: str) -> list[str]:
        """Return the names of the hosts that may have an instance: its own, or all shared ones."""
        names = await asyncio.to_thread(ray_api.actor_names)
        own = [
            name for name in names if name in {instance_id, self._claimed_spare_host(instance_id)}
        ]
        return own or [name for name in names if name.startswith(SHARED_PREFIX)]

    def _claimed_spare_host(self, instance_id: str) -> str | None:
        """Return the spare host that was claimed for this id, or None."""
        name = self._where.get(instance_id)
        return name if name in self._requested else None

    def _forget(self, name: str) -> None:
        self._hosts.forget(name)
        self._where.pop(name, None)
        self._where.pop(self._requested.pop(name, ""), None)

    def _forget_dedicated(self, name: str) -> None:
        self._dedicated.pop(name, None)
        self._places.pop(name, None)

    async def list_instances(self) -> list[InstanceInfo]:
        """Return the live instances of all hosts."""
        return (await self.account_for(()))[0]

    async def account_for(self, ids: Collection[str]) -> tuple[list[InstanceInfo], set[str]]:
        """Return the live instances, and the ids among `ids` that may be on a silent host."""
        names = await asyncio.to_thread(ray_api.actor_names)
        # These hosts may have no instance yet.
        creating = {self._own_host(instance_id) for instance_id in self._creating}
        hosts = await self._hosts.find([n for n in names if n not in self._no_hosts()])
        seen = await list_instances_on(self._ask, hosts)
        doubtful = seen.doubtful(ids, self._where)
        for name in seen.unheard:
            self._forget(name)
        self._where = seen.located(hosts, self._where)
        self._hosts.nodes |= {info.host: info.node_id for info in seen.found}
        dedicated = (info for info in seen.found if info.density is ActorDensity.DEDICATED)
        self._places |= {info.host: info.places for info in dedicated if info.places > 1}
        for name in seen.vacant(hosts) - creating:
            if not name.startswith(SHARED_PREFIX):
                self._forget(name)
                self._forget_dedicated(name)  # its instance has ended, and the host may too
        return sorted(seen.found, key=lambda info: info.created_at), doubtful

    def _no_hosts(self) -> Collection[str]:
        """Return the names of our actors that are no hosts with instances."""
        return _NO_HOSTS | self._spare_hosts.names

    async def pools(self) -> dict[str, int]:
        """Return how many warm sandboxes all hosts have, by environment reference.

        Hosts that do not answer are left out.
        """
        return await count_pools(self._hosts, self._ask)

    async def count_processes(self) -> int:
        """Return how many processes, containers and pods of sandboxes run on all nodes.

        Raises:
            FabricUnavailable: A live node, or the daemon or API of its sandboxes, does not answer.
        """
        return await count_processes(self._hosts, self._ask)

    # --- draining ---------------------------------------------------------------------------
    # Workers of other versions drain with these, too: keep their arguments, and `NodeState`, as
    # other versions know them.

    async def drain(self, name: str, is_leaving: bool = False) -> NodeState:
        """Stop new instances on a node, see `NodeDrains.drain`."""
        return await self._drains.drain(name, is_leaving=is_leaving)

    async def undrain(self, name: str) -> NodeState:
        """Let a node take instances again, see `NodeDrains.undrain`."""
        return await self._drains.undrain(name)

    async def nodes(self) -> list[NodeState]:
        """Return the state of each live node."""
        return await self._drains.nodes()

    def _note_draining(self) -> None:
        self._admission.forget_nodes()
        self._spare_hosts.tick((), self._drains.draining)

    async def _instances_by_node(self, nodes: Collection[str]) -> tuple[Counter[str], Counter[str]]:
        """Return on each node the number of instances that run or start, and of silent hosts."""
        names = await asyncio.to_thread(ray_api.actor_names)
        hosts = await self._hosts.find([n for n in names if n not in self._no_hosts()])
        counts, silent = await count_instances_on(self._ask, hosts)
        self._metrics.heard(counts)
        where = await asyncio.to_thread(ray_api.actor_nodes)  # now, as some may have restarted
        creating = {self._own_host(instance_id) for instance_id in self._creating}
        instances: Counter[str] = Counter()
        for name in counts.keys() | creating:
            node = where.get(name, self._hosts.nodes.get(name, ""))
            instances[node] += max(counts.get(name, 0), name in creating)
        # One that has been restarting for so long could be on any node.
        doubtful = Counter(
            n for name in silent for n in ([where[name]] if name in where else nodes)
        )
        return instances, doubtful

    # --- releasing --------------------------------------------------------------------------

    async def release(self, instance_ids: Sequence[InstanceId], host: str = "") -> None:
        """End instances, in any state and on any host; idempotent.

        Args:
            instance_ids: The instances.
            host: Id of the actor that hosts them, if the caller knows it. Then the hosts of all
                nodes are asked only about those that it does not know.
        """
        is_known = self._where.keys() >= set(instance_ids)
        likely = "" if is_known else self._hosts.name_of(host)
        self._admission.forget(instance_ids)
        self._doomed |= self._creating.intersection(instance_ids)
        groups: dict[str, list[InstanceId]] = {}
        for instance_id in instance_ids:
            if (name := self._where.get(instance_id, likely)) in self._hosts.actors:
                groups.setdefault(str(name), []).append(instance_id)
        left = set(instance_ids) - await self._release_groups(groups)
        if left:
            left -= await self._release_anywhere(left)
        left -= self._creating
        if left:
            # No host knows them: they never existed, ended long ago, or their host was killed.
            nodes = {self._hosts.nodes.get(self._claimed_spare_host(i) or i) for i in left}
            await self._orphans.end(nodes, left)
            # A restarted host may have adopted them in the meantime.
            left -= await self._release_anywhere(left)
        for instance_id in instance_ids:
            name = self._claimed_spare_host(instance_id) or instance_id
            self._where.pop(instance_id, None)
            if instance_id not in left:
                self._forget(name)
                self._forget_dedicated(name)  # its dedicated host may end now

    async def _release_anywhere(self, ids: Collection[InstanceId]) -> set[InstanceId]:
        """End instances on their dedicated or on shared hosts; return those that a host knew."""
        names = await asyncio.to_thread(ray_api.actor_names)
        hosts = {i: self._claimed_spare_host(i) or i for i in ids}
        own = {host: [i] for i, host in hosts.items() if host in names}
        others = sorted(i for i, host in hosts.items() if host not in own)
        shared = {n: others for n in names if n.startswith(SHARED_PREFIX) and others}
        return await self._release_groups(own | shared)

    async def _release_groups(self, groups: dict[str, list[InstanceId]]) -> set[InstanceId]:
        """End instances, given by host name; return those that a host knew."""
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._release_on(name, groups[name]))
                for name in await self._hosts.find(groups)
            ]
        return {instance_id for task in asked for instance_id in task.result()}

    async def _release_on(self, name: str, ids: list[InstanceId]) -> list[InstanceId]:
        try:
            known: list[InstanceId] = await self._ask(name, "release", ids)
        except AenvError as exc:
            logger.warning("releasing %d instances on %s failed: %s", len(ids), name, exc)
            self._hosts.actors.pop(name, None)
            return []
        return known

    async def _end_orphans_on(self, node: str, ids: list[str]) -> None:
        where = {"scheduling_strategy": ray_api.pinned(node)}
        with ray_api.translated(f"ending orphans on node {node[:8]}"):
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                ended = await orphan_cleanup_task().options(**where).remote(ids)
            if ended.outer:
                await self.release(ended.inner)
                async with asyncio.timeout(CONTROL_DEADLINE_S):
                    await forget_orphans_task().options(**where).remote(ended.outer)

    # --- owners -----------------------------------------------------------------------------

    async def _watch_for_ever(self) -> None:
        """End the instances of ended Ray jobs and of dead hosts, until the actor ends."""
        if ray_api.was_restarted():
            await self._guarded("taking over from an earlier controller", self._take_over())
        self._taken_over.set()
        while True:
            await self._guarded("ending the instances of ended jobs", self._end_jobs())
            await self._guarded("retrying to end orphans", self._orphans.retry())
            await self._guarded("ending the instances of dead hosts", self._end_hosts())
            await self._guarded(
                "ending the inner instances of lost nodes", self._end_inner_of_lost_nodes()
            )
            await self._guarded("draining nodes", self._drains.keep())
            await asyncio.sleep(LOOK_S)

    async def _measure_for_ever(self) -> None:
        while True:
            await self._guarded("measuring the cluster", self._measure())
            await asyncio.sleep(MEASURE_S)

    async def _measure(self) -> None:
        alive = await asyncio.to_thread(ray_api.actor_names)
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        names = self._hosts.actors.keys() - self._spare_hosts.names
        hosts = {name: self._hosts.nodes.get(name, "") for name in names}
        async with asyncio.TaskGroup() as group:
            asked = {name: group.create_task(self._measures_of(name)) for name in names}
        found = {name: m for name, task in asked.items() if (m := task.result()) is not None}
        loads = [
            HostLoad(name, hosts[name], m.instances, m.capacity)
            for name, m in found.items()
            if name.startswith(SHARED_PREFIX)
        ]
        self._metrics.note(nodes, loads, self._admission.queued())
        self._metrics.happened(found, hosts, set(alive), nodes.keys())

    async def _measures_of(self, name: str) -> HostMeasures | None:
        """Return what a host reports; None if it does not answer."""
        try:
            measures: HostMeasures = await self._ask(name, "measures")
        except AenvError as exc:
            logger.info("host %s is missing from the metrics: %s", name, exc.message)
            return None
        return measures

    async def _guarded(self, what: str, look: Any) -> None:
        try:
            await look
        except Exception as exc:  # noqa: BLE001  # the watch continues
            logger.warning("%s failed: %r", what, exc)

    async def _take_over(self) -> None:
        await self._find_claimed()
        await self.list_instances()
        await self._admission.open()
        await self._orphans.end({None}, ())

    async def _find_claimed(self) -> None:
        """End the spare hosts of an earlier controller, and find those that it has claimed."""
        names = await asyncio.to_thread(ray_api.actor_names)
        hosts = await self._hosts.find(
            n for n in names if n not in _NO_HOSTS and not n.startswith(SHARED_PREFIX)
        )
        async with asyncio.TaskGroup() as group:
            for name in hosts:
                group.create_task(self._retire(name))

    async def _retire(self, name: str) -> None:
        try:
            claimed_for: str | None = await self._ask(name, "retire")
        except AenvError as exc:
            logger.warning("cannot ask host %s which instance claimed it: %s", name, exc)
            return
        if claimed_for is None:
            self._forget(name)
        elif claimed_for != name:
            self._note_claimed(name, claimed_for)

    async def _end_hosts(self) -> None:
        before = dict(self._dedicated)  # copied first: Ray's list may lack hosts made later
        spare_hosts = self._spare_hosts.ready
        names = set(await asyncio.to_thread(ray_api.actor_names))
        self._spare_hosts.tick(spare_hosts - names, self._drains.draining)
        for name in names.intersection(self._hosts.actors) - self._spare_hosts.names:
            if not name.startswith(SHARED_PREFIX):
                self._dedicated[name] = self._hosts.nodes.get(name)
        gone = {name: node for name, node in before.items() if name not in names}
        if gone:
            await self._orphans.end(set(gone.values()), ())
        for name in gone:
            self._note_created(self._requested.get(name, name))
            self._forget(name)
            self._forget_dedicated(name)

    async def _end_inner_of_lost_nodes(self) -> None:
        """End inner instances whose outer one was lost with its node, its host and its records."""
        nodes = set(await asyncio.to_thread(ray_api.alive_nodes))
        self._lost_nodes |= self._live_nodes - nodes
        self._live_nodes = nodes
        if not self._lost_nodes:
            return
        lost = set(self._lost_nodes)
        infos = await self.list_instances()
        outer = {info.labels[OUTER_LABEL] for info in infos if OUTER_LABEL in info.labels}
        found, doubtful = await self.account_for(outer)
        left = without_outer(found, doubtful)
        if left:
            await self.release(left)
        if not doubtful:
            self._lost_nodes -= lost

    async def _end_jobs(self) -> None:
        dead = await asyncio.to_thread(ray_api.dead_jobs) - self._seen_dead
        if not dead:
            return
        self._admission.forget_jobs(dead)
        await self.list_instances()
        async with asyncio.TaskGroup() as group:
            for name in list(self._hosts.actors):
                group.create_task(self._end_jobs_on(name, dead))
        now = asyncio.get_running_loop().time()
        for job in dead:
            # Tell hosts repeatedly: an instance may come up after its job has ended.
            if now - self._dead_since.setdefault(job, now) > JOB_RETELL_S:
                self._seen_dead.add(job)

    async def _end_jobs_on(self, name: str, jobs: set[str]) -> None:
        try:
            await self._ask(name, "release_jobs", sorted(jobs))
        except AenvError as exc:
            logger.warning("ending the instances of ended jobs on %s failed: %s", name, exc)
            self._forget(name)


@functools.cache
def controller_actor() -> Any:
    """Return the actor class; cached, because each `ray.remote` exports the class again."""
    return ray_api.restartable_actor(Controller, max_concurrency=10_000)


def ensure_controller(inner_instances: ConnectInner) -> RemoteController:
    """Return the controller of this cluster; start it if necessary.

    Args:
        inner_instances: As for `Controller`.
    """
    controller: RemoteController = (
        controller_actor()
        .options(
            name=ray_api.CONTROLLER_NAME,
            namespace=ray_api.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            **ray_api.on_head(),
        )
        .remote(inner_instances)
    )
    return controller
