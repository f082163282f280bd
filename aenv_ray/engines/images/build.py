"""Builds the image of a project: its Dockerfile, then one layer with the runtime.

The runtime layer comes from `aenv_ray.engines.images.runtime_bundle` and suits the image's Python.
It holds `aenv_ray.runtime` and pydantic, without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aenv_ray.engines.images import buildkit, registry, runtime_bundle
from aenv_ray.engines.images.buildkit import BuildKit, OnOutput, OnStep
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import RUNTIME_LABEL, DockerImages
from aenv_ray.engines.images.reference import split_tag
from aenv_ray.engines.images.registry import Transfer
from aenv_ray.engines.node.docker_client import (
    DaemonRefused,
    DockerClient,
    daemon_hint,
    socket_path,
)
from aenv_ray.errors import ConfigError, FabricUnavailable, SandboxStartFailed
from aenv_ray.runtime.container.process_one import HOME


@dataclass(frozen=True)
class BuildPlan:
    """One image to build."""

    dockerfile: Path
    context: Path
    references: Sequence[str]
    """``registry/namespace/name:tag``; the image gets all of them."""
    platform: str | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BuiltImage:
    """An image that was built."""

    id: str
    """``sha256:…`` of its configuration: its name on the daemon that built it."""
    runtime_bytes: int
    """Size of the runtime layer; 0 if the base image carries the same runtime."""


class ImageBuilder:
    """Builds and pushes images with one daemon."""

    def __init__(
        self,
        address: str,
        cache_dir: Path,
        docker_config: Path,
        *,
        say: Callable[[str], None],
        on_step: OnStep,
        on_output: OnOutput,
    ) -> None:
        self._address = f"unix://{socket_path(address)}"
        self._cache_dir = cache_dir
        self._docker_config = docker_config
        self._credentials = Credentials(docker_config)
        self._say = say
        self._on_step = on_step
        self._on_output = on_output
        self._client = DockerClient(self._address)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def build(self, plan: BuildPlan) -> BuiltImage:
        """Build the Dockerfile, add the runtime and tag the result.

        Cancelling ends the build; BuildKit keeps the finished steps in its cache.

        Raises:
            ConfigError: The Dockerfile or the context does not exist, or a step failed.
            Unauthorized: The registry of a base image requires a login.
            SandboxStartFailed: The image has no Python that can run the runtime.
            FabricUnavailable: The daemon or the registry of a base image does not answer, or
                BuildKit is not installed.
        """
        await asyncio.to_thread(self._check, plan)
        try:
            found = await buildkit.find(self._client, os.environ.get("PATH", os.defpath))
            self._say(f"builder: {found}")
            async with self._temporary_tag() as tag:
                image_id = await self._build_dockerfile(found, plan, tag)
                self._on_output("adding the runtime")
                bundle = await self._bundle(image_id)
                size = 0
                if bundle is not None:
                    image_id = await self._add_runtime(found, tag, bundle, plan.platform)
                    size = await asyncio.to_thread(_size, bundle)
                await self._tag(image_id, plan.references)
        except DaemonRefused as exc:
            raise FabricUnavailable(
                f"the Docker daemon refused: {exc.message}",
                hint="check the daemon with: docker info",
            ) from exc
        return BuiltImage(image_id, size)

    async def push(self, reference: str, on_progress: Callable[[Transfer], None]) -> str:
        """Push one tag of an image and return the image's name by digest; see `registry.push`."""
        return await registry.push(self._client, self._credentials, reference, on_progress)

    def _check(self, plan: BuildPlan) -> None:
        if not plan.dockerfile.is_file():
            raise ConfigError(
                f"Dockerfile not found: {plan.dockerfile}",
                hint="name it with -f, or create a project with `aenv init`",
            )
        if not plan.context.is_dir():
            raise ConfigError(
                f"the build context {plan.context} is not a directory",
                hint="buildConfig.context is relative to the project",
            )
        path = socket_path(self._address)
        if not Path(path).is_socket():
            raise FabricUnavailable(f"no Docker daemon at {path}", hint=daemon_hint(self._address))

    @contextlib.asynccontextmanager
    async def _temporary_tag(self) -> AsyncIterator[str]:
        """Yield a tag for the image without the runtime; BuildKit's FROM takes no image ids."""
        tag = f"localhost/aenv-build:{uuid.uuid4().hex}"
        try:
            yield tag
        finally:
            # A tag that stays behind is harmless, and not what the caller should hear of.
            with contextlib.suppress(DaemonRefused, FabricUnavailable):
                await self._client.request("DELETE", f"/images/{tag}")

    async def _build_dockerfile(self, found: BuildKit, plan: BuildPlan, tag: str) -> str:
        try:
            return await buildkit.build(
                found, self._address, self._docker_config,
                dockerfile=plan.dockerfile, context=plan.context, tag=tag,
                platform=plan.platform, build_args=plan.build_args,
                on_step=self._on_step, on_output=self._on_output,
            )  # fmt: skip
        except ConfigError:
            # A daemon that went away looks like a failed step.
            await self._client.request("GET", "/version")
            raise

    async def _add_runtime(
        self, found: BuildKit, base: str, bundle: Path, platform: str | None
    ) -> str:
        with tempfile.TemporaryDirectory(prefix="aenv-build-") as directory:
            dockerfile = Path(directory, "Dockerfile")
            text = (
                f"FROM {base}\nCOPY runtime {HOME}/runtime\nCOPY lib {HOME}/lib\n"
                f"LABEL {RUNTIME_LABEL}={runtime_bundle.fingerprint()}\n"
            )
            await asyncio.to_thread(dockerfile.write_text, text)
            try:
                return await buildkit.build(
                    found, self._address, self._docker_config,
                    dockerfile=dockerfile, context=bundle, platform=platform,
                )  # fmt: skip
            except ConfigError as exc:  # not a mistake in the project
                raise FabricUnavailable(
                    f"the runtime cannot be added to the image: {exc.message}",
                    hint="check the Docker daemon with `aenv doctor`, and build again",
                ) from exc

    async def _tag(self, image_id: str, references: Sequence[str]) -> None:
        for reference in references:
            repository, tag = split_tag(reference)
            await self._client.request(
                "POST", f"/images/{image_id}/tag", params={"repo": repository, "tag": tag}
            )

    async def _bundle(self, image_id: str) -> Path | None:
        images = DockerImages(self._client, self._credentials, {}, self._cache_dir)
        try:
            return await images.bundle(await images.find(image_id))
        except SandboxStartFailed as exc:
            details = await self._client.request("GET", f"/images/{image_id}/json")
            own = (await self._client.request("GET", "/version"))["Arch"]
            if details["Architecture"] == own:
                raise
            raise SandboxStartFailed(
                f"the runtime cannot be added to a {details['Architecture']} image: {exc.message}",
                hint=f"the Docker daemon runs on {own}: enable emulation there (binfmt_misc), or "
                f"build on a {details['Architecture']} machine",
            ) from exc


def _size(bundle: Path) -> int:
    files = (path for part in ("runtime", "lib") for path in (bundle / part).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())
