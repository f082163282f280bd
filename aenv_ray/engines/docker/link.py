"""Connections between a host and the runtime in a container.

If container and node share a kernel, they connect through a Unix socket whose listener the host
hands to process 1, so that calls pass through no other process and only process 1 can answer. A
container with its own kernel (gVisor, a virtual machine) shares no sockets with its node without
special options of its OCI runtime. But every runtime can execute programs in a container and
forward their streams, so each connection is a program started by the daemon
(`aenv_ray.runtime.container.bridge`). This needs no port, network or option, and the daemon does
not log these streams.

In the second case, a key authenticates host and sandbox to each other. The sandbox reads its key
from standard input before any other program runs in it. On the node, only users of the daemon could
read that input, and they are root anyway. The key is never in a variable, label, mount or command,
because the daemon shows these to all its users.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.door import connect_to_door
from aenv_ray.engines.node.container_reports import read_report
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import LINK_LABEL
from aenv_ray.engines.node.host_key import HostKey, authenticate
from aenv_ray.runtime.container.process_one import BOOT, HOME

AUTHENTICATION_S: Final = 60.0
"""How long process 1 may take to answer; it does not answer while it loads the project."""
_BACKLOG: Final = 16
_SHARED_KERNEL: Final = frozenset({"runc", "crun", "youki", "nvidia-container-runtime"})
"""Runtimes, by program name, whose containers run on the node's kernel."""
_BRIDGE: Final = f"{HOME}/runtime/aenv_ray/runtime/container/bridge.py"
_BRIDGE_USER: Final = "64871:64871"
"""Reserved: no process in the container, root without capabilities included, can kill a bridge or
open its streams."""
OPEN_S: Final = 30.0
"""How long the daemon may take to open a stream."""
_PIECE_BYTES: Final = 65_536
_HEAD_BYTES: Final = 16_384
_FRAME_HEAD: Final = struct.Struct(">BxxxI")
_STDERR: Final = 2
_ERROR_BYTES: Final = 4096


def has_own_kernel(description: Mapping[str, Any]) -> bool:
    """Return whether a daemon's description is of a runtime whose containers may have a kernel."""
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
    """Unix sockets of a node that shares its kernel with the container.

    The host creates the listener of the door and hands it to process 1 over ``boot``, before
    anything else runs in the container. The door's path exists on the node alone, so no other
    process in the container can take its place, and no directory has to be writable from inside.

    Args:
        boot: Path of the socket that process 1 finds in its read-only directory.
        door: Path of the door.
    """

    def __init__(self, boot: Path, door: Path) -> None:
        self._boot_path = boot
        self._door_path = door
        self._boot: socket.socket | None = None
        self._door: socket.socket | None = None

    async def before_start(self, container_id: str) -> None:  # noqa: D102
        del container_id
        self._door = _listener(self._door_path, mode=0o600)
        self._boot = _listener(self._boot_path, mode=0o777)  # for any user of the container
        self._boot.setblocking(False)

    async def after_start(self) -> None:  # noqa: D102
        return

    async def read_boot_report(self) -> dict[str, Any]:  # noqa: D102
        assert self._boot is not None  # set by before_start
        assert self._door is not None
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._boot)
            with sock:
                # One that has failed and ended already still has its report here.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(sock, [b"d"], [self._door.fileno()])
                return await read_report(sock) or {}
        finally:
            self.close()

    async def connect(self) -> socket.socket:  # noqa: D102
        return await connect_to_door(self._door_path)

    def close(self) -> None:  # noqa: D102
        for sock in (self._boot, self._door):
            if sock is not None:
                sock.close()
        self._boot = self._door = None
        self._boot_path.unlink(missing_ok=True)


class ExecLink(Link):
    """Streams of programs that the daemon executes in the container.

    Args:
        client: The client of the daemon.
        key: The key of the node's hosts; the container's key is derived from it, so that a
            restarted host has it too.
        entrypoint: The entrypoint of the container; the programs use its Python.
        container_id: The id of a container that already runs.
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
        assert self._input is not None  # set by before_start
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
            report = await read_report(sock) or {}
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
    """Creates the links to one host's containers."""

    def __init__(self, host: DockerHost) -> None:
        self._host = host
        self._key = HostKey(host.files.host_key)

    def open(self) -> None:
        """Load the key of the node's hosts; the directories exist."""
        self._key.load()

    def link(self, name: str, config: Mapping[str, Any], container_id: str = "") -> Link:
        """Return the link to a container with a config; `container_id` if it already runs."""
        if LINK_LABEL in config["Labels"]:
            return ExecLink(self._host.client, self._key, config["Entrypoint"], container_id)
        files = self._host.files
        return SocketLink(files.run_directory(name) / BOOT, files.door(name))


def _listener(path: Path, *, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    path.chmod(mode)
    sock.listen(_BACKLOG)
    return sock


# --- raw streams of the daemon -------------------------------------------------------------------


async def hijack(path: str, target: str, body: Any = None) -> tuple[socket.socket, bytes]:
    """Make a request that turns its connection into a raw stream.

    Returns:
        The connection, non-blocking, and what was already received on it.

    Raises:
        DaemonRefused: The daemon refuses.
        OSError: It does not answer, or not in time (`TimeoutError`).
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(OPEN_S):
            await loop.sock_connect(sock, path)
            content = json.dumps(body).encode() if body is not None else b""
            request = (
                f"POST {target} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\n"
                "Upgrade: tcp\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            await loop.sock_sendall(sock, request.encode() + content)
            data = bytearray()
            while b"\r\n\r\n" not in data:
                piece = await loop.sock_recv(sock, _PIECE_BYTES)
                if not piece or len(data) > _HEAD_BYTES:
                    raise ConnectionResetError("the daemon closed the stream")
                data += piece
        head, _, rest = bytes(data).partition(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        if status not in (101, 200):
            message = rest.decode(errors="replace").strip()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = str(json.loads(rest)["message"])
            raise DaemonRefused(status, message)
    except BaseException:
        sock.close()
        raise
    return sock, rest


class Stream:
    """Forwards data between a raw stream of the daemon and a socket.

    Input is sent unchanged. Output comes in frames, which are unpacked here, so that the engine
    gets an ordinary socket; stderr is collected for error messages.
    """

    def __init__(self, daemon: socket.socket, received: bytes) -> None:
        self._daemon = daemon
        self._buffer = bytearray(received)
        self._stderr = b""
        ours, self._near = socket.socketpair()
        ours.setblocking(False)
        self.socket = ours
        """The engine's end; closing it ends the stream."""
        self._near.setblocking(False)
        self._task = asyncio.create_task(self._forward())

    @property
    def errors(self) -> str:
        """The end of stderr, or of what was received instead of frames."""
        return (self._stderr or bytes(self._buffer)).decode(errors="replace").strip()

    async def _forward(self) -> None:
        directions = [asyncio.create_task(self._out()), asyncio.create_task(self._in())]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            await asyncio.wait(directions)
            self._near.close()
            self._daemon.close()

    async def _in(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the end of one direction ends the other
            while piece := await loop.sock_recv(self._near, _PIECE_BYTES):
                await loop.sock_sendall(self._daemon, piece)

    async def _out(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                for kind, payload in _frames(self._buffer):
                    if kind == _STDERR:
                        self._stderr = (self._stderr + payload)[-_ERROR_BYTES:]
                    else:
                        await loop.sock_sendall(self._near, payload)
                piece = await loop.sock_recv(self._daemon, _PIECE_BYTES)
                if not piece:
                    return
                self._buffer += piece

    async def ended(self) -> None:
        """Wait until both directions have ended."""
        await asyncio.wait([self._task])


def _frames(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Take the complete frames from the beginning of a buffer; return kind and payload of each."""
    found, position = [], 0
    while position + _FRAME_HEAD.size <= len(buffer):
        kind, size = _FRAME_HEAD.unpack_from(buffer, position)
        start = position + _FRAME_HEAD.size
        if start + size > len(buffer):
            break
        found.append((kind, bytes(buffer[start : start + size])))
        position = start + size
    del buffer[:position]
    return found
