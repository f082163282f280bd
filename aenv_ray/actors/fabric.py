"""The entrance for Ray code: `init`, `create`, `create_many`, `get`, `list_instances`, `shutdown`.

These functions block; in async code, call them in a thread or use `aenv_ray.Environment`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from aenv_ray import project
from aenv_ray.actors.create_options import CreateOptions, group_size
from aenv_ray.actors.gate import Gate, gated
from aenv_ray.actors.handle import EnvHandle
from aenv_ray.actors.placement import DEDICATED_PER_NODE, check_capacity
from aenv_ray.actors.shared_hosts import SharedHosts
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
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

logger = logging.getLogger("aenv_ray")

CREATE_DEADLINE_S: Final = 300.0
"""Longest wait for a create: it may build a virtual environment first."""
TELL_S: Final = 5.0
"""A create that takes longer says what it waits for, this often."""
LOOK_S: Final = 0.5
"""A wait sees within this time that the connection is shut down."""
LEAVE_S: Final = 5.0
"""How long `shutdown` waits for threads that still use the connection: longer than a look."""


class _Made(NamedTuple):
    """What became of one spec."""

    spec: InstanceSpec
    host: Any
    outcome: InstanceInfo | AenvError


class Fabric:
    """A connection of this process to the fabric of a Ray cluster."""

    def __init__(self, address: str | None = None) -> None:
        from aenv_ray.actors import controller, ray_api

        self.ray = ray_api
        self.gate = Gate()
        self.owns_ray = ray_api.ensure_ray(address)
        self.controller = controller.ensure_controller()
        self.shared = SharedHosts(self.controller, self.wait)
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

    def _wait_telling(self, reference: Any, what: str, source: project.Project) -> Any:
        """Wait as `wait` does, saying now and then what takes so long."""

        def tell(waited_s: float) -> None:
            installs = (source.path / "requirements.txt").is_file()
            doing = "the node installs its requirements" if installs else "the cluster is busy"
            logger.warning("%s: %s, %.0f s so far", what, doing, waited_s)

        return self.wait(reference, what, tell=tell)

    # --- creating -------------------------------------------------------------------------------

    @gated
    def create(
        self, source: project.Project, count: int, options: CreateOptions
    ) -> list[EnvHandle]:
        """Make `count` instances, all or none.

        Raises:
            AenvError: As `aenv_ray.create`; nothing is left then.
        """
        if options.actor is ActorDensity.SHARED:
            self.shared.check_size(count)
        elif count > DEDICATED_PER_NODE:
            check_capacity(count, DEDICATED_PER_NODE * len(self.ray.alive_nodes()))
        self._notice(source)
        specs = options.specs(source, count, job_id=self.ray.job_id())
        tried = [spec.instance_id for spec in specs]
        try:
            if options.actor is ActorDensity.DEDICATED:
                made = self._create_dedicated(source, specs)
            else:
                made = self._create_shared(source, specs, tried)
        except BaseException:
            # Cancelled or half done: whatever came to be must not live on. Where Ray ended, so did
            # that, and sending anything would start another Ray.
            if self.ray.is_connected():
                self.controller.release.remote(tried)
            raise
        failures = [one.outcome for one in made if isinstance(one.outcome, AenvError)]
        if failures:
            whole = [m.outcome.id for m in made if isinstance(m.outcome, InstanceInfo)]
            self.release(whole)
            raise of_group(failures[0], len(failures), count)
        return [  # one from a pool has an id of its own
            EnvHandle(one.outcome.id, one.spec.reference, one.host, self.controller)
            for one in made
            if isinstance(one.outcome, InstanceInfo)
        ]

    def _create_dedicated(self, source: project.Project, specs: list[InstanceSpec]) -> list[_Made]:
        reference = self.controller.create_dedicated.remote(specs, source.archive())
        what = f"creating {len(specs)} of {source.reference}"
        pairs = self._wait_telling(reference, what, source)
        return [_Made(spec, *pair) for spec, pair in zip(specs, pairs, strict=True)]

    def _create_shared(
        self, source: project.Project, specs: list[InstanceSpec], tried: list[InstanceId]
    ) -> list[_Made]:
        made, refusals = self._start_shared(source, specs, None)
        if not refusals:
            return made
        # Others filled a host, or a node went: what it was to make is made elsewhere, once. It may
        # have begun, so those ids are ended for good, and no id can ever be on two nodes.
        begun = {one.spec.instance_id for one in made}
        rest = [spec for spec in specs if spec.instance_id not in begun]
        self.controller.release.remote([spec.instance_id for spec in rest])
        again = [
            spec.model_copy(update={"instance_id": new_instance_id(source.config.name)})
            for spec in rest
        ]
        tried += [spec.instance_id for spec in again]
        failed = {n for n, error in refusals.items() if isinstance(error, FabricUnavailable)}
        more, refusals = self._start_shared(source, again, failed)
        for refusal in refusals.values():
            raise refusal
        return made + more

    def _start_shared(
        self, source: project.Project, specs: list[InstanceSpec], avoid: set[str] | None
    ) -> tuple[list[_Made], dict[str, AenvError]]:
        """Return what hosts made of a group, and why others, by name, made nothing."""
        made: list[_Made] = []
        begun, refusals = self.shared.begin(source, specs, avoid)
        for share, reference in begun:
            try:
                outcomes = self._wait_telling(reference, f"creating on {share.name}", source)
            except (CapacityExceeded, FabricUnavailable) as exc:
                refusals[share.name] = exc
                continue
            pairs = zip(share.specs, outcomes, strict=True)
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
        """Return how many processes and containers of sandboxes run, as each node itself says."""
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


def of_group(error: AenvError, failed: int, count: int) -> AenvError:
    """Return the error of a group of `count` instances of which `failed` were not made."""
    if count > 1 and isinstance(error, InstanceError):
        return type(error)(
            f"{failed} of {count} instances failed, so none was made; the first: {error.message}",
            instance_id=error.instance_id,
            hint=error.hint,
        )
    return error


_fabric: Fabric | None = None
_fabric_lock = threading.Lock()
_shutdowns = 0


def init(address: str | None = None) -> Fabric:
    """Connect this process to the fabric, bringing up Ray and the fabric where they are missing.

    Args:
        address: Ray cluster. None: ``RAY_ADDRESS``, a local Ray that runs, or a new local one.

    Raises:
        FabricUnavailable: Ray or the controller does not answer.
    """
    with _fabric_lock:
        return _connected(address)


def _connected(address: str | None) -> Fabric:
    """Return the connection, made when there is none; the caller holds the lock."""
    global _fabric
    import ray

    if _fabric is None or not ray.is_initialized():
        _fabric = Fabric(address)
    return _fabric


def connector() -> Callable[[], Fabric]:
    """Return an `init` for work that may run late, as in a thread of a pool.

    It raises FabricUnavailable where `shutdown` was called since: such work starts no Ray anew.
    """
    asked_at = _shutdowns

    def connect() -> Fabric:
        with _fabric_lock:
            if _shutdowns != asked_at:
                raise FabricUnavailable(
                    "the fabric was shut down meanwhile", hint="aenv_ray.init() connects again"
                )
            return _connected(None)

    return connect


def shutdown() -> None:
    """Forget the connection; a local Ray that `init` started ends, with every instance on it.

    What other threads still do with the connection ends first, with FabricUnavailable.
    """
    global _fabric, _shutdowns
    with _fabric_lock:
        fabric, _fabric = _fabric, None
        _shutdowns += 1
        if fabric is None:
            return
        if not fabric.gate.close(LEAVE_S):
            logger.warning("a thread still uses the fabric that is shut down")
        if fabric.owns_ray:
            import ray

            ray.shutdown()


def create(
    environment: str | Path,
    *,
    actor: Literal["dedicated", "shared"] = "dedicated",
    lifetime: Literal["job", "detached"] = "job",
    ttl: str | float | None = None,
    idle_timeout: str | float | None = None,
    engine: str | None = None,
    environment_variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    owner: str | None = None,
    datasource: str = "",
) -> EnvHandle:
    """Make an instance and return its handle once it answers calls.

    Args:
        environment: ``name@version`` or ``name`` of a built-in environment, or a project's path.
        actor: ``dedicated``: an actor of its own, visible in ``ray list actors``; ``shared``: a
            place on an actor of the node, a hundred times cheaper.
        lifetime: ``job``: ends with the Ray job of the caller; ``detached``: does not.
        ttl: Ends it after this long, renewable: ``"30m"``, ``"2h"``, or seconds. None: the
            project's ``deployConfig.ttl``, else 30 minutes.
        idle_timeout: Ends it after this long without a call. None: the project's, else never.
        engine: None: the project's, else ``AENV_ENGINE``, else ``process``.
        environment_variables: Added to the project's.
        arguments: ``sys.argv[1:]`` of its code.
        labels: For people and listings.
        owner: Whom it is accounted to.
        datasource: Given to it as ``AENV_DATASOURCE``.

    Raises:
        EnvironmentNotFound: No such environment or project.
        ConfigError: A malformed reference, project, TTL or option.
        SandboxStartFailed: Its code does not load, or its sandbox does not start.
        CapacityExceeded: The cluster is full.
        FabricUnavailable: Ray does not answer.
    """
    options = CreateOptions(
        actor=actor, lifetime=lifetime, ttl=ttl, idle_timeout=idle_timeout, engine=engine,
        environment_variables=environment_variables, arguments=arguments, labels=labels,
        owner=owner, datasource=datasource,
    )  # fmt: skip
    source = project.resolve(environment)
    return init().create(source, 1, options)[0]


def create_many(
    environment: str | Path,
    count: int,
    *,
    actor: Literal["dedicated", "shared"] = "shared",
    **options: Any,
) -> list[EnvHandle]:
    """Make `count` instances in one round trip to each node, all of them or none.

    Args:
        environment: As in `create`.
        count: How many, at least 1.
        actor: As in `create`, but shared by default.
        options: The other options of `create`.

    Raises:
        ConfigError: `count` is no whole number from 1 on.
        CapacityExceeded: The cluster never holds so many, or has no room for them now.
        AenvError: As `create`; nothing is left then.
    """
    parsed = CreateOptions(actor=actor, **options)
    number, source = group_size(count), project.resolve(environment)
    return init().create(source, number, parsed)


def get(instance_id: str) -> EnvHandle:
    """Return a handle to a live instance, from any driver.

    Raises:
        InstanceNotFound: No host has it, or it has ended.
    """
    return init().get(instance_id)


def list_instances() -> list[InstanceInfo]:
    """Return the live instances of the cluster, oldest first."""
    return init().list_instances()


def release_many(handles: Sequence[EnvHandle]) -> None:
    """End instances in one round trip to each node; from every state, any number of times.

    Raises:
        ConfigError: Something in it is no handle; nothing is ended then.
    """
    for handle in handles:
        if not isinstance(handle, EnvHandle):
            raise ConfigError(
                f"{handle!r} is not a handle of an instance", hint="pass what create returned"
            )
    init().release([handle.instance_id for handle in handles])
