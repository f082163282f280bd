"""The checks of this machine: versions, engines, Ray, Redis, ports, disks, internet."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.config import Settings
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.findings import Finding, Verdict

if TYPE_CHECKING:
    from aenv_ray.engines.base import Engine, Sandbox
    from aenv_ray.models import Isolation

_DOCKER_RUNTIMES: Final = "docker runtimes"
_KNOWN_RUNTIMES: Final = ("crun", "runsc", "kata-runtime")
"""Programs to mention if they are installed and not registered."""
CHECK_ERRORS: Final = (AenvError, OSError, TimeoutError)
"""The errors that trying an engine may raise."""

_TRY_S: Final = 60.0
_CONNECT_S: Final = 3.0
_LEAST_DISK_BYTES: Final = 1 << 30
_LEAST_SHM_BYTES: Final = 256 << 20
_INTERNET: Final = ("pypi.org", 443)
_DOCKER: Final = "engine docker"
_DEFAULT_DAEMON: Final = Settings.model_fields["docker_host"].default
NAMESPACES_HINT: Final = (
    "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0   (Ubuntu); in a container: "
    "run it with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)


def versions() -> Finding:
    """Check that the installed packages satisfy this version's requirements."""
    from packaging.requirements import Requirement

    wrong = []
    for line in importlib.metadata.requires("aenv-ray") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} {found} is not {wanted.specifier}")
    here = f"Python {platform.python_version()}, Ray {importlib.metadata.version('ray')}"
    if wrong:
        mend = f"{sys.executable} -m pip install --upgrade aenv-ray"
        return Finding("versions", Verdict.FAILED, "; ".join(wrong), mend)
    return Finding("versions", Verdict.OK, here)


def disk(settings: Settings) -> list[Finding]:
    """Check that the directories are writable and have room."""
    checks = []
    directories = (("data", settings.data_dir, _LEAST_DISK_BYTES, "AENV_DATA_DIR"),
              ("runtime", settings.runtime_dir, _LEAST_SHM_BYTES, "AENV_RUNTIME_DIR"))  # fmt: skip
    for name, directory, least, variable in directories:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        found = f"{directory}: {free >> 20:,} MiB free"
        mend = f"free some space, or set {variable} to another directory"
        if not os.access(existing, os.W_OK | os.X_OK):
            checks.append(Finding(name, Verdict.FAILED, f"{directory} is not writable", mend))
        elif free < least:
            checks.append(Finding(name, Verdict.WARNING, found, mend))
        else:
            checks.append(Finding(name, Verdict.OK, found))
    return checks


def ports(host: str, wanted: tuple[int, ...], ours: bool) -> list[Finding]:
    """Check that the ports of ``aenv up`` are free.

    Args:
        host: Address to listen on.
        wanted: The ports.
        ours: ``aenv up`` is running and may use them.
    """
    checks = []
    for port in wanted:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as exc:
                if ours:
                    checks.append(Finding(f"port {port}", Verdict.OK, "used by aenv up"))
                    continue
                option = "--port" if port == wanted[0] else "--mcp-port"
                checks.append(
                    Finding(
                        f"port {port}", Verdict.WARNING, str(exc.strerror), f"aenv up {option} 0"
                    )
                )
            else:
                checks.append(Finding(f"port {port}", Verdict.OK, "free"))
    return checks


def redis(settings: Settings) -> Finding:
    """Check that the hub's Redis answers, or that a Redis program is installed."""
    if settings.redis_url is None:
        from aenv_ray.hub.redis.server import find_program

        try:
            program, version = find_program()
        except AenvError as exc:
            return Finding("redis", Verdict.FAILED, exc.message, "sudo apt install redis-server")
        return Finding("redis", Verdict.OK, f"{program} {'.'.join(map(str, version))}")
    return asyncio.run(_ping(settings.redis_url, settings.redis_password))


async def _ping(url: str, password: str | None) -> Finding:
    from aenv_ray.hub.redis.connection import connect, redacted, redis_errors

    try:
        client = connect(url, password=password)
        try:
            with redis_errors(redacted(url)):
                await client.ping()
        finally:
            await client.aclose()
    except AenvError as exc:
        return Finding("redis", Verdict.FAILED, exc.message, "correct AENV_REDIS_URL, or unset it")
    return Finding("redis", Verdict.OK, f"{redacted(url)} answers")


def ray(settings: Settings) -> Finding:
    """Check that the configured Ray answers; without one, Ray starts when it is needed."""
    from aenv_ray import local_fabric

    fabric = local_fabric.read(settings.data_dir)
    address = settings.ray_address or (fabric.ray_address if fabric is not None else "")
    if not address:
        return Finding("ray", Verdict.OK, "not running; it starts when it is needed")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return Finding("ray", Verdict.OK, f"{address} answers")
    except (OSError, ValueError) as exc:
        mend = "correct RAY_ADDRESS, or unset it" if settings.ray_address else "aenv down"
        return Finding("ray", Verdict.FAILED, f"{address}: {exc}", mend)


def internet() -> Finding:
    """Check access to PyPI, which projects with requirements need."""
    try:
        with socket.create_connection(_INTERNET, _CONNECT_S):
            return Finding("internet", Verdict.OK, f"{_INTERNET[0]} answers")
    except OSError as exc:
        return Finding("internet", Verdict.WARNING, f"{_INTERNET[0]}: {exc}",
                     "needed only for new requirements and images; mirrors also work")  # fmt: skip


def engines(settings: Settings) -> list[Finding]:
    """Check each engine with an instance that runs a command."""
    return [asyncio.run(_process(settings)), *asyncio.run(_docker(settings))]


async def _process(settings: Settings) -> Finding:
    name = "engine process"
    try:
        isolation = await process_isolation(settings)
    except CHECK_ERRORS as exc:
        return Finding(name, Verdict.FAILED, line(exc), NAMESPACES_HINT)
    if isolation.kind == "none":
        found = f"works, without isolation: {'; '.join(isolation.missing)}"
        return Finding(name, Verdict.WARNING, found, NAMESPACES_HINT)
    return Finding(name, Verdict.OK, f"works, isolated by {isolation.kind}")


async def process_isolation(settings: Settings) -> Isolation:
    """Start a sandbox with the process engine, return its isolation, and end it.

    Raises:
        AenvError: The sandbox does not start; any other of `CHECK_ERRORS` is possible, too.
    """
    from aenv_ray.engines.process.engine import ProcessEngine
    from aenv_ray.ids import HostId

    with _short_directory() as root:
        engine = ProcessEngine(
            HostId("doctor"), runtime_dir=root / "r", data_dir=root / "d", scope="doctor",
            owner_pid=os.getpid(), isolation=settings.isolation or "auto",
        )  # fmt: skip
        async with tried(engine) as sandbox:
            return sandbox.isolation


async def docker_info(settings: Settings) -> dict[str, Any]:
    """Return the Docker daemon's answer to ``/info``.

    Raises:
        AenvError: The daemon does not answer; any other of `CHECK_ERRORS` is possible, too.
    """
    from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient

    client = DockerClient(settings.docker_host)
    try:
        return dict(await client.request("GET", "/info"))
    except DaemonRefused as exc:
        raise FabricUnavailable(str(exc)) from exc
    finally:
        await client.close()


async def _docker(settings: Settings) -> list[Finding]:
    """Check the Docker daemon and its OCI runtimes."""
    from aenv_ray.engines.node.docker_client import daemon_hint

    try:
        info = await docker_info(settings)
    except CHECK_ERRORS as exc:
        if settings.is_in_kuberay and settings.docker_host == _DEFAULT_DAEMON:
            found = "no Docker daemon in this pod, and none needed: instances are pods"
            return [Finding("docker", Verdict.OK, found)]
        return [Finding(_DOCKER, Verdict.FAILED, line(exc), daemon_hint(settings.docker_host))]
    runtimes = check_docker_runtimes(info, settings.docker_runtime)
    return [await _docker_engine(settings, f"Docker {info.get('ServerVersion', '?')}"), runtimes]


async def _docker_engine(settings: Settings, daemon: str) -> Finding:
    from aenv_ray.engines.docker.engine import DockerEngine
    from aenv_ray.ids import HostId

    name = _DOCKER
    if settings.docker_image is None:
        found = f"{daemon} answers; it was not tried, because no image is configured"
        return Finding(name, Verdict.OK, found, "AENV_DOCKER_IMAGE=python:3.12-slim aenv doctor")
    try:
        with _short_directory() as root:
            engine = DockerEngine(
                HostId("doctor"), runtime_dir=root / "r", data_dir=root / "d", scope=root.name,
                owner_pid=os.getpid(), address=settings.docker_host, image=settings.docker_image,
                runtime=settings.docker_runtime,
            )  # fmt: skip
            async with tried(engine):
                pass
    except CHECK_ERRORS as exc:
        return Finding(name, Verdict.FAILED, line(exc), f"docker pull {settings.docker_image}")
    return Finding(name, Verdict.OK, f"works, {daemon}, {settings.docker_image}")


@contextlib.asynccontextmanager
async def tried(engine: Engine, timeout_s: float = _TRY_S) -> AsyncIterator[Sandbox]:
    """Yield an instance of mini-terminal, without network, that answers; delete it afterwards."""
    from aenv_ray.actors.host.fresh_sandbox import fresh_sandbox
    from aenv_ray.project import project

    source = project.resolve("mini-terminal")
    async with (
        asyncio.timeout(timeout_s),
        fresh_sandbox(source, lifetime_s=timeout_s, make_engine=lambda _: engine) as sandbox,
    ):
        await sandbox.request("tools/list", {}, deadline_s=timeout_s)
        yield sandbox


@contextlib.contextmanager
def _short_directory() -> Any:
    """Yield a temporary directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ad-", dir="/tmp", ignore_cleanup_errors=True) as path:
        Path(path).chmod(0o755)
        yield Path(path)


def line(exc: BaseException) -> str:
    """Return the message of an error on one line."""
    text = exc.message if isinstance(exc, AenvError) else str(exc)
    return " ".join((text or type(exc).__name__).split())[:300]


def check_docker_runtimes(
    info: Mapping[str, Any],
    wanted: str | None,
    find: Callable[[str], str | None] = shutil.which,
) -> Finding:
    """Check that the wanted runtime is registered, and that the programs of all runtimes exist."""
    from aenv_ray.engines.docker.link import has_own_kernel

    described: dict[str, dict[str, Any]] = {
        name: dict(one or {})
        for name, one in sorted(dict(info.get("Runtimes") or {}).items())
        if not name.startswith("io.containerd.")
    }
    default = str(info.get("DefaultRuntime") or "runc")
    absent = [name for name, one in described.items() if one.get("path") and not find(one["path"])]
    words = []
    for name, one in described.items():
        notes = ["default"] if name == default else []
        notes += ["its own kernel"] if has_own_kernel(one) else []
        notes += [f"{one['path']} is not installed"] if name in absent else []
        words.append(f"{name} ({', '.join(notes)})" if notes else name)
    found = ", ".join(words) or "none reported"
    if wanted and wanted not in described:
        found = f"AENV_DOCKER_RUNTIME is {wanted}, which the daemon does not have; it has {found}"
        return Finding(_DOCKER_RUNTIMES, Verdict.FAILED, found, _registering(wanted, find(wanted)))
    if absent:
        mend = f"install {', '.join(absent)}, or remove it from the daemon's runtimes"
        return Finding(_DOCKER_RUNTIMES, Verdict.WARNING, found, mend)
    programs = {str(one.get("path", "")).rpartition("/")[2] for one in described.values()}
    unused = [
        f"{program} is installed and not registered"
        for program in _KNOWN_RUNTIMES
        if find(program) and program not in programs and program not in described
    ]
    return Finding(_DOCKER_RUNTIMES, Verdict.OK, "; ".join([found, *unused]))


def _registering(name: str, path: str | None) -> str:
    return f"dockerd --add-runtime {name}={path or '/path/to/it'}, or unset AENV_DOCKER_RUNTIME"
