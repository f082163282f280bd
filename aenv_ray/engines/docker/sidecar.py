"""Sidecars: started beside the main container, reached through its host, ended with it.

A sidecar joins the network of the main container, so that both have a private loopback, and shares
a volume with it. It runs our runtime without any code of the project; the host calls it on behalf
of the main container's runtime (`aenv_ray.engines.door`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.instances import SIDECAR, DockerInstance, await_boot
from aenv_ray.engines.docker.link import Links
from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.engines.docker.plan import ContainerPlan, SidecarPlan
from aenv_ray.engines.docker.spec import sidecar_body
from aenv_ray.engines.node.docker_client import DaemonRefused
from aenv_ray.errors import SandboxStartFailed


class Sidecars:
    """Starts and finds the sidecars of one host's instances.

    Args:
        containers: Of the host.
        files: Of the scope.
        links: To them.
    """

    def __init__(self, containers: Containers, files: DockerFiles, links: Links) -> None:
        self._containers = containers
        self._files = files
        self._links = links

    @contextlib.asynccontextmanager
    async def started(
        self, instance: DockerInstance, spec: SandboxSpec, plan: ContainerPlan
    ) -> AsyncIterator[None]:
        """Start the sidecar, if there is one, while the block waits for the main container.

        Raises:
            SandboxStartFailed: It did not start; an exception of the block takes precedence.
        """
        if plan.sidecar is None:
            yield
            return
        start = asyncio.create_task(self._start(instance, spec, plan, plan.sidecar))
        try:
            yield
            await start
        finally:
            if not start.done():
                start.cancel()
            await asyncio.wait([start])
            if not start.cancelled():
                start.exception()  # retrieved: the exception of the block is the one to report

    async def _start(
        self,
        instance: DockerInstance,
        spec: SandboxSpec,
        plan: ContainerPlan,
        sidecar: SidecarPlan,
    ) -> None:
        self._files.make_run_directory(sidecar.name)
        body = sidecar_body(spec, plan, sidecar)
        link = instance.links[sidecar.name] = self._links.link(sidecar.name, body)
        try:
            async with self._containers.slot():
                instance.sidecar_id = await self._containers.create(sidecar.name, body)
                await self._containers.start(sidecar.name, instance.sidecar_id, link)
                instance.started.add(sidecar.name)
        except DaemonRefused as exc:
            raise SandboxStartFailed(
                f"{spec.instance_id} did not start: {SIDECAR}{exc.message}",
                instance_id=spec.instance_id,
            ) from exc
        last_log = partial(self._containers.last_log, sidecar.name)
        await await_boot(instance, link, last_log, SIDECAR)

    async def find(self, instance: DockerInstance) -> str | None:
        """Find the sidecar of an instance that an earlier host actor started.

        Returns:
            Why it does not run; None if it does.
        """
        name = sidecar_name(instance.name)
        try:
            details = await self._containers.details(name)
        except DaemonRefused:
            return f"{SIDECAR}it was removed while its host was away"
        instance.sidecar_id = details["Id"]
        instance.links[name] = self._links.link(name, details["Config"], details["Id"])
        instance.started.add(name)
        if details["State"]["Running"]:
            return None
        return SIDECAR + self._containers.cause(name, details)
