"""HTTP to a gateway, blocking or async.

`GatewayPolicy` decides addresses, headers, proxies, timeouts, which requests are sent again, and
which error a failure becomes. The clients only send, sleep and read, in the same coroutines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from typing import Any, Final, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import httpx

import aenv_ray
from aenv_ray.addresses import is_proxied, retry_after_s
from aenv_ray.blocking import awaited, run_blocking
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    Forbidden,
    InternalError,
    RateLimited,
    Unauthorized,
    boundary,
    from_wire,
)

T = TypeVar("T")

GATEWAY_PORTS: Final = {"http": "8080", "https": ""}
"""Default ports, as in AEnvironment's client; "" leaves the port out."""
SERVER_PORTS: Final = {"http": "8081", "https": "8081"}
CONNECT_S: Final = 10.0
logger = logging.getLogger("aenv_ray")

ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_SAID_AT: Final = 3
"""After this many attempts, a request that is still retried is logged."""
_SHOWN_CHARACTERS: Final = 200
"""Limit for quoting a response body that is not a gateway's."""
_REPEATABLE_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})
NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures before any byte of the request was sent."""
_LOST: Final = (
    httpx.NetworkError, httpx.RemoteProtocolError, FabricUnavailable, CallOutcomeUnknown,
)  # fmt: skip
"""Failures after which the request may have taken effect."""


def parse_url(text: str, ports: Mapping[str, str] = GATEWAY_PORTS) -> str:
    """Return the base URL of a gateway or an environment server, without a trailing slash.

    Args:
        text: ``host``, ``host:port``, ``[ipv6]:port`` or a URL, whose scheme, port and path prefix
            are kept.
        ports: Default port of each scheme.

    Raises:
        ConfigError: `text` is not such an address.
    """
    full = text.strip()
    hint = "write it as host, host:port or http(s)://host[:port][/prefix]"
    if "://" not in full:
        is_bare_ipv6 = full.count(":") > 1 and not full.startswith("[")
        full = f"http://[{full}]" if is_bare_ipv6 else f"http://{full}"
    try:
        parts = urlsplit(full)
        port = parts.port or ports.get(parts.scheme)
    except ValueError as exc:
        raise ConfigError(f"address {text!r}: {exc}", hint=hint) from None
    if parts.scheme not in ports or not parts.hostname:
        raise ConfigError(f"invalid address {text!r}", hint=hint)
    if parts.username or parts.query or parts.fragment:
        # The address is not quoted in full: a user part may be a secret.
        raise ConfigError(f"the address of {parts.hostname} has a user, query or fragment",
                          hint="give a token with --api-key or AENV_API_KEY")  # fmt: skip
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"


class GatewayPolicy:
    """How requests to one gateway are made, for the sync and the async client alike.

    Args:
        url: See `parse_url`.
        token: Sent as a bearer token; None sends none.
        timeout_s: Default for one response.
        attempts: How often a request is sent at most.

    Raises:
        ConfigError: The address is invalid, or the token cannot be sent in an HTTP header.
    """

    def __init__(
        self, url: str, token: str | None, *, timeout_s: float = 30.0, attempts: int = ATTEMPTS
    ) -> None:
        self.url = parse_url(url)
        self.verify = self.url.startswith("https:")
        """Reading the machine's certificates takes 20 ms, which plain HTTP does not need."""
        self.is_direct = not is_proxied(self.url)
        self.timeout_s = timeout_s
        self.attempts = attempts
        self._is_away = False
        self.headers = {"User-Agent": f"aenv-ray/{aenv_ray.__version__}"}
        if token:
            with boundary(ConfigError, "the token cannot be sent in an HTTP header"):
                token.encode("latin-1")
            self.headers["Authorization"] = f"Bearer {token}"

    def client_options(self) -> dict[str, Any]:
        """Return the arguments of `httpx.Client` and `httpx.AsyncClient`."""
        return {
            "base_url": self.url,
            "headers": self.headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s)),
            "follow_redirects": False,  # the token is sent to the configured address only
        }

    def pause_before_retry(
        self, error: Exception, *, attempt: int, repeatable: bool, attempts: int | None = None
    ) -> float | None:
        """Return how long to wait before a request is sent again; None: do not send it again.

        Args:
            error: Why the last attempt failed.
            attempt: How often it was sent, from 1.
            repeatable: Sending it twice has the effect of once, so it may be sent again even if the
                first one was received.
            attempts: Instead of the policy's.
        """
        if attempt >= (self.attempts if attempts is None else attempts):
            return None
        if isinstance(error, RateLimited):  # refused before it had any effect
            return error.retry_after_s if error.retry_after_s <= _LONGEST_PAUSE_S else None
        if isinstance(error, NOT_SENT) or (repeatable and isinstance(error, _LOST)):
            return min(_FIRST_PAUSE_S * 4.0 ** (attempt - 1), _LONGEST_PAUSE_S)
        return None

    def note_attempt(self, error: Exception | None, *, attempt: int) -> None:
        """Log once that the gateway cannot be reached, until it can be again.

        Args:
            error: Why an attempt failed, after which there is another one. None: it succeeded.
            attempt: Its number, from 1.
        """
        if error is None:
            self._is_away = False
        elif attempt >= _SAID_AT and isinstance(error, NOT_SENT) and not self._is_away:
            self._is_away = True
            reason = str(error) or type(error).__name__
            logger.warning("the gateway at %s is not reached, trying again: %s", self.url, reason)

    @contextmanager
    def translated(self, method: str, path: str, repeatable: bool | None = None) -> Iterator[bool]:
        """Translate httpx's errors that leave the block into ours.

        Args:
            method: The request's HTTP method.
            path: Its path, for messages.
            repeatable: As for `pause_before_retry`. If true, a lost response is not an unknown
                outcome.
                None: depends on the method.

        Yields:
            Whether the request is repeatable.
        """
        what = f"{method} {path}"
        if repeatable is None:
            repeatable = method in _REPEATABLE_METHODS
        try:
            yield repeatable
        except NOT_SENT as exc:
            raise self.unreachable(exc) from exc
        except httpx.TimeoutException as exc:
            raise DeadlineExceeded(f"{what}: the gateway at {self.url} did not answer in time",
                                   hint="raise the timeout, for example with --timeout"
                                   ) from exc  # fmt: skip
        except httpx.TransportError as exc:
            reason = str(exc) or type(exc).__name__
            if repeatable:
                raise FabricUnavailable(
                    f"{what}: the response of {self.url} was lost: {reason}"
                ) from exc
            raise CallOutcomeUnknown(
                f"{what}: the response of {self.url} was lost: {reason}",
                hint="the request may have taken effect: check that before you send it again",
            ) from exc
        except (httpx.InvalidURL, UnicodeError) as exc:
            raise ConfigError(
                f"{what}: {exc}", hint="check the gateway's URL, for example http://localhost:8080"
            ) from None

    def unreachable(self, exc: Exception) -> FabricUnavailable:
        """Return the error for a gateway that cannot be connected to."""
        return FabricUnavailable(
            f"the gateway at {self.url} cannot be reached: {str(exc) or type(exc).__name__}",
            hint="check the address (--system-url, AENV_SYSTEM_URL), or start a local gateway "
            "with: aenv up",
        )


class RequestOptions(TypedDict, total=False):
    """What a request has besides its method and path; the fields without a text are httpx's."""

    repeatable: bool | None
    """Sending it twice has the effect of once. None: depends on the method."""
    attempts: int | None
    """How often it is sent at most. None: the policy's."""
    timeout_s: float | None
    """For the response. None: the default; `math.inf` waits without limit."""
    params: Mapping[str, Any] | None
    headers: Mapping[str, str | None]
    json: Any
    content: bytes | Iterable[bytes]


class _GatewayClient:
    """What the clients share: coroutines that wait only in the attributes below.

    If these block, the coroutines never suspend, so `run_blocking` can run them.

    Args:
        url: See `parse_url`.
        token: Sent as a bearer token; None sends none.
        timeout_s: Default for one response.
        attempts: How often a request is sent at most.
        transport: Replaces network connections, for example by an application in this process.
        sleep: Called with the seconds between two attempts.
    """

    _sleep: Callable[[float], Any]
    _client: Callable[..., Any]
    _transport: Callable[..., Any]
    _read: Callable[[httpx.Response], Any]
    _close: Callable[[httpx.Response], Any]

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        attempts: int = ATTEMPTS,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Any] | None = None,
    ) -> None:
        self.policy = GatewayPolicy(url, token, timeout_s=timeout_s, attempts=attempts)
        self.url = self.policy.url
        if sleep is not None:
            self._sleep = sleep
        with boundary(ConfigError, f"gateway {self.url}"):
            if transport is None and self.policy.is_direct:
                transport = self._transport(verify=self.policy.verify)
            self._http = self._client(transport=transport, **self.policy.client_options())

    async def _respond(
        self,
        method: str,
        path: str,
        options: RequestOptions,
        *,
        stream: bool = False,
        allowed: frozenset[int] = frozenset(),
    ) -> httpx.Response:
        """Return a response that is successful or `allowed`; with `stream`, before its body."""

        async def once() -> httpx.Response:
            request = self._http.build_request(method, path, **_arguments(options))
            response: httpx.Response = await awaited(self._http.send(request, stream=stream))
            try:
                if not response.is_success and response.status_code not in allowed:
                    await awaited(self._read(response))
                    read_envelope(response)
            except BaseException:
                await awaited(self._close(response))
                raise
            return response

        with self.policy.translated(method, path, options.get("repeatable")) as repeatable:
            return await self.repeat(once, repeatable, options.get("attempts"))

    async def repeat(
        self, once: Callable[[], Awaitable[T]], repeatable: bool, attempts: int | None = None
    ) -> T:
        """Return what `once` returns, calling it again as the policy says."""
        attempt = 1
        while True:
            try:
                result = await once()
            except (httpx.TransportError, AenvError) as exc:
                pause_s = self.policy.pause_before_retry(
                    exc, attempt=attempt, repeatable=repeatable, attempts=attempts
                )
                if pause_s is None:
                    raise
                self.policy.note_attempt(exc, attempt=attempt)
            else:
                self.policy.note_attempt(None, attempt=attempt)
                return result
            await awaited(self._sleep(pause_s))
            attempt += 1


class GatewayHttp(_GatewayClient):
    """Blocking requests to one gateway."""

    _sleep = staticmethod(time.sleep)
    _client = httpx.Client
    _transport = httpx.HTTPTransport
    _read = staticmethod(httpx.Response.read)
    _close = staticmethod(httpx.Response.close)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def data(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """Return the ``data`` of the response of a route.

        Raises:
            AenvError: The gateway's error.
            FabricUnavailable: It cannot be reached, or the response to a repeatable request was
                lost.
            CallOutcomeUnknown: The response to a request that must not be repeated was lost.
            DeadlineExceeded: It did not answer in time.
        """
        return self.answer(method, path, **options)[0]

    def answer(
        self, method: str, path: str, **options: Unpack[RequestOptions]
    ) -> tuple[Any, httpx.Headers]:
        """Return the ``data`` of a response and its headers; see `data`."""
        response = run_blocking(self._respond(method, path, options))
        return read_envelope(response), response.headers

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        allowed: frozenset[int] = frozenset(),
        **options: Unpack[RequestOptions],
    ) -> Iterator[httpx.Response]:
        """Yield a response whose body is still to be read; once it began it is not sent again.

        Failing statuses in `allowed` are yielded instead of raised.

        Raises:
            AenvError: As `data`; also when the body breaks off.
        """
        response = run_blocking(self._respond(method, path, options, stream=True, allowed=allowed))
        with self.policy.translated(method, path), closing(response):
            yield response


class AsyncGatewayHttp(_GatewayClient):
    """`GatewayHttp` for async code. Use it on one event loop."""

    _sleep = staticmethod(asyncio.sleep)
    _client = httpx.AsyncClient
    _transport = httpx.AsyncHTTPTransport
    _read = staticmethod(httpx.Response.aread)
    _close = staticmethod(httpx.Response.aclose)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def data(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """Return the ``data`` of a response; see `GatewayHttp.data`."""
        return read_envelope(await self._respond(method, path, options))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[httpx.Response]:
        """Yield a response whose body is still to be read; see `GatewayHttp.stream`."""
        response = await self._respond(method, path, options, stream=True)
        with self.policy.translated(method, path):
            async with aclosing(response):
                yield response


def read_envelope(
    response: httpx.Response,
    error_of: Callable[[httpx.Response, dict[str, Any]], AenvError] | None = None,
) -> Any:
    """Return the ``data`` of a response.

    Args:
        response: Of a gateway, of an environment server, or of a proxy in front of one.
        error_of: Returns what a response stands for that has no error of ours, given its JSON
            object, empty if it is none. None: what it means if a gateway's own route fails.

    Raises:
        AenvError: The error in the response, else that of `error_of`.
    """
    body = json_object(response)
    if response.is_success and body.get("success"):
        return body.get("data")
    if isinstance(body.get("error"), Mapping):
        raise _with_hint(from_wire(body["error"]))
    raise (error_of or _error_of_route)(response, body)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response; empty if it is none."""
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _error_of_route(response: httpx.Response, body: dict[str, Any]) -> AenvError:
    status, url = response.status_code, response.request.url
    if "message" in body:
        text = str(body["message"])
    else:
        text = " ".join(response.text.split())[:_SHOWN_CHARACTERS]
    if status == 401:
        return _with_hint(Unauthorized(text or f"{url} requires a token"))
    if status == 403:
        return _with_hint(Forbidden(text or f"{url} does not allow this"))
    if status in {502, 503, 504}:
        return FabricUnavailable(
            f"{url} answered HTTP {status}: {text}",
            hint="the gateway is starting or overloaded: try again, or run there: aenv doctor",
        )
    if (refused := error_of_refusal(status, url, text, response.headers)) is not None:
        return refused
    if status >= 500:
        return InternalError(f"{url} answered HTTP {status}: {text}")
    return ConfigError(f"{url} answered HTTP {status}: {text or 'nothing'}",
                       hint="check that this is the address of a gateway")  # fmt: skip


def error_of_refusal(
    status: int, url: object, text: str, headers: Mapping[str, str]
) -> RateLimited | FabricUnavailable | None:
    """Return the error for a status that any server uses to refuse work; None for others."""
    if status == 429:
        return RateLimited(
            f"{url} limits requests" + (f": {text}" if text else ""),
            retry_after_s=retry_after_s(headers),
            hint="send fewer requests, or wait as long as the error says",
        )
    if status == 503:
        return FabricUnavailable(
            f"{url} answered HTTP {status}: {text}",
            hint="the server is starting or overloaded: try again",
        )
    return None


def _with_hint(error: AenvError) -> AenvError:
    if isinstance(error, Unauthorized | Forbidden) and error.hint is None:
        error.hint = "use another token with --api-key, AENV_API_KEY or hub_config.api_key"
    return error


def _arguments(options: RequestOptions) -> dict[str, Any]:
    """Return arguments for httpx: no parameter or header that is None, JSON as UTF-8."""
    arguments: dict[str, Any] = {
        k: v for k, v in options.items() if k not in {"repeatable", "attempts", "timeout_s", "json"}
    }
    timeout_s = options.get("timeout_s")
    if timeout_s is not None:
        arguments["timeout"] = httpx.Timeout(
            None if math.isinf(timeout_s) else timeout_s, connect=CONNECT_S
        )
    for key in ("params", "headers"):
        if arguments.get(key) is not None:
            arguments[key] = {k: v for k, v in arguments[key].items() if v is not None}
    if "json" in options:
        with boundary(ConfigError, "the request is not JSON"):
            arguments["content"] = json.dumps(options["json"], allow_nan=False).encode()
        json_type = {"Content-Type": "application/json"}
        arguments["headers"] = json_type | (arguments.get("headers") or {})
    return arguments
