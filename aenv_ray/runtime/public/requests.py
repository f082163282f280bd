"""Parses HTTP requests at the public door: arguments, deadline and call id."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.async_calls import CALL_ID, TIMEOUT_S, Disconnect

BODY_S: Final = 60.0
"""How long to wait for the next piece of a request's body."""


class BadRequest(Exception):
    """The request is invalid; carries the HTTP status and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self) -> Response:
        """Return the answer for the client."""
        body = {"success": False, "error": str(self), "code": "tool_input_invalid"}
        return Response(to_json(body), self.status, media_type="application/json")


async def watch(receive: Receive, disconnect: Disconnect) -> None:
    """Wait until the client disconnects; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    disconnect.happen()


def read_meta(request: Request) -> dict[str, Any]:
    """Return MCP's ``_meta`` for a request: deadline and call id, from the headers.

    Raises:
        BadRequest: The deadline is not a number.
    """
    meta: dict[str, Any] = {}
    timeout = request.headers.get("aenv-timeout-s")
    if timeout is not None:
        try:
            meta[TIMEOUT_S] = float(timeout)
        except ValueError:
            raise BadRequest(
                400, f"aenv-timeout-s: {timeout!r} is not a number of seconds"
            ) from None
    call_id = request.headers.get("aenv-call-id")
    if call_id is not None:
        meta[CALL_ID] = call_id
    return meta


async def read_arguments(
    request: Request, method: str, schema: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a function's arguments, from the query or the body depending on the HTTP method.

    Args:
        request: A request whose body has not been read.
        method: HTTP method of the function.
        schema: JSON Schema of the arguments.

    Raises:
        BadRequest: The body is not a JSON object.
    """
    if method == "GET":
        return query_arguments(request, schema)
    if method == "DELETE" and request.query_params:
        # Many clients send no body with DELETE.
        return {**query_arguments(request, schema), **await body_arguments(request)}
    return await body_arguments(request)


async def body_arguments(request: Request) -> dict[str, Any]:
    """Return the body's JSON object; no body means no arguments.

    Raises:
        BadRequest: The body is not a JSON object.
    """
    body = await request.body()
    if not body.strip():
        return {}
    try:
        data = pydantic_core.from_json(body)
    except ValueError as exc:
        raise BadRequest(400, f"the body is not JSON: {exc}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise BadRequest(
            400, f'the body is a JSON {type(data).__name__}; arguments are an object: {{"name": …}}'
        )
    return data


def query_arguments(request: Request, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the query as arguments; the function's signature converts text to numbers and flags.

    Lists and objects may be written as JSON, as AEnvironment's client does; lists also as repeated
    keys.
    """
    properties = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    given: dict[str, list[str]] = {}
    for key, text in request.query_params.multi_items():  # `getlist` reads all of them
        given.setdefault(key, []).append(text)
    for key, values in given.items():
        kinds = _kinds(properties.get(key, {}))
        if len(values) > 1:
            arguments[key] = values
        elif kinds & {"array", "object"} and "string" not in kinds:
            arguments[key] = _structured(values[0], kinds)
        else:
            arguments[key] = values[0]
    return arguments


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a parameter's schema allows; a reference is an object."""
    if "$ref" in schema:
        return {"object"}
    if "type" in schema:
        kinds = schema["type"]
        return {
            kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if type(kind) is str
        }
    branches = schema.get("anyOf", []) + schema.get("oneOf", []) + schema.get("allOf", [])
    return set().union(*map(_kinds, branches)) if branches else set()


def _structured(text: str, kinds: set[str]) -> Any:
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return [text] if "array" in kinds else text


class SameOrigin:
    """Refuses web pages of other origins, those of other local ports included, with 403."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is None or origin.partition(b"://")[2].lower() == host.lower():
            await self._app(scope, receive, send)
        else:
            refusal = Response("web pages of other origins may not use this server", 403)
            await refusal(scope, receive, send)


class BodyLimit:
    """Refuses a body that is too large with 413, and one that stalls with 408."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._message = f"the request is larger than the limit of {limit_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit_bytes:
            await BadRequest(413, self._message).response()(scope, receive, send)
            return
        received, is_whole = 0, False

        async def counted() -> Message:
            nonlocal received, is_whole
            if is_whole:  # the next message is the disconnect
                return await receive()
            try:
                async with asyncio.timeout(BODY_S):
                    message = await receive()
            except TimeoutError:
                raise BadRequest(408, f"no more of the body came for {BODY_S:g} s") from None
            is_whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._limit_bytes:
                raise BadRequest(413, self._message)
            return message

        await self._app(scope, counted, send)
