"""Thin wrappers around Ray's API: start it, find actors, jobs and nodes, wait for references."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import uuid
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import ray
from ray import exceptions as ray_exceptions
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aenv_ray import local_fabric
from aenv_ray.actors.ray_shell.nodes import ENGINE_LABEL, SLOT, NodeFacts, SlotDemand
from aenv_ray.actors.ray_shell.ray_start import (
    await_listener,
    children,
    end_since,
    of_ray_start,
    run_on_main_thread,
    short_directory,
    start_hint,
)
from aenv_ray.actors.ray_shell.ray_token import carry_token, protect_token, use_token
from aenv_ray.config import settings
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    SandboxLost,
)

if TYPE_CHECKING:
    import pyarrow
    import ray.data

T = TypeVar("T")
logger = logging.getLogger("aenv_ray")

NAMESPACE: Final = "aenv"
"""Ray namespace of all our actors."""
CONTROLLER_NAME: Final = "aenv-controller"
HUB_NAME: Final = "aenv-hub"
GATEWAY_APP: Final = "aenv-gateway"
"""Serve application of the gateway."""
_REPLICA: Final = "ServeReplica:"
"""Beginning of the class of Serve's replicas; application and deployment follow."""
_ROUTINE_WARNINGS: Final = {
    "ray._private.authentication.authentication_token_setup": "Token authentication is enabled",
    "ray._private.worker": "SIGTERM handler is not set",
}
"""Loggers of Ray, with the beginning of a warning that each start of Ray logs."""
_PATIENCE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable with the time for which Ray's core waits for a lost head before it ends its process."""
_PATIENCE_S: Final = 600
_HEAD: Final = "node:__internal_head__"
"""Resource with which Ray marks its head."""
_SHARE_OF_NODE: Final = 0.001
_DRAINING: Final = "draining-nodes"
"""Key of the ids of draining nodes, each with whether it is leaving."""
_LEAVING: Final = f"{NAMESPACE}-leaving"
"""Ray namespace of the actors that keep leaving nodes in use."""
_DEMAND: Final = "aenv-demand-"
"""Prefix of the names of our placement groups."""

SYSTEM_CONFIG: Final = {
    # Keep idle workers: an actor in an existing worker takes 0.4 s, in a new one several.
    "idle_worker_killing_time_threshold_ms": 600_000,
    # Ray's agents import for seconds; its limit of 30 s is too short on a busy machine.
    "agent_register_timeout_ms": 120_000,
}


def ensure_ray(address: str | None = None) -> bool:
    """Connect to Ray; start a local one if there is none to join.

    Args:
        address: A cluster. None: ``RAY_ADDRESS`` if set, else the Ray of ``aenv up``, else that of
            this user's ``ray start`` on this machine, else a new one.

    Returns:
        Whether a local Ray was started; it ends with this process.

    Raises:
        FabricUnavailable: The cluster does not answer, or the local Ray does not start.
    """
    if ray.is_initialized():
        protect_token()  # the program called `ray.init`, which leaves the token open
        return False
    address = address or settings().ray_address
    local = _of_aenv_up(address)
    if local is not None:
        address = local
        use_token()
    address = address or of_ray_start()
    if address is None:
        carry_token()
    else:
        await_listener(address)
    before = children()
    try:
        run_on_main_thread(lambda: _init_ray(address))
    except KeyboardInterrupt:
        end_since(before)
        raise
    except Exception as exc:  # Ray raises a plain Exception if its processes are slow to start
        end_since(before)
        if address is None:
            raise FabricUnavailable(
                f"a local Ray cannot be started: {exc}",
                hint=start_hint(),
            ) from exc
        raise FabricUnavailable(
            f"Ray at {address} cannot be reached: {exc}",
            hint="check RAY_ADDRESS, or unset it to start a local Ray",
        ) from exc
    protect_token()
    return address is None


def _init_ray(address: str | None) -> None:
    with quiet_start(), _patient() if address is not None else contextlib.nullcontext():
        ray.init(
            address=address or "local",  # not None: Ray would look for the address of a dead Ray
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
            include_dashboard=False if address is None else None,
            _system_config=dict(SYSTEM_CONFIG) if address is None else None,
            _temp_dir=short_directory() if address is None else None,
        )


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Let Ray's core wait for a lost head for `_PATIENCE_S`, if Ray starts within the block.

    By default, Ray ends this process after a minute without the head. The variable is removed after
    the block, so that child processes do not inherit it.
    """
    if _PATIENCE in os.environ:
        yield
        return
    os.environ[_PATIENCE] = str(_PATIENCE_S)
    try:
        yield
    finally:
        del os.environ[_PATIENCE]


def head_address() -> str:
    """Return ``HOST:PORT`` of the head of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Log Ray's routine start-up warnings at level INFO, through our own logger."""
    loggers = [logging.getLogger(name) for name in _ROUTINE_WARNINGS]
    for ray_logger in loggers:
        ray_logger.addFilter(_demote_routine)
    try:
        yield
    finally:
        for ray_logger in loggers:
            ray_logger.removeFilter(_demote_routine)


def _demote_routine(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if not message.startswith(_ROUTINE_WARNINGS[record.name]):
        return True
    logger.info("Ray: %s", message)
    return False


def start_local(num_cpus: int) -> str:
    """Start a Ray of this process with that many CPUs, join it, and return its address."""
    carry_token()
    context: Any = ray.init(
        address="local",
        num_cpus=num_cpus,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        _system_config=dict(SYSTEM_CONFIG),
    )
    protect_token()
    return str(context.address_info["gcs_address"])


def all_processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Yield pid, command and environment of each process that this user may inspect."""
    import psutil

    listing: Any = psutil.process_iter
    for process in listing():
        with contextlib.suppress(psutil.Error):
            yield process.pid, process.cmdline(), process.environ()


def listening() -> list[tuple[int | None, str, int]]:
    """Return process, address and port of the TCP sockets that accept connections.

    The process is None if this user may not inspect it.
    """
    import psutil

    connections: Any = psutil.net_connections
    return [
        (one.pid, one.laddr.ip, one.laddr.port)
        for one in connections(kind="tcp")
        if one.status == psutil.CONN_LISTEN
    ]


def _of_aenv_up(address: str | None) -> str | None:
    """Return the address of the fabric of ``aenv up`` if `address` refers to it, else None."""
    try:
        fabric = local_fabric.read(settings().data_dir)
    except ConfigError:
        return None  # `aenv status` reports it; Ray code does not depend on that file
    if fabric is None or not fabric.owns_ray or address not in (None, fabric.ray_address):
        return None
    return fabric.ray_address if fabric.ray_answers() else None


def leave() -> None:
    """Disconnect from Ray; a Ray that this process started ends, one that it joined continues."""
    ray.shutdown()


def is_connected() -> bool:
    """Whether this process is connected to Ray. Using Ray without a connection starts one."""
    return bool(ray.is_initialized())


def job_id() -> str:
    """Return the id of the Ray job that this process belongs to."""
    return str(ray.get_runtime_context().get_job_id())


def node_id() -> str:
    """Return the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def node_of(place: Any) -> str:
    """Return the id of a node: `place` itself, this process's for ``"me"``, or an actor's.

    It is empty for an actor that has no node now. While Ray looks for room for one, it may be a
    node without room for it.
    """
    if isinstance(place, str):
        return node_id() if place == "me" else place
    from ray._private import state

    found: dict[str, Any] = state.actors(actor_id(place))
    return str(found.get("Address", {}).get("NodeID", ""))


def actor_id(actor: Any) -> str:
    """Return the id of an actor, in hexadecimal."""
    return str(actor._actor_id.hex())


def session_scope() -> str:
    """Return a text that is unique to this node and this Ray session."""
    context = ray.get_runtime_context()
    if hasattr(context, "get_session_name"):
        session = context.get_session_name()
    else:  # Ray below 2.54
        worker: Any = ray._private.worker.global_worker
        session = worker.node.session_name
    return f"{session}/{context.get_node_id()}"


def with_backpressure(method: Any, items: int) -> Any:
    """Return an actor's generator method that waits while `items` of its results are unread.

    Ray below 2.57 cannot do that for async actors: there a slow reader's results wait in memory.
    """
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < (2, 57):
        return method
    return method.options(_generator_backpressure_num_objects=items)


def serialization_context() -> Any:
    """Return Ray's serialization context of this process."""
    return ray._private.worker.global_worker.get_serialization_context()  # type: ignore[no-untyped-call]


def was_restarted() -> bool:
    """Whether Ray restarted the current actor after a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's property uses what Ray itself deprecates (2.60)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def alive_nodes() -> dict[str, NodeFacts]:
    """Return the live nodes by id."""
    draining = draining_nodes()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return {node_id: _facts(node, draining.get(node_id)) for node_id, node in alive.items()}


def draining_nodes() -> dict[str, bool]:
    """Return the ids of the nodes that take no new instances, each with whether it is leaving.

    Raises:
        FabricUnavailable: Ray does not answer.
    """
    kept: dict[str, bool] | list[str] = json.loads(stored_value(_DRAINING) or "{}")
    # A cluster that an earlier version ran may have a list, of nodes that were only drained.
    return kept if isinstance(kept, dict) else dict.fromkeys(kept, False)


def set_draining_nodes(nodes: Mapping[str, bool]) -> None:
    """Store what `draining_nodes` returns; only the controller does so.

    It is stored with Ray's own records, which survive the head if Ray has a Redis.

    Raises:
        FabricUnavailable: Ray does not answer.
    """
    store(_DRAINING, json.dumps(dict(nodes), sort_keys=True))


class _NodeUse:
    """An actor that keeps a node in use: Ray ends a node that it drains once it is unused."""

    def ready(self) -> None:
        """Return once the actor runs."""


def drained_by_ray() -> set[str]:
    """Return the ids of the nodes on which Ray places nothing new."""
    from ray._private import state

    nodes: dict[str, int] = state.state.get_draining_nodes()
    return set(nodes)


def drain_by_ray(node: str, within_s: float) -> None:
    """Have Ray place nothing new on a node; idempotent, irrevocable, and it blocks.

    Serve then moves its replicas: each ends after another one runs on another node. Everything else
    on the node continues, but actors that fail there are not restarted.

    Raises:
        FabricUnavailable: The node, or Ray, does not answer within `within_s`.
    """
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2  # Ray gives neither of them types
    worker: Any = ray._private.worker.global_worker
    use = disposable_actor(_NodeUse, max_concurrency=1).options(
        name=node, namespace=_LEAVING, lifetime="detached", get_if_exists=True,
        scheduling_strategy=pinned(node),
    )  # fmt: skip
    with translated(f"draining node {node[:12]}"):
        ray.get(use.remote().ready.remote(), timeout=within_s)
        worker.gcs_client.drain_node(
            node, messages.DRAIN_NODE_REASON_PREEMPTION, "aenv cluster drain", 0
        )


def actors_by_node(is_meant: Callable[[str], bool]) -> Counter[str]:
    """Return the number of live actors on each node, of the classes that are meant.

    Args:
        is_meant: Called with the name of a class, with its module.
    """
    from ray._private import state

    rows: dict[str, dict[str, Any]] = state.actors(actor_state_name="ALIVE")
    return Counter(
        str(row["Address"]["NodeID"])
        for row in rows.values()
        if is_meant(str(row["ActorClassName"]))
    )


def actor_nodes() -> dict[str, str]:
    """Return the ids of the nodes on which named actors run, by name; not of those that restart."""
    from ray._private import state

    rows: dict[str, dict[str, Any]] = state.actors(actor_state_name="ALIVE")
    return {str(row["Name"]): str(row["Address"]["NodeID"]) for row in rows.values()}


def replicas_by_node() -> Counter[str]:
    """Return the number of replicas of Serve on each node, without those of the gateway."""

    def is_replica(name: str) -> bool:
        return name.startswith(_REPLICA) and not name.startswith(f"{_REPLICA}{GATEWAY_APP}:")

    return actors_by_node(is_replica)


def _facts(node: dict[str, Any], is_leaving: bool | None) -> NodeFacts:
    """Return what is known of a node; `is_leaving` is None if it is not draining."""
    resources: dict[str, float] = node["Resources"]
    slots = resources.get(SLOT)
    return NodeFacts(
        cores=int(resources.get("CPU", 0)),
        slots=None if slots is None else int(slots),
        is_head=_HEAD in resources,
        machine=str(node.get("NodeManagerHostname", "")),
        engine=(node.get("Labels") or {}).get(ENGINE_LABEL),
        is_draining=is_leaving is not None,
        is_leaving=bool(is_leaving),
    )


def declared_engine() -> str | None:
    """Return the `ENGINE_LABEL` of this process's node; None if it has none."""
    labels: Any = ray.get_runtime_context().get_node_labels()  # strings; Ray declares another type
    declared = labels.get(ENGINE_LABEL)
    return None if declared is None else str(declared)


def leaving_nodes() -> set[str]:
    """Return the ids of the nodes that are to be stopped, from which services move.

    Raises:
        FabricUnavailable: Ray does not answer.
    """
    return {node for node, is_leaving in draining_nodes().items() if is_leaving}


def is_on_head() -> bool:
    """Whether this process runs on Ray's head."""
    facts = alive_nodes().get(node_id())
    return facts is not None and facts.is_head


def on_head() -> dict[str, Any]:
    """Return options that keep an actor, also after restarts, on Ray's head.

    On another node it would prevent the autoscaler from removing that node.
    """
    return {"resources": {_HEAD: _SHARE_OF_NODE}}


def on_this_node() -> dict[str, Any]:
    """Return options that keep an actor, also after restarts, on nodes with this node's address."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own
    (address,) = [n["NodeManagerAddress"] for n in nodes if n["NodeID"] == node_id()]
    return {"resources": {f"node:{address}": _SHARE_OF_NODE}}


def hosting(slots: int | None) -> dict[str, Any]:
    """Return options for a host that occupies this many slots of its node; None for none."""
    return {} if slots is None else {"resources": {SLOT: slots}}


def demand_slots(bundles: Sequence[SlotDemand]) -> None:
    """Ask Ray's autoscaler for slots until the next call; each bundle must fit on one node.

    The demand consists of unused placement groups: only these add to the demand of others and start
    no process.
    """
    table: dict[str, dict[str, Any]] = placement_group_table()
    for group_id, row in table.items():
        if row["name"].startswith(_DEMAND) and row["state"] != "REMOVED":
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))
            remove_placement_group(group)
    for slots, engines in bundles:
        selector = [{ENGINE_LABEL: f"in({','.join(engines)})"}] if engines else None
        name = f"{_DEMAND}{uuid.uuid4().hex[:12]}"
        placement_group([{SLOT: slots}], name=name, bundle_label_selector=selector)


def has_autoscaler() -> bool:
    """Return whether an autoscaler, of either of Ray's versions, reports to this cluster."""
    from ray._private import ray_constants
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental import internal_kv

    key = ray_constants.DEBUG_AUTOSCALING_STATUS
    return bool(internal_kv._internal_kv_get(key)) or is_autoscaler_v2(fetch_from_server=True)


def dead_jobs() -> set[str]:
    """Return the ids of the ended Ray jobs, from the GCS."""
    from ray._private import state

    jobs: list[dict[str, Any]] = state.jobs()  # type: ignore[no-untyped-call]  # Ray's own
    return {job["JobID"] for job in jobs if job["IsDead"]}


def restartable_actor(cls: type, *, max_concurrency: int) -> Any:
    """Return an actor class that Ray restarts and whose interrupted tasks it repeats.

    Its methods must therefore be idempotent; calls are idempotent because of their ids.
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": max_concurrency,
        "enable_task_events": False,
    }
    return ray.remote(**options)(cls)


def disposable_actor(cls: type, *, max_concurrency: int) -> Any:
    """Return an actor class that Ray does not restart; its creator starts another."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": max_concurrency,
        "enable_task_events": False,
    }
    return ray.remote(**options)(cls)


def environment_actor(cls: type) -> Any:
    """Return a class as an actor of somebody else's framework, which sets its options."""
    return ray.remote(cls)


def put(value: Any) -> Any:
    """Put a value into the object store; its reference can be passed in place of the value."""
    return ray.put(value)


def dataset_of(table: pyarrow.Table) -> ray.data.Dataset:
    """Return an Arrow table as a data set of Ray Data.

    Raises:
        ConfigError: Ray Data cannot be imported.
    """
    try:
        import ray.data
    except ImportError as exc:
        raise ConfigError(
            f"to_ray() requires Ray Data, which cannot be imported: {exc}",
            hint="pip install 'aenv-ray[data]'",
        ) from exc
    return ray.data.from_arrow(table)


def cheap_task(function: Any) -> Any:
    """Return a Ray task that reserves no CPU and is retried."""
    return ray.remote(num_cpus=0, max_retries=3)(function)


def store_once(key: str, value: str) -> str:
    """Store a value under a key for the life of the cluster, unless the key has a value.

    Returns:
        The stored value.
    """
    from ray.experimental import internal_kv

    name = f"{NAMESPACE}:{key}".encode()
    internal_kv._internal_kv_put(name, value.encode(), overwrite=False)
    kept: bytes = internal_kv._internal_kv_get(name)
    return kept.decode()


def store(key: str, value: str) -> None:
    """Store a value under a key for the life of the cluster.

    Raises:
        FabricUnavailable: Ray does not answer.
    """
    from ray.experimental import internal_kv

    with translated("storing a value"):
        internal_kv._internal_kv_put(f"{NAMESPACE}:{key}".encode(), value.encode(), overwrite=True)


def stored_value(key: str) -> str | None:
    """Return the value under a key, or None.

    Raises:
        FabricUnavailable: Ray does not answer.
    """
    from ray.experimental import internal_kv

    with translated("reading a value"):
        kept: bytes | None = internal_kv._internal_kv_get(f"{NAMESPACE}:{key}".encode())
    return None if kept is None else kept.decode()


def find_actor(name: str, namespace: str = NAMESPACE) -> Any | None:
    """Return the live actor with this name, or None."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def actor_names() -> list[str]:
    """Return the names of our live actors."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [row["name"] for row in listed if row["namespace"] == NAMESPACE]


def pinned(node: str) -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy that keeps an actor, also after restarts, on a node."""
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def kill(actor: Any) -> None:
    """Kill an actor without restart."""
    ray.kill(actor, no_restart=True)


def end_current_actor() -> None:
    """Kill the actor that runs this code, without restart."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def wait(
    reference: Any,
    what: str,
    deadline_s: float,
    look: Callable[[float], None],
    *,
    look_s: float,
) -> Any:
    """Return the value of a reference; blocks.

    `look` is called every `look_s` with the seconds waited so far; an exception from it ends the
    wait. `what` names the wait in errors.

    Raises:
        FabricUnavailable: The actor behind it is gone, or `deadline_s` passed.
        AenvError: What the actor raised.
    """
    waited_s = 0.0
    with translated(what):
        while True:
            # No `ray.wait` before `ray.get`: it would wake this thread twice.
            once_s = min(look_s, deadline_s - waited_s)
            try:
                return ray.get(reference, timeout=once_s)
            except ray_exceptions.GetTimeoutError as exc:
                waited_s += once_s
                if waited_s >= deadline_s:
                    raise FabricUnavailable(
                        f"{what} did not answer within {deadline_s:g} s",
                        hint="check the cluster with `ray status`; logs are in "
                        "/tmp/ray/session_latest/logs on each node",
                    ) from exc
            look(waited_s)


async def wait_async(
    reference: Awaitable[T], what: str, deadline_s: float, *, instance_id: str | None = None
) -> T:
    """Return the value of a reference, in an event loop; cancelling leaves the task running.

    `what` names the wait in errors; `instance_id` is the called instance, None for other actors.

    Raises:
        FabricUnavailable: The actor is gone, or `deadline_s` passed.
        SandboxLost, DeadlineExceeded: The same for an instance.
        CallCancelled: The task was cancelled.
        AenvError: What the actor raised.
    """
    kind: type[AenvError] = FabricUnavailable if instance_id is None else DeadlineExceeded
    where = "" if instance_id is None else f" on {instance_id}"
    late = kind(f"{what}{where} had no answer within {deadline_s:g} s")
    try:
        with translated(what, instance_id=instance_id):
            async with deadline(deadline_s, late):
                return await reference
    except ray_exceptions.TaskCancelledError:
        raise CallCancelled(f"{what}{where}: the call was cancelled") from None


def cancel(reference: Any) -> None:
    """Cancel an actor task; an async method sees `asyncio.CancelledError`."""
    with contextlib.suppress(ray_exceptions.RayError, TypeError, ValueError):
        ray.cancel(reference)


def unwrap(exc: BaseException) -> BaseException:
    """Return the exception that a Ray error wraps, or `exc` itself."""
    if isinstance(exc, ray_exceptions.RayTaskError):
        cause = getattr(exc, "cause", None)
        return cause if isinstance(cause, BaseException) else exc
    return exc


@contextlib.contextmanager
def translated(what: str, *, instance_id: str | None = None) -> Iterator[None]:
    """Translate Ray's exceptions that leave the block into ours.

    Args:
        what: Names the operation in errors.
        instance_id: If given, the death of its host is `SandboxLost`, else FabricUnavailable.
    """
    try:
        yield
    except ray_exceptions.RayTaskError as exc:
        cause = unwrap(exc)
        if isinstance(cause, AenvError):
            raise cause from None
        if cause is not exc and isinstance(cause, ray_exceptions.RayError):
            # What the actor itself asked of Ray failed, for example because the head was away. The
            # actor lives, so nothing is chained that would say that it died.
            raise FabricUnavailable(f"{what}: {_first_line(cause)}") from None
        raise
    except ray_exceptions.TaskCancelledError:
        raise
    except ray_exceptions.RayError as exc:
        if instance_id is not None:
            raise SandboxLost(
                f"{what}: the host of {instance_id} is gone: {_first_line(exc)}",
                instance_id=instance_id,
                hint="its actor or node died, or the instance was released long ago",
            ) from exc
        raise FabricUnavailable(f"{what}: {_first_line(exc)}") from exc


@contextlib.asynccontextmanager
async def deadline(seconds: float, late: AenvError) -> AsyncIterator[None]:
    """Raise `late` if the block takes longer than `seconds`.

    Errors of ours and of Ray that happen to be a TimeoutError leave the block unchanged.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        if isinstance(exc, AenvError | ray_exceptions.RayError):
            raise
        raise late from exc


def is_from_ray(error: AenvError) -> bool:
    """Whether `translated` made the error from one of Ray's."""
    return isinstance(error.__cause__, ray_exceptions.RayError)


def is_of_a_dead_actor(error: AenvError) -> bool:
    """Whether an error of `translated` means that the actor has ended for good.

    An actor whose node died cannot be restarted either; Ray has a different error for that.
    """
    gone = (ray_exceptions.ActorDiedError, ray_exceptions.ActorUnschedulableError)
    return isinstance(error.__cause__, gone)


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
