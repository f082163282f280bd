"""The HTTP server of one replica: it runs in its own thread, on sockets that replicas share.

Serve's proxy would cost a hop per call, and listens on one port only. So every replica of a node
listens itself: the kernel distributes connections among them, and a dead replica gets none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.serve.gateway.http_protocol import HeaderTimeoutProtocol

_BACKLOG: Final = 2048
_KEEP_ALIVE_S: Final = 75
_DRAIN_S: Final = 10
"""How long requests in progress may continue after a replica was asked to end."""

OpenApp = Callable[[], AbstractAsyncContextManager[ASGIApp]]


def listen(host: str, port: int, *, shared: bool = True) -> socket.socket:
    """Return a listening socket.

    Args:
        host: An address of this node.
        port: The port; 0 for any free one.
        shared: Other replicas of the gateway may listen on the same port.

    Raises:
        ConfigError: Another program uses the port, or the address is not of this node.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port}: {exc.strerror}",
            hint="choose a free port, and an address of this node",
        ) from None
    sock.setblocking(False)
    return sock


class GatewayListener:
    """Serves an application on sockets until it is stopped.

    Args:
        open_app: Opens the application in the event loop that serves it. It is closed there after
            the last request.
        sockets: Listening sockets.
    """

    def __init__(self, open_app: OpenApp, sockets: Sequence[socket.socket]) -> None:
        self._open_app = open_app
        self._sockets = list(sockets)
        self._server: uvicorn.Server | None = None
        self._error: BaseException | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aenv-gateway", daemon=True)

    def start(self, deadline_s: float) -> None:
        """Serve, and return once the application answers.

        Raises:
            FabricUnavailable: It does not answer within `deadline_s`.
            AenvError: The application could not be opened.
        """
        self._thread.start()
        if not self._is_up.wait(deadline_s):
            raise FabricUnavailable(
                f"the gateway's HTTP server did not start within {deadline_s:g} s",
                hint="try again; Ray's logs contain those of the gateway's replicas",
            )
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Check that the server runs.

        Raises:
            FabricUnavailable: It has ended.
        """
        if not self._thread.is_alive():
            raise FabricUnavailable("the gateway's HTTP server has ended")

    def stop(self) -> None:
        """Finish the requests in progress, and close the sockets."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(_DRAIN_S + 5)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as exc:  # noqa: BLE001  # `start` raises it
            self._error = exc
        finally:
            self._is_up.set()

    async def _serve(self) -> None:
        async with self._open_app() as app:
            self._server = _Server(self._config(app), self._is_up.set)
            await self._server.serve(sockets=self._sockets)

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            lifespan="off",
            ws="websockets-sansio",  # the default before uvicorn 0.50 is deprecated by websockets
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            http=HeaderTimeoutProtocol,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
            ws_max_size=64 * 1024 * 1024,
        )


class _Server(uvicorn.Server):
    """Calls `on_up` once it serves; leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, on_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_up = on_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_up()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
