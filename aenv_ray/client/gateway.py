"""A gateway's control side, as calls: environments, instances, pools, tokens, the hub."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from aenv_ray.client.gateway_http import ATTEMPTS, GatewayHttp
from aenv_ray.client.gateway_records import (
    Answer,
    EnvironmentAnswer,
    InstanceAnswer,
    TokenAnswer,
    parse,
)
from aenv_ray.client.gateway_services import GatewayServices
from aenv_ray.errors import (
    ConfigError,
    FabricUnavailable,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    boundary,
    from_wire,
)
from aenv_ray.project.archive import MAX_ARCHIVE_BYTES

PAGE: Final = 200
_SILENCE_S: Final = 60.0
"""A stream that says nothing for so long, not even that all is as before, has broken."""
_PIECE_BYTES: Final = 256 * 1024
TRANSFER_S: Final = 300.0
"""How long a gateway may take to unpack and load what it was given, or to make an instance."""
_ENDED: Final = frozenset({"Failed", "Terminated"})
GONE: Final = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)
"""What is raised about an instance that has ended."""

OnBytes = Callable[[int], None]
"""Told how many more bytes went over the wire; a negative number takes back what starts anew."""


def _nothing(count: int) -> None:
    del count


class Gateway:
    """Calls to one gateway; blocks. Each raises what the gateway answered, and FabricUnavailable.

    Args:
        http: How it is reached.
    """

    def __init__(self, http: GatewayHttp) -> None:
        self.http = http
        self.services = GatewayServices(http)

    @property
    def url(self) -> str:
        """Where it is."""
        return self.http.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()

    def health(self) -> Any:
        """Return what the gateway says of itself; it needs no token."""
        return self.http.data("GET", "/health", attempts=1)

    # --- environments ---------------------------------------------------------------------------

    def environment(self, name: str, version: str | None = None) -> EnvironmentAnswer:
        """Return a version; None: the highest one."""
        path = _path("env", name, version) if version else _path("env", name)
        return _environment(self.http.data("GET", path))

    def environments(self, limit: int, *, offset: int = 0, **filters: Any) -> list[Any]:
        """Return up to `limit` versions after the first `offset`, in the hub's order.

        Args:
            limit: How many at most.
            offset: How many are left out at the start.
            filters: ``name, tag, text, status, latest``; None is none.
        """
        rows = self._all("/env/", filters, limit + offset)
        return [_environment(row) for row in rows[offset:]]

    def versions(self, name: str) -> list[EnvironmentAnswer]:
        """Return all versions of a name, the highest first."""
        rows = self.http.data("GET", _path("env", name, "versions"))
        return [_environment(row) for row in rows or []]

    def functions(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return what a version registers, without starting it."""
        rows = self.http.data("GET", _path("env", name, version, "functions"))
        return [dict(row) for row in rows or []]

    def release_environment(self, name: str, version: str) -> None:
        """Move a version to Released, in which it stays."""
        self.http.data("POST", _path("env", name, version, "release"))

    def delete_environment(self, name: str, version: str) -> None:
        """Delete a version."""
        self.http.data("DELETE", _path("env", name, version))

    # --- artifacts ------------------------------------------------------------------------------

    def has_artifact(self, digest: str) -> bool:
        """Return whether the gateway has an archive."""
        path = _path("artifacts", digest)
        with self.http.stream("HEAD", path, allowed=frozenset({404})) as response:
            return response.is_success

    def upload(self, archive: bytes, digest: str, on_bytes: OnBytes = _nothing) -> None:
        """Upload an archive under the name of its content; the same again changes nothing.

        Args:
            archive: Its bytes.
            digest: Their SHA-256.
            on_bytes: Told of progress.
        """
        sent = 0

        class Body:
            """Read anew for each attempt: a stream that was begun cannot be sent again."""

            def __iter__(self) -> Iterator[bytes]:
                nonlocal sent
                on_bytes(-sent)
                sent = 0
                for start in range(0, len(archive), _PIECE_BYTES):
                    piece = archive[start : start + _PIECE_BYTES]
                    yield piece
                    sent += len(piece)
                    on_bytes(len(piece))

        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(archive)),
        }
        path = _path("artifacts", digest)
        self.http.data("PUT", path, content=Body(), headers=headers, timeout_s=TRANSFER_S)

    def download(self, digest: str, on_bytes: OnBytes = _nothing) -> bytes:
        """Return an archive, checked against its name.

        Raises:
            FabricUnavailable: The body broke off, or is not what its name says.
            ConfigError: It is larger than any project may be.
        """
        content = bytearray()
        path = _path("artifacts", digest)
        with self.http.stream("GET", path, timeout_s=TRANSFER_S) as response:
            for piece in response.iter_bytes(_PIECE_BYTES):
                content += piece
                on_bytes(len(piece))
                if len(content) > MAX_ARCHIVE_BYTES:
                    raise ConfigError(
                        f"archive {digest[:12]} is over {MAX_ARCHIVE_BYTES >> 20} MiB",
                        hint="no project is so large: what answers is no gateway of ours",
                    )
        seen = hashlib.sha256(content).hexdigest()
        if seen != digest:
            raise FabricUnavailable(
                f"archive {digest[:12]} came as something else ({seen[:12]})",
                hint="try again; if it stays so, push the version under a new number",
            )
        return bytes(content)

    def publish(self, archive: str, allow_secrets: Sequence[str] = ()) -> EnvironmentAnswer:
        """Publish an uploaded archive; the same content again changes nothing.

        Args:
            archive: Its SHA-256.
            allow_secrets: Files, or patterns, that are published although they look like secrets.
        """
        body = {"archive": archive, "allow_secrets": list(allow_secrets)}
        data = self.http.data("POST", "/publish", json=body, repeatable=True, timeout_s=TRANSFER_S)
        return _environment(data)

    # --- instances ------------------------------------------------------------------------------

    def create(
        self,
        environment: str,
        options: Mapping[str, Any],
        *,
        key: str | None = None,
        timeout_s: float = TRANSFER_S,
        attempts: int = ATTEMPTS,
    ) -> list[InstanceAnswer]:
        """Make instances and return them once they run.

        A lost answer is asked for again under the same key, so that nothing is made twice.

        Args:
            environment: ``name@version`` or ``name``.
            options: ``ttl, idle_timeout, engine, environment_variables, arguments, labels, owner,
                datasource, count``.
            key: What makes a repeated call the same one. None: a new one.
            timeout_s: How long one answer may take.
            attempts: How often it is asked at most.
        """
        data = self.http.data(
            "POST",
            "/instances",
            json={"envName": environment, "wait": True, **options},
            headers={"Idempotency-Key": key or secrets.token_hex(16)},
            repeatable=True,
            attempts=attempts,
            timeout_s=timeout_s,
        )
        return [_instance(row) for row in (data if isinstance(data, list) else [data])]

    def instances(self, limit: int, **filters: Any) -> list[InstanceAnswer]:
        """Return up to `limit` instances, the newest first.

        Args:
            limit: How many at most.
            filters: ``owner, label, status, env``; None is none.
        """
        return [_instance(row) for row in self._all("/instances", filters, limit)]

    def count_instances(self) -> int:
        """Return how many instances there are that this token may see."""
        data, headers = self.http.answer("GET", "/instances", params={"limit": 1})
        total = headers.get("X-Total-Count", "")
        return int(total) if total.isdecimal() else len(data or [])

    def instance(self, instance_id: str) -> InstanceAnswer:
        """Return an instance."""
        return _instance(self.http.data("GET", _path("instances", instance_id)))

    def delete(self, instance_id: str) -> None:
        """End an instance."""
        self.http.data("DELETE", _path("instances", instance_id), timeout_s=120.0)

    def check_health(self, instance_id: str) -> dict[str, Any]:
        """Return what an instance's health function says."""
        headers = {"AEnvCore-EnvInstance-ID": instance_id}
        return dict(self.http.data("GET", "/health", headers=headers) or {})

    def tools(self, instance_id: str) -> list[dict[str, Any]]:
        """Return the tools of an instance, as MCP lists them."""
        path = _path("instances", instance_id, "mcp")
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        headers = {"Accept": "application/json, text/event-stream"}
        with self.http.stream("POST", path, json=message, headers=headers) as response:
            response.read()
            answer = parse(Answer, _rpc(response.text), "tools/list").shown()
        return [dict(tool) for tool in (answer.get("result") or {}).get("tools") or []]

    def functions_of(self, instance_id: str) -> list[dict[str, Any]]:
        """Return the functions of an instance that are no tools."""
        headers = {"AEnvCore-EnvInstance-ID": instance_id}
        found = self.http.data("GET", "/functions/list", headers=headers) or []
        return [
            dict(one) for one in (found.get("functions", []) if isinstance(found, dict) else found)
        ]

    def renew(self, instance_id: str, ttl: str | float) -> InstanceAnswer:
        """Let an instance live `ttl` from now on; again and again if need be."""
        path = _path("instances", instance_id, "renew")
        return _instance(self.http.data("POST", path, json={"ttl": ttl}, repeatable=True))

    def exec(
        self, instance_id: str, command: Sequence[str] | str, timeout_s: float
    ) -> dict[str, Any]:
        """Run a command in an instance, once, and return what came of it."""
        body = {"command": command, "timeout": timeout_s}
        path = _path("instances", instance_id, "exec")
        data = self.http.data("POST", path, json=body, timeout_s=timeout_s + 30.0)
        return dict(data)

    def logs(self, instance_id: str, tail: int | None, follow: bool) -> Iterator[str]:
        """Yield what an instance printed; with `follow` until it ends."""
        params = {"tail": tail, "follow": "true" if follow else None}
        path = _path("instances", instance_id, "logs")
        limit_s = math.inf if follow else None  # an instance may print nothing for hours
        with self.http.stream("GET", path, params=params, timeout_s=limit_s) as response:
            yield from response.iter_text()

    def follow(self, instance_id: str) -> Iterator[InstanceAnswer]:
        """Yield an instance as it is now and whenever its status changes, until it has ended.

        Raises:
            FabricUnavailable: The gateway went away meanwhile; follow it again.
        """
        path = _path("instances", instance_id, "events")
        with self.http.stream("GET", path, timeout_s=_SILENCE_S) as response:
            event = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data" and event == "error":
                    raise from_wire(json.loads(value))
                elif name == "data":
                    found = _instance(json.loads(value))
                    yield found
                    if found.status in _ENDED:
                        return
        raise FabricUnavailable(f"the gateway stopped telling of {instance_id}")

    # --- pools, tokens, the hub -----------------------------------------------------------------

    def pools(self) -> list[dict[str, Any]]:
        """Return the warm pools."""
        return [dict(row) for row in self.http.data("GET", "/pools") or []]

    def set_pool(self, environment: str, count: int) -> Any:
        """Keep `count` sandboxes of an environment ready; 0: none."""
        body = {"environment": environment, "count": count}
        return self.http.data("PUT", "/pools", json=body, timeout_s=TRANSFER_S)

    def tokens(self) -> list[TokenAnswer]:
        """Return the tokens that this one may see, without their secrets."""
        return [parse(TokenAnswer, row, "/tokens") for row in self.http.data("GET", "/tokens")]

    def create_token(self, **wanted: Any) -> TokenAnswer:
        """Make a token; its secret is in this answer alone, so a lost one is not asked for again.

        Args:
            wanted: ``role, owner, instance_id, ttl, note``; None is none.
        """
        body = {key: value for key, value in wanted.items() if value is not None}
        path = "/tokens"
        if body.get("role") == "agent" and "instance_id" in body:
            path = _path("instances", body["instance_id"], "token")  # its owner is the token's
        answer: TokenAnswer = parse(
            TokenAnswer, self.http.data("POST", path, json=body), f"POST {path}"
        )
        return answer

    def revoke_token(self, token_id: str) -> bool:
        """End a token, and tell whether there was one."""
        return bool(self.http.data("DELETE", _path("tokens", token_id)))

    def hub(self) -> dict[str, Any]:
        """Return what the hub says of itself."""
        return dict(self.http.data("GET", "/hub"))

    def _all(self, path: str, filters: Mapping[str, Any], limit: int) -> list[Any]:
        """Return the first `limit` rows of a listing, page by page."""
        rows: list[Any] = []
        cursor: str | None = None
        while len(rows) < limit:
            params = {**filters, "limit": min(PAGE, limit - len(rows)), "cursor": cursor}
            data, headers = self.http.answer("GET", path, params=params)
            rows += data or []
            cursor = headers.get("X-Next-Cursor")
            if not cursor or not data:
                break
        return rows[:limit]


def _path(*parts: str) -> str:
    """Return a path whose parts cannot be taken for more than one."""
    for part in parts:
        if part in {"", ".", ".."}:
            raise ConfigError(f"{part!r} is no name")
    return "/" + "/".join(quote(part, safe="@") for part in parts)


def _rpc(body: str) -> Any:
    """Return the message of an answer that is JSON, or one event of a stream."""
    events = [line[5:] for line in body.splitlines() if line.startswith("data:")]
    with boundary(FabricUnavailable, "the answer cannot be read"):
        return json.loads(events[-1] if events else body)


def _environment(data: Any) -> EnvironmentAnswer:
    answer: EnvironmentAnswer = parse(EnvironmentAnswer, data, "environment")
    return answer


def _instance(data: Any) -> InstanceAnswer:
    answer: InstanceAnswer = parse(InstanceAnswer, data, "instance")
    return answer
