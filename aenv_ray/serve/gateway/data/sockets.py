"""WebSockets to servers inside an instance, on the ports that its environment declares."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Final

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from aenv_ray.actors.calls.port_stream import PortStream
from aenv_ray.errors import AenvError, PortUnreachable
from aenv_ray.serve.gateway.data.ports import OWN_HEADERS, PortProxy, request_target
from aenv_ray.serve.gateway.envelope import error_response

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_NOT_SENT: Final = frozenset({1005, 1006, 1015})
"""Codes that mean a missing code; they must not be sent."""


class SocketProxy:
    """Answers WebSockets at ``/instances/{id}/ports/{port}/{path}``, and the same for services."""

    def __init__(self, proxy: PortProxy) -> None:
        self._proxy = proxy

    async def serve(self, websocket: WebSocket) -> None:
        """Forward messages in both directions until either side closes."""
        try:
            async with self._proxy.connected(websocket) as stream:
                await _Tunnel(websocket, stream).run()
        except AenvError as exc:
            refusal = error_response(websocket, exc)
            if websocket.client_state.name == "CONNECTING":
                await websocket.send_denial_response(refusal)
            else:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # already closed
                    await websocket.close(1011, exc.message[:120])


def port_routes(base: str, ports: PortProxy) -> list[BaseRoute]:
    """Return the routes to the ports of the instance or service at `base`."""
    port = f"{base}/ports/{{port:port}}"
    routes: list[Route | WebSocketRoute] = [
        WebSocketRoute(f"{port}/{{path:path}}", SocketProxy(ports).serve),
        Route(port, ports),
        Route(f"{port}/{{path:path}}", ports),
    ]
    for route in routes:  # the server's path may contain any character, even an escaped newline
        route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return list(routes)


class _Tunnel:
    """A client's WebSocket, connected to a WebSocket of the server inside."""

    def __init__(self, websocket: WebSocket, stream: PortStream) -> None:
        self._websocket = websocket
        self._stream = stream
        self._writing = asyncio.Lock()
        self._parts: list[bytes] = []
        self._is_text = False
        port = websocket.path_params["port"]
        self._protocol = ClientProtocol(
            parse_uri(f"ws://127.0.0.1:{port}{request_target(websocket)}"),
            subprotocols=[Subprotocol(name) for name in websocket.scope["subprotocols"]] or None,
            max_size=MAX_MESSAGE_BYTES,
        )

    async def run(self) -> None:
        """Connect to the server, accept the client, and forward messages.

        Raises:
            PortUnreachable: The server does not speak WebSocket.
        """
        await self._shake_hands()
        await self._websocket.accept(self._protocol.subprotocol)
        loop = asyncio.get_running_loop()
        ways = {loop.create_task(self._inwards()), loop.create_task(self._outwards())}
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)

    async def _shake_hands(self) -> None:
        request = self._protocol.connect()
        for name, value in self._websocket.headers.items():
            if name not in OWN_HEADERS and not name.startswith("sec-websocket-"):
                request.headers[name] = value
        self._protocol.send_request(request)
        await self._flush()
        while self._protocol.state is State.CONNECTING:
            await self._receive()
            error = self._protocol.handshake_exc
            if error is not None:
                did = "refused" if isinstance(error, InvalidHandshake) else "closed"
                raise PortUnreachable(
                    f"the server inside {did} the WebSocket: {error}",
                    hint="check the path and the log of that server",
                ) from error

    async def _inwards(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                if self._protocol.state is State.OPEN:
                    self._protocol.send_close(1001)
                    await self._flush()
                return
            if message.get("text") is not None:
                self._protocol.send_text(message["text"].encode())
            else:
                self._protocol.send_binary(message["bytes"])
            await self._flush()

    async def _outwards(self) -> None:
        while True:
            for frame in self._protocol.events_received():
                if isinstance(frame, Frame) and await self._pass_on(frame):
                    return
            if self._protocol.state is State.CLOSED:
                await self._websocket.close(1011, "the server closed the connection")
                return
            await self._receive()

    async def _pass_on(self, frame: Frame) -> bool:
        """Send a frame's message to the client once it is complete; True for the closing frame."""
        if frame.opcode is Opcode.CLOSE:
            told = self._protocol.close_rcvd
            if told is None or told.code in _NOT_SENT:
                await self._websocket.close()
            else:
                await self._websocket.close(told.code, told.reason)
            return True
        if frame.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
            return False
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._parts.append(bytes(frame.data))
        if frame.fin:
            data = b"".join(self._parts)
            self._parts.clear()
            if self._is_text:
                await self._websocket.send_text(data.decode(errors="replace"))
            else:
                await self._websocket.send_bytes(data)
        return False

    async def _receive(self) -> None:
        data = await self._stream.read()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        await self._flush()

    async def _flush(self) -> None:
        """Send the protocol's pending data, in order."""
        async with self._writing:
            for data in self._protocol.data_to_send():
                with contextlib.suppress(PortUnreachable):  # the next read reports it
                    await self._stream.write(data)
