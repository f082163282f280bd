"""The functions for Ray code: `init`, `create`, `create_many`, `get`, `list_instances`, `shutdown`.

They block; in async code, use `aenv_ray.Environment` or call them in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.fabric.create_options import QUEUE_S, CreateOptions, group_size
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.references import resolve_environment
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.models import InstanceInfo

if TYPE_CHECKING:
    from aenv_ray.actors.fabric.create_options import Near
    from aenv_ray.actors.fabric.inner_instances import FabricInstances

logger = logging.getLogger("aenv_ray")

LEAVE_S: Final = 5.0
"""How long `shutdown` waits for other threads; they notice it within half a second."""

_fabric: Fabric | None = None
_fabric_lock = threading.Lock()
_shutdowns = 0


def init(address: str | None = None) -> Fabric:
    """Connect this process to the fabric; start Ray and the fabric if necessary.

    Args:
        address: Ray cluster. None: ``RAY_ADDRESS``, else a running local one, else a new one.

    Raises:
        ConfigError: The cluster runs an incompatible version of aenv-ray.
        FabricUnavailable: Ray or the controller does not answer.
    """
    with _fabric_lock:
        return _connected(address)


def _connected(address: str | None) -> Fabric:
    """Return the connection, after connecting if necessary; the caller holds the lock."""
    from aenv_ray.actors.ray_shell import ray_api

    global _fabric
    if _fabric is None or not ray_api.is_connected():
        _fabric = Fabric(connect_inner, address)
    return _fabric


async def connect_inner() -> FabricInstances:
    """Connect a host to the fabric, for the inner instances of its instances.

    Raises:
        FabricUnavailable: The controller does not answer.
    """
    from aenv_ray.actors.fabric.async_fabric import AsyncFabric
    from aenv_ray.actors.fabric.inner_instances import FabricInstances

    fabric = await asyncio.to_thread(init)
    return FabricInstances(fabric, AsyncFabric(fabric))


def connector() -> Callable[[], Fabric]:
    """Return an `init` for work that may run later, for example in a thread pool.

    It raises FabricUnavailable after a `shutdown`, so that late work does not start Ray again.
    """
    asked_at = _shutdowns

    def connect() -> Fabric:
        with _fabric_lock:
            if _shutdowns != asked_at:
                raise FabricUnavailable(
                    "the fabric was shut down in the meantime",
                    hint="aenv_ray.init() connects again",
                )
            return _connected(None)

    return connect


def shutdown() -> None:
    """Disconnect. A local Ray that `init` started ends, with all its instances.

    Operations that other threads have under way fail with FabricUnavailable first.
    """
    from aenv_ray.actors.ray_shell import ray_api

    global _fabric, _shutdowns
    with _fabric_lock:
        fabric, _fabric = _fabric, None
        _shutdowns += 1
        if fabric is None:
            return
        fabric.head_watch.stop()
        if not fabric.gate.close(LEAVE_S):
            logger.warning("shutting down although another thread still uses the fabric")
        if fabric.owns_ray:
            ray_api.leave()


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
    seed: int | None = None,
    near: Near | None = None,
) -> EnvHandle:
    """Create an instance and return its handle once it answers calls.

    Args:
        environment: ``name@version`` or ``name`` of a built-in or published environment, or the
            path of a project.
        actor: ``dedicated``: the instance has its own actor, visible in ``ray list actors``;
            ``shared``: it shares a host actor of its node, which is a hundred times cheaper.
        lifetime: ``job``: it ends with the Ray job of the caller; ``detached``: it does not.
        ttl: The instance ends after this long unless renewed: ``"30m"``, ``"2h"``, or seconds.
            None: the project's ``deployConfig.ttl``, else 30 minutes.
        idle_timeout: The instance ends after this long without a call. None: the project's
            ``deployConfig.idleTimeout``, else never.
        engine: Name of the engine. None: the project's, else ``AENV_ENGINE``, else one that suits
            the project and runs on a node with room.
        environment_variables: Added to the variables of the project.
        arguments: ``sys.argv[1:]`` of the environment's code.
        labels: Labels for listings and quotas; names that start with ``aenv.`` are reserved.
        owner: The owner whose quota the instance counts towards.
        datasource: Value of ``AENV_DATASOURCE`` in the sandbox.
        queue_timeout: How long to wait for room in a full cluster, where owners take turns. 0: do
            not wait.
        seed: Seed of the first episode: ``AENV_SEED`` in the sandbox, and `current_call().seed`.
        near: Run it on this node if there is room, else anywhere: the id of a Ray node, ``"me"``
            for the caller's node, or an actor, such as a trainer, for its node.

    Raises:
        EnvironmentNotFound: The environment or project does not exist.
        CatalogConflict: The published version has status Failed.
        ConfigError: The reference, the project or an option is invalid.
        SandboxStartFailed: Its code does not load, or its sandbox does not start.
        CapacityExceeded: The cluster remained full for `queue_timeout`.
        FabricUnavailable: Ray does not answer, or no node can run the engine.
    """
    options = CreateOptions(
        actor=actor, lifetime=lifetime, ttl=ttl, idle_timeout=idle_timeout, engine=engine,
        environment_variables=environment_variables, arguments=arguments, labels=labels,
        owner=owner, datasource=datasource, queue_timeout=queue_timeout, seed=seed,
        near=near,
    )  # fmt: skip
    source = resolve_environment(environment, init)
    return init().create(source, 1, options)[0]


def create_many(
    environment: str | Path,
    count: int,
    *,
    actor: Literal["dedicated", "shared"] = "shared",
    **options: Any,
) -> list[EnvHandle]:
    """Create `count` instances, all or none, with one round trip to each node.

    Args:
        environment: As in `create`.
        count: Number of instances, at least 1.
        actor: As in `create`, but shared by default.
        options: The other options of `create`.

    Raises:
        ConfigError: `count` is not an integer, or less than 1.
        CapacityExceeded: The cluster can never hold that many, or has no room for them now.
        AenvError: As `create`; nothing is left behind.
    """
    parsed = CreateOptions(actor=actor, **options)
    number, source = group_size(count), resolve_environment(environment, init)
    return init().create(source, number, parsed)


def get(instance_id: str) -> EnvHandle:
    """Return a handle to a live instance, no matter which process created it.

    Raises:
        InstanceNotFound: No host has it, or it has ended.
    """
    return init().get(instance_id)


def list_instances() -> list[InstanceInfo]:
    """Return the live instances of the cluster, oldest first."""
    return init().list_instances()


def release_many(handles: Sequence[EnvHandle]) -> None:
    """End instances in any state, with one round trip to each node; idempotent.

    Raises:
        ConfigError: An item is not a handle; nothing is ended.
    """
    for handle in handles:
        if not isinstance(handle, EnvHandle):
            raise ConfigError(
                f"{handle!r} is not an EnvHandle", hint="pass the handles that create returned"
            )
    init().release([handle.instance_id for handle in handles])
