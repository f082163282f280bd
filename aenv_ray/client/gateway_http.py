"""HTTP to a gateway: its address, its envelope, and what may be sent again."""

from __future__ import annotations

import ipaddress
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx

import aenv_ray
from aenv_ray.errors import (
    AenvError,
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

DEFAULT_PORT: Final = 8080
CONNECT_S: Final = 10.0
ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_SHOWN_CHARACTERS: Final = 200
"""Of a body that is not ours."""


def parse_url(text: str) -> str:
    """Return the base URL of a gateway, without a trailing slash.

    Args:
        text: ``host``, ``host:port`` or a URL, whose path prefix is kept. Without a port it is
            8080, as AEnvironment's client has it, and for https its own.

    Raises:
        ConfigError: It is no such address.
    """
    full = text.strip() if "://" in text else f"http://{text.strip()}"
    hint = "write it as host, host:port or http(s)://host[:port][/prefix]"
    try:
        parts = urlsplit(full)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"gateway address: {exc}", hint=hint) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"{text!r} is no address of a gateway", hint=hint)
    if parts.username or parts.query or parts.fragment:
        # Not shown whole: a user part may be a secret.
        raise ConfigError(f"the address of {parts.hostname} has a user, query or fragment",
                          hint="give a token with --api-key or AENV_API_KEY")  # fmt: skip
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None and parts.scheme == "http":
        port = DEFAULT_PORT
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"


def pause_before_retry(error: Exception, *, attempt: int, repeatable: bool) -> float | None:
    """Return how long to wait before a request is sent again; None: it must not be.

    Args:
        error: What came of it.
        attempt: How often it was sent, from 1.
        repeatable: Doing it twice does it once, so that a lost answer is no reason to stop.
    """
    pause_s = min(_FIRST_PAUSE_S * 4.0 ** (attempt - 1), _LONGEST_PAUSE_S)
    if isinstance(error, RateLimited):  # refused before anything was done
        return error.retry_after_s if error.retry_after_s <= _LONGEST_PAUSE_S else None
    never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    lost = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError | FabricUnavailable)
    return pause_s if never_sent or (repeatable and lost) else None


class GatewayHttp:
    """Requests to one gateway, each with our errors and sent again where that is harmless.

    Args:
        url: As `parse_url` takes it.
        token: Sent as a bearer token; None: none is.
        timeout_s: How long one answer may take.
        transport: Instead of sockets, such as an application in this process.
        sleep: Called with the seconds between two attempts.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = parse_url(url)
        self._sleep = sleep
        is_direct = _is_loopback(self.url)
        headers = {"User-Agent": f"aenv-ray/{aenv_ray.__version__}"}
        if token:
            with boundary(ConfigError, "the token is no text that HTTP can carry"):
                token.encode("latin-1")
            headers["Authorization"] = f"Bearer {token}"
        with boundary(ConfigError, f"gateway {self.url}"):
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
                transport=transport,
                follow_redirects=False,  # a token goes nowhere but where it was meant to
                trust_env=not is_direct,
                # Reading the machine's certificates takes 20 ms: not for a line without TLS.
                verify=not is_direct or self.url.startswith("https:"),
            )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def data(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        attempts: int = ATTEMPTS,
        **request: Any,
    ) -> Any:
        """Return the ``data`` of an answer.

        Args:
            method: HTTP method.
            path: Of the route, quoted.
            repeatable: Doing it twice does it once. None: by the method.
            attempts: How often it is sent at most.
            request: Further arguments of `httpx.Client.build_request`; ``timeout_s`` instead of
                the client's, infinite for none.

        Raises:
            AenvError: What the gateway answered.
            FabricUnavailable: It cannot be reached, or its answer was lost.
            DeadlineExceeded: It did not answer in time.
        """
        return self.answer(method, path, repeatable=repeatable, attempts=attempts, **request)[0]

    def answer(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        attempts: int = ATTEMPTS,
        **request: Any,
    ) -> tuple[Any, httpx.Headers]:
        """Return the ``data`` of an answer and its headers; as `data`."""
        again = method in {"GET", "HEAD", "PUT", "DELETE"} if repeatable is None else repeatable

        def once() -> tuple[Any, httpx.Headers]:
            response = self._http.send(self._http.build_request(method, path, **_full(request)))
            return read_envelope(response), response.headers

        return self._repeat(once, f"{method} {path}", again, attempts)

    @contextmanager
    def stream(
        self, method: str, path: str, *, allowed: frozenset[int] = frozenset(), **request: Any
    ) -> Iterator[httpx.Response]:
        """Yield an answer whose body is read piece by piece; not sent again.

        Args:
            method: HTTP method.
            path: Of the route, quoted.
            allowed: Failing statuses that are an answer too.
            request: As in `data`.

        Raises:
            AenvError: As `data`; also when the body breaks off.
        """
        with self._translated(f"{method} {path}"):
            built = self._http.build_request(method, path, **_full(request))
            response = self._http.send(built, stream=True)
            try:
                if not response.is_success and response.status_code not in allowed:
                    response.read()
                    read_envelope(response)
                yield response
            finally:
                response.close()

    def _repeat(self, once: Callable[[], T], what: str, again: bool, attempts: int) -> T:
        with self._translated(what):
            for attempt in range(1, attempts + 1):
                try:
                    return once()
                except (httpx.TransportError, AenvError) as exc:
                    pause_s = pause_before_retry(exc, attempt=attempt, repeatable=again)
                    if pause_s is None or attempt == attempts:
                        raise
                self._sleep(pause_s)
            raise AssertionError

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            raise FabricUnavailable(
                f"the gateway at {self.url} cannot be reached: {str(exc) or type(exc).__name__}",
                hint="bring up a local one with: aenv up; or name another with --system-url",
            ) from exc
        except httpx.TimeoutException as exc:
            raise DeadlineExceeded(f"{what}: the gateway at {self.url} did not answer in time",
                                   hint="give it more with --timeout") from exc  # fmt: skip
        except httpx.TransportError as exc:
            raise FabricUnavailable(
                f"{what}: the answer of {self.url} was lost: {str(exc) or type(exc).__name__}"
            ) from exc
        except (httpx.InvalidURL, UnicodeError) as exc:
            raise ConfigError(f"{what}: {exc}") from None


def read_envelope(response: httpx.Response) -> Any:
    """Return the ``data`` of an answer.

    Raises:
        AenvError: The one that the answer, or else its status, describes.
    """
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and response.is_success and body.get("success"):
        return body.get("data")
    if isinstance(body, dict) and isinstance(body.get("error"), Mapping):
        raise _with_way_out(from_wire(body["error"]))
    status, url = response.status_code, response.request.url
    if isinstance(body, dict) and "message" in body:
        text = str(body["message"])
    else:
        text = " ".join(response.text.split())[:_SHOWN_CHARACTERS]
    if status == 401:
        raise _with_way_out(Unauthorized(text or f"{url} wants a token"))
    if status == 403:
        raise _with_way_out(Forbidden(text or f"{url} does not allow this"))
    if status == 429:
        seconds = response.headers.get("Retry-After", "")
        raise RateLimited(text, retry_after_s=float(seconds) if seconds.isdecimal() else 1.0)
    if status in {502, 503, 504}:
        raise FabricUnavailable(f"{url} answered HTTP {status}: {text}")
    if status >= 500:
        raise InternalError(f"{url} answered HTTP {status}: {text}")
    raise ConfigError(f"{url} answered HTTP {status}: {text or 'nothing'}",
                      hint="is that the address of a gateway?")  # fmt: skip


def _with_way_out(error: AenvError) -> AenvError:
    if isinstance(error, Unauthorized | Forbidden) and error.hint is None:
        error.hint = "give a token that may with --api-key, AENV_API_KEY or hub_config.api_key"
    return error


def _full(request: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for httpx: no parameter or header that is None, JSON as UTF-8."""
    full = dict(request)
    timeout_s = full.pop("timeout_s", None)
    if timeout_s is not None:
        full["timeout"] = httpx.Timeout(
            None if math.isinf(timeout_s) else timeout_s, connect=CONNECT_S
        )
    for key in ("params", "headers"):
        if full.get(key) is not None:
            full[key] = {k: v for k, v in full[key].items() if v is not None}
    if "json" in full:
        with boundary(ConfigError, "the request is no JSON"):
            full["content"] = json.dumps(full.pop("json"), allow_nan=False).encode()
        full["headers"] = {"Content-Type": "application/json", **(full.get("headers") or {})}
    return full


def _is_loopback(url: str) -> bool:
    """Return whether a proxy of this machine's user cannot be meant."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
