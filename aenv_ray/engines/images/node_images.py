"""Images on a node: found by reference, pulled where they are missing, looked into once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.images import node_python as docker_python
from aenv_ray.engines.images import registry as docker_registry
from aenv_ray.engines.images import runtime_kit as docker_kit
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.runtime_kit import ImagePython
from aenv_ray.engines.images.serving import ImageContent
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import DEADLINE_LABEL
from aenv_ray.engines.node.singleflight import SingleFlight
from aenv_ray.errors import AenvError, ConfigError, SandboxStartFailed
from aenv_ray.files import FileLock
from aenv_ray.project.config import EnvironmentConfig

logger = logging.getLogger(__name__)

RUNTIME_LABEL: Final = "aenv.runtime"
"""On images of ``aenv build``: which runtime they carry."""
ARTIFACT_TYPE: Final = "image"
PULL_DEADLINE_S: Final = 3600.0
"""How long a host waits for another one that pulls the same image."""
TOOL_DEADLINE_S: Final = 120.0
"""A container that looks into an image, or compiles for it, has done so within this."""
_LOOK: Final = """
import importlib.util, json, platform, sys
print(json.dumps({
    "version": sys.version_info[:2],
    "machine": platform.machine(),
    "libc": "glibc" if platform.libc_ver()[0] == "glibc" else "musl",
    "aenvironment": importlib.util.find_spec("aenv") is not None,
}))
"""
_LOOK_FOR_SHELL: Final = "import json, os; print(json.dumps(os.access('/bin/sh', os.X_OK)))"
_NO_PROGRAM: Final = ("not found", "no such file", "permission denied", "exec format")
"""How daemons say that a program cannot be started."""
_NOBODY: Final = "65534:65534"
_COMPILE: Final = "import compileall, sys; sys.exit(not compileall.compile_dir('/kit', quiet=1))"


@dataclass(frozen=True)
class Image:
    """An image that is on this node."""

    id: str
    """``sha256:…``, of its content."""
    user: str
    path: str
    """Its variable ``PATH``."""
    directory: str
    """``WORKDIR``; "" for none."""
    python: ImagePython | None
    """The one that starts as ``python3``; None for none."""
    content: ImageContent


def reference_of(config: EnvironmentConfig, default: str | None) -> str:
    """Return which image a project runs in.

    Raises:
        ConfigError: It names none, and there is no default.
    """
    built = [a.digest or a.content for a in config.artifacts if a.type == ARTIFACT_TYPE]
    reference = config.deploy.container.image or (built[0] if built else default)
    if reference is None:
        raise ConfigError(
            f"{config.reference} has no image to run in",
            hint="build one with `aenv build`, name one as deployConfig.container.image, or set "
            "AENV_DOCKER_IMAGE to one with Python 3.11 or newer",
        )
    return reference


class _Failed(DaemonRefused):
    """What ran in an image to look into it started, and failed."""


class DockerImages:
    """Finds images for one host.

    Args:
        client: Of the node's daemon.
        credentials: For registries.
        own_labels: For containers that only look into an image; the janitor finds them by these.
        cache_dir: Kits, and what is known of images, shared by every host of the node.
        clock: Wall-clock seconds.
    """

    def __init__(
        self,
        client: DockerClient,
        credentials: Credentials,
        own_labels: Mapping[str, str],
        cache_dir: Path,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._labels = own_labels
        self._cache_dir = cache_dir
        self._clock = clock or SystemClock()
        self._known: dict[str, Image] = {}
        self._lookups: SingleFlight[Image] = SingleFlight()

    async def find(self, reference: str) -> Image:
        """Return an image, pulling it where it is missing: once for all on this node who ask.

        A reference that was found stays what it was then, until an image turns out to be gone.

        Raises:
            SandboxStartFailed: It does not exist, or cannot be pulled.
            FabricUnavailable: The daemon does not answer.
        """
        if reference not in self._known:
            self._known[reference] = await self._lookups.run(
                reference, lambda: self._look(reference)
            )
        return self._known[reference]

    def forget(self) -> None:
        """Look at every reference anew when it is next asked for: an image was removed."""
        self._known.clear()

    async def _look(self, reference: str) -> Image:
        details = await self._inspect(reference)
        config = details.get("Config") or {}
        variables = dict(item.partition("=")[::2] for item in config.get("Env") or ())
        facts = await self._facts(details["Id"])
        python = None
        if facts.get("version"):
            major, minor = facts["version"]
            python = ImagePython((major, minor), facts["machine"], facts["libc"])
        words = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
        content = ImageContent(
            reference=reference,
            python=python.version if python else None,
            has_fitting_python=python is not None and python.version >= docker_kit.OLDEST,
            has_shell=facts["shell"],
            has_aenvironment=bool(facts.get("aenvironment")),
            carries_runtime=(config.get("Labels") or {}).get(RUNTIME_LABEL)
            == docker_kit.fingerprint(),
            command=tuple(words),
            ports=frozenset(config.get("ExposedPorts") or ()),
        )
        return Image(
            details["Id"], config.get("User") or "", variables.get("PATH", ""),
            config.get("WorkingDir") or "", python, content,
        )  # fmt: skip

    async def _inspect(self, reference: str) -> dict[str, Any]:
        path = f"/images/{reference}/json"
        with contextlib.suppress(DaemonRefused):
            return dict(await self._client.request("GET", path))
        name = hashlib.sha256(reference.encode()).hexdigest()[:16]
        locks = self._cache_dir / "pulls"
        await asyncio.to_thread(locks.mkdir, parents=True, exist_ok=True)
        with await _pull_lock(locks / f"{name}.lock", reference):
            with contextlib.suppress(DaemonRefused):  # another host of this node pulled it
                return dict(await self._client.request("GET", path))
            if reference.startswith("sha256:"):
                raise SandboxStartFailed(
                    f"image {reference[:19]} is not on this node, and no registry has it by that "
                    "name",
                    hint="it was built on another node: push it there with `aenv build --push`",
                )
            await docker_registry.pull(self._client, self._credentials, reference)
            return dict(await self._client.request("GET", path))

    # --- looking inside ---------------------------------------------------------------------

    async def kit(self, image: Image) -> Path | None:
        """Return the kit that an image's own Python runs; None when it carries the same runtime.

        Raises:
            SandboxStartFailed: It has no fitting Python, or the kit cannot be made.
        """
        if image.content.carries_runtime:
            return None
        if image.python is None or not image.content.has_fitting_python:
            raise SandboxStartFailed(
                image.content.lack, hint="base the image on Python 3.11 or newer"
            )

        async def compile_in(kit: Path) -> None:
            command = ["python3", "-P", "-c", _COMPILE]
            await self._run(image.id, command, f"{os.geteuid()}:{os.getegid()}", {kit: "/kit"})

        try:
            return await docker_kit.ensure(image.python, self._cache_dir / "kits", compile_in)
        except DaemonRefused as exc:
            raise SandboxStartFailed(f"image {image.content.reference}: {exc.message}") from exc

    async def carried_kit(self) -> Path:
        """Return the kit that brings its own Python, for any image.

        Raises:
            SandboxStartFailed: This node's Python cannot be carried.
        """
        return await docker_kit.carried(self._cache_dir / "kits")

    async def _facts(self, image_id: str) -> dict[str, Any]:
        """Return what `_LOOK` says, where the image has a Python, and whether it has a shell."""
        note = self._cache_dir / "looks" / f"{image_id.partition(':')[2]}.json"
        if await asyncio.to_thread(note.exists):
            return dict(json.loads(await asyncio.to_thread(note.read_text)))
        facts: dict[str, Any] = {"shell": True}
        try:
            command = ["python3", "-P", "-c", _LOOK]
            facts |= json.loads(await self._run(image_id, command, _NOBODY))
        except DaemonRefused as exc:
            if not isinstance(exc, _Failed) and not any(
                mark in exc.message.lower() for mark in _NO_PROGRAM
            ):
                raise  # the daemon's trouble says nothing about the image
            logger.info("image %s has no python3 that starts: %s", image_id[:19], exc.message)
            facts["shell"] = await self._has_shell(image_id)
        await asyncio.to_thread(_write, note, json.dumps(facts))
        return facts

    async def _has_shell(self, image_id: str) -> bool:
        kit = await self.carried_kit()
        command = [*docker_python.command("/kit/python"), "-c", _LOOK_FOR_SHELL]
        try:
            return bool(json.loads(await self._run(image_id, command, _NOBODY, {kit: "/kit"})))
        except DaemonRefused as exc:
            raise SandboxStartFailed(
                f"image {image_id[:19]} runs nothing, not even this node's Python: {exc.message}",
                hint="is it an image for this node's architecture?",
            ) from exc

    async def _run(
        self, image_id: str, command: list[str], user: str, mounts: Mapping[Path, str] | None = None
    ) -> str:
        """Run a command in the image, without network, and return what it printed."""
        name = f"aenv-look-{uuid.uuid4().hex[:12]}"
        deadline = self._clock.now() + TOOL_DEADLINE_S
        binds = [
            {"Type": "bind", "Source": str(source), "Target": target}
            for source, target in (mounts or {}).items()
        ]
        body = {
            "Image": image_id,
            "Entrypoint": command,
            "Cmd": [],
            "User": user,
            "WorkingDir": "/",
            "NetworkDisabled": True,
            "Labels": {**self._labels, DEADLINE_LABEL: repr(deadline)},
            "HostConfig": {
                "NetworkMode": "none", "Mounts": binds, "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"], "LogConfig": {"Type": "local"},
            },
        }  # fmt: skip
        try:
            await self._client.request(
                "POST", "/containers/create", params={"name": name}, body=body
            )
            await self._client.request("POST", f"/containers/{name}/start")
            ended = await self._client.request("POST", f"/containers/{name}/wait")
            words = await self._client.log(name, 50)
            if ended["StatusCode"]:
                raise _Failed(500, words or f"exit code {ended['StatusCode']}")
            return words
        finally:
            with contextlib.suppress(DaemonRefused, AenvError):  # the janitor is the second chance
                await self._client.request(
                    "DELETE", f"/containers/{name}", params={"force": 1, "v": 1}
                )


async def _pull_lock(path: Path, reference: str) -> FileLock:
    try:
        return await FileLock.acquire_async(path, PULL_DEADLINE_S)
    except TimeoutError as exc:
        raise SandboxStartFailed(
            f"image {reference} was not pulled: another process of this node has been pulling it "
            f"for {PULL_DEADLINE_S:g} s",
            hint=f"look at the daemon, or try on that node: docker pull {reference}",
        ) from exc


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    partial.write_text(text)
    partial.replace(path)
