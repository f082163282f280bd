"""Prepares what a container needs of its node: image and kit, network, OCI runtime, sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from aenv_ray.engines.base import SandboxSpec, check_os
from aenv_ray.engines.docker.disk_quota import DiskQuota
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.link import has_own_kernel
from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.engines.docker.networks import ContainerNetwork, DockerNetworks
from aenv_ray.engines.docker.plan import (
    ContainerPlan,
    DaemonFeatures,
    OciRuntime,
    Program,
    SidecarPlan,
)
from aenv_ray.engines.images import serving as image_serving
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import DockerImages, NodeImage, reference_of
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.node import docker_labels as labels
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.ids import HostId
from aenv_ray.project.config import DeployConfig, NetworkMode

logger = logging.getLogger(__name__)


class ContainerPlanner:
    """Plans the containers of one host; what they share is prepared once.

    Args:
        client: Of the node's daemon.
        files: Of the scope.
        scope: On the label of every container.
        host_id: On the label of every container.
        cache_dir: Directory of the runtime kits.
        image: For projects that name none.
        runtime: OCI runtime for projects that name none; None for the daemon's default.
        docker_config: Directory of Docker's ``config.json``.
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
            labels.SCOPE_LABEL: scope,
            labels.HOST_LABEL: host_id,
            labels.DIRECTORY_LABEL: str(files.directory),
        }
        credentials = Credentials(docker_config.expanduser())
        self._images = DockerImages(client, credentials, own_labels, cache_dir)
        self._networks = DockerNetworks(client, files, scope)
        self._disk_quota = DiskQuota(client, own_labels)
        self._features = DaemonFeatures()
        self._runtimes: dict[str, dict[str, Any]] = {}
        self._daemon_runtime = ""
        self._os = "linux"

    async def learn(self) -> None:
        """Ask the daemon what it can do.

        Raises:
            FabricUnavailable: The daemon does not answer, or refuses this user.
        """
        try:
            info: dict[str, Any] = await self._client.request("GET", "/info")
        except DaemonRefused as exc:
            raise FabricUnavailable(f"the Docker daemon refused: {exc.message}") from exc
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        self._features = DaemonFeatures(
            seccomp=any("name=seccomp" in option for option in options),
            user_namespaces=any("name=userns" in option for option in options),
        )
        self._runtimes = dict(info.get("Runtimes") or {})
        self._daemon_runtime = str(info.get("DefaultRuntime") or "")
        self._os = str(info.get("OSType") or "linux")
        self._disk_quota.learn(info)

    def on_refusal(self, refusal: DaemonRefused) -> None:
        """Take note that the daemon refused to create a planned container."""
        if refusal.status == 404:
            self._images.forget()

    @contextlib.asynccontextmanager
    async def plan(self, spec: SandboxSpec, name: str) -> AsyncIterator[ContainerPlan]:
        """Plan an instance's containers; they are started within the block.

        Args:
            spec: Of the instance.
            name: Of its main container.

        Raises:
            ConfigError: The project asks for something that this node does not have.
            SandboxStartFailed: An image cannot be pulled, or cannot run the project.
            FabricUnavailable: The daemon does not answer.
        """
        deploy = spec.config.deploy
        check_os(spec.config, self._os, "the Docker daemon")
        runtime = self._runtime(deploy)
        image = await self._images.find(reference_of(spec.config, self._default_image))
        program = await self._program(spec, image)
        mode = image_serving.network_mode(spec.config.reference, deploy, program.serving)
        sidecar = await self._sidecar(spec, name)
        features = replace(self._features, disk_quota=await self._disk_quota.works(image.id))
        async with self._networks.joined(mode, deploy.allow) as network:
            yield ContainerPlan(
                name=name,
                scope=self._scope,
                host_id=self._host_id,
                directory=self._files.directory,
                image=image,
                program=program,
                network=await self._with_resolvers(network, runtime),
                project_dir=spec.project_dir,
                run_directory=self._files.run_directory(name),
                etc_directory=self._files.etc_directory(name),
                runtime=runtime,
                daemon=features,
                sidecar=sidecar,
            )

    def _runtime(self, deploy: DeployConfig) -> OciRuntime:
        """Return the OCI runtime of a project.

        Raises:
            ConfigError: The daemon does not have it.
        """
        name = deploy.container.runtime or self._default_runtime or ""
        if name and name not in self._runtimes:
            raise ConfigError(
                f"the Docker daemon has no runtime {name!r} (deployConfig.container.runtime or "
                f"AENV_DOCKER_RUNTIME); it has {', '.join(sorted(self._runtimes))}",
                hint=f"register it with the daemon: dockerd --add-runtime {name}=/path/to/it",
            )
        description = self._runtimes.get(name or self._daemon_runtime)
        return OciRuntime(name, description is not None and has_own_kernel(description))

    async def _program(self, spec: SandboxSpec, image: NodeImage) -> Program:
        has_code = await asyncio.to_thread(image_serving.has_code, spec.project_dir)
        serving, lack = image_serving.choose(spec.config.deploy, image.content, has_code=has_code)
        if lack and has_code:
            logger.warning("%s: no tools: %s", spec.instance_id, lack)
        if serving is Serving.RUNTIME:
            kit = await self._images.kit(image)
        else:
            kit = await self._images.carried_kit()
        server = image_serving.server_command(image.content, tuple(spec.arguments))
        return Program(serving, kit, lack, server)

    async def _with_resolvers(
        self, network: ContainerNetwork, runtime: OciRuntime
    ) -> ContainerNetwork:
        """Give a container with its own kernel resolvers that its network stack can reach.

        The daemon's own resolver listens on a loopback that such a container does not share.
        """
        if not runtime.has_own_kernel or network.mode is not NetworkMode.INTERNET:
            return network
        file = await asyncio.to_thread(self._files.write_resolvers, network.dns)
        return replace(network, resolver_file=file)

    async def _sidecar(self, spec: SandboxSpec, name: str) -> SidecarPlan | None:
        """Plan the sidecar; None for an instance without one."""
        deploy = spec.config.deploy
        if not deploy.is_dual:
            return None
        reference = image_serving.sidecar_image(spec.config.reference, deploy, spec.datasource)
        own_name = sidecar_name(name)
        return SidecarPlan(
            name=own_name,
            image=await self._images.find(reference),
            kit=await self._images.carried_kit(),
            run_directory=self._files.run_directory(own_name),
        )
