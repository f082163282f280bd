"""BuildKit: found where the daemon has it, and asked by a ``docker`` command that speaks it.

It is reached by a protocol of its own, which Docker's command line speaks: by itself up to version
22, by its plugin ``buildx`` since. The command finds logins for registries itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.images.build_plan import BuildPlan
from aenv_ray.engines.images.build_report import BuildKitReport, OnOutput, OnStep
from aenv_ray.engines.node.docker_client import DockerClient

_FIRST_API: Final = (1, 39)
"""The API of Docker 18.09, the first with BuildKit."""
_BUILT_IN: Final = range(19, 23)
"""Versions of the command that speak to BuildKit without a plugin."""
_ASK_S: Final = 30.0
_END_S: Final = 10.0
_LINE_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class BuildKit:
    """A command that speaks to the BuildKit of a daemon."""

    program: str
    version: str

    def __str__(self) -> str:
        return f"BuildKit, by {self.program} {self.version}"


async def find(client: DockerClient, path: str) -> BuildKit | str:
    """Return the command to use, or why there is none.

    Args:
        client: Of the daemon.
        path: Where commands are looked for; as ``PATH``.

    Raises:
        FabricUnavailable: The daemon does not answer.
        DaemonRefused: It refuses.
    """
    without = lack(await client.request("GET", "/version"))
    if without:
        return without
    programs = await asyncio.to_thread(_programs, path)
    for program in programs:
        said = re.match(r"Docker version (\d+)\.\S*?(?=,)", await _say(program, "--version"))
        if said is None:  # for example Podman's, under that name
            continue
        version = said[0].removeprefix("Docker version ")
        if int(said[1]) in _BUILT_IN or await _say(program, "buildx", "version"):
            return BuildKit(program, version)
    if programs:
        return f"{' and '.join(programs)}: the plugin buildx is missing"
    return "there is no docker command, which speaks to it"


def _programs(path: str) -> list[str]:
    places = [Path(directory, "docker") for directory in path.split(os.pathsep) if directory]
    found = [str(place) for place in places if place.is_file() and os.access(place, os.X_OK)]
    return list(dict.fromkeys(found))


def lack(version: Mapping[str, Any]) -> str:
    """Return why a daemon that says this of itself has no BuildKit; "" when it has."""
    names = [str(part.get("Name", "")) for part in version.get("Components") or ()]
    if any("podman" in name.lower() for name in names):
        return "the daemon is Podman, which has none"
    api = str(version.get("ApiVersion", ""))
    numbers = tuple(int(word) for word in re.findall(r"\d+", api))
    if numbers < _FIRST_API:
        return f"the daemon's API {api} is older than BuildKit"
    if version.get("Os") != "linux":
        return f"the daemon runs on {version.get('Os')}"
    return ""


async def _say(program: str, *arguments: str) -> str:
    """Return what a command prints; "" when it fails."""
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_ASK_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        await _end(process)
    return "" if process.returncode else output.decode(errors="replace").strip()


async def build(
    buildkit: BuildKit,
    address: str,
    docker_config: Path,
    plan: BuildPlan,
    on_step: OnStep,
    on_output: OnOutput,
) -> str:
    """Build a plan's own Dockerfile and return the image's id.

    Cancelling it ends the build.

    Raises:
        ConfigError: A step failed: which, and its words.
        Unauthorized: A base image wants a login.
        FabricUnavailable: The registry of a base image is not reached, or the disk is full.
    """
    report = BuildKitReport(on_step, on_output)
    with tempfile.TemporaryDirectory(prefix="aenv-build-") as directory:
        noted = Path(directory, "id")
        command = [
            buildkit.program, "build", "--progress", "plain", "--iidfile", str(noted),
            "--file", str(plan.dockerfile),
            *(("--platform", plan.platform) if plan.platform else ()),
            *(word for item in plan.build_args.items() for word in ("--build-arg", "=".join(item))),
            str(plan.context),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, env=_environment(address, docker_config),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async for line in _lines(process.stdout):
                report.take(line)
            await process.wait()
        finally:
            await _end(process)
        if process.returncode:
            raise report.failure(
                f"{plan.dockerfile.name} does not build",
                report.last_words or f"docker build ended with exit code {process.returncode}",
            )
        return (await asyncio.to_thread(noted.read_text)).strip()


def _environment(address: str, docker_config: Path) -> dict[str, str]:
    own = {
        "DOCKER_HOST": address,
        "DOCKER_CONFIG": str(docker_config),
        "DOCKER_BUILDKIT": "1",
        "BUILDX_BUILDER": "default",  # the daemon's own: the image must be where it is run
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",  # with them the id is a list's, not the image's
        "NO_COLOR": "1",
    }
    return {k: v for k, v in os.environ.items() if k != "DOCKER_CONTEXT"} | own


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines, of whatever length: what is longer than 64 KiB comes in pieces."""
    pending = b""
    while piece := await stream.read(_LINE_BYTES):
        *whole, pending = (pending + piece).split(b"\n")
        if len(pending) > _LINE_BYTES:
            whole, pending = [*whole, pending], b""
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
    if pending:
        yield pending.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command that still runs; the daemon ends what it did for it."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
