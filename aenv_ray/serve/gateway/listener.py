"""The ports of one replica: an HTTP server in a thread of its own, on sockets that replicas share.

Serve's own proxy would cost a hop per call and listens on one port. Here every replica of a node
listens itself; the kernel spreads connections over them, and a dead one gets no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.serve.gateway.header_timeout import HeaderTimeoutProtocol

_BACKLOG: Final = 2048
_KEEP_ALIVE_S: Final = 75
_DRAIN_S: Final = 10
"""How long requests under way may go on when a replica is asked to end."""

MakeApp = Callable[[], Awaitable[ASGIApp]]


def listen(host: str, port: int, *, shared: bool = True) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Address of this node.
        port: To listen on.
        shared: With other replicas of the gateway.

    Raises:
        ConfigError: Another program has the port, or the address is not this node's.
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
            hint="another program has the port, or another gateway: choose other ports",
        ) from None
    sock.setblocking(False)
    return sock


class Listener:
    """Serves an application on sockets until it is stopped.

    Args:
        make_app: Makes the application, in the loop that serves it.
        sockets: That listen.
        close: Run in that loop after the last request.
    """

    def __init__(
        self,
        make_app: MakeApp,
        sockets: Sequence[socket.socket],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._make_app = make_app
        self._sockets = list(sockets)
        self._close = close
        self._server: uvicorn.Server | None = None
        self._error: BaseException | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aenv-gateway", daemon=True)

    def start(self, deadline_s: float) -> None:
        """Serve, and return once the application answers.

        Raises:
            FabricUnavailable: It is not up within `deadline_s`.
            AenvError: The application could not be made.
        """
        self._thread.start()
        if not self._is_up.wait(deadline_s):
            raise FabricUnavailable(f"the gateway's server is not up after {deadline_s:g} s")
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Do nothing while it serves.

        Raises:
            FabricUnavailable: It does not.
        """
        if not self._thread.is_alive():
            raise FabricUnavailable("the gateway's server has ended")

    def stop(self) -> None:
        """Let requests under way end, and close the sockets."""
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
        except BaseException as exc:  # noqa: BLE001  # told to whoever started or checks it
            self._error = exc
        finally:
            self._is_up.set()

    async def _serve(self) -> None:
        app = await self._make_app()
        config = uvicorn.Config(
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
        self._server = _Server(config, self._is_up.set)
        try:
            await self._server.serve(sockets=self._sockets)
        finally:
            await self._close()


class _Server(uvicorn.Server):
    """Tells when it serves, and leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, on_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_up = on_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_up()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the faster loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
