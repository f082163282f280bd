"""The create protocol: from specs to running instances, all of a group or none.

Drivers run it blocking and the gateway in its event loop, see `aenv_ray.actors.fabric.waits`.

Shared instances are placed by this process and started by the shared hosts directly; if the cluster
is full, they wait for their turn at the controller. Dedicated instances are made by the controller,
each with a host actor. A host whose node does not have the project answers `ProjectMissing`; only
then is the project packed and sent, once to each node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from aenv_ray.actors.controller.placement import DEDICATED_PER_NODE, check_capacity, may_grow
from aenv_ray.actors.fabric.shared_hosts import Share, SharedHosts
from aenv_ray.actors.fabric.waits import OnWait, WaitNotices, Waits
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.host.start_messages import ProjectMissing, decode_outcomes, encode_specs
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.engines.process import virtual_environment
from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable, InstanceError
from aenv_ray.ids import InstanceId, new_instance_id
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project.project import Project

CREATE_DEADLINE_S: Final = 300.0
"""Longest wait for a create: it may build a virtual environment first."""
_REASON_S: Final = 2.0


class Created(NamedTuple):
    """A running instance. Its id is ``info.id``; one from a warm pool has another than its spec."""

    spec: InstanceSpec
    host: RemoteHost
    """The host actor."""
    info: InstanceInfo


class _Started(NamedTuple):
    """What became of one spec."""

    spec: InstanceSpec
    host: RemoteHost
    outcome: InstanceInfo | AenvError


_Refusals = dict[str, AenvError]
"""Why hosts, by name, started nothing of their share."""


class CreateProtocol:
    """Creates instances over one connection to the fabric.

    Args:
        notices: Logs that creates take long; None: nobody reads the log.

    Attributes:
        shared_hosts: The shared hosts as this connection knows them.
    """

    def __init__(self, controller: Any, waits: Waits, notices: WaitNotices | None = None) -> None:
        self._controller = controller
        self._waits = waits
        self._notices = notices
        self.shared_hosts = SharedHosts(controller, waits)
        self._sending = waits.lock()
        self._sends = 0
        self._sent_as: dict[tuple[str, str], int] = {}
        """The last send of a project to a node, by node id and digest."""

    async def create(
        self,
        source: Project,
        specs: Sequence[InstanceSpec],
        density: ActorDensity,
        queue_s: float,
        *,
        may_rename: bool = True,
    ) -> list[Created]:
        """Create all instances of a group, or none.

        If it fails or is cancelled, what was started is released.

        It waits for room in a full cluster for `queue_s`. If a host fails, `may_rename` has the
        group started again on other hosts under new ids; otherwise the create fails.

        Raises:
            AenvError: As `aenv_ray.create`.
        """
        tried = [spec.instance_id for spec in specs]
        try:
            if density is ActorDensity.DEDICATED:
                started = await self._create_dedicated(source, specs, queue_s)
            else:
                started = await self._create_shared(
                    source, list(specs), queue_s, tried if may_rename else None
                )
        except BaseException:
            # After the end of Ray nothing may be sent: that would start another local Ray.
            if ray_api.is_connected():
                self._controller.release.remote(tried)
            raise
        created = [
            Created(one.spec, one.host, one.outcome)
            for one in started
            if isinstance(one.outcome, InstanceInfo)
        ]
        failures = [one.outcome for one in started if isinstance(one.outcome, AenvError)]
        if failures:
            await self._release([one.info.id for one in created])
            raise _group_error(failures[0], len(failures), len(specs))
        return created

    async def check_size(self, count: int, density: ActorDensity) -> None:
        """Refuse a group that would not fit into an empty cluster, before its specs are made.

        Small groups cost nothing.

        Raises:
            CapacityExceeded: It would not fit.
            FabricUnavailable: No node has a host.
        """
        if count <= DEDICATED_PER_NODE:
            return
        nodes = await self._waits.run(ray_api.alive_nodes)
        if may_grow(nodes.values()):
            return
        if density is ActorDensity.SHARED:
            await self.shared_hosts.check_size(count)
        else:
            check_capacity(count, DEDICATED_PER_NODE * len(nodes))

    async def _release(self, ids: Sequence[InstanceId]) -> None:
        reference = self._controller.release.remote(list(ids))
        await self._waits.result(reference, f"releasing {len(ids)} instances", CREATE_DEADLINE_S)

    # --- dedicated ------------------------------------------------------------------------------

    async def _create_dedicated(
        self, source: Project, specs: Sequence[InstanceSpec], queue_s: float
    ) -> list[_Started]:
        mark = self._sends
        reference = self._controller.create_dedicated.remote(list(specs), queue_s)
        what = f"creating {len(specs)} of {source.reference}"
        answers = await self._long_wait(reference, what, source, queue_s)
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

    # --- shared ---------------------------------------------------------------------------------

    async def _create_shared(
        self,
        source: Project,
        specs: list[InstanceSpec],
        queue_s: float,
        tried: list[InstanceId] | None,
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
        is_full = all(isinstance(error, CapacityExceeded) for error in refusals.values())
        is_anywhere = not specs or not specs[0].node_ids  # a place in the queue may be on any node
        if refusals and is_full and queue_s and is_anywhere:
            shares = await self._queue(source, _without(specs, started), queue_s)
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

        A failed host may have started them, so their old ids are released: no id is ever on two
        nodes.
        """
        self._controller.release.remote([spec.instance_id for spec in specs])
        return [spec.model_copy(update={"instance_id": new_instance_id(name)}) for spec in specs]

    async def _queue(
        self, source: Project, specs: list[InstanceSpec], queue_s: float
    ) -> list[Share]:
        """Return reserved places for a group, once it is its turn and there is room."""
        by_id = {spec.instance_id: spec for spec in specs}
        reference = self._controller.places.remote(
            list(by_id), specs[0].owner or specs[0].job_id or "", specs[0].job_id, queue_s
        )
        what = f"room for {len(specs)} of {source.reference}"
        reserved = await self._long_wait(reference, what, source, queue_s)
        return [Share(name, host, [by_id[i] for i in ids]) for name, host, ids in reserved]

    async def _start(
        self, source: Project, shares: Sequence[Share]
    ) -> tuple[list[_Started], _Refusals]:
        """Have each host start its share, all at the same time."""
        mark = self._sends
        asked = [(share, share.host.start.remote(encode_specs(share.specs))) for share in shares]
        started: list[_Started] = []
        refusals: _Refusals = {}
        for share, reference in asked:
            what = f"creating on {share.name}"
            try:
                answer = decode_outcomes(await self._long_wait(reference, what, source))
                if isinstance(answer, ProjectMissing):
                    await self._send_project(source, answer.node_id, share.host, mark)
                    reference = share.host.start.remote(encode_specs(share.specs))  # noqa: PLW2901
                    answer = decode_outcomes(await self._long_wait(reference, what, source))
            except (CapacityExceeded, FabricUnavailable) as exc:
                refusals[share.name] = exc
                continue
            if isinstance(answer, ProjectMissing):
                refusals[share.name] = _lost_project(source, answer)
                continue
            pairs = zip(share.specs, answer, strict=True)
            started += [_Started(spec, share.host, outcome) for spec, outcome in pairs]
        return started, refusals

    # --- projects -------------------------------------------------------------------------------

    async def send_if_missing(self, source: Project, node_id: str, host: RemoteHost) -> None:
        """Make sure that a node has the project's files.

        Raises:
            FabricUnavailable: The host is gone.
        """
        mark = self._sends
        reference = host.has_project.remote(source.digest)
        if not await self._waits.result(reference, f"node {node_id[:8]}", CREATE_DEADLINE_S):
            await self._send_project(source, node_id, host, mark)

    async def _send_project(
        self, source: Project, node_id: str, host: RemoteHost, mark: int
    ) -> None:
        """Send a project to a node that lacked it, unless another create has done so since.

        `mark` is the value of `_sends` before the node said that it lacks the project.
        """
        async with self._sending:
            key = node_id, source.digest
            if self._sent_as.get(key, 0) > mark:
                return
            archive = await self._waits.run(source.archive)
            reference = host.put_project.remote(source.digest, archive)
            what = f"sending {source.reference} to node {node_id[:8]}"
            await self._waits.result(reference, what, CREATE_DEADLINE_S)
            self._sends += 1
            self._sent_as[key] = self._sends

    # --- waiting --------------------------------------------------------------------------------

    async def _long_wait(
        self, reference: Any, what: str, source: Project, queue_s: float = 0.0
    ) -> Any:
        """Return the value of a reference; log what a long wait is for."""
        with self._noticed(source, is_queued=bool(queue_s)) as on_wait:
            return await self._waits.result(reference, what, CREATE_DEADLINE_S + queue_s, on_wait)

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
            asked = self._controller.queue_reason.remote()
            try:
                reason = ray_api.wait(
                    asked, "the controller", _REASON_S, lambda _: None, look_s=_REASON_S
                )
            except AenvError as exc:
                reason = exc.message
        if reason:
            return reason
        if virtual_environment.may_be_installing(source.path):
            return f"the requirements of {source.reference} may be being installed"
        return "the nodes are busy starting sandboxes"


def _without(specs: Sequence[InstanceSpec], started: Sequence[_Started]) -> list[InstanceSpec]:
    """Return the specs that no host answered for."""
    known = {one.spec.instance_id for one in started}
    return [spec for spec in specs if spec.instance_id not in known]


def _lost_project(source: Project, answer: Any) -> Any:
    """Return an answer, or the error of a node that lost the project right after it was sent."""
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
            f"{failed} of {count} instances failed, so none was made; the first: {error.message}",
            instance_id=error.instance_id,
            hint=error.hint,
        )
    return error
