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
from aenv_ray.engines import docker_files as labels
from aenv_ray.engines import docker_kit
from aenv_ray.engines.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.docker_files import locked
from aenv_ray.engines.docker_kit import ImagePython
from aenv_ray.errors import AenvError, ConfigError, SandboxStartFailed
from aenv_ray.models import EnvironmentConfig

logger = logging.getLogger(__name__)

RUNTIME_LABEL: Final = "aenv.runtime"
"""On images of ``aenv build``: which runtime they carry."""
ARTIFACT_TYPE: Final = "image"
TOOL_DEADLINE_S: Final = 120.0
"""A container that looks into an image, or compiles for it, has done so within this."""
_TELL_S: Final = 5.0
_LOOK: Final = """
import json, platform, sys
print(json.dumps({
    "version": sys.version_info[:2],
    "machine": platform.machine(),
    "libc": "glibc" if platform.libc_ver()[0] == "glibc" else "musl",
}))
"""
_COMPILE: Final = "import compileall, sys; sys.exit(not compileall.compile_dir('/kit', quiet=1))"


@dataclass(frozen=True)
class Image:
    """An image that is on this node."""

    id: str
    """``sha256:…``, of its content."""
    user: str
    path: str
    """Its variable ``PATH``."""
    kit: Path | None
    """The runtime for it, on this node; None when it carries the same one itself."""


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


class DockerImages:
    """Finds images for one host.

    Args:
        client: Of the node's daemon.
        own_labels: For containers that only look into an image; the janitor finds them by these.
        cache_dir: Kits, and what is known of images, shared by every host of the node.
        clock: Wall-clock seconds.
    """

    def __init__(
        self,
        client: DockerClient,
        own_labels: Mapping[str, str],
        cache_dir: Path,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._labels = own_labels
        self._cache_dir = cache_dir
        self._clock = clock or SystemClock()
        self._known: dict[str, Image] = {}
        self._finding: dict[str, asyncio.Lock] = {}

    async def find(self, reference: str) -> Image:
        """Return an image that can run a project, pulling it where it is missing.

        A reference that was found stays what it was then, for as long as this host lives.

        Raises:
            SandboxStartFailed: It does not exist, cannot be pulled, or has no suitable Python.
            FabricUnavailable: The daemon does not answer.
        """
        async with self._finding.setdefault(reference, asyncio.Lock()):
            if reference not in self._known:
                self._known[reference] = await self._look(reference)
            return self._known[reference]

    def forget(self, reference: str) -> None:
        """Look at a reference anew when it is next asked for."""
        self._known.pop(reference, None)

    async def _look(self, reference: str) -> Image:
        details = await self._inspect(reference)
        config = details.get("Config") or {}
        variables = dict(item.partition("=")[::2] for item in config.get("Env") or ())
        carries = (config.get("Labels") or {}).get(RUNTIME_LABEL) == docker_kit.fingerprint()
        kit = None if carries else await self._kit(reference, details["Id"])
        return Image(details["Id"], config.get("User") or "", variables.get("PATH", ""), kit)

    async def _inspect(self, reference: str) -> dict[str, Any]:
        path = f"/images/{reference}/json"
        with contextlib.suppress(DaemonRefused):
            return dict(await self._client.request("GET", path))
        name = hashlib.sha256(reference.encode()).hexdigest()[:16]
        lock = contextlib.ExitStack()
        await asyncio.to_thread(
            lock.enter_context, locked(self._cache_dir / "pulls" / f"{name}.lock")
        )
        with lock:
            with contextlib.suppress(DaemonRefused):  # another host of this node pulled it
                return dict(await self._client.request("GET", path))
            await self._pull(reference)
            return dict(await self._client.request("GET", path))

    async def _pull(self, reference: str) -> None:
        if reference.startswith("sha256:"):
            raise SandboxStartFailed(
                f"image {reference[:19]} is not on this node, and no registry has it by that name",
                hint="it was built on another node: push it there with `aenv build --push`",
            )
        logger.warning("pulling image %s", reference)
        loop = asyncio.get_running_loop()
        tell_at = loop.time() + _TELL_S
        layers: dict[str, str] = {}
        params = {"fromImage": reference, **({} if _has_tag(reference) else {"tag": "latest"})}
        try:
            async with self._client.stream("POST", "/images/create", params=params) as lines:
                async for line in lines:
                    if "error" in line:
                        raise DaemonRefused(500, str(line["error"]))
                    layers[line.get("id", "")] = line.get("status", "")
                    if loop.time() >= tell_at:
                        tell_at = loop.time() + _TELL_S
                        done = sum(
                            s in ("Pull complete", "Already exists") for s in layers.values()
                        )
                        logger.warning("pulling %s: %d of %d", reference, done, len(layers))
        except DaemonRefused as exc:
            raise _pull_failure(reference, exc.message) from exc

    # --- looking inside ---------------------------------------------------------------------

    async def _kit(self, reference: str, image_id: str) -> Path:
        python = await self._python(reference, image_id)
        if python.version < docker_kit.OLDEST:
            found = ".".join(map(str, python.version))
            raise SandboxStartFailed(
                f"image {reference} has Python {found}, and the runtime needs 3.11 or newer",
                hint="base the image on a newer Python",
            )

        async def compile_in(kit: Path) -> None:
            await self._run(image_id, _COMPILE, f"{os.geteuid()}:{os.getegid()}", kit)

        try:
            return await docker_kit.ensure(python, self._cache_dir / "kits", compile_in)
        except DaemonRefused as exc:
            raise SandboxStartFailed(f"image {reference}: {exc.message}") from exc

    async def _python(self, reference: str, image_id: str) -> ImagePython:
        note = self._cache_dir / "images" / f"{image_id.partition(':')[2]}.json"
        if await asyncio.to_thread(note.exists):
            facts = json.loads(await asyncio.to_thread(note.read_text))
        else:
            try:
                facts = json.loads(await self._run(image_id, _LOOK, "65534:65534"))
            except DaemonRefused as exc:
                raise SandboxStartFailed(
                    f"image {reference} has no python3 that starts: {exc.message}",
                    hint="the docker engine runs projects with the image's Python 3.11 or newer",
                ) from exc
            await asyncio.to_thread(_write, note, json.dumps(facts))
        major, minor = facts["version"]
        return ImagePython((major, minor), facts["machine"], facts["libc"])

    async def _run(self, image_id: str, script: str, user: str, kit: Path | None = None) -> str:
        """Run a script in the image, without network, and return what it printed."""
        name = f"aenv-look-{uuid.uuid4().hex[:12]}"
        deadline = self._clock.now() + TOOL_DEADLINE_S
        mounts = [{"Type": "bind", "Source": str(kit), "Target": "/kit"}] if kit else []
        body = {
            "Image": image_id,
            "Entrypoint": ["python3", "-P", "-c", script],
            "Cmd": [],
            "User": user,
            "WorkingDir": "/",
            "Labels": {**self._labels, labels.DEADLINE_LABEL: repr(deadline)},
            "HostConfig": {
                "NetworkMode": "none", "Mounts": mounts, "CapDrop": ["ALL"],
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
                raise DaemonRefused(500, words or f"exit code {ended['StatusCode']}")
            return words
        finally:
            with contextlib.suppress(DaemonRefused, AenvError):  # the janitor is the second chance
                await self._client.request(
                    "DELETE", f"/containers/{name}", params={"force": 1, "v": 1}
                )


def _has_tag(reference: str) -> bool:
    return "@" in reference or ":" in reference.rpartition("/")[2]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    partial.write_text(text)
    partial.replace(path)


_REASONS: Final = (
    (("no space left",), "the node's disk is full", "free some, for example: docker image prune"),
    (
        ("unauthorized", "denied", "authentication required"),
        "it does not exist, or this node may not pull it",
        "log the node in: docker login",
    ),
    (("not found", "manifest unknown"), "it does not exist", "check its name and tag"),
)


def _pull_failure(reference: str, words: str) -> SandboxStartFailed:
    for marks, reason, hint in _REASONS:
        if any(mark in words.lower() for mark in marks):
            return SandboxStartFailed(
                f"image {reference} cannot be pulled: {reason} ({words})", hint=hint
            )
    return SandboxStartFailed(
        f"image {reference} cannot be pulled: {words}",
        hint="is its registry reachable from this node? An image that is there needs no pull",
    )
