"""Functions, rewards and health of an instance, with AEnvironment's paths.

Path and method are those of the instance's public door, including the endpoints that its functions
chose. Headers or the path name the instance, see `targets`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import pydantic_core
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Send

from aenv_ray.actors.calls.json_calls import JsonCall, JsonCalls
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.engines.base import read_json
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    ConfigError,
    ToolInputInvalid,
    ToolNotFound,
)
from aenv_ray.runtime.api.registry import DEFAULT_REWARD_PATH
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.async_calls import TIMEOUT_S
from aenv_ray.runtime.door.dispatch import HEALTHY
from aenv_ray.runtime.public.requests import (
    body_arguments,
    query_arguments,
    read_arguments,
    read_meta,
)
from aenv_ray.runtime.public.server import HEALTH_TIMEOUT_S
from aenv_ray.serve.gateway.auth import CheckAgain
from aenv_ray.serve.gateway.data.http import JSON, watched_disconnect
from aenv_ray.serve.gateway.data.targets import Target

MAX_OFFERS: Final = 1000
"""Instances whose functions a replica caches; they never change while an instance lives."""
MAX_OFFER_BYTES: Final = 16 * 1024 * 1024
"""Total size of the cached listings: an environment decides how large its listing is."""
MAX_LISTING_BYTES: Final = 2 * 1024 * 1024
MAX_FUNCTIONS: Final = 1000
_PARAMETER: Final = re.compile(r"\{[^{}]*?(:path)?\}")


class _Listed(BaseModel):
    """One entry of a listing, as far as the gateway uses it."""

    name: str = Field(max_length=200)
    method: str = Field(max_length=20)
    endpoint: str = Field(max_length=1000)
    input_schema: dict[str, Any] | None = Field(default=None, alias="inputSchema")


class _Listing(BaseModel):
    """What a sandbox answers to the question for its functions, which may be anything."""

    functions: tuple[_Listed, ...] = Field(max_length=MAX_FUNCTIONS)
    health: tuple[_Listed, ...] = Field(max_length=1)


@dataclass(frozen=True)
class _Function:
    """A function of an environment, with its route."""

    name: str
    method: str
    schema: Mapping[str, Any]
    route: Route


@dataclass(frozen=True)
class _Offer:
    """The functions and the health check of an environment."""

    functions: tuple[_Function, ...]
    health_schema: Mapping[str, Any]


class FunctionProxy:
    """Answers all requests except ``/mcp``."""

    def __init__(
        self,
        find: Callable[[Request], Awaitable[Target]],
        calls: JsonCalls,
        check_again: CheckAgain,
    ) -> None:
        self._find = find
        self._calls = calls
        self._check_again = check_again
        self._offers: BoundedCache[str, _Offer] = BoundedCache(
            MAX_OFFERS, max_bytes=MAX_OFFER_BYTES
        )

    async def serve(self, request: Request, send: Send) -> Response:
        """Return the answer to a request.

        Raises:
            AenvError: The request names no instance, or the call failed.
            BadRequest: The body does not hold valid arguments.
        """
        del send
        target = await self._find(request)
        target.check_not_agent()
        path, method = request.scope["path"], request.method
        if path == "/health" and method == "GET":
            return await self._health(target, request)
        if path == "/functions/list" and method == "GET":
            listing = await self._call(target, request, "aenv/functions", {})
            return _json(b'{"success":true,"data":' + listing + b"}")
        if path == DEFAULT_REWARD_PATH or path.startswith(f"{DEFAULT_REWARD_PATH}/"):
            _check_method(request, "POST")
            named = path.removeprefix(DEFAULT_REWARD_PATH).removeprefix("/")
            name = named or request.query_params.get("name")
            params = {"name": name, "arguments": await body_arguments(request)}
            return _data(await self._call(target, request, "aenv/reward", params))
        function, in_path = await self._function(target, request)
        arguments = await read_arguments(request, function.method, function.schema)
        params = {"name": function.name, "arguments": {**in_path, **arguments}}
        return _data(await self._call(target, request, "aenv/function", params))

    async def _call(
        self, target: Target, request: Request, method: str, params: Mapping[str, Any]
    ) -> bytes:
        call = JsonCall(target.instance_id, method, params, read_meta(request), target.session)
        await request.body()  # after the body, `receive` reports the disconnect of the client
        await self._check_again(request)  # the body may have taken long, and so may the call
        async with watched_disconnect(request.receive) as disconnect:
            result = await self._calls.call(call, disconnect)
        await self._check_again(request)
        return result

    # --- functions --------------------------------------------------------------------------

    async def _function(
        self, target: Target, request: Request
    ) -> tuple[_Function, Mapping[str, Any]]:
        """Return the function that a request names, and the arguments in its path."""
        allowed = []
        functions = (await self._offer(target, request)).functions
        asked = {**request.scope, "path_params": {}}
        for function in functions:
            match, scope = function.route.matches(asked)
            if match is Match.FULL:
                return function, scope["path_params"]
            if match is Match.PARTIAL:
                allowed.append(function.method)
        path = request.scope["path"]
        if allowed:
            _check_method(request, *allowed)
        known = ", ".join(sorted(f.name for f in functions)) or "none"
        raise ToolNotFound(
            f"no function has the path {path}; the environment's functions are: {known}",
            hint="GET /functions/list shows their endpoints",
        )

    async def _offer(self, target: Target, request: Request) -> _Offer:
        known = self._offers.get(target.instance_id)
        if known is None:
            listed = await self._call(target, request, "aenv/functions", {})
            known = _offer(target.instance_id, listed)
            self._offers.put(target.instance_id, known, size_bytes=len(listed))
        return known

    # --- health -----------------------------------------------------------------------------

    async def _health(self, target: Target, request: Request) -> Response:
        schema = (await self._offer(target, request)).health_schema
        params = {"arguments": query_arguments(request, schema)}
        meta = {TIMEOUT_S: HEALTH_TIMEOUT_S, **read_meta(request)}
        call = JsonCall(target.instance_id, "aenv/health", params, meta, target.session)
        try:
            async with watched_disconnect(request.receive) as disconnect:
                result = await self._calls.call(call, disconnect)
            data = read_json(result).get("data")
        except AenvError as exc:
            if isinstance(exc, (ToolInputInvalid, *INFRASTRUCTURE)):
                raise
            data = {"status": "unhealthy", "message": exc.message, "code": exc.code}
        if not isinstance(data, dict) or not isinstance(data.get("status"), str):
            raise ConfigError(
                f"the health check of {target.instance_id} did not return an object with a text "
                "under `status`",
                hint="update aenv-ray in its image: its runtime may be of another version",
            )
        if data["status"] == "ok":
            data["status"] = "healthy"  # AEnvironment's client waits for this or "success"
        status = 200 if data["status"] in HEALTHY else 503
        return _json(to_json({"success": True, "data": data}), status)


def _offer(instance_id: str, listed: bytes) -> _Offer:
    """Return what a listing offers; the sandbox that sent it is not trusted.

    Raises:
        ConfigError: It is too long, or not a listing.
    """
    if len(listed) > MAX_LISTING_BYTES:
        raise ConfigError(
            f"the list of functions of {instance_id} has {len(listed)} bytes; the limit is "
            f"{MAX_LISTING_BYTES}",
            hint="shorten the schemas of its functions, or call it over Ray",
        )
    try:
        listing = _Listing.model_validate(pydantic_core.from_json(listed))
    except (ValidationError, ValueError) as exc:
        raise ConfigError(
            f"{instance_id} returned a malformed list of functions",
            hint=f"give it at most {MAX_FUNCTIONS} functions; if it has fewer, update aenv-ray in "
            "its image: its runtime may be of another version",
        ) from exc
    functions = tuple(
        _Function(one.name, one.method, one.input_schema or {}, _route(one))
        for one in listing.functions
    )
    schema = listing.health[0].input_schema if listing.health else None
    return _Offer(functions, schema or {})


def _route(listed: _Listed) -> Route:
    """Return the route that a function chose, or the default route if that is invalid."""
    try:
        if is_simple(listed.endpoint):
            return Route(listed.endpoint, _nothing, methods=[listed.method])
    except (ValueError, AssertionError):  # Starlette rejects a path such as "/{a}/{a}"
        pass
    return Route(f"/functions/{quote(listed.name, safe='')}", _nothing, methods=["POST"])


def is_simple(endpoint: str) -> bool:
    """Return whether a path is matched in linear time.

    Starlette makes a regular expression of it. Several parameters that could take each other's
    characters need polynomial time, in the event loop that serves all owners.
    """
    parameters = list(_PARAMETER.finditer(endpoint))
    if sum(one[1] is not None for one in parameters) > 1:
        return False
    return all(len(_PARAMETER.findall(part)) <= 1 for part in endpoint.split("/"))


async def _nothing(request: Request) -> Response:
    """Endpoint of a route that is only matched, never called."""
    del request
    return Response()


def _check_method(request: Request, *allowed: str) -> None:
    if request.method not in allowed:
        raise MethodRefused(
            f"{request.url.path} does not accept {request.method}, only {', '.join(allowed)}",
            hint="GET /functions/list shows the method of each function",
        )


class MethodRefused(ConfigError):
    """The path does not accept this HTTP method; nothing ran."""

    http_status = 405


def _data(result: bytes) -> Response:
    # The bytes that the fast door sent, not decoded and encoded again.
    return _json(b'{"success":true,' + result[1:])


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=JSON)
