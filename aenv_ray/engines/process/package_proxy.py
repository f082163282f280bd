"""The only way from an installer's sandbox to the network: an HTTP proxy to the package sources.

It listens on a socket that was created inside the sandbox's network namespace, and connects from
outside of it, to the hosts that the operator configured and to no other.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

_HEAD_BYTES: Final = 16 * 1024
_HEAD_S: Final = 30.0
_CONNECT_S: Final = 30.0
_PIECE_BYTES: Final = 256 * 1024
_SHOWN: Final = 100
PORTS: Final = {"http": 80, "https": 443}


def host_and_port(address: str) -> str:
    """Return ``host:port`` of a URL, in the form in which a proxy is asked for it.

    Raises:
        ValueError: It is not an ``http`` or ``https`` URL with a host.
    """
    parts = urlsplit(address)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(f"{parts.scheme or 'no scheme'!r} is not http or https with a host")
    return _joined(parts.hostname, parts.port or PORTS[parts.scheme])


def _joined(host: str, port: int) -> str:
    return f"{host.lower().rstrip('.')}:{port}"


class PackageProxy:
    """Passes connections on to the allowed hosts.

    Args:
        hosts: ``host:port`` of each, with the URL of the proxy through which this machine reaches
            it; empty: it is reached directly.
        say: Called with a line for the installer's output.
    """

    def __init__(self, hosts: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._say = say
        self._upstreams = {
            address: urlsplit(url) if url else None for address, url in hosts.items()
        }

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the task is cancelled."""
        server = await asyncio.start_server(self._on_connection, sock=listener, limit=_HEAD_BYTES)
        async with server:
            await server.serve_forever()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            try:
                async with asyncio.timeout(_HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                await self._pass_on(head, reader, writer)
            except (TimeoutError, ValueError, UnicodeError):
                writer.write(_answer("400 Bad Request"))
        writer.close()

    async def _pass_on(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect a request to its host, or refuse it.

        Raises:
            ValueError: It is not a request to a proxy.
        """
        method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        is_tunnel = method == "CONNECT"
        address = host_and_port(f"https://{target}" if is_tunnel else target)
        if address not in self._upstreams:
            shown = ascii(address)[1:-1][:_SHOWN]
            self._say(
                f"refused a connection to {shown}: it is not a package source; the operator can "
                "add it to AENV_PACKAGE_HOSTS"
            )
            writer.write(_answer("403 Forbidden"))
            return
        try:
            upstream = self._upstreams[address]
            async with asyncio.timeout(_CONNECT_S):
                there, back = await _connect(address, upstream)
        except (OSError, TimeoutError) as exc:
            self._say(f"no connection to {address}: {str(exc) or 'no answer in time'}")
            writer.write(_answer("502 Bad Gateway"))
            return
        with contextlib.closing(back):
            if not is_tunnel:
                # Nothing more is read from the sandbox: its next request would not be checked.
                back.write(_one_request(head, target, upstream))
                await _copy(there, writer)
                return
            if upstream is None:
                writer.write(_answer("200 Connection established", ""))
            else:
                back.write(_with_fields(head, *_authorization(upstream)))
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, back))
                both.create_task(_copy(there, writer))


async def _connect(
    address: str, upstream: SplitResult | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    if upstream is not None:
        host, port = upstream.hostname or "", str(upstream.port or PORTS["http"])
    return await asyncio.open_connection(host, int(port))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side ends; then close the other."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


def _answer(status: str, close: str = "Connection: close\r\nContent-Length: 0\r\n") -> bytes:
    return f"HTTP/1.1 {status}\r\n{close}\r\n".encode()


def _authorization(upstream: SplitResult) -> list[bytes]:
    if upstream.username is None:
        return []
    user = f"{unquote(upstream.username)}:{unquote(upstream.password or '')}"
    return [b"Proxy-Authorization: Basic " + base64.b64encode(user.encode())]


def _with_fields(head: bytes, *fields: bytes) -> bytes:
    """Return a request with these header fields in place of those for a proxy."""
    line, *rest = head.split(b"\r\n")
    kept = [field for field in rest if not field.lower().startswith((b"connection:", b"proxy-"))]
    return b"\r\n".join([line, *fields, *kept])


def _one_request(head: bytes, target: str, upstream: SplitResult | None) -> bytes:
    """Return a request as its server, or the next proxy, expects it, as the only one."""
    if upstream is not None:
        return _with_fields(head, b"Connection: close", *_authorization(upstream))
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _with_fields(head.replace(target.encode(), path.encode(), 1), b"Connection: close")
