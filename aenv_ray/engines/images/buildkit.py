"""BuildKit, driven through a ``docker`` command, and its progress report.

BuildKit has its own protocol, which Docker's command line speaks: up to version 22 by itself, since
then through the plugin ``buildx``. The command reads the logins for registries itself. The report
is that of ``--progress plain``
(https://docs.docker.com/reference/cli/docker/buildx/build/#progress).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.images.registry import Reason, diagnose
from aenv_ray.engines.node.docker_client import DockerClient
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, Unauthorized

OnStep = Callable[[int, int, str], None]
"""Called when a step begins: its number, the number of steps, its text."""
OnOutput = Callable[[str], None]

_FIRST_API: Final = (1, 39)
"""The API of Docker 18.09, the first with BuildKit."""
_BUILT_IN: Final = range(19, 23)
"""Versions of the ``docker`` command that speak to BuildKit without a plugin."""
_ASK_S: Final = 30.0
_END_S: Final = 10.0
_LINE_BYTES: Final = 64 * 1024
_OUTPUT_LINES: Final = 30
"""How many lines of a failed step's output an error shows."""
_VERTEX: Final = re.compile(r"#(\d+) (.*)")
_STEP: Final = re.compile(r"\[(?:(.*) )?(\d+)/(\d+)\] (.*)")
_OUTPUT: Final = re.compile(r"\d+\.\d+ (.*)")
_BASE_IMAGE: Final = re.compile(
    r"(?:\[internal\] load metadata for|(?:[^:]* )?\d+/\d+ : FROM) (\S+)", re.IGNORECASE
)


@dataclass(frozen=True)
class BuildKit:
    """A ``docker`` command that can drive a daemon's BuildKit."""

    program: str
    version: str

    def __str__(self) -> str:
        return f"BuildKit, by {self.program} {self.version}"


async def find(client: DockerClient, path: str) -> BuildKit:
    """Return the ``docker`` command to build with.

    Args:
        client: The client of the daemon.
        path: Directories to search, in the form of ``PATH``.

    Raises:
        FabricUnavailable: The daemon does not answer or has no BuildKit, or no command drives it.
        DaemonRefused: The daemon refused to tell its version.
    """
    lack = daemon_lack(await client.request("GET", "/version"))
    if lack:
        raise FabricUnavailable(
            f"this build needs BuildKit: {lack}",
            hint="build with Docker 18.09 or newer on Linux; DOCKER_HOST names another daemon",
        )
    programs = await asyncio.to_thread(_programs, path)
    for program in programs:
        said = re.match(r"Docker version (\d+)\.\S*?(?=,)", await _output(program, "--version"))
        if said is None:  # for example Podman under that name
            continue
        version = said[0].removeprefix("Docker version ")
        if int(said[1]) in _BUILT_IN or await _output(program, "buildx", "version"):
            return BuildKit(program, version)
    raise FabricUnavailable(
        f"this build needs BuildKit: {', '.join(programs)} without the buildx plugin"
        if programs
        else "this build needs BuildKit: no docker command on PATH",
        hint="install Docker's command line with its buildx plugin: "
        "apt install docker-cli docker-buildx, or docker-ce-cli docker-buildx-plugin",
    )


def daemon_lack(version: Mapping[str, Any]) -> str:
    """Return why a daemon has no BuildKit; "" if it has."""
    names = [str(part.get("Name", "")) for part in version.get("Components") or ()]
    if any("podman" in name.lower() for name in names):
        return "the daemon is Podman, which does not have it"
    api = str(version.get("ApiVersion", ""))
    numbers = tuple(int(word) for word in re.findall(r"\d+", api))
    if numbers < _FIRST_API:
        return f"the daemon's API {api} is older than BuildKit"
    if version.get("Os") != "linux":
        return f"the daemon runs on {version.get('Os')}"
    return ""


def _programs(path: str) -> list[str]:
    candidates = [Path(directory, "docker") for directory in path.split(os.pathsep) if directory]
    found = [str(file) for file in candidates if file.is_file() and os.access(file, os.X_OK)]
    return list(dict.fromkeys(found))


async def _output(program: str, *arguments: str) -> str:
    """Return the output of a command; "" if it fails."""
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
    *,
    dockerfile: Path,
    context: Path,
    tag: str | None = None,
    platform: str | None = None,
    build_args: Mapping[str, str] | None = None,
    on_step: OnStep = lambda number, total, text: None,
    on_output: OnOutput = lambda line: None,
) -> str:
    """Build an image and return its id.

    Cancelling ends the build.

    Raises:
        ConfigError: A step failed; the message names it and shows its output.
        Unauthorized: The registry of a base image requires a login.
        FabricUnavailable: The registry of a base image cannot be reached, or the disk is full.
    """
    report = ProgressReport(on_step, on_output)
    with tempfile.TemporaryDirectory(prefix="aenv-build-") as directory:
        id_file = Path(directory, "id")
        command = [
            buildkit.program, "build", "--progress", "plain", "--iidfile", str(id_file),
            "--file", str(dockerfile),
            *(("--tag", tag) if tag else ()),
            *(("--platform", platform) if platform else ()),
            *(f"--build-arg={name}={value}" for name, value in (build_args or {}).items()),
            str(context),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, env=_environment(address, docker_config),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async for line in _lines(process.stdout):
                report.feed(line)
            await process.wait()
        finally:
            await _end(process)
        if process.returncode:
            raise report.failure(
                f"{dockerfile.name} does not build",
                report.error or f"docker build ended with exit code {process.returncode}",
            )
        return (await asyncio.to_thread(id_file.read_text)).strip()


def _environment(address: str, docker_config: Path) -> dict[str, str]:
    own = {
        "DOCKER_HOST": address,
        "DOCKER_CONFIG": str(docker_config),
        "DOCKER_BUILDKIT": "1",
        "BUILDX_BUILDER": "default",  # the daemon's own, so that the image is where it will run
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",  # with them the id is a manifest list's
        "NO_COLOR": "1",
    }
    return {k: v for k, v in os.environ.items() if k != "DOCKER_CONTEXT"} | own


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines of any length; those longer than 64 KiB come in pieces."""
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
    """Terminate a command that still runs; the daemon then cancels its work."""
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


# --- the progress report --------------------------------------------------------------------------


@dataclass
class _Vertex:
    title: str
    output: list[str]


class ProgressReport:
    """Parses the report of one build: progress while it runs, a typed error if it fails.

    Steps of several stages run at once; each line carries the number of its step.
    """

    def __init__(self, on_step: OnStep, on_output: OnOutput) -> None:
        self._on_step = on_step
        self._on_output = on_output
        self._failed = _Vertex("", [])
        self._vertices: dict[str, _Vertex] = {}
        self._stages: dict[str, int] = {}
        self._begun = 0
        self._tail: list[str] = []

    def feed(self, line: str) -> None:
        """Parse one line."""
        match = _VERTEX.fullmatch(line)
        if match is None:
            self._tail += [line] if line.strip() else []
            return
        number, text = match[1], match[2]
        vertex = self._vertices.get(number)
        if vertex is None:
            self._vertices[number] = _Vertex(self._begin(text), [])
        elif text.startswith("ERROR: "):
            self._failed = vertex
        else:
            output = _OUTPUT.fullmatch(text)
            if output is not None and output[1].strip():
                vertex.output.append(output[1])
                self._on_output(output[1])

    @property
    def error(self) -> str:
        """What the report ends with, outside of any step: why there is no image."""
        ends = [number for number, line in enumerate(self._tail) if not line.strip("-")]
        return "\n".join(self._tail[ends[-1] + 1 if ends else 0 :][-_OUTPUT_LINES:])

    def _begin(self, title: str) -> str:
        step = _STEP.fullmatch(title)
        if step is None:
            return title
        stage, number, total, command = step[1] or "", step[2], int(step[3]), step[4]
        self._stages[stage] = total
        self._begun += 1
        self._on_step(self._begun, max(self._begun, sum(self._stages.values())), command)
        return f"{f'{stage} ' if stage else ''}{number}/{total} : {command}"

    def failure(self, what: str, error: str) -> AenvError:
        """Return the exception for a build that failed.

        Args:
            what: Begins the message.
            error: Ends it; tells trouble with a registry or the disk from a mistake in the project.
        """
        step = self._failed.title
        output = "\n".join([*self._failed.output[-_OUTPUT_LINES:], error.strip()])
        message = f"{what}{f' at step {step}' if step else ''}:\n{output}"
        reason = diagnose(error)
        if reason is Reason.DISK_FULL:
            hint = "free some space, for example: docker system prune"
            return FabricUnavailable(f"the disk of the Docker daemon is full: {message}", hint=hint)
        base = _BASE_IMAGE.match(step)
        if base is not None and reason is Reason.UNAUTHORIZED:
            hint = f"check the name {base[1]}; if it is right, run `docker login` on this machine"
            return Unauthorized(message, hint=hint)
        if base is not None and reason is Reason.UNREACHABLE:
            hint = "a base image that the daemon already has needs no registry"
            return FabricUnavailable(message, hint=hint)
        return ConfigError(message, hint="fix that step; nothing was changed")
