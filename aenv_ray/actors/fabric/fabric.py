"""A process's connection to the fabric of a Ray cluster: it creates, finds and ends instances.

`aenv_ray.actors.fabric.driver_api` holds the one connection of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate, gated
from aenv_ray.errors import InstanceNotFound
from aenv_ray.models import InstanceInfo, InstanceStatus
from aenv_ray.project.project import Project
from aenv_ray.units import counted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from ray import ObjectRef

    from aenv_ray.actors.controller.draining import NodeState
    from aenv_ray.actors.controller.placement import HostLoad
    from aenv_ray.actors.fabric.create_protocol import CreateProtocol
    from aenv_ray.actors.host.environment_relay import ConnectInner
    from aenv_ray.actors.host.remote_host import RemoteHost

LOOK_S: Final = 0.5
"""A wait notices within this time that the connection was shut down."""
_ANSWER_S: Final = 300.0
"""Deadline of an answer of the controller. It is longer than a lost head usually takes to
return."""


T = TypeVar("T")


class Fabric:
    """A connection of this process to the fabric of a Ray cluster.

    Args:
        connect_inner: As for `Controller`; used if there is no controller yet.
        address: Ray cluster, as for `init`.
        any_version: Connect also to a controller with an incompatible version of aenv-ray. Only
            `nodes`, `drain` and `undrain` work then: their messages are the same in all versions.

    Raises:
        ConfigError: The versions are incompatible.
        FabricUnavailable: As `init`.
    """

    def __init__(
        self,
        connect_inner: ConnectInner,
        address: str | None = None,
        *,
        any_version: bool = False,
    ) -> None:
        from aenv_ray.actors.controller import controller
        from aenv_ray.actors.fabric.create_protocol import CreateProtocol
        from aenv_ray.actors.fabric.quota_client import QuotaClient
        from aenv_ray.actors.fabric.waits import NOTICE_AFTER_S, BlockingWaits, WaitNotices
        from aenv_ray.actors.ray_shell import ray_api
        from aenv_ray.actors.ray_shell.head_watch import CUT_OFF, START_AGAIN, HeadWatch
        from aenv_ray.actors.ray_shell.versions import check_version

        self.gate = ShutdownGate()
        self.owns_ray = ray_api.ensure_ray(address)
        with ray_api.translated("finding the controller"):  # the head may have been lost since
            self.controller = controller.ensure_controller(connect_inner)
        self._notice_after_s = NOTICE_AFTER_S
        notices = WaitNotices(is_silent=lambda: self.head_watch.is_missed)
        self.quotas = QuotaClient()
        self.protocol = CreateProtocol(
            self.controller, BlockingWaits(self.wait), notices, quotas=self.quotas
        )
        version = self.wait(self.controller.ping.remote(), "the controller", 120.0)
        if not any_version:
            check_version(
                version,
                "the cluster's head",
                "install the version of the cluster here, or upgrade it",
            )
        self.head_watch = HeadWatch(
            ray_api.head_address(),
            has_node=lambda: ray_api.node_id() in ray_api.alive_nodes(),
            on_cut_off=lambda: self.gate.fail(CUT_OFF, START_AGAIN),
        )
        self.protocols: dict[AbstractEventLoop, CreateProtocol] = {}
        """Those of event loops; `protocol` is the one for threads."""

    @gated
    def wait(
        self,
        reference: ObjectRef[T],
        what: str,
        deadline_s: float = _ANSWER_S,
        on_wait: Callable[[float], None] | None = None,
    ) -> T:
        """Return the value of a Ray reference; blocks.

        The arguments are those of `Waits.result`.

        Raises:
            FabricUnavailable: The actor is gone, `deadline_s` passed, or `shutdown` was called.
            AenvError: What the actor raised.
        """
        from aenv_ray.actors.ray_shell import ray_api

        def look(waited_s: float) -> None:
            self.gate.check()
            if on_wait is not None and waited_s % self._notice_after_s == 0:
                on_wait(waited_s)

        answer: T = ray_api.wait(reference, what, deadline_s, look, look_s=LOOK_S)
        return answer

    # --- creating -------------------------------------------------------------------------------

    @gated
    def create(self, source: Project, count: int, options: CreateOptions) -> list[EnvHandle]:
        """Create `count` instances, all or none.

        Raises:
            AenvError: As `aenv_ray.create`; nothing is left behind.
        """
        from aenv_ray.actors.fabric.quota_client import quota_subjects
        from aenv_ray.actors.ray_shell import operator_policy, ray_api
        from aenv_ray.blocking import run_blocking

        places = 1 + source.config.deploy.inner_limit
        run_blocking(self.protocol.check_size(count, options.actor, places))
        if options.near is not None:
            options.near_node = ray_api.node_of(options.near)
        specs = options.specs(
            source, count, job_id=ray_api.job_id(), policy=operator_policy.current()
        )
        created = run_blocking(
            self.protocol.create(
                source, specs, options.actor, options.queue_s, subjects=quota_subjects(options)
            )
        )
        return [
            EnvHandle(one.info.id, one.spec.reference, one.host, self.controller) for one in created
        ]

    def shared_hosts(
        self, wanted: int, engines: Sequence[str] = ()
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Return the shared hosts that can run one of `engines`, with their load; blocks.

        Nodes without hosts get some if the others have fewer than `wanted` free slots.

        Raises:
            FabricUnavailable: No node has a host, or none can run these engines.
        """
        from aenv_ray.blocking import run_blocking

        return run_blocking(self.protocol.shared_hosts.look(wanted, engines))

    # --- finding --------------------------------------------------------------------------------

    @gated
    def get(self, instance_id: str) -> EnvHandle:
        """Return a handle to a live instance.

        Raises:
            InstanceNotFound: No host has it, or it has ended.
        """
        host, info = self.wait(self.controller.locate.remote(instance_id), f"finding {instance_id}")
        if info.status is not InstanceStatus.RUNNING:
            raise InstanceNotFound(
                f"{instance_id} has ended", instance_id=instance_id, hint="create a new instance"
            )
        return EnvHandle(info.id, info.reference, host, self.controller)

    @gated
    def count_processes(self) -> int:
        """Return how many processes, containers and pods of sandboxes run on all nodes."""
        return self.wait(self.controller.count_processes.remote(), "counting sandboxes")

    @gated
    def list_instances(self) -> list[InstanceInfo]:
        """Return the live instances."""
        return self.wait(self.controller.list_instances.remote(), "listing instances")

    @gated
    def release(self, instance_ids: Sequence[str]) -> None:
        """End instances, in any state; idempotent."""
        reference = self.controller.release.remote(list(instance_ids))
        self.wait(reference, f"releasing {counted(len(instance_ids), 'instance')}")

    # --- nodes ----------------------------------------------------------------------------------

    @gated
    def nodes(self) -> list[NodeState]:
        """Return the state of each live node."""
        return self.wait(self.controller.nodes.remote(), "the nodes")

    @gated
    def drain(self, node: str, *, is_leaving: bool = False) -> NodeState:
        """Stop new instances on a node, see `NodeDrains.drain`."""
        return self.wait(self.controller.drain.remote(node, is_leaving), "draining")

    @gated
    def undrain(self, node: str) -> NodeState:
        """Let a node take instances again, see `NodeDrains.undrain`."""
        return self.wait(self.controller.undrain.remote(node), "undraining")
