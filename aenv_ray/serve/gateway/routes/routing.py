"""How FastAPI serves the control routes: admission, JSON bodies, envelopes, errors.

A handler is a function with FastAPI's annotations. `ControlRoute` adds what all handlers share:

- The token is checked before the body is read: without one, a client cannot make a replica read.
- A body is JSON whatever its ``Content-Type`` says, has a size limit, and may be empty.
- What a handler returns becomes the ``data`` of an envelope; an error becomes an error envelope.
"""

# Without `from __future__ import annotations`: older versions of FastAPI do not resolve the
# annotations of callable objects, such as `TokenGuard`, if they are strings.

import functools
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, get_type_hints

import pydantic_core
from fastapi import APIRouter, Depends
from fastapi.datastructures import DefaultPlaceholder
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aenv_ray.errors import (
    AenvError,
    ConfigError,
    FabricUnavailable,
    Forbidden,
    InternalError,
    RateLimited,
    Unauthorized,
)
from aenv_ray.hub.records import AuditRecord, Role
from aenv_ray.serve.gateway.data.document import BODY_FAILURES, OR, Failures, failures
from aenv_ray.serve.gateway.envelope import error_response, success
from aenv_ray.serve.gateway.requests import ClientLeft, NoAnswer, read_body
from aenv_ray.serve.gateway.routes.control import RouteCall

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]


class Envelope(BaseModel, Generic[T]):
    """A successful answer."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    success: Literal[True] = True
    code: Literal[0] = 0
    message: str = ""
    data: T


async def call_of(request: Request) -> RouteCall:
    """Return a request as handlers receive it."""
    return RouteCall(request.app.state.control, request)


class TokenGuard(SecurityBase):
    """Admits requests whose token has at least a given role, within its rate limit.

    `ControlRoute` calls `admit` before it reads the body. As a FastAPI dependency, the guard then
    gives handlers the call, and documents that the route needs a token.
    """

    scheme_name = "token"
    model = HTTPBearer()

    def __init__(self, least: Role) -> None:
        self.least = least

    async def admit(self, request: Request) -> None:
        """Check the token of a request.

        Raises:
            Unauthorized: The token is missing or invalid.
            Forbidden: Its role is not sufficient.
            RateLimited: The token sends too many requests.
        """
        control = (await call_of(request)).control
        principal = await control.deps.authenticate(request)
        control.rate.take(principal.token_id)
        principal.check_role(self.least)

    async def __call__(self, request: Request) -> RouteCall:
        """Return an admitted request as its handler receives it."""
        return await call_of(request)


PublicCall = Annotated[RouteCall, Depends(call_of)]
"""Parameter of a handler that needs no token."""
UserCall = Annotated[RouteCall, Depends(TokenGuard(Role.USER))]
"""Parameter of a handler for every role but agents."""
PublisherCall = Annotated[RouteCall, Depends(TokenGuard(Role.PUBLISHER))]
"""Parameter of a handler for publishers and administrators."""
AdminCall = Annotated[RouteCall, Depends(TokenGuard(Role.ADMIN))]
"""Parameter of a handler for administrators."""


class ControlRoute(APIRoute):
    """A control route; see the module."""

    methods: set[str]

    def __init__(
        self,
        path: str,
        endpoint: Handler,
        *,
        response_model: Any = DefaultPlaceholder(None),  # noqa: B008  # FastAPI's "not given"
        **options: Any,
    ) -> None:
        if isinstance(response_model, DefaultPlaceholder):
            data = get_type_hints(endpoint, include_extras=True)["return"]
            is_response = inspect.isclass(data) and issubclass(data, Response)
            response_model = None if is_response else Envelope[data]  # type: ignore[valid-type]  # a type at run time
        doc = inspect.getdoc(endpoint) or ""
        options["summary"] = doc.partition("\n")[0].rstrip(".")
        super().__init__(path, _in_envelope(endpoint), response_model=response_model, **options)
        self.operation_id = _operation_id(self.method, path)
        self.description = ""
        self.response_description = self.summary or ""
        self.responses = _merged(self.responses, self._common_failures())
        # A path parameter may hold any character, an escaped line break too.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what serves a request; overrides FastAPI's."""
        handle = super().get_route_handler()
        guards = self.guards
        reads_body = self.body_field is not None
        name = f"{self.method} {self.path}"
        action = AUDITED.get(name)

        async def serve(request: Request) -> Response:
            request.scope["aenv.route"] = name
            request.scope["aenv.audit"] = {}
            try:
                try:
                    for guard in guards:
                        await guard.admit(request)
                except Forbidden as exc:
                    if action is not None:
                        await _record(request, action, exc)
                    raise
                answering = handle(await self._with_body(request) if reads_body else request)
                return await (answering if action is None else _audited(request, action, answering))
            except (ClientLeft, ClientDisconnect):
                return NoAnswer()
            except RequestValidationError as exc:
                return error_response(request, validation_error(exc.errors()))
            except Exception as exc:  # noqa: BLE001  # logged there, and answered as our bug
                return error_response(request, exc)

        return serve

    async def _with_body(self, request: Request) -> Request:
        parsed = await _parsed(request)
        if self.guards:  # the body may have taken long
            await (await call_of(request)).control.deps.authenticate.check_again(request)
        return parsed

    @property
    def method(self) -> str:
        """The one HTTP method that the route is documented with."""
        return next(iter(self.methods - {"HEAD"}), "HEAD")

    @property
    def guards(self) -> list[TokenGuard]:
        """The checks of a request's token; none for a public route."""
        calls = [dependency.call for dependency in self.dependant.dependencies]
        return [call for call in calls if isinstance(call, TokenGuard)]

    def _common_failures(self) -> Failures:
        errors: tuple[type[AenvError], ...] = (ConfigError, InternalError, FabricUnavailable)
        if self.guards:
            errors += (Unauthorized, Forbidden, RateLimited)
        found = failures(*errors)
        has_body = self.body_field is not None or "requestBody" in (self.openapi_extra or {})
        if has_body:  # it stops coming, or is too large
            found |= BODY_FAILURES
        return found


AUDITED: Final = {
    "POST /publish": "publish",
    "POST /env": "publish",
    "POST /env/": "publish",
    "PUT /env/{name}/{version}": "publish",
    "POST /env/{name}/{version}/status": "status",
    "POST /env/{name}/{version}/release": "status",
    "DELETE /env/{name}/{version}": "delete",
    "PUT /names/{name}/grants/{owner:path}": "grant.set",
    "DELETE /names/{name}/grants/{owner:path}": "grant.revoke",
    "POST /tokens": "token.create",
    "POST /instances/{id}/token": "token.create",
    "DELETE /tokens/{id}": "token.revoke",
    "PUT /quotas/{subject:path}": "quota.set",
    "DELETE /quotas/{subject:path}": "quota.delete",
    "PUT /pools": "pool.set",
}
"""Routes whose requests are recorded in the audit log, and the name of the action."""


async def _audited(
    request: Request, action: str, answering: Coroutine[Any, Any, Response]
) -> Response:
    """Return the answer to an admitted request, after recording its outcome in the audit log.

    Raises:
        Exception: What answering raises; it is recorded too.
    """
    try:
        response = await answering
    except BaseException as exc:
        await _record(request, action, exc)
        raise
    await _record(request, action)
    return response


async def _record(request: Request, action: str, error: BaseException | None = None) -> None:
    """Record an attempt of an authenticated caller in the audit log."""
    told = dict(request.scope["aenv.audit"])
    subject, outcome = told.pop("subject", ""), told.pop("outcome", "ok")
    if error is not None:
        outcome = InternalError.code
    if isinstance(error, AenvError):
        outcome, told["error"] = error.code, error.message
    call = await call_of(request)
    parts = request.path_params
    names = [parts[part] for part in ("name", "subject", "id") if part in parts]
    version = f"@{parts['version']}" if "version" in parts else ""
    record = AuditRecord(
        actor=call.caller.owner,
        role=call.caller.role,
        token_id=call.caller.token_id,
        action=action,
        subject=subject or "".join(names) + version,
        outcome=outcome,
        detail=told,
        request_id=request.scope.get("aenv.request_id", ""),
    )
    try:
        await call.hub.record(record)
    except AenvError as exc:
        logger.warning("not in the audit log: %s (%s)", record, exc.message)


def control_router(tag: str) -> APIRouter:
    """Return an empty router for control routes."""
    return APIRouter(tags=[tag], route_class=ControlRoute)


def _merged(one: Failures, other: Failures) -> Failures:
    merged = one | other
    for status in one.keys() & other.keys():
        codes = {code for part in (one, other) for code in part[status]["description"].split(OR)}
        merged[status] = merged[status] | {"description": OR.join(sorted(codes))}
    return dict(sorted(merged.items(), key=lambda item: str(item[0])))


def _operation_id(method: str, path: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", path.lower()).strip("_")
    slash = "_all" if path.endswith("/") else ""
    return f"{method.lower()}_{words}{slash}"


def _in_envelope(endpoint: Handler) -> Handler:
    @functools.wraps(endpoint)
    async def answer(**arguments: Any) -> Response:
        data = await endpoint(**arguments)
        return data if isinstance(data, Response) else success(data)

    # FastAPI would look names up in this module, and not in the endpoint's.
    vars(answer)["__signature__"] = inspect.signature(endpoint, eval_str=True)
    return answer


# --- bodies --------------------------------------------------------------------------------------


class _JsonRequest(Request):
    """A request whose body is JSON whatever its ``Content-Type`` says, read and parsed already."""

    def __init__(self, request: Request, raw: bytes, values: Mapping[str, Any]) -> None:
        headers = [item for item in request.scope["headers"] if item[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._raw = raw
        self._values = values

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._values


async def _parsed(request: Request) -> Request:
    """Return a request with its JSON body.

    Raises:
        ConfigError: The body is not a JSON object.
        HTTPException: See `read_body`.
    """
    limit_bytes = (await call_of(request)).control.deps.settings.max_body_bytes
    raw = await read_body(request, limit_bytes) or b"{}"
    return _JsonRequest(request, raw, parse_json_object(raw))


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ConfigError: It is not one.
    """
    try:
        values = pydantic_core.from_json(raw)
    except ValueError as exc:
        raise ConfigError(
            f"the request body is not valid JSON: {exc}", hint="send a JSON object, in UTF-8"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            "the request body is not a JSON object", hint="send {} if there is nothing to say"
        )
    return values


M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], values: Mapping[str, Any]) -> M:
    """Return a JSON object as a model.

    Raises:
        ConfigError: A field is missing or invalid.
    """
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        problems = exc.errors(include_url=False, include_input=False)
        raise validation_error([p | {"loc": ("body", *p["loc"])} for p in problems]) from None


_PLACES: Final = {"query": "query parameter", "body": "field"}


def validation_error(problems: Any) -> ConfigError:
    """Return pydantic's or FastAPI's list of problems as one of our errors.

    Args:
        problems: Each with ``loc``, which begins with ``query``, ``body``, ``path`` or ``header``,
            and ``msg``.
    """
    texts = []
    for problem in problems:
        place, *names = problem["loc"]
        where = ".".join(map(str, names))
        text = problem["msg"].removeprefix("Value error, ")
        texts.append(f"{_PLACES.get(place, place)} {where}: {text}")
    return ConfigError("; ".join(texts), hint="GET /openapi.json describes every route")
