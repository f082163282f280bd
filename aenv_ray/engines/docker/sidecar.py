"""Second containers: started beside the first, reached through its host, ended with it.

The second container joins the network of the first, so that the two have a loopback that nobody
else has, and shares a volume with it. In it runs our runtime without any code, which the host asks
on behalf of the first container's runtime (`aenv_ray.engines.door`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker import spec as docker_spec
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.files import DockerFiles, second_name
from aenv_ray.engines.docker.instance import Instance, await_boot
from aenv_ray.engines.docker.link import Links
from aenv_ray.engines.docker.surroundings import SecondSurroundings, Surroundings
from aenv_ray.engines.node.docker_client import DaemonRefused
from aenv_ray.errors import SandboxStartFailed

SECOND: Final = "its second container: "
"""Before the cause of an end that began in the second container."""


class SecondContainers:
    """Starts and checks the second containers of one host.

    Args:
        containers: Of the host.
        files: Of the node's scope.
        links: To them.
    """

    def __init__(self, containers: Containers, files: DockerFiles, links: Links) -> None:
        self._containers = containers
        self._links = links
        self._files = files

    @contextlib.asynccontextmanager
    async def beside(
        self, instance: Instance, spec: SandboxSpec, around: Surroundings
    ) -> AsyncIterator[None]:
        """Start the second container while the block waits for the first, if there is to be one.

        Raises:
            SandboxStartFailed: It did not start, and the block did not fail before.
        """
        if around.second is None:
            yield
            return
        starting = asyncio.create_task(self._start(instance, spec, around, around.second))
        try:
            yield
            await starting
        finally:
            if not starting.done():
                starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()  # what ended the block is told, not this

    async def _start(
        self,
        instance: Instance,
        spec: SandboxSpec,
        around: Surroundings,
        second: SecondSurroundings,
    ) -> None:
        self._files.make_run_directory(second.name)
        body = docker_spec.second_body(spec, around, second)
        link = instance.links[second.name] = self._links.link(second.name, body)
        try:
            async with self._containers.slot():
                instance.second_id = await self._containers.create(second.name, body)
                await self._containers.start(second.name, instance.second_id, link)
                instance.started.add(second.name)
        except DaemonRefused as exc:
            raise SandboxStartFailed(
                f"{spec.instance_id} did not start: {SECOND}{exc.message}",
                instance_id=spec.instance_id,
            ) from exc
        last_words = partial(self._containers.last_words, second.name)
        await await_boot(instance, link, last_words, SECOND)

    async def find(self, instance: Instance) -> str | None:
        """Look for the second container of an instance that an earlier host made.

        Returns:
            Why it does not run, in words; None when it does.
        """
        name = second_name(instance.name)
        try:
            details = await self._containers.details(name)
        except DaemonRefused:
            return f"{SECOND}it was removed while its host was away"
        instance.second_id = details["Id"]
        instance.links[name] = self._links.link(name, details["Config"], details["Id"])
        instance.started.add(name)
        if details["State"]["Running"]:
            return None
        return SECOND + self._containers.cause(name, details)
