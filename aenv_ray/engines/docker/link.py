"""Connections between a host and the runtime in a container.

If container and node share a kernel, they connect through Unix sockets in a shared directory: the
kernel identifies the peers, and calls pass through no other process. A container with its own
kernel (gVisor, a virtual machine) shares no sockets with its node without special options of its
OCI runtime. But every runtime can execute programs in a container and forward their streams, so
each connection is a program started by the daemon (`aenv_ray.runtime.container.bridge`). This needs
no port, network or option, and the daemon does not log these streams.

There, a key authenticates host and sandbox to each other. The sandbox reads its key from standard
input before any other program runs in it; on the node, only users of the daemon could read that,
and they are root anyway. The key is never in a variable, label, mount or command, which the daemon
shows to all its users.
"""

from __future__ import annotations

import asyncio
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.stream import Stream, hijack
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import LINK_LABEL
from aenv_ray.engines.node.host_key import HostKey, authenticate
from aenv_ray.runtime.container.process_one import HOME

AUTHENTICATION_S: Final = 60.0
"""How long process 1 may take to answer; it does not answer while it loads the project."""
_REPORT_BYTES: Final = 1 << 20
_SHARED_KERNEL: Final = frozenset({"runc", "crun", "youki", "nvidia-container-runtime"})
"""Runtimes, by program name, whose containers run on the node's kernel."""
_BRIDGE: Final = f"{HOME}/runtime/aenv_ray/runtime/container/bridge.py"
_BRIDGE_USER: Final = "64871:64871"
"""Reserved: no process in the container, root without capabilities included, can kill a bridge or
open its streams."""


def has_own_kernel(description: Mapping[str, Any]) -> bool:
    """Return whether containers of an OCI runtime may have their own kernel.

    Args:
        description: From the daemon, with the runtime's ``path`` or ``runtimeType``.
    """
    program = PurePosixPath(description.get("path") or "").name
    if not program:  # io.containerd.NAME.v2
        parts = str(description.get("runtimeType") or "").split(".")
        program = parts[-2] if len(parts) > 1 else ""
    return program not in _SHARED_KERNEL


class Link(ABC):
    """The connection to one container; the methods are called in this order."""

    @abstractmethod
    async def before_start(self, container_id: str) -> None:
        """Prepare for the start of a container that was created."""

    @abstractmethod
    async def after_start(self) -> None:
        """Send a container that was started what it waits for."""

    @abstractmethod
    async def read_boot_report(self) -> dict[str, Any]:
        """Return its report after booting; empty if it closed the connection without one.

        Raises:
            OSError: The connection to it broke.
        """

    @abstractmethod
    async def connect(self) -> socket.socket:
        """Return a new connection to its door.

        Raises:
            OSError: It does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what only the boot needs, and unused connections."""


class SocketLink(Link):
    """Unix sockets in a directory that container and node share.

    Args:
        directory: Its path on the node.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener: socket.socket | None = None

    async def before_start(self, container_id: str) -> None:  # noqa: D102
        del container_id
        path = self._directory / "boot"
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o777)  # for any user of the container
        listener.listen(1)
        listener.setblocking(False)

    async def after_start(self) -> None:  # noqa: D102
        return

    async def read_boot_report(self) -> dict[str, Any]:  # noqa: D102
        assert self._listener is not None  # by before_start
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            with sock:
                return await _report(sock)
        finally:
            self.close()

    async def connect(self) -> socket.socket:  # noqa: D102
        sock = socket.socket(socket.AF_UNIX)
        try:
            # Connecting to a listening Unix socket does not block, thanks to its backlog.
            sock.connect(str(self._directory / "door"))
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:  # noqa: D102
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            (self._directory / "boot").unlink(missing_ok=True)


class ExecLink(Link):
    """Streams of programs that the daemon executes in the container.

    Args:
        client: Of the daemon.
        key: Of the node's hosts; the container's key is derived from it, so that a restarted host
            has it too.
        entrypoint: Of the container; the programs use its Python.
        container_id: Of a container that already runs.
    """

    def __init__(
        self, client: DockerClient, key: HostKey, entrypoint: Sequence[str], container_id: str = ""
    ) -> None:
        self._client = client
        self._key = key
        self._id = container_id
        # Without "-c" and its script.
        self._python = list(entrypoint[:-2])
        self._input: socket.socket | None = None
        self._booted: socket.socket | None = None

    @property
    def _secret(self) -> bytes:
        return self._key.secret("docker", self._id, "door")

    @property
    def _door(self) -> str:
        # Unique, because containers that share a network share abstract socket names.
        return f"aenv-{self._id[:16]}"

    async def before_start(self, container_id: str) -> None:  # noqa: D102
        self._id = container_id
        target = f"/containers/{container_id}/attach?stream=1&stdin=1"
        self._input, _ = await hijack(self._client.path, target)

    async def after_start(self) -> None:  # noqa: D102
        assert self._input is not None  # by before_start
        order = {"door": self._door, "key": self._secret.hex()}
        with self._input as sock:
            line = json.dumps(order).encode() + b"\n"
            await asyncio.get_running_loop().sock_sendall(sock, line)
            sock.shutdown(socket.SHUT_WR)
        self._input = None

    async def read_boot_report(self) -> dict[str, Any]:  # noqa: D102
        sock = await self._exec("boot")
        report: dict[str, Any] = {}
        try:
            report = await _report(sock)
        finally:
            if "ready" in report:
                self._booted = sock
            else:
                sock.close()
        return report

    async def connect(self) -> socket.socket:  # noqa: D102
        sock, self._booted = self._booted, None
        return sock or await self._exec("door")

    def close(self) -> None:  # noqa: D102
        for sock in (self._input, self._booted):
            if sock is not None:
                sock.close()
        self._input = self._booted = None

    async def _exec(self, kind: str) -> socket.socket:
        body = {
            "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "User": _BRIDGE_USER,
            "WorkingDir": "/",
            "Cmd": [*self._python, "-I", "-S", _BRIDGE, self._door],
        }  # fmt: skip
        try:
            created = await self._client.request("POST", f"/containers/{self._id}/exec", body=body)
            start = {"Detach": False, "Tty": False}
            stream = Stream(*await hijack(self._client.path, f"/exec/{created['Id']}/start", start))
        except DaemonRefused as exc:
            raise ConnectionRefusedError(exc.message) from exc
        try:
            async with asyncio.timeout(AUTHENTICATION_S):
                await authenticate(stream.socket, self._secret, {"kind": kind})
        except ConnectionError as exc:
            stream.socket.close()
            await stream.ended()
            raise ConnectionResetError(stream.errors or str(exc)) from exc
        except BaseException:
            stream.socket.close()
            raise
        return stream.socket


class Links:
    """Creates the links to one host's containers.

    Args:
        client: Of the daemon.
        files: Of the scope.
    """

    def __init__(self, client: DockerClient, files: DockerFiles) -> None:
        self._client = client
        self._files = files
        self._key = HostKey(files.host_key)

    def open(self) -> None:
        """Load the key of the node's hosts; the directories exist."""
        self._key.load()

    def link(self, name: str, config: Mapping[str, Any], container_id: str = "") -> Link:
        """Return the link to a container.

        Args:
            name: Of the container.
            config: From which it will be, or was, created.
            container_id: Of a container that already runs.
        """
        if LINK_LABEL in config["Labels"]:
            return ExecLink(self._client, self._key, config["Entrypoint"], container_id)
        return SocketLink(self._files.run_directory(name))


async def _report(sock: socket.socket) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = await loop.sock_recv(sock, _REPORT_BYTES)
        if not piece:
            return {}
        data += piece
    return dict(json.loads(data))
