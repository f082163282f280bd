"""From a created pod to a runtime that answers: the host's side of a start.

A pod contains nothing but its image. Over the first connection, its container reports its Python,
and the host sends the runtime with libraries for that Python, the project, and a request with all
variables. The container passes the files on to the pod's unpacker.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.base import EndCause, SandboxSpec, start_failed
from aenv_ray.engines.images import runtime_bundle
from aenv_ray.engines.images.runtime_bundle import ImagePython
from aenv_ray.engines.images.serving import PUBLIC_SERVER, SHARED, Serving
from aenv_ray.engines.kubernetes import manifest, names, pod_status
from aenv_ray.engines.kubernetes.plan import PodPlan
from aenv_ray.engines.kubernetes.pod_instance import PodInstance, connect
from aenv_ray.engines.kubernetes.pod_status import UnsuitableImage
from aenv_ray.engines.kubernetes.settings import PodSettings
from aenv_ray.engines.node.container_reports import read_report
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.engines.node.variables import instance_variables, work_bytes
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.runtime.container.process_one import HOME, PROJECT

BOOT_DEADLINE_S: Final = 60.0
"""How long a container may take to boot once it runs."""
SENDING_S: Final = 30.0
"""How long sending the runtime and the project may take."""
LAST_REPORT_S: Final = 2.0
"""How long to read the report of a container whose pod has ended: it was sent before the end."""
CAUSE_WAIT_S: Final = 15.0
"""How long to wait for the API to report why a pod ended."""
SCHEDULE_S: Final = 300.0
"""How long a pod may wait for a node: adding nodes takes minutes."""
PULL_S: Final = 900.0
"""How long a pod may take until its containers run."""
_PAGE: Final = 4096
"""More than the work directory holds, so that a full one reports that it is full."""

BootRequest = tuple[dict[str, Any], list[tuple[Path, str]]]
"""What a container is told, and the directories that it gets, each with its path there."""


def check_deadline(pod: pod_status.Pod, deadline: float, grace_s: float) -> None:
    """Refuse a deadline beyond the pod's own, which cannot be moved.

    Raises:
        ConfigError: The deadline is too late.
    """
    life_s = pod["spec"]["activeDeadlineSeconds"] - grace_s
    if deadline > pod_status.created_at(pod) + life_s:
        raise ConfigError(
            f"the pod of {pod['metadata']['annotations'][names.INSTANCE]} ends {life_s:g} s "
            "after its creation, and Kubernetes cannot extend that",
            hint="create the instance with a longer TTL, or raise AENV_KUBERNETES_LIFE",
        )


async def await_containers(instance: PodInstance, schedule_s: float) -> None:
    """Wait until all containers of a pod run.

    Raises:
        SandboxStartFailed: The containers cannot run, or the pod ended.
        CapacityExceeded: No node has room.
        UnsuitableImage: The image has no Python.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    futures: set[asyncio.Future[Any]] = {instance.address, instance.ended, instance.failed}
    while not any(future.done() for future in futures):
        waited = loop.time() - begun
        limit = schedule_s if instance.unscheduled_reason else PULL_S
        if waited >= limit:
            if instance.unscheduled_reason:
                raise pod_status.no_room(instance.id, instance.unscheduled_reason, limit)
            raise start_failed(instance.id, f"its containers did not run within {limit:g} s")
        await asyncio.wait(
            futures, timeout=min(1.0, limit - waited), return_when=asyncio.FIRST_COMPLETED
        )
    if instance.failed.done():
        instance.failed.result()
    if not instance.address.done():
        raise start_failed(instance.id, instance.ended.result())


async def boot(
    instance: PodInstance,
    spec: SandboxSpec,
    plan: PodPlan,
    key: HostKey,
    bundles: RuntimeBundles,
    ends_in_s: float,
) -> None:
    """Send the containers of a pod what they serve, and wait until they are ready.

    Raises:
        SandboxStartFailed: A container reports a failure, or ended.
        UnsuitableImage: The image's Python is too old.
    """

    async def boot_one(port: int, request_of: Callable[..., BootRequest], prefix: str) -> None:
        container_key = key.secret(instance.name, instance.nonce, str(port))
        message, directories = request_of(spec, plan, container_key, ends_in_s)
        container = names.SIDECAR_CONTAINER if prefix else names.MAIN_CONTAINER
        message["mounts"] = instance.mounts[container] if plan.refuses_volumes else None
        await _boot_container(instance, port, key, (message, directories), bundles, prefix)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(boot_one(manifest.PORT, main_request, ""))
            if instance.has_sidecar:
                group.create_task(
                    boot_one(manifest.SIDECAR_PORT, sidecar_request, pod_status.SIDECAR)
                )
    except ExceptionGroup as several:
        raise several.exceptions[0] from several


async def _boot_container(
    instance: PodInstance,
    port: int,
    key: HostKey,
    request: BootRequest,
    bundles: RuntimeBundles,
    prefix: str,
) -> None:
    """Boot one container, unless its pod ends first."""
    secret = key.secret(instance.name, instance.nonce, "boot")
    booting = asyncio.create_task(_send(instance.address.result(), port, secret, request, bundles))
    futures: set[asyncio.Future[Any]] = {booting, instance.ended, instance.failed}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        # The end can be known first: the API reports it on another connection.
        await asyncio.wait([booting], timeout=LAST_REPORT_S)
        if not booting.done():
            if instance.failed.done():
                instance.failed.result()
            raise start_failed(instance.id, instance.ended.result())
        booting.result()
    except OSError as exc:
        why = EndCause(f"its pod did not answer ({exc})")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CAUSE_WAIT_S):
                why = await asyncio.shield(instance.ended)
        raise start_failed(instance.id, why) from exc
    except ValueError as exc:
        raise start_failed(instance.id, f"{prefix}its image sent {exc}") from exc
    except SandboxStartFailed as exc:
        if not booting.done():
            raise
        raise start_failed(instance.id, f"{prefix}{exc.message}") from exc
    finally:
        booting.cancel()
        await asyncio.wait([booting])


async def _send(
    address: str, port: int, secret: bytes, request: BootRequest, bundles: RuntimeBundles
) -> None:
    """Send a container its runtime, project and request, and wait for its report.

    Raises:
        UnsuitableImage: The image's Python is too old.
        SandboxStartFailed: The container reports why it failed; the message is that text alone.
        ValueError: What the container reports is not a report.
        OSError: The connection broke, or nothing listened in time.
    """
    loop = asyncio.get_running_loop()
    message, directories = request
    sock = await connect(address, port, within_s=BOOT_DEADLINE_S)
    with sock:
        async with asyncio.timeout(BOOT_DEADLINE_S):
            await loop.sock_sendall(sock, secret)
            facts = await _report(sock)
        python = ImagePython.reported({**facts, "version": facts.get("python")})
        if python.version < runtime_bundle.OLDEST:
            found = ".".join(map(str, python.version))
            raise UnsuitableImage(f"its image has Python {found}, and tools need 3.11 or newer")
        archives = [await bundles.archive(python), await asyncio.to_thread(pack, directories)]
        body = json.dumps(message).encode()
        # A container that does not boot in time reports that itself, with its log.
        async with asyncio.timeout(SENDING_S + BOOT_DEADLINE_S):
            size = sum(map(len, archives))
            head = len(body).to_bytes(8, "big") + body + size.to_bytes(8, "big")
            for piece in (head, *archives):
                await loop.sock_sendall(sock, piece)
            report = await _report(sock)
    if "ready" not in report:
        raise SandboxStartFailed(
            str(report.get("failed") or "it gave no reason"),
            hint="run `aenv test` in the project, which shows what its code printed",
        )


async def _report(sock: socket.socket) -> dict[str, Any]:
    report = await read_report(sock)
    if report is None:
        raise ConnectionResetError("the pod closed the connection")
    return report


# --- what is sent ---------------------------------------------------------------------------------


def main_request(spec: SandboxSpec, plan: PodPlan, key: bytes, ends_in_s: float) -> BootRequest:
    """Return the request for the main container."""
    deploy = spec.config.deploy
    variables = instance_variables(spec, "namespaces", "/usr/bin/python3")
    if "PATH" not in {**deploy.variables, **spec.environment_variables}:
        del variables["PATH"]  # the image's own applies
    if plan.sidecar_image:
        variables.setdefault("WORK_SHARE", SHARED)
    variables.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for plugins takes 20 ms
    is_public = plan.serving is Serving.PUBLIC
    message = {
        **_common_request(spec, key, ends_in_s, plan.settings, variables),
        "unpack": manifest.unpack_order(names.MAIN_CONTAINER, hides=deploy.hide_source),
        "arguments": list(spec.arguments),
        "serving": plan.serving.value,
        "absence": plan.no_tools_reason,
        "directory": "/" if is_public else "",
        "server": [*PUBLIC_SERVER, *spec.arguments] if is_public else [],
    }
    return message, [(spec.project_dir, PROJECT)]


def sidecar_request(spec: SandboxSpec, plan: PodPlan, key: bytes, ends_in_s: float) -> BootRequest:
    """Return the request for the sidecar; arguments as for `main_request`."""
    variables = {"AENV_INSTANCE_ID": spec.instance_id, "WORK_SHARE": SHARED, "HOME": "/"}
    message = {
        **_common_request(spec, key, ends_in_s, plan.settings, variables),
        "unpack": manifest.unpack_order(names.SIDECAR_CONTAINER, hides=False),
        "arguments": [],
        "serving": Serving.COMMANDS.value,
        "absence": "",
        "directory": "/",
        "server": [],
    }
    return message, []


def _common_request(
    spec: SandboxSpec,
    key: bytes,
    ends_in_s: float,
    settings: PodSettings,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    deploy = spec.config.deploy
    kept_bytes = spec.storage.size_bytes if spec.storage is not None else 0
    largest = max(work_bytes(deploy), manifest.root_bytes(deploy, settings), kept_bytes)
    return {
        # Kubernetes counts volumes and layers, but no file that the kubelet mounts into a pod.
        "file_bytes": largest + _PAGE,
        "home": HOME,
        "key": key.hex(),
        "boot_s": BOOT_DEADLINE_S,
        "ends_in_s": ends_in_s,
        "grace_s": settings.grace_s,
        "variables": dict(variables),
    }


class RuntimeBundles:
    """The runtime with libraries for each Python, as archives."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._archives: dict[str, bytes] = {}

    async def archive(self, python: ImagePython) -> bytes:
        """Return the bundle for a Python, creating it if necessary.

        Raises:
            SandboxStartFailed: The libraries are not available for this Python.
        """
        key = str(python)
        if key not in self._archives:
            await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True)

            bundle = await runtime_bundle.ensure(python, self._directory)
            parts = [(bundle / part, f"{HOME}/{part}") for part in ("runtime", "lib")]
            self._archives[key] = await asyncio.to_thread(pack, parts)
        return self._archives[key]


def pack(directories: Sequence[tuple[Path, str]]) -> bytes:
    """Return directories as one archive that any user may unpack; blocks."""

    def readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for directory, target in directories:
            for path in sorted(directory.iterdir()):
                archive.add(path, f"{target.strip('/')}/{path.name}", filter=readable)
    return buffer.getvalue()
