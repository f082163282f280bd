"""What a container needs of its node: image and kit, network, OCI runtime, facts of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aenv_ray.engines.base import SandboxSpec, check_os
from aenv_ray.engines.docker import files as docker_files
from aenv_ray.engines.docker import link as docker_link
from aenv_ray.engines.docker.disk_quota import StorageDriver
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.networks import Joined, Networks
from aenv_ray.engines.docker.surroundings import SecondSurroundings, Surroundings
from aenv_ray.engines.images import node_images as docker_images
from aenv_ray.engines.images import serving as docker_serving
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import DockerImages, Image
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.ids import HostId
from aenv_ray.project.config import DeployConfig, NetworkMode

logger = logging.getLogger(__name__)


class Planner:
    """Makes ready, once each, what the containers of a host share.

    Args:
        client: Of the node's daemon.
        files: Of the node's scope.
        scope: On the label of every container.
        host_id: Whose containers they are.
        cache_dir: For kits.
        image: Of projects that name none.
        runtime: OCI runtime of projects that name none; None for the daemon's.
        docker_config: Directory of Docker's own ``config.json``.
    """

    def __init__(
        self,
        client: DockerClient,
        files: DockerFiles,
        scope: str,
        host_id: HostId,
        *,
        cache_dir: Path,
        image: str | None,
        runtime: str | None,
        docker_config: Path,
    ) -> None:
        self._client = client
        self._files = files
        self._scope = scope
        self._host_id = host_id
        self._default_image = image
        self._default_runtime = runtime
        own_labels = {
            docker_labels.SCOPE_LABEL: scope,
            docker_labels.HOST_LABEL: host_id,
            docker_labels.DIRECTORY_LABEL: str(files.directory),
        }
        credentials = Credentials(docker_config.expanduser())
        self._images = DockerImages(client, credentials, own_labels, cache_dir)
        self._runtimes: dict[str, dict[str, Any]] = {}
        self._daemons_runtime = ""
        self._has_seccomp = False
        self._has_user_namespace = False
        self._os = "linux"
        self._networks = Networks(client, files, scope)
        self._storage = StorageDriver(client, own_labels)

    async def learn(self) -> None:
        """Ask the daemon what it can do.

        Raises:
            FabricUnavailable: It does not answer, or refuses this user.
        """
        try:
            info: dict[str, Any] = await self._client.request("GET", "/info")
        except DaemonRefused as exc:
            raise FabricUnavailable(f"the Docker daemon refuses: {exc.message}") from exc
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        self._has_seccomp = any("name=seccomp" in option for option in options)
        self._has_user_namespace = any("name=userns" in option for option in options)
        self._runtimes = dict(info.get("Runtimes") or {})
        self._daemons_runtime = str(info.get("DefaultRuntime") or "")
        self._os = str(info.get("OSType") or "linux")
        self._storage.learn(info)

    def note_refusal(self, refusal: DaemonRefused) -> None:
        """Note that the daemon made no container of what `surroundings` gave."""
        if refusal.status == 404:
            self._images.forget()

    @contextlib.asynccontextmanager
    async def surroundings(self, spec: SandboxSpec, name: str) -> AsyncIterator[Surroundings]:
        """Have what a container gets that its spec does not say; it is started within the block.

        Args:
            spec: The instance's.
            name: The container's.

        Raises:
            ConfigError: The project asks for what this node does not have.
            SandboxStartFailed: An image of it cannot be had, or cannot run it.
            FabricUnavailable: The daemon does not answer.
        """
        deploy = spec.config.deploy
        check_os(spec.config, self._os, "the Docker daemon")
        runtime = self._runtime(deploy)
        image = await self._images.find(
            docker_images.reference_of(spec.config, self._default_image)
        )
        code = await asyncio.to_thread(docker_serving.has_code, spec.project_dir)
        serving, absence = docker_serving.choose(deploy, image.content, has_code=code)
        if absence and code:
            logger.warning("%s: no tools: %s", spec.instance_id, absence)
        mode = docker_serving.network_mode(spec.config.reference, deploy, serving)
        kit = await self._kit(image, serving)
        second = await self._second(spec, name)
        has_quota = await self._storage.has_quota(image.id)
        async with self._networks.joined(mode, deploy.allow) as network:
            yield Surroundings(
                scope=self._scope,
                host_id=self._host_id,
                directory=self._files.directory,
                name=name,
                image_id=image.id,
                image_user=image.user,
                image_path=image.path,
                image_directory=image.directory,
                kit=kit,
                serving=serving,
                absence=absence,
                server=docker_serving.server_command(image.content, tuple(spec.arguments)),
                run_directory=self._files.run_directory(name),
                etc_directory=self._files.etc_directory(name),
                project_dir=spec.project_dir,
                network_mode=mode,
                network=network.name,
                dns=network.dns,
                resolver_file=await self._resolver_file(runtime, mode, network),
                dns_options=network.dns_options,
                hosts=network.hosts,
                allowed=network.allowed,
                runtime=runtime,
                has_own_kernel=self._has_own_kernel(runtime),
                has_seccomp=self._has_seccomp,
                has_user_namespace=self._has_user_namespace,
                has_quota=has_quota,
                second=second,
            )

    def _runtime(self, deploy: DeployConfig) -> str:
        """Return the OCI runtime that a project runs under; "" for the daemon's.

        Raises:
            ConfigError: The daemon does not have it.
        """
        runtime = deploy.container.runtime or self._default_runtime or ""
        if runtime and runtime not in self._runtimes:
            raise ConfigError(
                f"the Docker daemon has no runtime {runtime!r} (deployConfig.container.runtime, "
                f"or AENV_DOCKER_RUNTIME); it has {', '.join(sorted(self._runtimes))}",
                hint=f"register it with the daemon: dockerd --add-runtime {runtime}=/path/to/it",
            )
        return runtime

    async def _resolver_file(self, runtime: str, mode: NetworkMode, network: Joined) -> Path | None:
        """Return what names resolvers that another kernel's own network reaches too."""
        if not self._has_own_kernel(runtime) or mode is not NetworkMode.INTERNET:
            return None
        return await asyncio.to_thread(self._files.note_resolvers, network.dns)

    def _has_own_kernel(self, runtime: str) -> bool:
        described = self._runtimes.get(runtime or self._daemons_runtime)
        return described is not None and docker_link.has_own_kernel(described)

    async def _kit(self, image: Image, serving: Serving) -> Path | None:
        if serving is not Serving.RUNTIME:
            return await self._images.carried_kit()
        return await self._images.kit(image)

    async def _second(self, spec: SandboxSpec, name: str) -> SecondSurroundings | None:
        """Return what the second container gets; None for an instance without one."""
        deploy = spec.config.deploy
        if not deploy.is_dual:
            return None
        reference = docker_serving.second_image(spec.config.reference, deploy, spec.datasource)
        image = await self._images.find(reference)
        second = docker_files.second_name(name)
        return SecondSurroundings(
            name=second,
            image_id=image.id,
            image_user=image.user,
            image_path=image.path,
            image_directory=image.directory,
            kit=await self._images.carried_kit(),
            run_directory=self._files.run_directory(second),
        )
