"""Connects to Redis by URL and translates its errors.

No message contains a password: URLs are named without their credentials, and the library's errors
about malformed URLs are not repeated.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ConstantBackoff

from aenv_ray.errors import ConfigError, FabricUnavailable

ANSWER_S: Final = 5.0
"""Deadline of a command; scripts take milliseconds."""
CONNECT_S: Final = 3.0
_HINT: Final = (
    "AENV_REDIS_URL is redis://[user:password@]host[:port][/db], rediss:// with TLS, "
    "unix:///path.sock, redis+sentinel://[user:password@]host:port,host:port/service[/db] or "
    "redis+cluster://host:port"
)
_ADDRESSES: Final = re.compile(r"(,?([A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?)+")


def _options(answer_s: float) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "encoding_errors": "surrogatepass",
        "socket_timeout": answer_s,
        "socket_connect_timeout": CONNECT_S,
        # A pooled connection may be older than a restart of Redis. Further retries are up to the
        # caller: only one layer retries.
        "retry": Retry(ConstantBackoff(0.02), 1),
    }


_FOR_NOW: Final = (
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
)
"""Errors of a Redis that may serve us later."""

RedisClient = Any
"""``redis.asyncio.Redis`` or ``RedisCluster``, which agree in what the hub uses."""


def redacted(url: str) -> str:
    """Return a URL for messages, without credentials and options."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "without a scheme"
    if scheme == "unix":
        return f"unix://{rest.rpartition('@')[2].partition('?')[0]}"
    # In a malformed URL, any part may belong to the password.
    address = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
    is_clear = "@" not in rest.partition("/")[2] and _ADDRESSES.fullmatch(address)
    return f"{scheme}://{address if is_clear else '…'}"


def connect(url: str, answer_s: float = ANSWER_S, *, password: str | None = None) -> RedisClient:
    """Return a client for a URL; it connects at its first command.

    Args:
        url: As in `AENV_REDIS_URL`.
        answer_s: Deadline of a command.
        password: Password, if the URL has none. None or empty: no password.

    Raises:
        ConfigError: The URL is malformed, or names a file that does not exist here.
    """
    scheme = url.partition("://")[0].lower()
    _check_files(url)
    try:
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _sentinel(url, answer_s, password)
        options = {**_options(answer_s), "password": password or None}  # what the URL has wins
        if scheme in ("redis+cluster", "rediss+cluster"):
            plain = url.replace("+cluster", "", 1)
            return aioredis.RedisCluster.from_url(plain, **options)
        if scheme in ("redis", "rediss", "unix"):
            return aioredis.Redis.from_url(url, **options)
    except (ValueError, TypeError, exceptions.RedisError):
        # The message of the library may repeat the password.
        raise ConfigError(f"invalid Redis URL {redacted(url)}", hint=_HINT) from None
    raise ConfigError(f"invalid Redis URL {redacted(url)}", hint=_HINT)


def _check_files(url: str) -> None:
    """Refuse a URL with a file of TLS that is missing: Redis would seem not to answer."""
    options = parse_qs(url.partition("?")[2])
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        for path in options.get(name, ()):
            if not Path(path).is_file():
                raise ConfigError(
                    f"the file {path} does not exist on this machine; the URL of Redis names it as "
                    f"{name}",
                    hint="correct AENV_REDIS_URL, or copy the file here",
                )


def connect_socket(path: str, password: str, answer_s: float = ANSWER_S) -> RedisClient:
    """Return a client for a Unix socket."""
    return aioredis.Redis(unix_socket_path=path, password=password, **_options(answer_s))


def _sentinel(url: str, answer_s: float, given: str | None) -> RedisClient:
    """Return a client for the present master according to Sentinel.

    Sentinels get the password of Redis unless the URL has one for them, as Ray does it. A sentinel
    without a password accepts any password of the user ``default``.
    """
    parts = urlsplit(url)
    credentials, _, addresses = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    service, _, database = parts.path.lstrip("/").partition("/")
    nodes = [_host_and_port(address) for address in addresses.split(",")]
    if not service:
        raise ValueError("no service")
    parse_qsl(parts.query, strict_parsing=bool(parts.query))  # parse_url ignores what is malformed
    options: dict[str, Any] = dict(parse_url(f"redis://host?{parts.query}"))
    common = _options(answer_s)
    if url.lower().startswith("rediss"):
        common["ssl"] = True
        common |= {k: v for k, v in options.items() if k.startswith("ssl_")}
    secret = unquote(password) or given or None
    own: dict[str, Any] = {
        "username": unquote(user) or None,
        "password": secret,
        "db": int(database or 0),
    }
    theirs = {**common, "password": options.get("sentinel_password", secret)}
    if theirs["password"]:
        theirs["username"] = options.get("sentinel_username", "default")
    make: Any = Sentinel  # redis-py gives it no types
    sentinel = make(nodes, sentinel_kwargs=theirs, **common)
    client: _MasterRedis = sentinel.master_for(service, redis_class=_MasterRedis, **own)
    client.sentinels = sentinel.sentinels
    return client


class _MasterRedis(aioredis.Redis):
    """A client for a master behind Sentinel; also closes the connections to the sentinels."""

    sentinels: Sequence[aioredis.Redis] = ()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for sentinel in self.sentinels:
            await sentinel.aclose()


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "26379")
    if not host:
        raise ValueError("no host")
    return host, int(port)


async def leave_replica(client: RedisClient, error: exceptions.ResponseError) -> None:
    """Close the idle connections of a client if Redis refused a write because it is a replica.

    Behind an address that leads to the master, such as that of a managed Redis or a Service of
    Kubernetes, connections to a demoted master stay open: only new ones reach its successor.
    """
    # Before Redis 7, the error inside a script is reported as an error of the script.
    if isinstance(error, exceptions.ReadOnlyError) or "-READONLY " in str(error):
        pool = getattr(client, "connection_pool", None)  # a client of a cluster has none
        if pool is not None:
            await pool.disconnect(inuse_connections=False)


@contextlib.contextmanager
def redis_errors(where: str) -> Iterator[None]:
    """Translate Redis's exceptions that leave the block into ours.

    Args:
        where: The address of Redis, without credentials.

    Raises:
        ConfigError: Redis refuses the password or user.
        FabricUnavailable: Redis does not answer, or cannot write now; try again.
    """
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.AuthorizationError) as exc:
        raise _refused(where) from exc
    except exceptions.NoPermissionError as exc:
        raise ConfigError(
            f"the user of Redis at {where} may not run the hub's commands: {exc}",
            hint="grant the user of AENV_REDIS_URL all commands on keys that begin with {aenv}",
        ) from exc
    except exceptions.ResponseError as exc:
        if re.match(r"(NOAUTH|WRONGPASS|ERR AUTH|invalid (username|password))", str(exc)):
            raise _refused(where) from exc
        # Before Redis 7, these errors inside a script are reported as errors of the script.
        words = r"(MISCONF|NOREPLICAS|BUSY|Error running script .*-(OOM|MISCONF|READONLY) )"
        if not isinstance(exc, _FOR_NOW) and not re.match(words, str(exc)):
            raise
        raise FabricUnavailable(
            f"Redis at {where} cannot run the command now: {exc}", hint="see the log of Redis"
        ) from exc
    except (
        exceptions.RedisError, exceptions.RedisClusterException, OSError, TimeoutError
    ) as exc:  # fmt: skip
        if isinstance(exc.__cause__, exceptions.AuthenticationError):
            raise _refused(where) from exc  # how a Redis Cluster reports it
        raise FabricUnavailable(
            f"Redis at {where} does not answer: {type(exc).__name__}: {exc}",
            hint="try again; check AENV_REDIS_URL, and that Redis is running",
        ) from exc


def _refused(where: str) -> ConfigError:
    return ConfigError(
        f"Redis at {where} refuses the password or user",
        hint="set both in AENV_REDIS_URL: redis://user:password@host:port, or the password in "
        "AENV_REDIS_PASSWORD",
    )
