"""One control route: what it takes, what it answers and who may ask, said once.

The route that serves and the OpenAPI document that describes both come from the same object.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.serve.gateway.deps import Deps, Principal
from aenv_ray.serve.gateway.envelope import success
from aenv_ray.serve.gateway.limits import RequestRate, read_body


class Access(StrEnum):
    """Who may use a route."""

    PUBLIC = "public"
    """Everybody, without a token."""
    OWNER = "owner"
    """Owners and administrators."""
    ADMIN = "admin"
    """Administrators."""
    CAPABILITY = "capability"
    """Whoever has a signed URL; the handler checks."""


class Nothing(BaseModel):
    """No parameters."""


Q = TypeVar("Q", bound=BaseModel)
B = TypeVar("B", bound=BaseModel | None)


@dataclass(frozen=True)
class Asked(Generic[Q, B]):
    """One request, parsed."""

    request: Request
    principal: Principal
    path: Mapping[str, str]
    query: Q
    body: B


Handler = Callable[[Asked[Any, Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Endpoint:
    """A route of the control side."""

    method: str
    path: str
    handle: Handler
    """Returns the data of the answer, or a whole `Response`."""
    summary: str
    tag: str
    access: Access = Access.OWNER
    query: type[BaseModel] = Nothing
    body: type[BaseModel] | None = None
    data: Any = None
    """Type of the answer's data; None: null."""
    errors: tuple[type[AenvError], ...] = ()
    """Beyond those that every route may answer."""
    media: str = "application/json"
    """Of the answer."""
    is_plain: bool = False
    """The answer carries no envelope; text never does."""
    upload: bool = False
    """The body is a stream of bytes that the handler reads."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that the request may carry, with what they mean."""

    def route(self, deps: Deps, rate: RequestRate) -> Route:
        """Return the route that serves it."""

        async def serve(request: Request) -> Response:
            request.scope["aenv.route"] = f"{self.method} {self.path}"
            principal = await self._admitted(request, deps, rate)
            asked = Asked(
                request,
                principal,
                request.path_params,
                parse_query(self.query, request),
                await self._parsed_body(request, deps),
            )
            answer = await self.handle(asked)
            return answer if isinstance(answer, Response) else success(answer)

        route = Route(self.path, serve, methods=[self.method])
        # A rest of a path may hold any character, a line's end too: its handler judges it.
        route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
        return route

    async def _admitted(self, request: Request, deps: Deps, rate: RequestRate) -> Principal:
        if self.access in {Access.PUBLIC, Access.CAPABILITY}:
            return NOBODY
        principal = await deps.authenticate(request)
        rate.take(principal.token_id)
        principal.check_not_agent()
        if self.access is Access.ADMIN:
            principal.check_admin()
        return principal

    async def _parsed_body(self, request: Request, deps: Deps) -> BaseModel | None:
        if self.body is None:
            return None
        try:
            raw = await read_body(request, deps.settings.max_body_bytes)
        except ClientDisconnect:
            raise ConfigError("the client left while it sent the body") from None
        return parse_body(self.body, raw)


NOBODY: Final = Principal(role=None, owner="", instance_id=None, token_id="")
"""Who asks where no token is needed."""


def parse_query(model: type[Q], request: Request) -> Q:
    """Return a query string as a model.

    Raises:
        ConfigError: A parameter is unknown or has a value that cannot be.
    """
    given = request.query_params
    repeated = {
        name
        for name, info in model.model_fields.items()
        if str(info.annotation).startswith(("tuple", "list"))
    }
    values: dict[str, Any] = {
        name: given.getlist(name) if name in repeated else given[name] for name in given
    }
    return _validated(model, values, "query parameter")


def parse_body(model: type[BaseModel], raw: bytes) -> BaseModel:
    """Return a JSON body as a model.

    Raises:
        ConfigError: It is no JSON object, or a field has a value that cannot be.
    """
    try:
        values = pydantic_core.from_json(raw or b"{}")
    except ValueError as exc:
        raise ConfigError(f"the body is no JSON: {exc}") from None
    if not isinstance(values, dict):
        raise ConfigError("the body is no JSON object")
    return _validated(model, values, "field")


def _validated(model: type[Q], values: dict[str, Any], what: str) -> Q:
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        problems = [
            f"{what} {'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in exc.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("; ".join(problems)) from None
