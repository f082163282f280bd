"""The first connection to a container: it gets its runtime and project, and says that it is up.

Nothing is in the pod but its image: the runtime and its libraries for that image's Python, which
the container tells, the project, and the order with all variables go over this connection.
"""

from __future__ import annotations

import asyncio
import compileall
import io
import json
import py_compile
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.images import runtime_kit as docker_kit
from aenv_ray.engines.images.runtime_kit import ImagePython
from aenv_ray.engines.images.serving import PUBLIC_SERVER, SHARED, Serving
from aenv_ray.engines.kubernetes.causes import Unfitting
from aenv_ray.engines.kubernetes.door import reach
from aenv_ray.engines.kubernetes.spec import Surroundings
from aenv_ray.engines.node.variables import instance_variables
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.runtime.container.process_one import HOME, PROJECT

BOOT_DEADLINE_S: Final = 60.0
"""A container that runs is up within this, or is ended."""
SENDING_S: Final = 30.0
"""How long what it serves may be on its way before that."""
_REPORT_BYTES: Final = 65_536


class Kits:
    """The runtime for images' Pythons, as archives.

    Args:
        directory: Where kits are kept.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._archives: dict[str, bytes] = {}

    async def archive(self, python: ImagePython) -> bytes:
        """Return the kit for a Python, making it if need be.

        Raises:
            SandboxStartFailed: The libraries cannot be had for this Python.
        """
        key = str(python)
        if key not in self._archives:
            await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True)

            async def compile_in(kit: Path) -> None:
                if python.is_ours:
                    await asyncio.to_thread(_compile, kit)

            kit = await docker_kit.ensure(python, self._directory, compile_in)
            parts = [(kit / part, f"{HOME}/{part}") for part in ("runtime", "lib")]
            self._archives[key] = await asyncio.to_thread(pack, parts)
        return self._archives[key]


def _compile(kit: Path) -> None:
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(str(kit), quiet=2, workers=1, invalidation_mode=mode)


def pack(parts: Sequence[tuple[Path, str]]) -> bytes:
    """Return directories as one archive that anybody may unpack; blocks.

    Args:
        parts: Directory, and the path that it gets.
    """

    def readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for directory, target in parts:
            for path in sorted(directory.iterdir()):
                archive.add(path, f"{target.strip('/')}/{path.name}", filter=readable)
    return buffer.getvalue()


def order(
    spec: SandboxSpec, around: Surroundings, key: bytes, ends_in_s: float
) -> tuple[dict[str, Any], list[tuple[Path, str]]]:
    """Return what the first container is told, and the directories that it gets besides its kit.

    Args:
        spec: Of the instance.
        around: Of its pod.
        key: Of all further connections.
        ends_in_s: Until its deadline.
    """
    deploy = spec.config.deploy
    variables = instance_variables(spec, "namespaces", "/usr/bin/python3")
    if "PATH" not in {**deploy.variables, **spec.environment_variables}:
        del variables["PATH"]  # the image's own
    if around.second_image:
        variables.setdefault("WORK_SHARE", SHARED)
    variables.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for some costs 20 ms
    is_public = around.serving is Serving.PUBLIC
    told = {
        **_told(key, ends_in_s, around.place.grace_s, variables),
        "arguments": list(spec.arguments),
        "serving": around.serving.value,
        "absence": around.absence,
        "directory": "/" if is_public else "",
        "server": [*PUBLIC_SERVER, *spec.arguments] if is_public else [],
        "hide_source": deploy.hide_source,
    }
    return told, [(spec.project_dir, PROJECT)]


def second_order(
    spec: SandboxSpec, around: Surroundings, key: bytes, ends_in_s: float
) -> tuple[dict[str, Any], list[tuple[Path, str]]]:
    """Return what the second container is told; arguments as for `order`."""
    variables = {"AENV_INSTANCE_ID": spec.instance_id, "WORK_SHARE": SHARED, "HOME": "/"}
    told = {
        **_told(key, ends_in_s, around.place.grace_s, variables),
        "arguments": [],
        "serving": Serving.COMMANDS.value,
        "absence": "",
        "directory": "/",
        "server": [],
        "hide_source": False,
    }
    return told, []


def _told(
    key: bytes, ends_in_s: float, grace_s: float, variables: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "home": HOME,
        "project": PROJECT,
        "key": key.hex(),
        "boot_s": BOOT_DEADLINE_S,
        "ends_in_s": ends_in_s,
        "grace_s": grace_s,
        "variables": dict(variables),
    }


async def boot(
    address: str,
    port: int,
    secret: bytes,
    told: Mapping[str, Any],
    parts: Sequence[tuple[Path, str]],
    kits: Kits,
) -> None:
    """Give a container what it serves, and wait until it does.

    Args:
        address: Of the pod.
        port: Of the container's process 1.
        secret: That opens its first connection.
        told: From `order`.
        parts: From `order`.
        kits: For its Python.

    Raises:
        Unfitting: The image's Python is too old.
        SandboxStartFailed: It says why not; the message has that alone.
        OSError: The connection broke, or nobody listened in time.
    """
    loop = asyncio.get_running_loop()
    sock = await reach(address, port, within_s=BOOT_DEADLINE_S)
    with sock:
        async with asyncio.timeout(BOOT_DEADLINE_S):
            await loop.sock_sendall(sock, secret)
            facts = json.loads(await _line(sock))
        version = tuple(facts["python"])
        if version < docker_kit.OLDEST:
            found = ".".join(map(str, version))
            raise Unfitting(f"its image has Python {found}, and tools need 3.11 or newer")
        python = ImagePython((version[0], version[1]), facts["machine"], facts["libc"])
        pieces = [await kits.archive(python), await asyncio.to_thread(pack, parts)]
        words = json.dumps(dict(told)).encode()
        # The pod itself tells of one that does not come up, with its log.
        async with asyncio.timeout(SENDING_S + BOOT_DEADLINE_S):
            size = sum(map(len, pieces))
            head = len(words).to_bytes(8, "big") + words + size.to_bytes(8, "big")
            for piece in (head, *pieces):
                await loop.sock_sendall(sock, piece)
            report = json.loads(await _line(sock))
    if "ready" not in report:
        raise SandboxStartFailed(str(report.get("failed") or "it said nothing"))


async def _line(sock: Any) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = await loop.sock_recv(sock, _REPORT_BYTES)
        if not piece:
            raise ConnectionResetError("the pod closed the connection")
        data += piece
    return bytes(data)
