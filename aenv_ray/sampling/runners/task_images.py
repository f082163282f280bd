"""The images that tasks bring: built on this node, once for each content."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from aenv_ray.actors.fabric.create_options import OwnOptions
from aenv_ray.config import Settings
from aenv_ray.engines.images import buildkit
from aenv_ray.engines.node.docker_client import (
    DaemonRefused,
    DockerClient,
    daemon_hint,
    socket_path,
)
from aenv_ray.engines.node.singleflight import SingleFlight
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, SandboxStartFailed
from aenv_ray.project.config import DeployChanges
from aenv_ray.trajectories.schema import ImageBuild, InstanceNeeds, Task

REPOSITORY: Final = "localhost/aenv-task"
"""The repository of the images that are built; the tag is made from their content."""
_BUILDS_AT_ONCE: Final = 2


class TaskImages:
    """Builds images with the Docker daemon of this node. Use it on one event loop.

    An image that the daemon has is not built again. A build that failed is not repeated.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: DockerClient | None = None
        self._builds: SingleFlight[None] = SingleFlight()
        self._slots = asyncio.Semaphore(_BUILDS_AT_ONCE)
        self._failed: dict[str, SandboxStartFailed] = {}

    async def close(self) -> None:
        """Close the connection to the daemon."""
        if self._client is not None:
            await self._client.close()

    async def options(self, task: Task) -> OwnOptions | None:
        """Return the options of a task's instance, once its image is built; None if it has none.

        Raises:
            SandboxStartFailed: The image cannot be built.
            FabricUnavailable: The daemon does not answer, or the registry of a base image.
        """
        datasource, needs = task.datasource, task.instance or InstanceNeeds()
        if needs.build is not None:
            datasource = await self._built(task.id, needs.build)
        changes = DeployChanges(cpu=needs.cpu, memory=needs.memory, network=needs.network)
        own = OwnOptions(datasource, changes if changes != DeployChanges() else None)
        return own if own != OwnOptions() else None

    async def _built(self, task_id: str, plan: ImageBuild) -> str:
        try:
            digest = await asyncio.to_thread(content_digest, plan)
        except OSError as exc:
            raise SandboxStartFailed(
                f"task {task_id!r}: its image cannot be built: {exc}",
                hint=f"make the files in {plan.context} readable",
            ) from exc
        tag = f"{REPOSITORY}:{digest}"
        if digest not in self._failed:
            try:
                await self._builds.run(digest, lambda: self._ensure(tag, plan))
                return tag
            except (ConfigError, TimeoutError) as exc:
                why = exc.message if isinstance(exc, AenvError) else f"over {plan.timeout_s:g} s"
                self._failed[digest] = SandboxStartFailed(
                    f"task {task_id!r}: its image cannot be built: {why}",
                    hint=f"try it: docker build --file {plan.dockerfile} {plan.context}",
                )
            except DaemonRefused as exc:
                raise FabricUnavailable(
                    f"the Docker daemon refused: {exc.message}",
                    hint="check the daemon with: docker info",
                ) from exc
        raise self._failed[digest]

    async def _ensure(self, tag: str, plan: ImageBuild) -> None:
        client = self._connected()
        async with self._slots:
            try:
                await client.request("GET", f"/images/{tag}/json")
            except DaemonRefused as exc:
                if exc.status != 404:
                    raise
                async with asyncio.timeout(plan.timeout_s):
                    await self._build(client, tag, plan)

    def _connected(self) -> DockerClient:
        address = self._settings.docker_host
        path = socket_path(address)
        if not Path(path).is_socket():
            raise FabricUnavailable(f"no Docker daemon at {path}", hint=daemon_hint(address))
        if self._client is None:
            self._client = DockerClient(f"unix://{path}")
        return self._client

    async def _build(self, client: DockerClient, tag: str, plan: ImageBuild) -> None:
        found = await buildkit.find(client, os.environ.get("PATH", os.defpath))
        with tempfile.TemporaryDirectory(prefix="aenv-task-") as directory:
            dockerfile = Path(directory, "Dockerfile")
            await asyncio.to_thread(_write_recipe, dockerfile, plan)
            await buildkit.build(
                found, f"unix://{socket_path(self._settings.docker_host)}",
                self._settings.docker_config, dockerfile=dockerfile, context=Path(plan.context),
                tag=tag, build_args=plan.arguments,
            )  # fmt: skip


def content_digest(plan: ImageBuild) -> str:
    """Return a digest of what an image is built from; blocks.

    Raises:
        OSError: A file cannot be read.
    """
    root = Path(plan.context)
    found = hashlib.sha256(repr((plan.dockerfile, plan.ignored, plan.arguments)).encode())
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if _is_hidden(relative, plan) or (path.is_dir() and not path.is_symlink()):
            continue
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        mode = path.lstat().st_mode & 0o777
        head = f"{relative.as_posix()}\0{mode:o}\0{hashlib.sha256(content).hexdigest()}\0"
        found.update(head.encode())
    return found.hexdigest()[:32]


def _is_hidden(relative: Path, plan: ImageBuild) -> bool:
    """Return whether the build does not get a file; patterns with ``!`` are exceptions."""
    if relative.parts[0] not in {pattern.strip("/") for pattern in plan.ignored}:
        return False
    name = relative.as_posix()
    shown = [pattern[1:] for pattern in plan.ignored if pattern.startswith("!")]
    return not any(fnmatchcase(name, one) or fnmatchcase(name, f"{one}/*") for one in shown)


def _write_recipe(dockerfile: Path, plan: ImageBuild) -> None:
    """Write the Dockerfile, and what its build does not get, outside of the context."""
    root = Path(plan.context)
    dockerfile.write_bytes((root / plan.dockerfile).read_bytes())
    own = root / ".dockerignore"
    patterns = own.read_text(encoding="utf-8") if own.is_file() else ""
    text = "\n".join([patterns, *plan.ignored, ""])
    dockerfile.with_name("Dockerfile.dockerignore").write_text(text, encoding="utf-8")
