"""The way of a pod from the API's word to a runtime that answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.kubernetes import causes, names
from aenv_ray.engines.kubernetes import spec as kubernetes_spec
from aenv_ray.engines.kubernetes.boot import Kits, boot, order, second_order
from aenv_ray.engines.kubernetes.instance import Instance
from aenv_ray.engines.kubernetes.spec import Surroundings
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.errors import ConfigError, SandboxStartFailed

CAUSE_WAIT_S: Final = 15.0
"""How late a node may tell why a pod ended."""
SCHEDULE_S: Final = 300.0
"""How long a pod waits for a node: a cluster that grows takes minutes."""
PULL_S: Final = 900.0
"""How long a pod may take until its containers run."""


def failed(instance_id: str, why: str) -> SandboxStartFailed:
    """Return the error for an instance that did not start."""
    return SandboxStartFailed(f"{instance_id} did not start: {why}", instance_id=instance_id)


async def reachable(instance: Instance, schedule_s: float) -> None:
    """Wait until all containers of a pod run.

    Args:
        instance: Told by the watch.
        schedule_s: How long it waits for a node.

    Raises:
        SandboxStartFailed: They cannot, or it ended.
        CapacityExceeded: No node takes it.
        Unfitting: Its image has no Python.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    futures: set[asyncio.Future[Any]] = {instance.address, instance.ended, instance.failed}
    while not any(future.done() for future in futures):
        waited = loop.time() - begun
        limit = schedule_s if instance.waits_for else PULL_S
        if waited >= limit:
            if instance.waits_for:
                raise causes.no_room(instance.id, instance.waits_for, limit)
            raise failed(instance.id, f"its containers did not run after {limit:g} s")
        await asyncio.wait(
            futures, timeout=min(1.0, limit - waited), return_when=asyncio.FIRST_COMPLETED
        )
    if instance.failed.done():
        instance.failed.result()
    if not instance.address.done():
        raise failed(instance.id, instance.ended.result())


async def give(
    instance: Instance,
    spec: SandboxSpec,
    around: Surroundings,
    key: HostKey,
    kits: Kits,
    ends_in_s: float,
) -> None:
    """Give the containers of a pod what they serve, and wait until they do.

    Args:
        instance: Reachable.
        spec: Its spec.
        around: Of its pod.
        key: Of this host.
        kits: For its Pythons.
        ends_in_s: Until its deadline.

    Raises:
        SandboxStartFailed: One of them says why not, or ended.
        Unfitting: Its image's Python is too old.
    """
    secret = key.secret(instance.name, instance.nonce, "boot")

    async def give_one(port: int, make: Any, what: str) -> None:
        told, parts = make(
            spec, around, key.secret(instance.name, instance.nonce, str(port)), ends_in_s
        )
        booting = asyncio.create_task(
            boot(instance.address.result(), port, secret, told, parts, kits)
        )
        futures: set[asyncio.Future[Any]] = {booting, instance.ended, instance.failed}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not booting.done():
                if instance.failed.done():
                    instance.failed.result()
                raise failed(instance.id, instance.ended.result())
            booting.result()
        except OSError as exc:
            why = f"its pod did not answer ({exc})"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_WAIT_S):
                    why = await asyncio.shield(instance.ended)
            raise failed(instance.id, why) from exc
        except SandboxStartFailed as exc:
            if not booting.done():
                raise
            raise failed(instance.id, f"{what}{exc.message}") from exc
        finally:
            booting.cancel()
            await asyncio.wait([booting])

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(give_one(kubernetes_spec.PORT, order, ""))
            if instance.has_second:
                group.create_task(
                    give_one(kubernetes_spec.SECOND_PORT, second_order, causes.SECOND)
                )
    except ExceptionGroup as several:
        raise several.exceptions[0] from several


def check_life(pod: causes.Pod, deadline: float, grace_s: float) -> None:
    """Refuse a deadline beyond the pod's own, which nobody can move.

    Args:
        pod: The instance's.
        deadline: Wished for; seconds since the epoch.
        grace_s: How much longer than its instance a pod may live.

    Raises:
        ConfigError: It is.
    """
    life_s = pod["spec"]["activeDeadlineSeconds"] - grace_s
    if deadline > causes.created_at(pod) + life_s:
        raise ConfigError(
            f"the pod of {pod['metadata']['annotations'][names.INSTANCE]} ends {life_s:g} s "
            "after it was made, and Kubernetes lets nobody move that",
            hint="create with the longest TTL that may be needed, or raise AENV_KUBERNETES_LIFE",
        )
