"""The entrance for Ray code: `init`, `create`, `create_many`, `get`, `list_instances`, `shutdown`.

These functions block; in async code, call them in a thread or use `aenv_ray.Environment`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.fabric.create_options import QUEUE_S, CreateOptions, group_size
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.references import resolve
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.models import InstanceInfo

logger = logging.getLogger("aenv_ray")

LEAVE_S: Final = 5.0
"""How long `shutdown` waits for threads that still use the connection: longer than a look."""

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
    if _fabric is None or not _fabric.ray.is_connected():
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
            fabric.ray.leave()


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
    queue_timeout: str | float = QUEUE_S,
) -> EnvHandle:
    """Make an instance and return its handle once it answers calls.

    Args:
        environment: ``name@version`` or ``name`` of an environment that is built in or published
            to the hub, or a project's path.
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
        queue_timeout: How long to wait for room in a full cluster, where owners take turns. 0: not
            at all.

    Raises:
        EnvironmentNotFound: No such environment or project.
        CatalogConflict: The published version is Failed.
        ConfigError: A malformed reference, project, TTL or option.
        SandboxStartFailed: Its code does not load, or its sandbox does not start.
        CapacityExceeded: The cluster was full all that time.
        FabricUnavailable: Ray does not answer.
    """
    options = CreateOptions(
        actor=actor, lifetime=lifetime, ttl=ttl, idle_timeout=idle_timeout, engine=engine,
        environment_variables=environment_variables, arguments=arguments, labels=labels,
        owner=owner, datasource=datasource, queue_timeout=queue_timeout,
    )  # fmt: skip
    source = resolve(environment, init)
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
    number, source = group_size(count), resolve(environment, init)
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
