"""Prepares what a container needs of its node: image and bundle, network, OCI runtime, sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import SandboxSpec, check_os
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.docker.link import has_own_kernel
from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.engines.docker.networks import DockerNetworks
from aenv_ray.engines.docker.plan import (
    ContainerPlan,
    DaemonFeatures,
    OciRuntime,
    Program,
    SidecarPlan,
)
from aenv_ray.engines.images import serving as image_serving
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import (
    DockerImages,
    NodeImage,
    check_image,
    check_names,
    reference_of,
)
from aenv_ray.engines.images.reference import may_be_id
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.node import docker_labels as labels
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.policy import Policy
from aenv_ray.project.config import DeployConfig

logger = logging.getLogger(__name__)

_CANDIDATE: Final = ("overlay2", "xfs")
"""The storage driver and file system that may have quotas, depending on mount options. The limits
of other drivers include the image."""
_TRIAL_BYTES: Final = 1 << 30
_TRIAL_S: Final = 60.0


class ContainerPlanner:
    """Plans the containers of one host; what they share is prepared once."""

    def __init__(
        self,
        host: DockerHost,
        *,
        cache_dir: Path,
        image: str | None,
        runtime: str | None,
        docker_config: Path,
        disk_bytes: int,
        policy: Callable[[], Policy],
    ) -> None:
        self._host = host
        self._default_image = image
        self._policy = policy
        self._default_runtime = runtime
        self._disk_bytes = disk_bytes
        own_labels = {
            labels.SCOPE_LABEL: host.scope,
            labels.HOST_LABEL: host.id,
            labels.DIRECTORY_LABEL: str(host.files.directory),
        }
        credentials = Credentials(docker_config.expanduser())
        self._images = DockerImages(host.client, credentials, own_labels, cache_dir)
        self._networks = DockerNetworks(host)
        self._disk_quota = _DiskQuota(host.client, own_labels)
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
            info: dict[str, Any] = await self._host.client.request("GET", "/info")
        except DaemonRefused as exc:
            raise FabricUnavailable(
                f"the Docker daemon refused to describe itself: {exc.message}",
                hint="allow this user to use the daemon's socket; `docker info` shows the same",
            ) from exc
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        self._features = DaemonFeatures(
            seccomp=any("name=seccomp" in option for option in options),
            user_namespaces=any("name=userns" in option for option in options),
            memory_bytes=int(info.get("MemTotal") or 0),
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

        Raises:
            ConfigError: The project asks for something that this node does not have.
            PolicyRefused: The policy does not allow an image, or the user that it names.
            SandboxStartFailed: An image cannot be pulled, or cannot run the project.
            FabricUnavailable: The daemon does not answer.
        """
        deploy = spec.config.deploy
        check_os(spec.config, self._os, "the Docker daemon")
        runtime = self._runtime(deploy)
        image = await self._main_image(spec)
        program = await self._program(spec, image)
        mode = image_serving.network_mode(spec.config.reference, deploy, program.serving)
        sidecar = await self._sidecar(spec, name)
        features = replace(self._features, disk_quota=await self._disk_quota.works(image.id))
        async with self._networks.joined(mode, deploy.allow, self._policy()) as network:
            yield ContainerPlan(
                name=name,
                host=self._host,
                image=image,
                program=program,
                network=network,
                project_dir=spec.project_dir,
                runtime=runtime,
                daemon=features,
                disk_bytes=self._disk_bytes,
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

    async def _main_image(self, spec: SandboxSpec) -> NodeImage:
        reference, what = reference_of(spec.config, self._default_image), spec.config.reference
        policy = self._policy()
        if reference == self._default_image:
            image = await self._images.find(reference)
        else:
            image = await self._allowed_image(policy, reference, what)
        if spec.config.deploy.container.user is None and image.user:
            policy.check_user(image.user, f"{what} (USER of its image)")
        return image

    async def _allowed_image(self, policy: Policy, reference: str, what: str) -> NodeImage:
        check_image(policy, reference, what)
        image = await self._images.find(reference)
        check_names(policy, reference, image.names, what)
        return image

    async def _program(self, spec: SandboxSpec, image: NodeImage) -> Program:
        has_code = await asyncio.to_thread(image_serving.has_code, spec.project_dir)
        serving, lack = image_serving.choose(spec.config.deploy, image.content, has_code=has_code)
        if lack and has_code:
            extra = logs.of_instance(spec.instance_id)
            logger.warning("%s: no tools: %s", spec.instance_id, lack, extra=extra)
        if serving is Serving.RUNTIME:
            bundle = await self._images.bundle(image)
        else:
            bundle = await self._images.carried_bundle()
        server = image_serving.server_command(image.content, tuple(spec.arguments))
        return Program(serving, bundle, lack, server)

    async def _sidecar(self, spec: SandboxSpec, name: str) -> SidecarPlan | None:
        """Plan the sidecar; None for an instance without one."""
        deploy = spec.config.deploy
        if not deploy.is_dual:
            return None
        what, policy = spec.config.reference, self._policy()
        reference = image_serving.sidecar_image(what, deploy, spec.datasource)
        image = await self._allowed_image(policy, reference, what)
        sidecar = SidecarPlan(sidecar_name(name), image, await self._images.carried_bundle())
        names = image.names if may_be_id(reference) else (reference,)
        policy.check_sidecar_user(sidecar.user, names, what)
        return sidecar


class _DiskQuota:
    """Whether a daemon can limit what containers write to their image's directories.

    The labels are for a container that is created to try a quota, and never started.
    """

    def __init__(self, client: DockerClient, own_labels: Mapping[str, str]) -> None:
        self._client = client
        self._labels = own_labels
        self._works: bool | None = None

    def learn(self, info: Mapping[str, Any]) -> None:
        """Rule out daemons without quotas, by their answer to ``/info``."""
        backing = dict(row for row in info.get("DriverStatus") or () if len(row) == 2)
        is_candidate = (info.get("Driver"), backing.get("Backing Filesystem")) == _CANDIDATE
        self._works = None if is_candidate else False

    async def works(self, image_id: str) -> bool:
        """Return whether containers can have a quota; tries it once, with any image."""
        if self._works is None:
            self._works = await self._try(image_id)
        return self._works

    async def _try(self, image_id: str) -> bool:
        name = f"aenv-try-{uuid.uuid4().hex[:12]}"
        body = {
            "Image": image_id,
            "Cmd": ["true"],
            "Labels": {**self._labels, labels.DEADLINE_LABEL: repr(SystemClock().now() + _TRIAL_S)},
            "HostConfig": {"NetworkMode": "none", "StorageOpt": {"size": str(_TRIAL_BYTES)}},
        }
        try:
            await self._client.request(
                "POST", "/containers/create", params={"name": name}, body=body
            )
        except DaemonRefused:
            return False
        await self._client.request("DELETE", f"/containers/{name}", params={"force": 1})
        return True
