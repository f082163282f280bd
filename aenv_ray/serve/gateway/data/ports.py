"""HTTP to servers inside an instance, on the ports that its environment declares.

A sandbox accepts no connections from the network. Its runtime opens the connection inside, and the
bytes travel as calls of the fast door; this module turns them back into HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final
from urllib.parse import quote, unquote

import h11
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Receive, Scope, Send

from aenv_ray.actors.calls.port_stream import PortStream
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import AenvError, ConfigError, PortUnreachable, ToolNotFound
from aenv_ray.serve.gateway.data.targets import Target
from aenv_ray.serve.gateway.deps import Deps
from aenv_ray.serve.gateway.requests import STREAMED

_MAX_ENVIRONMENTS: Final = 1000
"""Environments whose ports are cached."""
OWN_HEADERS: Final = frozenset(
    {
        "authorization", "proxy-authorization", "connection", "keep-alive", "proxy-connection",
        "te", "upgrade", "host",
    }
)  # fmt: skip
"""Headers of the connection to the gateway; the sandbox must not see its tokens."""
_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_PREFIX_SEGMENTS: Final = 5
"""Segments of the URL's path before the server's path: ``/instances/{id}/ports/{port}/``."""


class PortConvertor(Convertor[int]):
    """Parses a port number in a route."""

    regex = "[0-9]{1,5}"

    def convert(self, value: str) -> int:  # noqa: D102
        return int(value)

    def to_string(self, value: int) -> str:  # noqa: D102
        return str(value)


register_url_convertor("port", PortConvertor())


class PortProxy:
    """The ASGI application of ``/instances/{id}/ports/{port}/{path}``, also for services."""

    def __init__(self, find: Callable[[HTTPConnection], Awaitable[Target]], deps: Deps) -> None:
        self._find = find
        self._deps = deps
        self._declared: BoundedCache[str, tuple[int, ...]] = BoundedCache(_MAX_ENVIRONMENTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        request = Request(scope, receive)
        async with self.connected(request) as stream:
            await _Exchange(stream, request, send).run(request.path_params["port"])

    @contextlib.asynccontextmanager
    async def connected(self, request: HTTPConnection) -> AsyncIterator[PortStream]:
        """Yield a connection to the port that a request names.

        Raises:
            AenvError: The instance or port does not exist, or the client has no access to it.
        """
        target = await self._find(request)
        target.check_not_agent()
        port = request.path_params["port"]
        if port not in target.ports:
            await self._check_declared(target.instance_id, port)
        stream = _AdmittedStream(self._deps, target.instance_id, request)
        await stream.open(port)
        try:
            yield stream
        finally:
            with contextlib.suppress(AenvError):  # an instance that is gone has no connections
                await asyncio.shield(stream.close())

    async def _check_declared(self, instance_id: str, port: int) -> None:
        info = await self._deps.fabric.info(instance_id)
        declared = self._declared.get(info.reference)
        if declared is None:
            source = await self._deps.resolve(info.reference)
            declared = source.config.deploy.ports
            self._declared.put(info.reference, declared)
        if port not in declared:
            known = ", ".join(map(str, declared)) or "none"
            raise ToolNotFound(
                f"environment {info.reference} does not declare port {port}; it declares: {known}",
                hint="add it to deployConfig.ports and publish a new version of the environment",
            )


class _AdmittedStream(PortStream):
    """A connection that ends with the validity of the client's token.

    Raises:
        Unauthorized: From `read` and `write`: the token has expired or was revoked.
    """

    def __init__(self, deps: Deps, instance_id: str, request: HTTPConnection) -> None:
        super().__init__(deps.calls, instance_id)
        self._authenticate = deps.authenticate
        self._request = request

    async def read(self) -> bytes:
        data = await super().read()
        await self._authenticate.check_again(self._request)
        return data

    async def write(self, data: bytes) -> None:
        await self._authenticate.check_again(self._request)
        await super().write(data)


def request_target(request: HTTPConnection) -> str:
    """Return path and query for the server inside, escaped as in the client's request."""
    path = str(request.path_params.get("path", ""))
    pieces = bytes(request.scope.get("raw_path") or b"").split(b"/", _PREFIX_SEGMENTS)
    written = pieces[_PREFIX_SEGMENTS].decode("latin-1") if len(pieces) > _PREFIX_SEGMENTS else ""
    if unquote(written) != path:  # the prefix contains unusual escapes
        written = quote(path)
    query = bytes(request.scope.get("query_string") or b"").decode("latin-1")
    return f"/{written}?{query}" if query else f"/{written}"


class _Exchange:
    """One HTTP request and its answer; both bodies are streamed."""

    def __init__(self, stream: PortStream, request: Request, send: Send) -> None:
        self._stream = stream
        self._request = request
        self._send = send
        self._http = h11.Connection(h11.CLIENT)

    async def run(self, port: int) -> None:
        """Forward the request, and return its answer to the client.

        Raises:
            PortUnreachable: The server does not speak HTTP, or closed before its answer began.
            ConfigError: The request is not valid in HTTP/1.1.
        """
        await self._stream.write(self._head(port))
        loop = asyncio.get_running_loop()
        answer, left = loop.create_task(self._answer()), loop.create_task(self._send_body())
        try:
            done, _ = await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except h11.RemoteProtocolError as exc:
            raise PortUnreachable(
                f"the server on port {port} does not speak HTTP: {exc}",
                hint="start an HTTP or WebSocket server on that port",
            ) from exc
        finally:
            for task in (answer, left):
                task.cancel()
            await asyncio.wait({answer, left})

    def _head(self, port: int) -> bytes:
        request = self._request
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in OWN_HEADERS]
        headers += [(b"host", b"127.0.0.1:%d" % port), (b"connection", b"close")]
        try:
            target = request_target(request)
            head = h11.Request(method=request.method, target=target, headers=headers)
            return self._http.send(head) or b""
        except h11.LocalProtocolError as exc:
            raise ConfigError(
                f"the request cannot be forwarded to port {port}: {exc}",
                hint="send a request that is valid in HTTP/1.1",
            ) from None

    async def _send_body(self) -> None:
        """Send the request's body; return when the client has disconnected."""
        self._request.scope[STREAMED] = True
        with contextlib.suppress(ClientDisconnect):
            # A server may close after it has answered, without reading the whole body.
            with contextlib.suppress(PortUnreachable, h11.LocalProtocolError):
                async for piece in self._request.stream():
                    await self._stream.write(self._http.send(h11.Data(data=piece)) or b"")
                await self._stream.write(self._http.send(h11.EndOfMessage()) or b"")
            while (await self._request.receive())["type"] != "http.disconnect":
                pass

    async def _answer(self) -> None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._stream.read())
            elif isinstance(event, h11.Response):
                headers = [(k, v) for k, v in event.headers if k not in _HOP]
                start = {"status": event.status_code, "headers": headers}
                await self._send({"type": "http.response.start", **start})
            elif isinstance(event, h11.Data):
                body = {"body": bytes(event.data), "more_body": True}
                await self._send({"type": "http.response.body", **body})
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                return
