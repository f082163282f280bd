"""Info and files of an instance. Reads are streamed; a write replaces a whole file."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import ConfigError
from aenv_ray.serve.gateway.auth import CheckAgain
from aenv_ray.serve.gateway.data.targets import Target
from aenv_ray.serve.gateway.envelope import success
from aenv_ray.serve.gateway.requests import read_body

PIECE_BYTES: Final = 4 * 1024 * 1024
"""Size of one read from the sandbox; bounds the memory that a slow client holds."""
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_MODE: Final = re.compile(r"(?:0o)?[0-7]{1,5}")


class _Content(StreamingResponse):
    """The content of a file. At its end, the direct connection that reading it opened is closed."""

    media_type = "application/octet-stream"

    def __init__(self, pieces: AsyncIterator[bytes], instance: AsyncEnvHandle) -> None:
        super().__init__(pieces)
        self._instance = instance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._instance.close()


class SandboxProxy:
    """Answers requests for the info and the files of an instance."""

    def __init__(
        self,
        find: Callable[[Request], Awaitable[Target]],
        fabric: AsyncFabric,
        limit_bytes: int,
        check_again: CheckAgain,
    ) -> None:
        self._find = find
        self._check_again = check_again
        self._fabric = fabric
        self._limit_bytes = limit_bytes

    async def _instance(self, request: Request) -> AsyncEnvHandle:
        target = await self._find(request)
        target.check_not_agent()
        return AsyncEnvHandle(await self._fabric.handle(target.instance_id))

    async def info(self, request: Request) -> Response:
        """Answer with the instance's state, including its isolation."""
        return success(await (await self._instance(request)).info())

    async def read(self, request: Request) -> Response:
        """Answer with a file's bytes: from `offset`, at most `length`.

        Raises:
            FileAccessError: The file cannot be read.
        """
        instance = await self._instance(request)
        path = _path(request)
        offset = _number(request, "offset", 0)
        length = _number(request, "length", -1)
        first = await instance.read_file(path, offset, _piece(length))

        async def pieces() -> AsyncIterator[bytes]:
            piece, at, left = first, offset, length
            while piece:
                yield piece
                at, left = at + len(piece), left - len(piece) if left >= 0 else left
                if len(piece) < PIECE_BYTES or left == 0:
                    return
                piece = await instance.read_file(path, at, _piece(left))
                await self._check_again(request)

        return _Content(pieces(), instance)

    async def write(self, request: Request) -> Response:
        """Write the body to a file, replacing it or appending to it.

        Raises:
            FileAccessError: The file cannot be written.
        """
        instance = await self._instance(request)
        path, mode = _path(request), request.query_params.get("mode")
        data = await read_body(request, self._limit_bytes)
        await self._check_again(request)  # the body may have taken long
        append = request.query_params.get("append", "false") in {"true", "1"}
        size = await instance.write_file(path, data, append, None if mode is None else _octal(mode))
        return success({"size_bytes": size})

    async def list(self, request: Request) -> Response:
        """Answer with the entries of a directory.

        Raises:
            FileAccessError: The directory cannot be listed.
        """
        instance = await self._instance(request)
        return success(await instance.list_files(request.query_params.get("path", ".")))


def _piece(length: int) -> int:
    return PIECE_BYTES if length < 0 else min(length, PIECE_BYTES)


def _path(request: Request) -> str:
    path = request.query_params.get("path")
    if not path:
        raise ConfigError("the request names no path", hint="add ?path=<file> to the URL")
    return path


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise ConfigError(
            f"invalid {name} {text[:40]!r}: expected a number of bytes",
            hint="leave it out to read the whole file",
        )
    return int(text)


def _octal(text: str) -> int:
    if not _MODE.fullmatch(text):
        raise ConfigError(
            f"invalid mode {text[:40]!r}: expected octal digits", hint="write it as 644"
        )
    return int(text, 8)
