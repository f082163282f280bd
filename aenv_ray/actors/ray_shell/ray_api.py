"""The one place that knows Ray's own API: starting it, finding actors, jobs and nodes.

Everything here is a thin call; what to do with it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

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
from aenv_ray.actors.ray_shell import main_thread_executor, ray_cleanup
from aenv_ray.actors.ray_shell.nodes import SLOT, NodeFacts
from aenv_ray.actors.ray_shell.ray_address import await_listener, short_directory, way_out
from aenv_ray.actors.ray_shell.ray_token import carry_token, use_token
from aenv_ray.config import settings
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    SandboxLost,
)

T = TypeVar("T")
logger = logging.getLogger("aenv_ray")

NAMESPACE: Final = "aenv"
"""Ray namespace of every actor of ours."""
CONTROLLER_NAME: Final = "aenv-controller"
HUB_NAME: Final = "aenv-hub"
_ROUTINE_WARNINGS: Final = {
    "ray._private.authentication.authentication_token_setup": "Token authentication is enabled",
    "ray._private.worker": "SIGTERM handler is not set",
}
"""Loggers of Ray, with the beginning of a warning that each start of Ray logs."""
_HEAD: Final = "node:__internal_head__"
"""Resource by which Ray marks its head."""
_SHARE_OF_HEAD: Final = 0.001
_DEMAND: Final = "aenv-demand-"
"""What the names of our placement groups begin with."""

SYSTEM_CONFIG: Final = {
    # Keep started workers warm: an actor from the pool takes 0.4 s, a cold one several.
    "idle_worker_killing_time_threshold_ms": 600_000,
    # Its agents import for seconds; on a busy machine half a minute, Ray's own limit, is too short.
    "agent_register_timeout_ms": 120_000,
}


def ensure_ray(address: str | None = None) -> bool:
    """Connect to Ray, starting a local one when there is none to join.

    Args:
        address: A cluster. None: what ``RAY_ADDRESS`` names, else that of ``aenv up``, else a local
            Ray that runs already or is started now.

    Returns:
        Whether a local Ray was started, which ends with this process.

    Raises:
        FabricUnavailable: The named cluster does not answer, or no local Ray comes up.
    """
    if ray.is_initialized():
        return False
    address = address or settings().ray_address
    local = _of_aenv_up(address)
    if local is not None:
        address = local
        use_token()
    if address is None:
        carry_token()
    else:
        await_listener(address)
    before = ray_cleanup.children()
    try:
        main_thread_executor.run(lambda: _init_ray(address))
    except KeyboardInterrupt:
        ray_cleanup.end_since(before)
        raise
    except Exception as exc:  # Ray raises a bare one where its processes are slow to start
        ray_cleanup.end_since(before)
        if address is None:
            raise FabricUnavailable(
                f"a local Ray cannot be started: {exc}",
                hint=way_out(),
            ) from exc
        raise FabricUnavailable(
            f"Ray at {address} cannot be reached: {exc}",
            hint="check RAY_ADDRESS, or unset it to start a local Ray",
        ) from exc
    return address is None


def _init_ray(address: str | None) -> None:
    with quiet_start():
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
            include_dashboard=False if address is None else None,
            _system_config=dict(SYSTEM_CONFIG) if address is None else None,
            _temp_dir=short_directory() if address is None else None,
        )


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
    context: Any = ray.init(
        address="local",
        num_cpus=num_cpus,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        _system_config=dict(SYSTEM_CONFIG),
    )
    return str(context.address_info["gcs_address"])


def all_processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Yield pid, command and environment of each process that this user may inspect.

    For systems without ``/proc``; psutil comes with Ray.
    """
    import psutil

    listing: Any = psutil.process_iter
    for process in listing():
        with contextlib.suppress(psutil.Error):
            yield process.pid, process.cmdline(), process.environ()


def _of_aenv_up(address: str | None) -> str | None:
    """Return the address of the fabric that ``aenv up`` started, if `address` means that one."""
    try:
        fabric = local_fabric.read(settings().data_dir)
    except ConfigError:
        return None  # `aenv status` says why; Ray code does not depend on that file
    if fabric is None or not fabric.owns_ray or address not in (None, fabric.ray_address):
        return None
    return fabric.ray_address if fabric.ray_answers() else None


def leave() -> None:
    """Disconnect this process from Ray; a Ray that it joined goes on."""
    ray.shutdown()


def is_connected() -> bool:
    """Whether this process is connected to Ray; using Ray when it is not starts a new one."""
    return bool(ray.is_initialized())


def job_id() -> str:
    """Return the id of the Ray job that this process belongs to."""
    return str(ray.get_runtime_context().get_job_id())


def node_id() -> str:
    """Return the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def session_scope() -> str:
    """Return what tells this node of this Ray session from any other on the machine."""
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
    """Return what this process serializes values for Ray with."""
    return ray._private.worker.global_worker.get_serialization_context()  # type: ignore[no-untyped-call]


def was_restarted() -> bool:
    """Whether Ray restarted the current actor after a failure."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def alive_nodes() -> dict[str, NodeFacts]:
    """Return the nodes that are up, by id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own
    return {str(node["NodeID"]): _facts(node) for node in nodes if node["Alive"]}


def _facts(node: dict[str, Any]) -> NodeFacts:
    resources: dict[str, float] = node["Resources"]
    slots = resources.get(SLOT)
    return NodeFacts(
        cores=int(resources.get("CPU", 0)),
        slots=None if slots is None else int(slots),
        is_head=_HEAD in resources,
        machine=str(node.get("NodeManagerHostname", "")),
    )


def is_on_head() -> bool:
    """Whether this process runs on Ray's head."""
    facts = alive_nodes().get(node_id())
    return facts is not None and facts.is_head


def on_head() -> dict[str, Any]:
    """Return the options that keep an actor, and its restarts, on Ray's head.

    Elsewhere it would keep a node from going when nothing else is there.
    """
    return {"resources": {_HEAD: _SHARE_OF_HEAD}}


def hosting(slots: int | None) -> dict[str, Any]:
    """Return the options of a host that holds as many slots of its node; None: it has none."""
    return {} if slots is None else {"resources": {SLOT: slots}}


def demand_slots(bundles: Sequence[int]) -> None:
    """Have Ray's autoscaler make room for that many slots, each number on one node.

    They are placement groups that nobody uses: the one demand that adds to what others ask for and
    starts no process. It stands until the next call.
    """
    table: dict[str, dict[str, Any]] = placement_group_table()
    for group_id, row in table.items():
        if row["name"].startswith(_DEMAND) and row["state"] != "REMOVED":
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))
            remove_placement_group(group)
    for slots in bundles:
        placement_group([{SLOT: slots}], name=f"{_DEMAND}{uuid.uuid4().hex[:12]}")


def has_autoscaler() -> bool:
    """Return whether an autoscaler, of either of Ray's versions, reports to this cluster."""
    from ray._private import ray_constants
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental import internal_kv

    key = ray_constants.DEBUG_AUTOSCALING_STATUS
    return bool(internal_kv._internal_kv_get(key)) or is_autoscaler_v2(fetch_from_server=True)


def dead_jobs() -> set[str]:
    """Return the ids of the Ray jobs that ended; asks the GCS, not the dashboard."""
    from ray._private import state

    jobs: list[dict[str, Any]] = state.jobs()  # type: ignore[no-untyped-call]  # Ray's own
    return {job["JobID"] for job in jobs if job["IsDead"]}


def restartable_actor(cls: type, *, max_concurrency: int) -> Any:
    """Return an actor class that Ray restarts, and whose interrupted tasks it sends again.

    Its methods are therefore idempotent: calls by their ids, the rest by what it does (D6).
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": max_concurrency,
        "enable_task_events": False,
    }
    return ray.remote(**options)(cls)


def cheap_task(function: Any) -> Any:
    """Return a Ray task that takes no CPU of the cluster's, and that Ray sends again."""
    return ray.remote(num_cpus=0, max_retries=3)(function)


def noted(key: str, value: str) -> str:
    """Note a value under a key for as long as the cluster lives, unless there is one.

    Returns:
        What is noted there.
    """
    from ray.experimental import internal_kv

    name = f"{NAMESPACE}:{key}".encode()
    internal_kv._internal_kv_put(name, value.encode(), overwrite=False)
    kept: bytes = internal_kv._internal_kv_get(name)
    return kept.decode()


def find_actor(name: str) -> Any | None:
    """Return the actor of ours with that name; None when there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def is_actor_alive(name: str, namespace: str) -> bool:
    """Whether a named actor is alive, as the GCS knows."""
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def actor_names() -> list[str]:
    """Return the names of our live actors."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [row["name"] for row in listed if row["namespace"] == NAMESPACE]


def pinned(node: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy that keeps an actor, and its restarts, on a node."""
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def kill(actor: Any) -> None:
    """End an actor for good."""
    ray.kill(actor, no_restart=True)


def end_current_actor() -> None:
    """End the actor that runs this code, for good."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def wait(
    reference: Any,
    what: str,
    deadline_s: float,
    look: Callable[[float], None],
    *,
    look_s: float,
) -> Any:
    """Return what a reference becomes, in a thread that may block.

    Args:
        reference: From a ``.remote(...)``.
        what: What is waited for, for the message.
        deadline_s: Seconds to wait at most.
        look: Called with the seconds waited so far, every `look_s`; what it raises ends the wait.
        look_s: Seconds between two looks.

    Raises:
        FabricUnavailable: The actor behind it is gone, or `deadline_s` passed.
        AenvError: What the actor raised.
    """
    waited_s = 0.0
    with translated(what):
        while True:
            # `ray.get` comes first: a `ray.wait` before it would be another round of waking up.
            once_s = min(look_s, deadline_s - waited_s)
            try:
                return ray.get(reference, timeout=once_s)
            except ray_exceptions.GetTimeoutError as exc:
                waited_s += once_s
                if waited_s >= deadline_s:
                    raise FabricUnavailable(
                        f"{what} did not answer within {deadline_s:g} s"
                    ) from exc
            look(waited_s)


async def wait_async(
    reference: Awaitable[T], what: str, deadline_s: float, *, instance_id: str | None = None
) -> T:
    """Return the value of a reference, in an event loop; cancelling leaves the task running.

    Args:
        reference: From a ``.remote(...)`` call.
        what: Names the wait in errors.
        deadline_s: Longest wait.
        instance_id: The instance that is called; None for any other actor.

    Raises:
        FabricUnavailable: The actor is gone, or `deadline_s` passed.
        SandboxLost, DeadlineExceeded: The same for an instance.
        CallCancelled: The task was cancelled.
        AenvError: What the actor raised.
    """
    late: type[AenvError] = FabricUnavailable if instance_id is None else DeadlineExceeded
    where = "" if instance_id is None else f" on {instance_id}"
    try:
        with translated(what, instance_id=instance_id):
            try:
                async with asyncio.timeout(deadline_s):
                    return await reference
            except TimeoutError as exc:
                if isinstance(exc, AenvError | ray_exceptions.RayError):
                    raise
                raise late(f"{what}{where} had no answer within {deadline_s:g} s") from exc
    except ray_exceptions.TaskCancelledError:
        raise CallCancelled(f"{what}{where}: the call was cancelled") from None


def cancel(reference: Any) -> None:
    """Cancel an actor task; an async method sees `asyncio.CancelledError`."""
    with contextlib.suppress(ray_exceptions.RayError, TypeError, ValueError):
        ray.cancel(reference)


def unwrap(exc: BaseException) -> BaseException:
    """Return our error inside one of Ray's, or `exc` itself."""
    if isinstance(exc, ray_exceptions.RayTaskError):
        cause = getattr(exc, "cause", None)
        return cause if isinstance(cause, BaseException) else exc
    return exc


@contextlib.contextmanager
def translated(what: str, *, instance_id: str | None = None) -> Iterator[None]:
    """Turn Ray's exceptions that leave the block into ours.

    Args:
        what: What was being done, for the message.
        instance_id: The instance concerned; its host's death is then `SandboxLost`.
    """
    try:
        yield
    except ray_exceptions.RayTaskError as exc:
        cause = unwrap(exc)
        if isinstance(cause, AenvError):
            raise cause from None
        raise
    except ray_exceptions.TaskCancelledError:
        raise
    except ray_exceptions.RayError as exc:
        if instance_id is not None:
            raise SandboxLost(
                f"{what}: the host of {instance_id} is gone: {_first_line(exc)}",
                instance_id=instance_id,
                hint="its actor or node died, or it was released long ago",
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
    """Whether an error of `translated` says that the actor has ended for good.

    One whose node died cannot be started anywhere else, which Ray tells in words of its own.
    """
    gone = (ray_exceptions.ActorDiedError, ray_exceptions.ActorUnschedulableError)
    return isinstance(error.__cause__, gone)


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
