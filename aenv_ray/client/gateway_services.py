"""A gateway's services, as calls."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from aenv_ray.client.gateway_http import GatewayHttp
from aenv_ray.client.gateway_records import ServiceAnswer, parse
from aenv_ray.errors import ConfigError


class GatewayServices:
    """Calls about services; each blocks, and raises what the gateway answered.

    Args:
        http: How the gateway is reached.
    """

    def __init__(self, http: GatewayHttp) -> None:
        self._http = http

    def create(self, environment: str, **options: Any) -> ServiceAnswer:
        """Make a service; it is Creating then.

        Args:
            environment: ``name`` or ``name@version``.
            options: Fields of the route's body; None is none.
        """
        body = {"envName": environment, **_given(options)}
        return _service(self._http.data("POST", "/env-service", json=body))

    def update(self, service_id: str, **changes: Any) -> ServiceAnswer:
        """Change a service; the same change again changes nothing."""
        path = _path(service_id)
        return _service(self._http.data("PUT", path, json=_given(changes), repeatable=True))

    def get(self, service_id: str) -> ServiceAnswer:
        """Return a service."""
        return _service(self._http.data("GET", _path(service_id)))

    def find(self, environment: str | None = None) -> list[ServiceAnswer]:
        """Return services, the newest first; of one environment, ``name`` or ``name@version``."""
        rows = self._http.data("GET", f"{_path(environment or '*')}/list")
        return [_service(row) for row in rows or []]

    def delete(self, service_id: str, *, delete_storage: bool = False) -> None:
        """End a service; with `delete_storage`, what it kept is deleted once it has ended."""
        query = {"deleteStorage": "true"} if delete_storage else None
        self._http.data("DELETE", _path(service_id), params=query)

    def logs(self, service_id: str, tail: int | None) -> str:
        """Return what its sandboxes printed."""
        path = f"{_path(service_id)}/logs"
        with self._http.stream("GET", path, params={"tail": tail}) as response:
            response.read()
            return response.text


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _path(name: str) -> str:
    if name in {"", ".", ".."}:
        raise ConfigError(f"{name!r} is no name")
    return "/env-service/" + quote(name, safe="@*")


def _service(data: Any) -> ServiceAnswer:
    answer: ServiceAnswer = parse(ServiceAnswer, data, "service")
    return answer
