"""The create protocol: from specs to running instances, all of a group or none.

Drivers run it blocking, and the gateway runs it in its event loop, see
`aenv_ray.actors.fabric.waits`.

* Shared instances: this process chooses the shared hosts and asks them directly to start the
  instances. If the cluster is full, the instances wait in the controller's queue.
* Dedicated instances: the controller creates them, each with its own host actor.
* If a host's node does not have the project, the host answers `ProjectMissing`. Only then is the
  project packed and sent, once to each node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple, Protocol

from aenv_ray.actors.calls.introduction import Introduction
from aenv_ray.actors.controller.placement import DEDICATED_PER_NODE, check_capacity, may_grow
from aenv_ray.actors.controller.remote_controller import RemoteController
from aenv_ray.actors.fabric.quota_client import QuotaClaim, QuotaClient
from aenv_ray.actors.fabric.shared_hosts import Share, SharedHosts, need_of
from aenv_ray.actors.fabric.waits import OnWait, WaitNotices, Waits
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.host.start_messages import ProjectMissing, decode_answer, encode_specs
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.engines.process import virtual_environment
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    FabricUnavailable,
    InstanceError,
    QuotaExceeded,
)
from aenv_ray.ids import InstanceId, new_instance_id
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project.project import Project
from aenv_ray.units import counted

CREATE_DEADLINE_S: Final = 300.0
"""Longest wait for a create; it is long because a virtual environment may be built first."""
STARTS_PER_HOST: Final = 2
"""Requests of one `create_each` that a host has at once. With two, the next request is already at
the host while the answer to the first one travels."""
INSTANCES_PER_START: Final = 32
"""Independent instances in one such request. It is answered when the last of them runs."""
_LEAST_QUEUE_S: Final = 1.0
_MOST_SENT: Final = 4096
_REASON_S: Final = 2.0


class Created(NamedTuple):
    """A running instance. Its id is ``info.id``, which differs from its spec's if it was warm."""

    spec: InstanceSpec
    host: RemoteHost
    """The host actor."""
    info: InstanceInfo
    introduction: Introduction | None = None
    """Introduction to its sandbox, if this process asked for one and is on the same node."""


class _Started(NamedTuple):
    """The outcome of one spec."""

    spec: InstanceSpec
    host: RemoteHost
    outcome: InstanceInfo | AenvError
    introduction: Introduction | None = None

    def result(self) -> Created | AenvError:
        if isinstance(self.outcome, AenvError):
            return self.outcome
        update = {"engine": self.outcome.engine, "engines": ()}
        spec = self.spec.model_copy(update=update) if self.spec.engines else self.spec
        return Created(spec, self.host, self.outcome, self.introduction)


OnQueue = Callable[[bool], None]
"""Called with True when a create begins to wait for room in a full cluster, with False after it."""
_Refusals = dict[str, AenvError]
"""By host name: why the host started no instance of its share."""


class CreateListener(Protocol):
    """Receives the outcomes of `CreateProtocol.create_each`."""

    def on_outcome(self, outcome: Created | AenvError) -> None:
        """One instance runs, or has failed."""

    def on_queued(self, count: int) -> None:
        """Some instances wait for room in the cluster."""

    def on_placed(self, count: int) -> None:
        """Some of the waiting instances have room now."""


class _Each:
    """One `create_each`.

    Args:
        source: The project.
        queue_s: Longest wait for room.
        listener: Receives the outcomes.
        tried: Ids of instances that may run and were not reported yet; this object updates it.
        withheld: Gets the created instances instead of the listener. None: the listener gets them.
    """

    def __init__(
        self,
        source: Project,
        queue_s: float,
        listener: CreateListener,
        tried: set[InstanceId],
        withheld: list[Created] | None,
    ) -> None:
        self.source = source
        self.queue_s = queue_s
        self.listener = listener
        self._tried = tried
        self._withheld = withheld

    def tell(self, started: Sequence[_Started]) -> None:
        for one in started:
            self._tried.discard(one.spec.instance_id)
            result = one.result()
            if self._withheld is not None and isinstance(result, Created):
                self._withheld.append(result)
            else:
                self.listener.on_outcome(result)

    def fail(self, specs: Sequence[InstanceSpec], error: AenvError) -> None:
        for spec in specs:
            self._tried.discard(spec.instance_id)
            self.listener.on_outcome(error)

    def replace(self, specs: Sequence[InstanceSpec], others: Sequence[InstanceSpec]) -> None:
        self._tried -= {spec.instance_id for spec in specs}
        self._tried |= {spec.instance_id for spec in others}

    async def guarded(self, specs: Sequence[InstanceSpec], work: Coroutine[Any, Any, None]) -> None:
        """Run a step for some instances; an AenvError makes these fail, and no others."""
        try:
            await work
        except AenvError as exc:
            self.fail(specs, exc)


class CreateProtocol:
    """Creates instances over one connection to the fabric.

    Args:
        controller: The controller actor.
        waits: How this process waits.
        notices: Logs that creates take long. None: nothing is logged.
        scope: Scope of this process, see `ray_api.session_scope`. Hosts on the same node introduce
            this process to the shared instances that they start. "": no introductions.
        quotas: The quotas as this process knows them. None: nobody else asks for them.

    Attributes:
        waits: As given.
        shared_hosts: The shared hosts as this connection knows them.
    """

    def __init__(
        self,
        controller: RemoteController,
        waits: Waits,
        notices: WaitNotices | None = None,
        scope: str = "",
        quotas: QuotaClient | None = None,
    ) -> None:
        self._controller = controller
        self.waits = waits
        self._notices = notices
        self._scope = scope
        self._quotas = quotas or QuotaClient()
        self.shared_hosts = SharedHosts(controller, waits)
        self._sending = waits.lock()
        self._sends = 0
        self._starting: dict[str, asyncio.Semaphore] = {}
        """By host name; used by `create_each` only."""
        self._sent_as: BoundedCache[tuple[str, str], int] = BoundedCache(_MOST_SENT)
        """The last send of a project to a node, by node id and digest."""

    async def create(
        self,
        source: Project,
        specs: Sequence[InstanceSpec],
        density: ActorDensity,
        queue_s: float,
        *,
        subjects: frozenset[str] = frozenset(),
        may_rename: bool = True,
        on_queue: OnQueue | None = None,
    ) -> list[Created]:
        """Create all instances of a group, or none.

        If it fails or is cancelled, the instances that were started are released, and none counts
        in a quota of `subjects`.

        It waits for room in a full cluster for `queue_s`. If a host fails, `may_rename` has the
        group started again on other hosts under new ids; otherwise the create fails. `on_queue` is
        told of the wait; of that of dedicated instances only after a few seconds.

        Raises:
            AenvError: As `aenv_ray.create`.
        """
        claim = await self._claim(specs, subjects, queue_s)
        async with self._counted(claim) as counted:
            tried = [spec.instance_id for spec in specs]
            try:
                if density is ActorDensity.DEDICATED:
                    started = await self._create_dedicated(source, specs, queue_s, on_queue)
                else:
                    started = await self._create_shared(
                        source,
                        list(specs),
                        queue_s,
                        tried if may_rename else None,
                        on_queue or (lambda _: None),
                    )
            except BaseException:
                # If Ray has ended, send nothing: that would start another local Ray.
                if ray_api.is_connected():
                    self._controller.release.remote(tried)
                raise
            results = [one.result() for one in started]
            created = [one for one in results if isinstance(one, Created)]
            failures = [one for one in results if isinstance(one, AenvError)]
            if failures:
                await self._release([one.info.id for one in created])
                raise _group_error(failures[0], len(failures), len(specs))
            counted.extend(created)
        return created

    async def check_size(self, count: int, density: ActorDensity, places: int = 1) -> None:
        """Refuse a group that would not fit into an empty cluster, before its specs are made.

        Small groups cost nothing. `places` is `InstanceSpec.places` of each instance.

        Raises:
            CapacityExceeded: It would not fit.
            FabricUnavailable: No node has a host.
        """
        if count * places <= DEDICATED_PER_NODE:
            return
        nodes = await self.waits.run(ray_api.alive_nodes)
        if may_grow(nodes.values()):
            return
        if density is ActorDensity.SHARED:
            await self.shared_hosts.check_size(count, places)
        else:
            check_capacity(count, DEDICATED_PER_NODE * len(nodes))

    async def _release(self, ids: Sequence[InstanceId]) -> None:
        reference = self._controller.release.remote(list(ids))
        await self.waits.result(
            reference, f"releasing {counted(len(ids), 'instance')}", CREATE_DEADLINE_S
        )

    # --- quotas ---------------------------------------------------------------------------------

    async def _claim(
        self, specs: Sequence[InstanceSpec], subjects: frozenset[str], queue_s: float
    ) -> QuotaClaim | None:
        if not subjects:
            return None
        return await self.waits.run(lambda: self._quotas.claim(specs, subjects, queue_s))

    @asynccontextmanager
    async def _counted(self, claim: QuotaClaim | None) -> AsyncIterator[list[Created]]:
        """Claim quotas for the block, and replace the claim by leases of what it has created.

        It adds those instances to the yielded list. If it fails or is cancelled, or if the claim
        or the replacement is, they are released and the claim is given up.
        """
        created: list[Created] = []
        if claim is None:
            yield created
            return
        try:
            await self.waits.run(claim.take)
            yield created
            pairs = [(one.spec, one.info.id) for one in created]
            await self.waits.run(lambda: claim.settle(pairs))
        except BaseException:
            if ray_api.is_connected():
                if created:
                    self._controller.release.remote([one.info.id for one in created])
                await self.waits.run(claim.give_up, is_cleanup=True)
            raise

    # --- dedicated ------------------------------------------------------------------------------

    async def _create_dedicated(
        self,
        source: Project,
        specs: Sequence[InstanceSpec],
        queue_s: float,
        on_queue: OnQueue | None = None,
    ) -> list[_Started]:
        mark = self._sends
        reference = self._controller.create_dedicated.remote(list(specs), queue_s)
        what = f"creating {len(specs)} of {source.reference}"
        if on_queue is None:
            answers = await self._long_wait(reference, what, source, queue_s)
        else:
            ids = [spec.instance_id for spec in specs]
            answers = await self._long_wait(
                reference, what, source, queue_s, lambda _: on_queue(self._is_queued(ids))
            )
            on_queue(False)
        missing = {
            spec.instance_id: (answer.node_id, host)
            for spec, (host, answer) in zip(specs, answers, strict=True)
            if isinstance(answer, ProjectMissing)
        }
        if missing:
            for node_id, host in missing.values():
                await self._send_project(source, node_id, host, mark)
            left = [spec for spec in specs if spec.instance_id in missing]
            reference = self._controller.start_dedicated.remote(left)
            more = await self._long_wait(reference, what, source)
            again = {spec.instance_id: pair for spec, pair in zip(left, more, strict=True)}
            answers = [
                again.get(spec.instance_id, answer)
                for spec, answer in zip(specs, answers, strict=True)
            ]
        return [
            _Started(spec, host, _lost_project(source, answer))
            for spec, (host, answer) in zip(specs, answers, strict=True)
        ]

    def _is_queued(self, ids: Sequence[InstanceId]) -> bool:
        """Return whether a create waits for room in the controller; blocks for a moment."""
        try:
            return bool(_answer_soon(self._controller.is_queued.remote(list(ids))))
        except AenvError:
            return False  # unknown; the next look asks again

    # --- shared ---------------------------------------------------------------------------------

    async def _create_shared(
        self,
        source: Project,
        specs: list[InstanceSpec],
        queue_s: float,
        tried: list[InstanceId] | None,
        on_queue: OnQueue,
    ) -> list[_Started]:
        """Start a group on the shared hosts.

        New ids of renamed instances are added to `tried`; None: instances keep their ids.
        """
        started, refusals = await self._place_and_start(source, specs, None)
        failed = {n for n, error in refusals.items() if isinstance(error, FabricUnavailable)}
        if failed and tried is not None:
            again = self._renamed(_without(specs, started), source.config.name)
            tried += [spec.instance_id for spec in again]
            more, refusals = await self._place_and_start(source, again, failed)
            started += more
            specs = [one.spec for one in started] + _without(again, more)
        ends = time.monotonic() + queue_s
        while refusals and all(isinstance(error, CapacityExceeded) for error in refusals.values()):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                break
            on_queue(True)
            shares = await self._queue(source, _without(specs, started), left_s)
            on_queue(False)
            more, refusals = await self._start(source, shares)
            started += more
        for refusal in refusals.values():
            self.shared_hosts.forget()
            raise refusal
        return started

    async def _place_and_start(
        self, source: Project, specs: list[InstanceSpec], avoid: set[str] | None
    ) -> tuple[list[_Started], _Refusals]:
        try:
            shares = await self.shared_hosts.place(specs, avoid=avoid)
        except CapacityExceeded as exc:
            return [], {"": exc}
        return await self._start(source, shares)

    def _renamed(self, specs: list[InstanceSpec], name: str) -> list[InstanceSpec]:
        """Return specs under new ids.

        The failed host may have started them under the old ids, so these are released. This way no
        id is ever on two nodes.
        """
        self._controller.release.remote([spec.instance_id for spec in specs])
        return [spec.model_copy(update={"instance_id": new_instance_id(name)}) for spec in specs]

    async def _queue(
        self,
        source: Project,
        specs: list[InstanceSpec],
        queue_s: float,
        *,
        is_divisible: bool = False,
    ) -> list[Share]:
        """Wait until it is the group's turn and there is room; return the reserved slots.

        If the group is divisible, the slots may be for only some of its instances.
        """
        by_id = {spec.instance_id: spec for spec in specs}
        owner = specs[0].owner or specs[0].job_id or ""
        reference = self._controller.reserve.remote(
            list(by_id), owner, specs[0].job_id, queue_s, is_divisible, need_of(specs)
        )
        what = f"room for {len(specs)} of {source.reference}"
        reserved = await self._long_wait(reference, what, source, queue_s)
        return [Share(name, host, [by_id[i] for i in ids]) for name, host, ids in reserved]

    async def _start(
        self, source: Project, shares: Sequence[Share]
    ) -> tuple[list[_Started], _Refusals]:
        """Have each host start its share, all at the same time.

        Those whose node lacks the project are asked once more, when it has been sent.
        """
        mark = self._sends
        asked = [(share, self._ask_to_start(share)) for share in shares]
        started: list[_Started] = []
        refusals: _Refusals = {}
        for is_last in (False, True):
            missing: list[tuple[Share, ProjectMissing]] = []
            for share, reference in asked:
                try:
                    data = await self._long_wait(reference, f"creating on {share.name}", source)
                except (CapacityExceeded, FabricUnavailable) as exc:
                    refusals[share.name] = exc
                    continue
                answer = decode_answer(data)
                if isinstance(answer, ProjectMissing):
                    missing.append((share, answer))
                    continue
                for spec, (outcome, door) in zip(share.specs, answer, strict=True):
                    started.append(_Started(spec, share.host, outcome, door))
            asked = []
            for share, answer in missing:
                if is_last:
                    refusals[share.name] = _lost_project(source, answer)
                    continue
                try:
                    await self._send_project(source, answer.node_id, share.host, mark)
                except (CapacityExceeded, FabricUnavailable) as exc:
                    refusals[share.name] = exc
                else:
                    asked.append((share, self._ask_to_start(share)))
        return started, refusals

    def _ask_to_start(self, share: Share) -> Any:
        return share.host.start.remote(encode_specs(share.specs), self._scope)

    # --- independent instances --------------------------------------------------------------------

    async def create_each(
        self,
        source: Project,
        specs: Sequence[InstanceSpec],
        density: ActorDensity,
        queue_s: float,
        listener: CreateListener,
        subjects: frozenset[str] = frozenset(),
    ) -> None:
        """Create independent instances, and report each as soon as it runs or has failed.

        As many as fit, and as the quotas of `subjects` allow, are started at once; the others wait
        in the queue for `queue_s`. Those that count in quotas are reported together. If this is
        cancelled, the instances that were not reported are released. For event loops only.
        """
        try:
            claim = await self._claim(specs, subjects, queue_s)
        except AenvError as exc:
            for _ in specs:
                listener.on_outcome(exc)
            return
        tried = {spec.instance_id for spec in specs}
        created: list[Created] = []
        try:
            async with self._counted(claim) as created:
                withheld = None if claim is None else created
                each = _Each(source, queue_s, listener, tried, withheld)
                try:
                    if density is ActorDensity.DEDICATED:
                        await self._dedicated_each(each, specs)
                    else:
                        await each.guarded(specs, self._place_each(each, list(specs), None))
                except BaseException:
                    if tried and ray_api.is_connected():
                        self._controller.release.remote(sorted(tried))
                    raise
        except AenvError as exc:
            if claim is None:
                raise
            if isinstance(exc, QuotaExceeded) and len(tried) > 1:
                half = len(specs) // 2
                for part in (specs[:half], specs[half:]):
                    await self.create_each(source, part, density, queue_s, listener, subjects)
                return
            for _ in [*tried, *created]:
                listener.on_outcome(exc)
        else:
            for one in created:
                listener.on_outcome(one)

    async def _dedicated_each(self, each: _Each, specs: Sequence[InstanceSpec]) -> None:
        async def create(spec: InstanceSpec) -> None:
            each.tell(await self._create_dedicated(each.source, [spec], each.queue_s))

        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(each.guarded([spec], create(spec)))

    async def _place_each(
        self, each: _Each, specs: list[InstanceSpec], avoid: set[str] | None
    ) -> None:
        """Start as many instances as fit, and queue the others; `avoid` as for `SharedHosts`."""
        shares = await self.shared_hosts.place_some(specs, avoid=avoid, may_queue=each.queue_s > 0)
        left = specs[sum(len(share.specs) for share in shares) :]
        async with asyncio.TaskGroup() as group:
            for part in _parts(shares):
                work = self._start_each(each, part, may_move=avoid is None)
                group.create_task(each.guarded(part.specs, work))
            if left:
                waits = self._queue_each(each, left, may_move=avoid is None)
                group.create_task(each.guarded(left, waits))

    async def _start_each(
        self, each: _Each, share: Share, *, may_move: bool, ends: float | None = None
    ) -> None:
        """Start instances on one host; if it refuses, they wait in the queue, or move to another.

        Even a host that reserved their slots may be full: a sandbox that ends can take one longer.
        """
        async with self._starting.setdefault(share.name, asyncio.Semaphore(STARTS_PER_HOST)):
            started, refusals = await self._start(each.source, [share])
        each.tell(started)
        for refusal in refusals.values():
            self.shared_hosts.forget()
            if isinstance(refusal, CapacityExceeded):
                if ends is not None and time.monotonic() > ends:
                    raise refusal
                await self._queue_each(each, share.specs, may_move=may_move, ends=ends)
                continue
            if not may_move:
                raise refusal
            again = self._renamed(share.specs, each.source.config.name)
            each.replace(share.specs, again)
            await each.guarded(again, self._place_each(each, again, {share.name}))

    async def _queue_each(
        self, each: _Each, specs: list[InstanceSpec], *, may_move: bool, ends: float | None = None
    ) -> None:
        """Start instances as the queue grants them slots."""
        if not each.queue_s:
            self.shared_hosts.forget()
            raise CapacityExceeded(
                f"no room for {counted(len(specs), 'instance')} of {each.source.reference}",
                retry_after_s=1.0,
                hint="release instances, lower the concurrency, or give a queue_timeout",
            )
        each.listener.on_queued(len(specs))
        ends = ends or time.monotonic() + each.queue_s
        async with asyncio.TaskGroup() as group:
            while specs:
                left_s = max(_LEAST_QUEUE_S, ends - time.monotonic())
                try:
                    shares = await self._queue(each.source, specs, left_s, is_divisible=True)
                except AenvError as exc:
                    each.fail(specs, exc)
                    return
                for part in _parts(shares):
                    work = self._start_each(each, part, may_move=may_move, ends=ends)
                    group.create_task(each.guarded(part.specs, work))
                placed = {spec.instance_id for share in shares for spec in share.specs}
                specs = [spec for spec in specs if spec.instance_id not in placed]
                each.listener.on_placed(len(placed))

    # --- projects -------------------------------------------------------------------------------

    async def send_if_missing(self, source: Project, node_id: str, host: RemoteHost) -> None:
        """Make sure that a node has the project's files.

        Raises:
            FabricUnavailable: The host is gone.
        """
        mark = self._sends
        reference = host.has_project.remote(source.digest)
        if not await self.waits.result(reference, f"node {node_id[:8]}", CREATE_DEADLINE_S):
            await self._send_project(source, node_id, host, mark)

    async def _send_project(
        self, source: Project, node_id: str, host: RemoteHost, mark: int
    ) -> None:
        """Send a project to a node that lacked it, unless another create has sent it since.

        `mark` is the value of `_sends` before the node was asked. If this project was sent to the
        node later than that, the node has it now.
        """
        async with self._sending:
            key = node_id, source.digest
            if (self._sent_as.get(key) or 0) > mark:
                return
            archive = await self.waits.run(source.archive)
            reference = host.put_project.remote(source.digest, archive)
            what = f"sending {source.reference} to node {node_id[:8]}"
            await self.waits.result(reference, what, CREATE_DEADLINE_S)
            self._sends += 1
            self._sent_as.put(key, self._sends)

    # --- waiting --------------------------------------------------------------------------------

    async def _long_wait(
        self,
        reference: Any,
        what: str,
        source: Project,
        queue_s: float = 0.0,
        on_look: OnWait | None = None,
    ) -> Any:
        """Return the value of a reference; log what a long wait is for, and call `on_look`."""
        with self._noticed(source, is_queued=bool(queue_s)) as on_notice:
            looks = [look for look in (on_notice, on_look) if look is not None]

            def on_wait(waited_s: float) -> None:
                for look in looks:
                    look(waited_s)

            return await self.waits.result(reference, what, CREATE_DEADLINE_S + queue_s, on_wait)

    @contextmanager
    def _noticed(self, source: Project, *, is_queued: bool) -> Iterator[OnWait | None]:
        if self._notices is None:
            yield None
            return
        with self._notices.waiting(lambda: self._reason(source, is_queued)) as on_wait:
            yield on_wait

    def _reason(self, source: Project, is_queued: bool) -> str:
        """Return what a create waits for; asks the controller, blocking for a moment."""
        reason = ""
        if is_queued:
            try:
                reason = str(_answer_soon(self._controller.queue_reason.remote()))
            except AenvError as exc:
                reason = exc.message
        if reason:
            return reason
        if virtual_environment.may_be_installing(source.path):
            return f"the requirements of {source.reference} are probably being installed"
        return "the nodes are busy starting sandboxes"


def _answer_soon(reference: Any) -> Any:
    """Return an answer of the controller; blocks for a moment at most."""
    return ray_api.wait(reference, "the controller", _REASON_S, lambda _: None, look_s=_REASON_S)


def _parts(shares: Sequence[Share]) -> Iterator[Share]:
    """Divide shares into requests of `INSTANCES_PER_START`."""
    for name, host, specs in shares:
        for start in range(0, len(specs), INSTANCES_PER_START):
            yield Share(name, host, specs[start : start + INSTANCES_PER_START])


def _without(specs: Sequence[InstanceSpec], started: Sequence[_Started]) -> list[InstanceSpec]:
    """Return the specs for which no host has answered."""
    known = {one.spec.instance_id for one in started}
    return [spec for spec in specs if spec.instance_id not in known]


def _lost_project(source: Project, answer: Any) -> Any:
    """Return an answer; if it is `ProjectMissing` again, the error that the node lost the files."""
    if not isinstance(answer, ProjectMissing):
        return answer
    return FabricUnavailable(
        f"node {answer.node_id[:8]} lost the files of {source.reference} right after it got them",
        hint="check whether something deletes files in AENV_DATA_DIR, and its free space",
    )


def _group_error(error: AenvError, failed: int, count: int) -> AenvError:
    """Return the error of a group of `count` instances of which `failed` did not start."""
    if count > 1 and isinstance(error, InstanceError):
        return type(error)(
            f"{failed} of {count} instances failed, so none was created; the first error: "
            f"{error.message}",
            instance_id=error.instance_id,
            hint=error.hint,
        )
    return error
