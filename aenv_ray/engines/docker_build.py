"""Builds a project's image: its own Dockerfile, then one layer that holds our runtime.

The runtime layer is what `aenv_ray.engines.docker_kit` makes for the image's Python: the island of
our package and pydantic, without Ray. Uses the `docker` package, which is synchronous.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines import docker_kit
from aenv_ray.engines.docker_client import DockerClient, socket_path
from aenv_ray.engines.docker_images import RUNTIME_LABEL, DockerImages
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.runtime.container import HOME

OnStep = Callable[[int, int, str], None]
"""Told the number of a step that begins, how many there are, and its text."""
OnOutput = Callable[[str], None]

REQUEST_DEADLINE_S: Final = 3600.0
"""A step that installs much is silent for long."""
_NOISE: Final = (" ---> ", "Removing intermediate container ", "Successfully ")
_WORDS: Final = 30
"""Lines of a failing step's output that are told."""


@dataclass(frozen=True)
class BuildPlan:
    """One image to build."""

    dockerfile: Path
    context: Path
    references: Sequence[str]
    """``registry/namespace/name:tag``; the same image gets all of them."""
    platform: str | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BuiltImage:
    """An image that was built."""

    id: str
    """``sha256:…`` of its configuration: what a daemon that has it calls it."""
    pushed: str
    """``registry/namespace/name@sha256:…``; "" when it was not pushed."""
    runtime_bytes: int
    """Size of the runtime layer."""


class ImageBuilder:
    """Builds with one daemon.

    Args:
        address: ``unix:///path``.
        cache_dir: Where kits are kept.
        on_step: Told the steps of the Dockerfile.
        on_output: Told what they print, line by line.
    """

    def __init__(self, address: str, cache_dir: Path, on_step: OnStep, on_output: OnOutput) -> None:
        self._address = f"unix://{socket_path(address)}"
        self._cache_dir = cache_dir
        self._on_step = on_step
        self._on_output = on_output

    def build(self, plan: BuildPlan, *, push: bool = False) -> BuiltImage:
        """Build, add the runtime, name, and push if asked.

        Raises:
            ConfigError: There is no Dockerfile, or one of its steps failed: which, and its words.
            SandboxStartFailed: The image has no Python that the runtime runs on.
            FabricUnavailable: The daemon or the registry does not answer.
        """
        import requests

        docker: Any = importlib.import_module("docker")  # it has no types
        if not plan.dockerfile.is_file():
            raise ConfigError(
                f"there is no {plan.dockerfile}", hint="name it with -f, or make one: aenv init"
            )
        path = socket_path(self._address)
        if not Path(path).is_socket():
            raise FabricUnavailable(
                f"there is no Docker daemon: {path} is no socket",
                hint="start one, or say where it is with DOCKER_HOST",
            )
        try:
            api = docker.APIClient(
                base_url=self._address, version="auto", timeout=REQUEST_DEADLINE_S
            )
            try:
                inner = self._build_own(api, plan)
                kit = asyncio.run(self._kit(inner))
                image_id, size = self._add_runtime(api, inner, kit, plan.platform)
                for reference in plan.references:
                    repository, tag = split_tag(reference)
                    api.tag(image_id, repository, tag)
                pushed = [self._push(api, reference) for reference in plan.references if push]
            finally:
                api.close()
        except (docker.errors.DockerException, requests.RequestException) as exc:
            raise FabricUnavailable(
                f"the Docker daemon at {self._address}: {exc}",
                hint="is it running, and may this user open its socket?",
            ) from exc
        return BuiltImage(image_id, pushed[0] if pushed else "", size)

    def _build_own(self, api: Any, plan: BuildPlan) -> str:
        lines = api.build(
            path=str(plan.context), dockerfile=str(plan.dockerfile), platform=plan.platform,
            buildargs=dict(plan.build_args), rm=True, forcerm=True, decode=True,
        )  # fmt: skip
        return self._follow(lines, f"{plan.dockerfile.name} does not build")

    async def _kit(self, image_id: str) -> Path | None:
        client = DockerClient(self._address)
        try:
            images = DockerImages(client, {}, self._cache_dir)
            return await images.kit(await images.find(image_id))
        finally:
            await client.close()

    def _add_runtime(
        self, api: Any, image_id: str, kit: Path | None, platform: str | None
    ) -> tuple[str, int]:
        if kit is None:
            return image_id, 0  # its base carries this very runtime
        dockerfile = (
            f"FROM {image_id}\nCOPY runtime {HOME}/runtime\nCOPY lib {HOME}/lib\n"
            f"LABEL {RUNTIME_LABEL}={docker_kit.fingerprint()}\n"
        )
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("Dockerfile")
            info.size = len(dockerfile)
            tar.addfile(info, io.BytesIO(dockerfile.encode()))
            for part in ("runtime", "lib"):
                tar.add(kit / part, part, filter=_anonymous)
        size = buffer.tell()
        buffer.seek(0)
        lines = api.build(
            fileobj=buffer, custom_context=True, platform=platform, rm=True, forcerm=True,
            decode=True,
        )  # fmt: skip
        return self._follow(lines, "the runtime cannot be added", quiet=True), size

    def _follow(self, lines: Any, failure: str, *, quiet: bool = False) -> str:
        """Read a build's report to its end and return the image's id."""
        step, image_id = "", ""
        words: list[str] = []
        for line in lines:
            if "error" in line:
                said = "\n".join([*words[-_WORDS:], str(line["error"]).strip()])
                where = f" at step {step}" if step else ""
                raise ConfigError(
                    f"{failure}{where}:\n{said}", hint="mend that step; nothing was changed"
                )
            image_id = (line.get("aux") or {}).get("ID") or image_id
            for text in str(line.get("stream", "")).splitlines():
                if text.startswith("Step ") and " : " in text:
                    step, words = text.removeprefix("Step "), []
                    numbers, _, command = step.partition(" : ")
                    done, _, total = numbers.partition("/")
                    if not quiet:
                        self._on_step(int(done), int(total), command)
                elif text.strip() and not text.startswith(_NOISE):
                    words.append(text)
                    if not quiet:
                        self._on_output(text)
        if not image_id:
            raise FabricUnavailable(f"{failure}: the daemon ended without a word")
        return image_id

    def _push(self, api: Any, reference: str) -> str:
        """Push one name of an image and return it by digest.

        Raises:
            FabricUnavailable: The registry refused, or does not answer.
        """
        repository, tag = split_tag(reference)
        digest = ""
        for line in api.push(repository, tag=tag, stream=True, decode=True):
            if "error" in line:
                raise FabricUnavailable(
                    f"{reference} cannot be pushed: {line['error']}",
                    hint="it is built, and on this node; log in with: docker login",
                )
            digest = (line.get("aux") or {}).get("Digest") or digest
        return f"{repository}@{digest}"


def split_tag(reference: str) -> tuple[str, str]:
    """Return repository and tag; ``latest`` where there is none."""
    head, slash, last = reference.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", tag or "latest"


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
