"""The Docker daemon's HTTP API over its Unix socket.

Asynchronous: a node starts many containers at once, and the `docker` package would need a thread
for each request. That package reads Docker's contexts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import httpx

from aenv_ray.errors import ConfigError, FabricUnavailable

REQUEST_DEADLINE_S: Final = 120.0
"""A daemon under load answers late; one that hangs must not block a host for ever."""
_CONNECTIONS: Final = 64


class DaemonRefused(Exception):
    """The daemon answered a request with an error.

    Attributes:
        status: HTTP status: 404 not found, 409 conflict, 500 the daemon failed.
        message: The daemon's message.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} ({status})")
        self.status = status
        self.message = message


def socket_path(address: str) -> str:
    """Return the path of the daemon's socket.

    Raises:
        ConfigError: `address` is not a Unix socket; sandboxes share directories with this node.
    """
    scheme, _, path = address.partition("://")
    if scheme != "unix" or not path.startswith("/"):
        raise ConfigError(
            f"DOCKER_HOST {address!r} is not a Unix socket on this node",
            hint="set DOCKER_HOST to the socket of the node's own daemon, for example "
            "unix:///var/run/docker.sock",
        )
    return path


def daemon_hint(address: str) -> str:
    """Return how to reach a Docker daemon, for a user whose `address` does not answer."""
    from docker.context.api import ContextAPI
    from docker.errors import DockerException

    with contextlib.suppress(DockerException, OSError, ValueError, KeyError):
        context = ContextAPI.get_current_context()  # type: ignore[no-untyped-call]
        if context is not None and context.Host and context.Host != address:
            return f"to use Docker's context {context.Name!r}, set DOCKER_HOST={context.Host}"
    return "start Docker (sudo systemctl start docker), or set DOCKER_HOST=unix:///path"


class DockerClient:
    """A client of one daemon; safe to use concurrently.

    Every request raises `FabricUnavailable` if the daemon does not answer, and `DaemonRefused` if
    it answers with an error.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.path = socket_path(address)
        """The path of the daemon's socket."""
        self._client: httpx.AsyncClient | None = None

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=_CONNECTIONS)
            # No TLS on a Unix socket; loading the certificates would take 20 ms.
            transport = httpx.AsyncHTTPTransport(
                uds=self.path, limits=limits, verify=False, trust_env=False
            )
            self._client = httpx.AsyncClient(
                transport=transport,
                base_url="http://docker",
                timeout=REQUEST_DEADLINE_S,
            )
        return self._client

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        within_s: float = REQUEST_DEADLINE_S,
    ) -> Any:
        """Make a request and return its JSON answer; None if it is empty.

        Args:
            method: HTTP method.
            path: The path of the request.
            params: Query; mappings in it are sent as JSON, the format of the daemon's filters.
            body: Sent as JSON.
            within_s: Deadline of the whole request.
        """
        with self._reaching():
            async with asyncio.timeout(within_s):
                response = await self._http.request(method, path, params=_query(params), json=body)
        if response.status_code >= 400:
            raise _refusal(response.status_code, response.content)
        return json.loads(response.content) if response.content else None

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        opens_in_s: float | None = None,
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Make a request whose answer is a stream of JSON objects, one per line.

        Args:
            method: HTTP method.
            path: The path of the request.
            params: Query, as for `request`.
            headers: Additional headers.
            opens_in_s: Deadline for the first byte of the answer. None: no deadline, because the
                daemon first does some work, such as connecting to a registry.
        """
        async with self._answer(method, path, params, headers, opens_in_s=opens_in_s) as response:
            yield self._lines(response)

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
        *,
        opens_in_s: float | None,
        silence_s: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Make a request and yield its answer unread.

        Reading fails if nothing comes for `silence_s`; None: never.
        """
        with self._reaching():
            request = self._http.build_request(
                method, path, params=_query(params), headers=headers,
                timeout=httpx.Timeout(REQUEST_DEADLINE_S, read=silence_s),
            )  # fmt: skip
            async with asyncio.timeout(opens_in_s):
                response = await self._http.send(request, stream=True)
        try:
            if response.status_code >= 400:
                raise _refusal(response.status_code, await response.aread())
            yield response
        finally:
            await response.aclose()

    async def _lines(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        with self._reaching():
            async for line in response.aiter_lines():
                if line.strip():
                    yield json.loads(line)

    async def read(self, path: str, params: Mapping[str, Any], limit_bytes: int) -> bytes:
        """Return the content of a GET answer that may be large.

        Raises:
            DaemonRefused: It is larger than `limit_bytes`.
        """
        async with self._answer(
            "GET", path, params, opens_in_s=REQUEST_DEADLINE_S, silence_s=REQUEST_DEADLINE_S
        ) as response:
            content = bytearray()
            with self._reaching():
                async for piece in response.aiter_raw():
                    content += piece
                    if len(content) > limit_bytes:
                        raise DaemonRefused(413, f"{path} is larger than {limit_bytes} bytes")
            return bytes(content)

    async def log(self, container: str, lines: int) -> str:
        """Return the last `lines` of a container's output, stdout and stderr in order."""
        params = {"stdout": 1, "stderr": 1, "tail": lines}
        with self._reaching():
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                response = await self._http.get(f"/containers/{container}/logs", params=params)
        if response.status_code >= 400:
            raise _refusal(response.status_code, response.content)
        return b"".join(_unframed(response.content)[0]).decode(errors="replace").strip()

    async def frames(
        self, path: str, params: Mapping[str, Any]
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the frames of a container's log, in batches as they arrive."""
        async with self._answer(
            "GET", path, params, opens_in_s=REQUEST_DEADLINE_S, silence_s=REQUEST_DEADLINE_S
        ) as response:
            pending = b""
            with self._reaching():
                async for piece in response.aiter_raw():
                    found, pending = _unframed(pending + piece)
                    if found:
                        yield found

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        try:
            yield
        except (httpx.HTTPError, TimeoutError) as exc:
            raise FabricUnavailable(
                f"the Docker daemon at {self._address} does not answer: "
                f"{type(exc).__name__}: {exc}".rstrip(": "),
                hint="check that it is running, and that this user may open its socket",
            ) from exc

    async def close(self) -> None:
        """Close every connection; a later request opens new ones."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


def _query(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if params is None:
        return None
    return {k: json.dumps(v) if isinstance(v, Mapping) else v for k, v in params.items()}


def _refusal(status: int, content: bytes) -> DaemonRefused:
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace").strip() or "no reason given"
    return DaemonRefused(status, message)


def _unframed(stream: bytes) -> tuple[list[bytes], bytes]:
    """Return the payloads of the complete frames, and the incomplete rest.

    A frame is a kind, three zeros, a length, and as many bytes.
    """
    parts: list[bytes] = []
    position = 0
    while position + 8 <= len(stream):
        (length,) = struct.unpack_from(">I", stream, position + 4)
        if position + 8 + length > len(stream):
            break
        parts.append(stream[position + 8 : position + 8 + length])
        position += 8 + length
    return parts, stream[position:]
