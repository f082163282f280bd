"""A real image registry for a test, and a gate between it and a daemon."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.contract.docker.docker_node import docker, shell_image

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD = "tester", "word for tests"
# The password in bcrypt, by htpasswd, with the lowest cost.
_HASH = "$2b$04$W58voRb2VEmodhFUcXGPcO5/17e1gqCgsYCu6qpfOkDjBlWaX8Gvu"
_LOOPBACK_ON = """
import fcntl, socket, struct
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
fcntl.ioctl(socket.socket(), SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
"""
_LISTENING = re.compile(r'msg="listening on 127\.0\.0\.1:(\d+)"')


class Registry:
    """A registry on a free port of this machine, which daemons reach over HTTP.

    Args:
        with_login: Whether it wants one: `USER` and `PASSWORD`.
        images: Of another registry, which it offers as well.
        beside: Process whose loopback it is on; None for the machine's.
    """

    def __init__(
        self, *, with_login: bool, images: Path | None = None, beside: int | None = None
    ) -> None:
        assert PROGRAM is not None
        self._root = Path(tempfile.mkdtemp(prefix="aenv-registry-"))
        (self._root / "htpasswd").write_text(f"{USER}:{_HASH}\n")
        self.images = images or self._root / "data"
        config = {
            "version": 0.1,
            "log": {"accesslog": {"disabled": False}},
            "storage": {"filesystem": {"rootdirectory": str(self.images)}},
            "http": {"addr": "127.0.0.1:0"},
        }
        if with_login:
            path = str(self._root / "htpasswd")
            config["auth"] = {"htpasswd": {"realm": "tests", "path": path}}
        (self._root / "config.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = self._root / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*_inside(beside), PROGRAM, "serve", str(self._root / "config.yml")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self._process.stderr is not None
        said = ""
        while not (found := _LISTENING.search(said)):
            line = self._process.stderr.readline()
            assert line, f"the registry does not start: {said}"
            said += line
        self.port = int(found[1])
        self._drain = subprocess.Popen(
            ["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL
        )
        self._process.stderr.close()

    @property
    def name(self) -> str:
        """``HOST:PORT``."""
        return f"localhost:{self.port}"

    def requests(self, method: str, part: str) -> int:
        """Return how many requests with a path that contains a part it received."""
        lines = self._log.read_text().splitlines()
        return sum(f'"{method} ' in line and part in line for line in lines)

    def end(self) -> None:
        """Stop it and delete its images."""
        for process in (self._process, self._drain):
            process.terminate()
            process.wait(30)
        shutil.rmtree(self._root)


def _inside(process: int | None) -> list[str]:
    """Return a command prefix that enters the network of a process and enables its loopback."""
    if process is None:
        return []
    inside = ["nsenter", f"--net=/proc/{process}/ns/net", "--"]
    subprocess.run([*inside, sys.executable, "-c", _LOOPBACK_ON], check=True, timeout=60)
    return inside


def log_in(directory: Path, registry: str, password: str = PASSWORD) -> None:
    """Write a login as ``docker login`` does."""
    directory.mkdir(exist_ok=True)
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (directory / "config.json").write_text(json.dumps({"auths": {registry: {"auth": auth}}}))


def push_new(reference: str, size_bytes: int, directory: Path) -> str:
    """Push an image with only a shell and a unique layer; return its id.

    Args:
        reference: In a registry that wants the login of this module, or none.
        size_bytes: Of the layer, which does not compress.
        directory: For files.
    """
    (directory / "only-here").write_bytes(os.urandom(size_bytes))
    container = docker("create", shell_image(), "true")
    docker("cp", str(directory / "only-here"), f"{container}:/only-here")
    image = docker("commit", container, reference)
    docker("rm", container)
    log_in(directory / "pusher", reference.partition("/")[0])
    docker("--config", str(directory / "pusher"), "push", reference)
    docker("rmi", "--force", reference)
    return image


def keep_login(directory: Path, programs: Path, registry: str) -> None:
    """Store a login in a credential helper, as ``docker login`` does."""
    directory.mkdir(exist_ok=True)
    programs.mkdir()
    config = {"auths": {registry: {}}, "credHelpers": {registry: "tests"}}
    (directory / "config.json").write_text(json.dumps(config))
    kept = json.dumps({"ServerURL": registry, "Username": USER, "Secret": PASSWORD})
    helper = programs / "docker-credential-tests"
    helper.write_text(
        f"#!/bin/sh\n[ \"$1 $(cat)\" = 'get {registry}' ] || "
        "{ echo credentials not found in native keychain; exit 1; }\n"
        f"echo '{kept}'\n"
    )
    helper.chmod(0o755)


class Gate:
    """A proxy for a registry that can be closed: answers stop after a few bytes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._open = asyncio.Event()
        self._passed = 0
        self.stuck = asyncio.Event()
        """Set while an answer waits."""
        self.name = ""
        """``HOST:PORT``."""

    def open(self) -> None:
        """Forward everything from now on."""
        self._open.set()

    @contextlib.asynccontextmanager
    async def serve(self, free_bytes: int) -> AsyncIterator[None]:
        """Serve until the end of the block.

        Args:
            free_bytes: Of answers that pass while it is shut.
        """

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far = await asyncio.open_connection("127.0.0.1", self._registry.port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._give(far[0], writer, free_bytes))
                await _copy(reader, far[1])
                far[1].close()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        self.name = f"localhost:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            self.open()
            server.close()

    async def _give(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, free_bytes: int
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(4096):
                self._passed += len(piece)
                if self._passed > free_bytes and not self._open.is_set():
                    self.stuck.set()
                    await self._open.wait()
                writer.write(piece)
                await writer.drain()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
