"""A process's connection to the fabric of a Ray cluster: it creates, finds and ends instances.

`aenv_ray.actors.fabric.entrance` keeps the one connection of a process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.wire import decode_outcomes
from aenv_ray.actors.controller.placement import DEDICATED_PER_NODE, check_capacity, may_grow
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.shared_hosts import Share, SharedHosts
from aenv_ray.actors.fabric.shutdown_gate import Gate, gated
from aenv_ray.engines.process import virtual_environment
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    FabricUnavailable,
    InstanceError,
    InstanceNotFound,
)
from aenv_ray.ids import InstanceId, new_instance_id
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceSpec,
    InstanceStatus,
)
from aenv_ray.project import project

logger = logging.getLogger("aenv_ray")

CREATE_DEADLINE_S: Final = 300.0
"""Longest wait for a create: it may build a virtual environment first."""
TELL_S: Final = 5.0
"""A create that takes longer says what it waits for, this often."""
LOOK_S: Final = 0.5
"""A wait sees within this time that the connection is shut down."""


class _Made(NamedTuple):
    """What became of one spec."""

    spec: InstanceSpec
    host: Any
    outcome: InstanceInfo | AenvError


class _Whole(NamedTuple):
    """An instance that was made."""

    spec: InstanceSpec
    host: Any
    outcome: InstanceInfo


class Fabric:
    """A connection of this process to the fabric of a Ray cluster."""

    def __init__(self, address: str | None = None) -> None:
        from aenv_ray.actors.controller import controller
        from aenv_ray.actors.fabric.quota_client import Accounts
        from aenv_ray.actors.ray_shell import ray_api

        self.ray = ray_api
        self.gate = Gate()
        self.owns_ray = ray_api.ensure_ray(address)
        self.controller = controller.ensure_controller()
        self.shared = SharedHosts(self.controller, self.wait)
        self._accounts = Accounts()
        self._noticed: set[str] = set()
        self.wait(self.controller.ping.remote(), "the controller", 120.0)

    @gated
    def wait(
        self,
        reference: Any,
        what: str,
        deadline_s: float = CREATE_DEADLINE_S,
        tell: Callable[[float], None] | None = None,
    ) -> Any:
        """Return what a reference becomes, with our errors instead of Ray's.

        `tell` is called every `TELL_S` with the seconds waited so far.

        Raises:
            FabricUnavailable: The actor is gone, `deadline_s` passed, or `shutdown` was called.
            AenvError: What the actor raised.
        """

        def look(waited_s: float) -> None:
            self.gate.check()
            if tell is not None and waited_s % TELL_S == 0:
                tell(waited_s)

        return self.ray.wait(reference, what, deadline_s, look, look_s=LOOK_S)

    def _wait_telling(
        self, reference: Any, what: str, source: project.Project, queue_s: float = 0.0
    ) -> Any:
        """Wait as `wait` does, saying now and then what takes so long."""

        def tell(waited_s: float) -> None:
            doing = "the cluster is busy, or they are slow to start"
            if virtual_environment.may_be_installing(source.path):
                doing += ", or their requirements are being installed"
            logger.warning("%s: %s, %.0f s so far", what, doing, waited_s)

        return self.wait(reference, what, CREATE_DEADLINE_S + queue_s, tell)

    # --- creating -------------------------------------------------------------------------------

    @gated
    def create(
        self, source: project.Project, count: int, options: CreateOptions
    ) -> list[EnvHandle]:
        """Make `count` instances, all or none.

        Raises:
            AenvError: As `aenv_ray.create`; nothing is left then.
        """
        self._check_size(count, options.actor)
        self._notice(source)
        specs = options.specs(source, count, job_id=self.ray.job_id())
        account = self._accounts.open(specs, options)
        try:
            made = self._make(source, specs, options)
        except BaseException:
            if account is not None and self.ray.is_connected():
                account.close()
            raise
        if account is not None:
            try:
                account.settle((one.spec, one.outcome.id) for one in made)
            except BaseException:
                self.release([one.outcome.id for one in made])
                raise
        return [  # one from a pool has an id of its own
            EnvHandle(one.outcome.id, one.spec.reference, one.host, self.controller) for one in made
        ]

    def _check_size(self, count: int, density: ActorDensity) -> None:
        """Refuse at once what the cluster never holds; the usual case costs nothing."""
        if count <= DEDICATED_PER_NODE or may_grow((nodes := self.ray.alive_nodes()).values()):
            return
        if density is ActorDensity.SHARED:
            self.shared.check_size(count)
        else:
            check_capacity(count, DEDICATED_PER_NODE * len(nodes))

    def _make(
        self, source: project.Project, specs: list[InstanceSpec], options: CreateOptions
    ) -> list[_Whole]:
        """Make what the specs say, all or none."""
        tried = [spec.instance_id for spec in specs]
        try:
            if options.actor is ActorDensity.DEDICATED:
                made = self._create_dedicated(source, specs, options.queue_s)
            else:
                made = self._create_shared(source, specs, tried, options.queue_s)
        except BaseException:
            # Cancelled or half done: whatever came to be must not live on. Where Ray ended, so did
            # that, and sending anything would start another Ray.
            if self.ray.is_connected():
                self.controller.release.remote(tried)
            raise
        whole = [
            _Whole(m.spec, m.host, m.outcome) for m in made if isinstance(m.outcome, InstanceInfo)
        ]
        failures = [one.outcome for one in made if isinstance(one.outcome, AenvError)]
        if failures:
            self.release([one.outcome.id for one in whole])
            raise of_group(failures[0], len(failures), len(specs))
        return whole

    def _create_dedicated(
        self, source: project.Project, specs: list[InstanceSpec], queue_s: float
    ) -> list[_Made]:
        reference = self.controller.create_dedicated.remote(specs, source.archive(), queue_s)
        what = f"creating {len(specs)} of {source.reference}"
        pairs = self._wait_telling(reference, what, source, queue_s)
        return [_Made(spec, *pair) for spec, pair in zip(specs, pairs, strict=True)]

    def _create_shared(
        self,
        source: project.Project,
        specs: list[InstanceSpec],
        tried: list[InstanceId],
        queue_s: float,
    ) -> list[_Made]:
        made, refusals = self._start_shared(source, specs, None)
        failed = {n for n, error in refusals.items() if isinstance(error, FabricUnavailable)}
        if failed:
            again = self._renamed(source, specs, made, tried)
            more, refusals = self._start_shared(source, again, failed)
            made += more
            specs = [one.spec for one in made] + _without(again, more)
        is_full = all(isinstance(error, CapacityExceeded) for error in refusals.values())
        is_free = not specs or not specs[0].node_ids  # a place in the queue may be on any node
        if refusals and is_full and queue_s and is_free:  # nothing of the rest has begun
            more, refusals = self._start_queued(source, _without(specs, made), queue_s)
            made += more
        for refusal in refusals.values():
            raise refusal
        return made

    def _renamed(
        self,
        source: project.Project,
        specs: list[InstanceSpec],
        made: list[_Made],
        tried: list[InstanceId],
    ) -> list[InstanceSpec]:
        """Return what is not made of a group under new ids, which are noted in `tried`.

        It may have begun, so its old ids are ended for good, and no id can ever be on two nodes.
        """
        rest = _without(specs, made)
        self.controller.release.remote([spec.instance_id for spec in rest])
        again = [
            spec.model_copy(update={"instance_id": new_instance_id(source.config.name)})
            for spec in rest
        ]
        tried += [spec.instance_id for spec in again]
        return again

    def _start_queued(
        self, source: project.Project, specs: list[InstanceSpec], queue_s: float
    ) -> tuple[list[_Made], dict[str, AenvError]]:
        """Start a group where it is given places, when it is its turn."""
        by_id = {spec.instance_id: spec for spec in specs}
        asked = self.controller.places.remote(
            list(by_id), specs[0].owner or specs[0].job_id or "", specs[0].job_id, queue_s
        )
        what = f"room for {len(specs)} of {source.reference}"
        places = self._wait_telling(asked, what, source, queue_s)
        shares = [Share(name, host, [by_id[i] for i in ids]) for name, host, ids in places]
        return self._finish_shared(source, *self.shared.begin_on(source, shares))

    def _start_shared(
        self, source: project.Project, specs: list[InstanceSpec], avoid: set[str] | None
    ) -> tuple[list[_Made], dict[str, AenvError]]:
        """Return what hosts made of a group, and why others, by name, made nothing."""
        try:
            begun, refusals = self.shared.begin(source, specs, avoid)
        except CapacityExceeded as exc:
            return [], {"": exc}
        return self._finish_shared(source, begun, refusals)

    def _finish_shared(
        self,
        source: project.Project,
        begun: list[tuple[Share, Any]],
        refusals: dict[str, AenvError],
    ) -> tuple[list[_Made], dict[str, AenvError]]:
        made: list[_Made] = []
        for share, reference in begun:
            try:
                outcomes = self._wait_telling(reference, f"creating on {share.name}", source)
            except (CapacityExceeded, FabricUnavailable) as exc:
                refusals[share.name] = exc
                continue
            pairs = zip(share.specs, decode_outcomes(outcomes), strict=True)
            made += [_Made(spec, share.host, outcome) for spec, outcome in pairs]
        return made, refusals

    def _notice(self, source: project.Project) -> None:
        if source.config.deploy.network is None and source.digest not in self._noticed:
            self._noticed.add(source.digest)
            logger.warning(
                "%s names no deployConfig.network: its instances use the node's network and can "
                'reach Ray; write "network": "none" unless its tools need more',
                source.reference,
            )

    # --- finding --------------------------------------------------------------------------------

    @gated
    def get(self, instance_id: str) -> EnvHandle:
        """Return a handle to a live instance."""
        reference = self.controller.locate.remote(instance_id)
        host, info = self.wait(reference, f"finding {instance_id}", 60.0)
        if info.status is not InstanceStatus.RUNNING:
            raise InstanceNotFound(
                f"{instance_id} has ended", instance_id=instance_id, hint="create a new instance"
            )
        return EnvHandle(info.id, info.reference, host, self.controller)

    @gated
    def count_processes(self) -> int:
        """Return how many processes, containers and pods of sandboxes run, as each node says."""
        return int(self.wait(self.controller.count_processes.remote(), "counting", 60.0))

    @gated
    def list_instances(self) -> list[InstanceInfo]:
        """Return the live instances."""
        return list(self.wait(self.controller.list_instances.remote(), "listing instances", 60.0))

    @gated
    def release(self, instance_ids: Sequence[InstanceId]) -> None:
        """End instances; from every state, any number of times."""
        reference = self.controller.release.remote(list(instance_ids))
        self.wait(reference, f"releasing {len(instance_ids)} instances")


def _without(specs: list[InstanceSpec], made: list[_Made]) -> list[InstanceSpec]:
    """Return the specs of which nothing is known."""
    known = {one.spec.instance_id for one in made}
    return [spec for spec in specs if spec.instance_id not in known]


def of_group(error: AenvError, failed: int, count: int) -> AenvError:
    """Return the error of a group of `count` instances of which `failed` were not made."""
    if count > 1 and isinstance(error, InstanceError):
        return type(error)(
            f"{failed} of {count} instances failed, so none was made; the first: {error.message}",
            instance_id=error.instance_id,
            hint=error.hint,
        )
    return error
