"""The gateway's REST API as blocking calls: environments, instances, services, pools, tokens."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import quote

from aenv_ray.client.gateway_http import GatewayHttp
from aenv_ray.client.gateway_records import (
    AuditAnswer,
    EnvironmentAnswer,
    GatewayRecord,
    HealthAnswer,
    HubAnswer,
    InstanceAnswer,
    NameAnswer,
    NodeAnswer,
    PoolAnswer,
    ServiceAnswer,
    TokenAnswer,
)
from aenv_ray.errors import ConfigError, FabricUnavailable, boundary, from_wire
from aenv_ray.project.archive import MAX_ARCHIVE_BYTES

PAGE: Final = 200
_SILENCE_S: Final = 60.0
"""An event stream that sends nothing for this long, not even a keep-alive, is broken."""
_PIECE_BYTES: Final = 256 * 1024
TRANSFER_S: Final = 300.0
"""Timeout for requests that load an archive or create an instance."""
_ENDED: Final = frozenset({"Failed", "Terminated"})

OnBytes = Callable[[int], None]
"""Called with the number of bytes transferred; negative when an upload starts over."""


def _nothing(count: int) -> None:
    del count


class Gateway:
    """Blocking calls to one gateway. Each raises the gateway's error, see `GatewayHttp.data`.

    Args:
        http: The HTTP client; closed with this object.
    """

    def __init__(self, http: GatewayHttp) -> None:
        self.http = http
        self.services = GatewayServices(http)

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self.http.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()

    def health(self) -> HealthAnswer:
        """Return the gateway's health; needs no token."""
        return HealthAnswer.read(self.http.data("GET", "/health", attempts=1))

    # --- environments ---------------------------------------------------------------------------

    def environment(self, name: str, version: str | None = None) -> EnvironmentAnswer:
        """Return a version of an environment; None is the highest one."""
        path = _path("env", name, version) if version else _path("env", name)
        return EnvironmentAnswer.read(self.http.data("GET", path))

    def environments(
        self, limit: int, *, offset: int = 0, **filters: Any
    ) -> list[EnvironmentAnswer]:
        """Return up to `limit` versions, by name and descending version.

        Args:
            limit: Maximum number of rows.
            offset: Number of rows to skip.
            filters: ``name, tag, text, status, latest``; None disables a filter.
        """
        rows = self._all("/env/", filters, limit + offset)
        return [EnvironmentAnswer.read(row) for row in rows[offset:]]

    def versions(self, name: str) -> list[EnvironmentAnswer]:
        """Return all versions of an environment, the highest first."""
        rows = self.http.data("GET", _path("env", name, "versions"))
        return [EnvironmentAnswer.read(row) for row in rows or []]

    def functions(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return the tools, functions and rewards of a version, without starting it."""
        rows = self.http.data("GET", _path("env", name, version, "functions"))
        return [dict(row) for row in rows or []]

    def release_environment(self, name: str, version: str) -> None:
        """Set the status of a version to Released, for good."""
        self.http.data("POST", _path("env", name, version, "release"))

    def delete_environment(self, name: str, version: str) -> None:
        """Delete a version."""
        self.http.data("DELETE", _path("env", name, version))

    # --- artifacts ------------------------------------------------------------------------------

    def has_artifact(self, digest: str) -> bool:
        """Return whether the gateway has an archive, by its SHA-256."""
        path = _path("artifacts", digest)
        with self.http.stream("HEAD", path, allowed=frozenset({404})) as response:
            return response.is_success

    def upload(self, archive: bytes, digest: str, on_bytes: OnBytes = _nothing) -> None:
        """Upload an archive; idempotent.

        Args:
            archive: The content.
            digest: Its SHA-256.
            on_bytes: Called with the progress.
        """
        sent = 0

        class Body:
            """Restarts for each attempt; a generator could be sent only once."""

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
        """Return an archive whose content has the digest.

        Raises:
            FabricUnavailable: The response broke off, or its content has another digest.
            ConfigError: It is larger than a project may be.
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
                        hint="check that this is a gateway's address: no project is that large",
                    )
        seen = hashlib.sha256(content).hexdigest()
        if seen != digest:
            raise FabricUnavailable(
                f"archive {digest[:12]} arrived with digest {seen[:12]}",
                hint="try again; if it repeats, push the project as a new version",
            )
        return bytes(content)

    def publish(self, archive: str, allow_secrets: Sequence[str] = ()) -> EnvironmentAnswer:
        """Publish an uploaded archive; idempotent for the same content.

        Args:
            archive: Its SHA-256.
            allow_secrets: Files or patterns to publish although they look like secrets.
        """
        body = {"archive": archive, "allow_secrets": list(allow_secrets)}
        data = self.http.data("POST", "/publish", json=body, repeatable=True, timeout_s=TRANSFER_S)
        return EnvironmentAnswer.read(data)

    # --- instances ------------------------------------------------------------------------------

    def create(
        self,
        environment: str,
        options: Mapping[str, Any],
        *,
        key: str | None = None,
        timeout_s: float = TRANSFER_S,
        attempts: int | None = None,
    ) -> list[InstanceAnswer]:
        """Create instances and return them once they run.

        If a response is lost, the request is repeated with the same idempotency key.

        Args:
            environment: ``name@version`` or ``name``.
            options: ``ttl, idle_timeout, engine, environment_variables, arguments, labels, owner,
                datasource, count``.
            key: Idempotency key. None generates one.
            timeout_s: Timeout for one response.
            attempts: How often the request is sent at most; None: the client's default.
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
        return [InstanceAnswer.read(row) for row in (data if isinstance(data, list) else [data])]

    def instances(self, limit: int, **filters: Any) -> list[InstanceAnswer]:
        """Return up to `limit` instances, the newest first.

        Args:
            limit: Maximum number of rows.
            filters: ``owner, label, status, env``; None disables a filter.
        """
        return [InstanceAnswer.read(row) for row in self._all("/instances", filters, limit)]

    def count_instances(self) -> int:
        """Return the number of instances that the token may see."""
        data, headers = self.http.answer("GET", "/instances", params={"limit": 1})
        total = headers.get("X-Total-Count", "")
        return int(total) if total.isdecimal() else len(data or [])

    def instance(self, instance_id: str) -> InstanceAnswer:
        """Return an instance."""
        return InstanceAnswer.read(self.http.data("GET", _path("instances", instance_id)))

    def delete(self, instance_id: str) -> None:
        """End an instance."""
        self.http.data("DELETE", _path("instances", instance_id), timeout_s=120.0)

    def check_health(self, instance_id: str) -> dict[str, Any]:
        """Return the result of an instance's health check."""
        headers = {"AEnvCore-EnvInstance-ID": instance_id}
        return dict(self.http.data("GET", "/health", headers=headers) or {})

    def tools(self, instance_id: str) -> list[dict[str, Any]]:
        """Return the tools of an instance as MCP ``Tool`` objects."""
        return self._listed(instance_id, "tools/list", "tools")

    def resources(self, instance_id: str) -> list[dict[str, Any]]:
        """Return its resources as MCP ``Resource`` and ``ResourceTemplate`` objects."""
        fixed = self._listed(instance_id, "resources/list", "resources")
        return fixed + self._listed(instance_id, "resources/templates/list", "resourceTemplates")

    def prompts(self, instance_id: str) -> list[dict[str, Any]]:
        """Return its prompts as MCP ``Prompt`` objects."""
        return self._listed(instance_id, "prompts/list", "prompts")

    def _listed(self, instance_id: str, method: str, key: str) -> list[dict[str, Any]]:
        path = _path("instances", instance_id, "mcp")
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}
        headers = {"Accept": "application/json, text/event-stream"}
        with self.http.stream("POST", path, json=message, headers=headers) as response:
            response.read()
            answer = GatewayRecord.read(_rpc(response.text, method)).shown()
        return [dict(one) for one in (answer.get("result") or {}).get(key) or []]

    def functions_of(self, instance_id: str) -> list[dict[str, Any]]:
        """Return the functions of an instance, without its tools."""
        headers = {"AEnvCore-EnvInstance-ID": instance_id}
        found = self.http.data("GET", "/functions/list", headers=headers) or []
        rows = found.get("functions", []) if isinstance(found, dict) else found
        return [dict(row) for row in rows]

    def renew(self, instance_id: str, ttl: str | float) -> InstanceAnswer:
        """Move the deadline of an instance to `ttl` from now."""
        path = _path("instances", instance_id, "renew")
        return InstanceAnswer.read(self.http.data("POST", path, json={"ttl": ttl}, repeatable=True))

    def exec(
        self, instance_id: str, command: Sequence[str] | str, timeout_s: float
    ) -> dict[str, Any]:
        """Run a command in an instance and return its result; never sent twice."""
        body = {"command": command, "timeout": timeout_s}
        path = _path("instances", instance_id, "exec")
        data = self.http.data("POST", path, json=body, timeout_s=timeout_s + 30.0)
        return dict(data)

    def logs(self, instance_id: str, tail: int | None, follow: bool) -> Iterator[str]:
        """Yield the output of an instance; with `follow` until it ends."""
        params = {"tail": tail, "follow": "true" if follow else None}
        path = _path("instances", instance_id, "logs")
        limit_s = math.inf if follow else None  # an instance may print nothing for hours
        with self.http.stream("GET", path, params=params, timeout_s=limit_s) as response:
            yield from response.iter_text()

    def follow(self, instance_id: str) -> Iterator[InstanceAnswer]:
        """Yield an instance now and at each change of its status, until it has ended.

        Raises:
            FabricUnavailable: The connection broke; call it again.
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
                    found = InstanceAnswer.read(json.loads(value))
                    yield found
                    if found.status in _ENDED:
                        return
        raise FabricUnavailable(
            f"the event stream of {instance_id} ended early",
            hint="follow it again; the instance is not affected",
        )

    # --- pools, tokens, the hub -----------------------------------------------------------------

    def pools(self) -> list[PoolAnswer]:
        """Return the warm pools."""
        return [PoolAnswer.read(row) for row in self.http.data("GET", "/pools") or []]

    def set_pool(self, environment: str, count: int) -> PoolAnswer:
        """Keep `count` sandboxes of an environment ready; 0 removes the pool."""
        body = {"environment": environment, "count": count}
        return PoolAnswer.read(self.http.data("PUT", "/pools", json=body, timeout_s=TRANSFER_S))

    def nodes(self) -> list[NodeAnswer]:
        """Return the nodes of the cluster, and whether they take instances."""
        return [NodeAnswer.read(row) for row in self.http.data("GET", "/nodes") or []]

    def tokens(self) -> list[TokenAnswer]:
        """Return the tokens that the caller's token may see, without their secrets."""
        return [TokenAnswer.read(row) for row in self.http.data("GET", "/tokens")]

    def create_token(self, **wanted: Any) -> TokenAnswer:
        """Create a token; only this response has its secret, so the request is never repeated.

        Args:
            wanted: ``role, owner, instance_id, ttl, note``; None leaves out a field.
        """
        body = _given(wanted)
        path = "/tokens"
        if body.get("role") == "agent" and "instance_id" in body:
            path = _path("instances", body["instance_id"], "token")  # the token gets its owner
        return TokenAnswer.read(self.http.data("POST", path, json=body))

    def revoke_token(self, token_id: str) -> bool:
        """Revoke a token; returns whether it existed."""
        return bool(self.http.data("DELETE", _path("tokens", token_id)))

    def name(self, name: str) -> NameAnswer:
        """Return the owner and the grants of a name."""
        return NameAnswer.read(self.http.data("GET", _path("names", name)))

    def grant(self, name: str, owner: str, right: str | None) -> NameAnswer:
        """Grant ``use`` or ``publish`` of a name to an owner, or ``*``; None revokes it."""
        path = _path("names", name, "grants", owner)
        if right is None:
            return NameAnswer.read(self.http.data("DELETE", path))
        return NameAnswer.read(self.http.data("PUT", path, json={"right": right}))

    def audit_log(self, limit: int, before: str | None = None) -> list[AuditAnswer]:
        """Return records of the audit log, newest first; `before`: older than this id."""
        params = {"limit": limit, "before": before}
        return [AuditAnswer.read(row) for row in self.http.data("GET", "/audit", params=params)]

    def hub(self) -> HubAnswer:
        """Return the hub's status."""
        return HubAnswer.read(self.http.data("GET", "/hub"))

    def _all(self, path: str, filters: Mapping[str, Any], limit: int) -> list[Any]:
        """Return the first `limit` rows of a paged listing."""
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


class GatewayServices:
    """Blocking calls about services.

    Args:
        http: The HTTP client.
    """

    def __init__(self, http: GatewayHttp) -> None:
        self._http = http

    def create(self, environment: str, **options: Any) -> ServiceAnswer:
        """Create a service and return it at once, with status Creating.

        Args:
            environment: ``name`` or ``name@version``.
            options: Fields of the request body; None leaves out a field.
        """
        body = {"envName": environment, **_given(options)}
        return ServiceAnswer.read(self._http.data("POST", "/env-service", json=body))

    def update(self, service_id: str, **changes: Any) -> ServiceAnswer:
        """Change a service; idempotent."""
        return ServiceAnswer.read(
            self._http.data("PUT", _service_path(service_id), json=_given(changes))
        )

    def get(self, service_id: str) -> ServiceAnswer:
        """Return a service."""
        return ServiceAnswer.read(self._http.data("GET", _service_path(service_id)))

    def find(self, environment: str | None = None) -> list[ServiceAnswer]:
        """Return services, the newest first; only of ``name`` or ``name@version`` if given."""
        rows = self._http.data("GET", _service_path(environment or "*", "list"))
        return [ServiceAnswer.read(row) for row in rows or []]

    def delete(self, service_id: str, *, delete_storage: bool = False) -> None:
        """End a service, and delete its storage if asked to."""
        query = {"deleteStorage": "true"} if delete_storage else None
        self._http.data("DELETE", _service_path(service_id), params=query)

    def logs(self, service_id: str, tail: int | None) -> str:
        """Return the output of the service's sandboxes."""
        path = _service_path(service_id, "logs")
        with self._http.stream("GET", path, params={"tail": tail}) as response:
            response.read()
            return response.text


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _service_path(*parts: str) -> str:
    return _path("env-service", *parts)


def _path(*parts: str) -> str:
    """Return a path of quoted parts; none can add a level or leave its place."""
    for part in parts:
        if part in {"", ".", ".."}:
            raise ConfigError(
                f"invalid name {part!r}",
                hint="give the name of an environment, service or instance",
            )
    return "/" + "/".join(quote(part, safe="@*") for part in parts)


def _rpc(body: str, method: str) -> Any:
    """Return the JSON-RPC message of a response that is JSON or an event stream."""
    events = [line[5:] for line in body.splitlines() if line.startswith("data:")]
    with boundary(FabricUnavailable, f"invalid response to {method}"):
        return json.loads(events[-1] if events else body)
