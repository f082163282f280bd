"""How a host speaks with the runtime in a container, from its boot on.

Where container and node have one kernel, by Unix sockets in a directory that both see: the kernel
tells who connects, and a call passes through nobody else. A container with a kernel of its own
(gVisor, a virtual machine) shares no socket with its node, at most by options of its OCI runtime.
All of them run programs in a container and pass on their streams, so that is the way there: each
connection is a program that the daemon runs (`aenv_ray.runtime.container.bridge`), without a port,
a network or an option. The daemon logs what a container prints, but not what passes there.

There a key tells host and sandbox apart from others. The sandbox gets its key on standard input,
before anything runs in it; on the node only who may speak with the daemon could read that, and who
may do that is root there. It is in no variable, label, mount or command, which the daemon tells to
whoever asks.
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

PROOF_S: Final = 60.0
"""How long process 1 may take to answer: while it loads the project it answers nobody."""
_REPORT_BYTES: Final = 1 << 20
_SHARED_KERNEL: Final = frozenset({"runc", "crun", "youki", "nvidia-container-runtime"})
"""Programs, by name, that make containers of the node's own kernel."""
_BRIDGE: Final = f"{HOME}/runtime/aenv_ray/runtime/container/bridge.py"
_BRIDGE_USER: Final = "64871:64871"
"""Nobody else: who runs in the container, root without capabilities among them, can neither end a
bridge nor open its streams."""


def has_own_kernel(description: Mapping[str, Any]) -> bool:
    """Whether containers of an OCI runtime may have a kernel of their own.

    Args:
        description: The daemon's: its program's ``path``, or its ``runtimeType``.
    """
    program = PurePosixPath(description.get("path") or "").name
    if not program:  # io.containerd.NAME.v2
        parts = str(description.get("runtimeType") or "").split(".")
        program = parts[-2] if len(parts) > 1 else ""
    return program not in _SHARED_KERNEL


class Link(ABC):
    """The way to one container, in the order of its methods."""

    @abstractmethod
    async def prepare(self, container_id: str) -> None:
        """Be ready for the start of a container that was created."""

    @abstractmethod
    async def begin(self) -> None:
        """Give a container that was started what it waits for."""

    @abstractmethod
    async def hear(self) -> dict[str, Any]:
        """Return what it says of its boot; empty when it closed without a word.

        Raises:
            OSError: The connection to it broke.
        """

    @abstractmethod
    async def open(self) -> socket.socket:
        """Return a connection to its door.

        Raises:
            OSError: It does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what only the boot needs, and of what nobody opened."""


class SocketLink(Link):
    """Sockets in a directory that container and node share.

    Args:
        directory: The node's view of it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener: socket.socket | None = None

    async def prepare(self, container_id: str) -> None:  # noqa: D102
        del container_id
        path = self._directory / "boot"
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o777)  # whoever the container runs as
        listener.listen(1)
        listener.setblocking(False)

    async def begin(self) -> None:  # noqa: D102
        return

    async def hear(self) -> dict[str, Any]:  # noqa: D102
        assert self._listener is not None  # prepared
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            with sock:
                return await _report(sock)
        finally:
            self.close()

    async def open(self) -> socket.socket:  # noqa: D102
        sock = socket.socket(socket.AF_UNIX)
        try:
            # A connect to a listening Unix socket does not block: the backlog takes it.
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


class ProgramLink(Link):
    """Programs that the daemon runs in the container.

    Args:
        client: Of the daemon.
        key: Of the node's hosts; the container's is made from it, so that a host that comes back
            has it.
        entrypoint: Of the container; its Python runs the programs too.
        container_id: The daemon's, of one that runs.
    """

    def __init__(
        self, client: DockerClient, key: HostKey, entrypoint: Sequence[str], container_id: str = ""
    ) -> None:
        self._client = client
        self._key = key
        self._id = container_id
        # Up to the "-c" and its script.
        self._python = list(entrypoint[:-2])
        self._input: socket.socket | None = None
        self._booted: socket.socket | None = None

    @property
    def _secret(self) -> bytes:
        return self._key.secret("docker", self._id, "door")

    @property
    def _door(self) -> str:
        # Told from others' where containers share a network, and with it such names.
        return f"aenv-{self._id[:16]}"

    async def prepare(self, container_id: str) -> None:  # noqa: D102
        self._id = container_id
        target = f"/containers/{container_id}/attach?stream=1&stdin=1"
        self._input, _ = await hijack(self._client.path, target)

    async def begin(self) -> None:  # noqa: D102
        assert self._input is not None  # prepared
        order = {"door": self._door, "key": self._secret.hex()}
        with self._input as sock:
            line = json.dumps(order).encode() + b"\n"
            await asyncio.get_running_loop().sock_sendall(sock, line)
            sock.shutdown(socket.SHUT_WR)
        self._input = None

    async def hear(self) -> dict[str, Any]:  # noqa: D102
        sock = await self._enter("boot")
        report: dict[str, Any] = {}
        try:
            report = await _report(sock)
        finally:
            if "ready" in report:
                self._booted = sock
            else:
                sock.close()
        return report

    async def open(self) -> socket.socket:  # noqa: D102
        sock, self._booted = self._booted, None
        return sock or await self._enter("door")

    def close(self) -> None:  # noqa: D102
        for sock in (self._input, self._booted):
            if sock is not None:
                sock.close()
        self._input = self._booted = None

    async def _enter(self, kind: str) -> socket.socket:
        body = {
            "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "User": _BRIDGE_USER,
            "WorkingDir": "/",
            "Cmd": [*self._python, "-I", "-S", _BRIDGE, self._door],
        }  # fmt: skip
        try:
            made = await self._client.request("POST", f"/containers/{self._id}/exec", body=body)
            start = {"Detach": False, "Tty": False}
            stream = Stream(*await hijack(self._client.path, f"/exec/{made['Id']}/start", start))
        except DaemonRefused as exc:
            raise ConnectionRefusedError(exc.message) from exc
        try:
            async with asyncio.timeout(PROOF_S):
                await authenticate(stream.socket, self._secret, {"kind": kind})
        except ConnectionError as exc:
            stream.socket.close()
            await stream.ended()
            raise ConnectionResetError(stream.words or str(exc)) from exc
        except BaseException:
            stream.socket.close()
            raise
        return stream.socket


class Links:
    """Makes the links of one host's containers.

    Args:
        client: Of the daemon.
        files: Of the node's scope.
    """

    def __init__(self, client: DockerClient, files: DockerFiles) -> None:
        self._client = client
        self._files = files
        self._key = HostKey(files.host_key)

    def open(self) -> None:
        """Have a key; the directories are there."""
        self._key.load()

    def link(self, name: str, config: Mapping[str, Any], container_id: str = "") -> Link:
        """Return the link to a container.

        Args:
            name: The container's.
            config: What it is to be made from, or what the daemon says that it was made from.
            container_id: The daemon's, of one that runs.
        """
        if LINK_LABEL in config["Labels"]:
            return ProgramLink(self._client, self._key, config["Entrypoint"], container_id)
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
