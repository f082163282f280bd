"""Builds a project's image: its own Dockerfile, then one layer that holds our runtime.

The Dockerfile is built by BuildKit where the daemon has it and a command speaks to it, else by the
daemon's own builder. The runtime layer is what `aenv_ray.engines.images.runtime_kit` makes for the
image's Python: the island of our package and pydantic, without Ray.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from aenv_ray.engines.images import buildkit as docker_buildkit
from aenv_ray.engines.images import registry as docker_registry
from aenv_ray.engines.images import runtime_kit as docker_kit
from aenv_ray.engines.images.build_plan import BuildPlan
from aenv_ray.engines.images.build_report import OnOutput, OnStep, PlainReport, buildkit_feature
from aenv_ray.engines.images.buildkit import BuildKit
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import RUNTIME_LABEL, DockerImages
from aenv_ray.engines.images.reference import split_tag
from aenv_ray.engines.images.registry import Transfer
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient, socket_path
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, SandboxStartFailed
from aenv_ray.runtime.container.process_one import HOME

_CHUNK_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class BuiltImage:
    """An image that was built."""

    id: str
    """``sha256:…`` of its configuration: what a daemon that has it calls it."""
    runtime_bytes: int
    """Size of the runtime layer; 0 when its base carries this very runtime."""


class ImageBuilder:
    """Builds and pushes with one daemon.

    Args:
        address: ``unix:///path``.
        cache_dir: Where kits are kept.
        docker_config: Directory of Docker's own ``config.json``, with the logins for registries.
        wants_buildkit: Whether BuildKit is used where it is there.
        say: Told which builder is used.
        on_step: Told the steps of the Dockerfile.
        on_output: Told what they print, line by line.
    """

    def __init__(
        self,
        address: str,
        cache_dir: Path,
        docker_config: Path,
        *,
        wants_buildkit: bool,
        say: Callable[[str], None],
        on_step: OnStep,
        on_output: OnOutput,
    ) -> None:
        self._address = f"unix://{socket_path(address)}"
        self._cache_dir = cache_dir
        self._docker_config = docker_config
        self._credentials = Credentials(docker_config)
        self._wants_buildkit = wants_buildkit
        self._say = say
        self._on_step = on_step
        self._on_output = on_output
        self._client = DockerClient(self._address)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def build(self, plan: BuildPlan) -> BuiltImage:
        """Build, add the runtime, and name.

        Cancelling it ends the build; images and containers of it that have no name yet stay with
        the daemon as its cache.

        Raises:
            ConfigError: There is no Dockerfile or context, one of its steps failed (which, and its
                words), or it needs BuildKit, and there is none.
            Unauthorized: A base image wants a login.
            SandboxStartFailed: The image has no Python that the runtime runs on.
            FabricUnavailable: The daemon, or the registry of a base image, does not answer.
        """
        await asyncio.to_thread(self._check, plan)
        try:
            inner = await self._build_own(plan)
            await self._check_platform(inner, plan.platform)
            self._on_output("adding the runtime")
            kit = await self._kit(inner)
            image_id, size = await self._add_runtime(inner, kit, plan.platform)
            for reference in plan.references:
                repository, tag = split_tag(reference)
                await self._client.request(
                    "POST", f"/images/{image_id}/tag", params={"repo": repository, "tag": tag}
                )
        except DaemonRefused as exc:
            raise FabricUnavailable(f"the Docker daemon refuses: {exc.message}") from exc
        return BuiltImage(image_id, size)

    async def push(self, reference: str, on_progress: Callable[[Transfer], None]) -> str:
        """Push one name of an image and return it by digest; see `docker_registry.push`."""
        return await docker_registry.push(self._client, self._credentials, reference, on_progress)

    def _check(self, plan: BuildPlan) -> None:
        if not plan.dockerfile.is_file():
            raise ConfigError(
                f"there is no {plan.dockerfile}", hint="name it with -f, or make one: aenv init"
            )
        if not plan.context.is_dir():
            raise ConfigError(
                f"the build's context {plan.context} is no directory",
                hint="buildConfig.context is relative to the project",
            )
        path = socket_path(self._address)
        if not Path(path).is_socket():
            raise FabricUnavailable(
                f"there is no Docker daemon: {path} is no socket",
                hint="start one, or say where it is with DOCKER_HOST",
            )

    # --- the project's own image ----------------------------------------------------------------

    async def _build_own(self, plan: BuildPlan) -> str:
        found: BuildKit | str = "DOCKER_BUILDKIT is 0"
        if self._wants_buildkit:
            found = await docker_buildkit.find(self._client, os.environ.get("PATH", os.defpath))
        try:
            if isinstance(found, BuildKit):
                self._say(f"builder: {found}")
                return await docker_buildkit.build(
                    found, self._address, self._docker_config, plan, self._on_step, self._on_output
                )
            self._say(f"builder: the daemon's own, without BuildKit: {found}")
            return await self._build_plainly(plan, without=found)
        except ConfigError:
            await self._client.request("GET", "/version")  # a daemon that went away fails no step
            raise

    async def _build_plainly(self, plan: BuildPlan, *, without: str) -> str:
        name, text = _within(plan.dockerfile, plan.context), _read(plan.dockerfile)
        packed = name or f".{plan.dockerfile.name}.aenv"
        params: dict[str, Any] = {
            "dockerfile": packed,
            "buildargs": dict(plan.build_args),
            **({"platform": plan.platform} if plan.platform else {}),
        }
        with tempfile.TemporaryFile(prefix="aenv-build-") as file:
            await asyncio.to_thread(_pack, plan.context, packed, text, name, file)
            report = PlainReport(self._on_step, self._on_output)
            logins = {"X-Registry-Config": await self._credentials.header_of_all()}
            await self._post(report, params, file, logins)
        if report.image_id:
            return report.image_id
        feature = buildkit_feature(text)
        if feature:
            raise ConfigError(
                f"{plan.dockerfile.name} uses {feature!r}, which only BuildKit knows, and this "
                f"build was without it: {without} ({report.error.strip()})",
                hint="Docker 18.09 or newer has it; its command needs the plugin docker-buildx",
            )
        raise report.failure(
            f"{plan.dockerfile.name} does not build",
            report.error or "the daemon ended without a word",
        )

    async def _post(
        self,
        report: PlainReport,
        params: Mapping[str, Any],
        file: IO[bytes],
        headers: Mapping[str, str],
    ) -> None:
        async def content() -> AsyncIterator[bytes]:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk

        file.seek(0)
        try:
            async with self._client.stream(
                "POST", "/build", params={**params, "rm": 1, "forcerm": 1},
                headers={**headers, "Content-Type": "application/x-tar"}, content=content(),
            ) as lines:  # fmt: skip
                async for line in lines:
                    report.take(line)
        except DaemonRefused as exc:  # before the first step: the Dockerfile cannot be read
            report.take({"error": exc.message})

    # --- the runtime ----------------------------------------------------------------------------

    async def _check_platform(self, image_id: str, platform: str | None) -> None:
        """Look whether an image is for the platform asked for: old builders only try.

        Raises:
            ConfigError: It is not.
        """
        details = await self._client.request("GET", f"/images/{image_id}/json")
        made = f"{details['Os']}/{details['Architecture']}"
        if platform is not None and not f"{platform}/".startswith(f"{made}/"):
            raise ConfigError(
                f"the image is for {made}, not for {platform} as asked for",
                hint=f"it is its base image's: name one that is for {platform}",
            )

    async def _kit(self, image_id: str) -> Path | None:
        images = DockerImages(self._client, self._credentials, {}, self._cache_dir)
        try:
            return await images.kit(await images.find(image_id))
        except SandboxStartFailed as exc:
            details = await self._client.request("GET", f"/images/{image_id}/json")
            own = (await self._client.request("GET", "/version"))["Arch"]
            if details["Architecture"] == own:
                raise
            raise SandboxStartFailed(
                f"the runtime for {details['Architecture']} cannot be added: {exc.message}",
                hint=f"the daemon's machine is {own}: let it run others' programs (binfmt_misc) or "
                "build on such a machine",
            ) from exc

    async def _add_runtime(
        self, image_id: str, kit: Path | None, platform: str | None
    ) -> tuple[str, int]:
        if kit is None:
            return image_id, 0  # its base carries this very runtime
        with tempfile.TemporaryFile(prefix="aenv-build-") as file:
            await asyncio.to_thread(_pack_runtime, image_id, kit, file)
            size = file.tell()
            report = PlainReport(lambda done, total, text: None, lambda text: None)
            await self._post(report, {"platform": platform} if platform else {}, file, {})
        if not report.image_id:
            raise _as_ours(report.failure("the runtime cannot be added", report.error))
        return report.image_id, size


def _as_ours(error: AenvError) -> AenvError:
    """Return the error of a step that is not the project's."""
    return FabricUnavailable(error.message) if isinstance(error, ConfigError) else error


def _read(dockerfile: Path) -> str:
    try:
        return dockerfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{dockerfile} cannot be read: {exc}") from exc


def _within(path: Path, directory: Path) -> str | None:
    """Return a path relative to a directory; None when it is not below it."""
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else None


def _pack(context: Path, name: str, dockerfile: str, inside: str | None, file: IO[bytes]) -> None:
    """Write a build's context, less what its ``.dockerignore`` says, as the daemon wants it.

    Args:
        context: The directory.
        name: What the Dockerfile is called in it.
        dockerfile: Its text.
        inside: Its path in the context; None when it comes from elsewhere.
        file: Written to.

    Raises:
        ConfigError: A file of it cannot be read.
    """
    from docker.utils.build import tar

    ignore = context / ".dockerignore"
    try:
        lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
        exclude = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        own = (name, None if inside else dockerfile)
        tar(str(context), exclude=exclude, dockerfile=own, fileobj=file)  # type: ignore[no-untyped-call]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"the build's context {context} cannot be read: {exc}",
            hint="what the image does not need can be named in .dockerignore",
        ) from exc


def _pack_runtime(image_id: str, kit: Path, file: IO[bytes]) -> None:
    dockerfile = (
        f"FROM {image_id}\nCOPY runtime {HOME}/runtime\nCOPY lib {HOME}/lib\n"
        f"LABEL {RUNTIME_LABEL}={docker_kit.fingerprint()}\n"
    )
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("Dockerfile")
        info.size = len(dockerfile)
        tar.addfile(info, io.BytesIO(dockerfile.encode()))
        for part in ("runtime", "lib"):
            tar.add(kit / part, part, filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
