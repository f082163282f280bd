"""A publisher's sandbox, and an owner's request, want the gateway to work for them alone.

One event loop of the gateway serves all owners, and what a sandbox lists is its publisher's word.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import Message

from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.json_calls import JsonCall
from aenv_ray.errors import ConfigError, ToolNotFound
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.runtime.public.requests import query_arguments
from aenv_ray.serve.gateway.data.functions import (
    MAX_FUNCTIONS,
    MAX_LISTING_BYTES,
    FunctionProxy,
    is_simple,
)
from aenv_ray.serve.gateway.data.targets import Target


class Sandbox:
    """Answers every call with the same text, as a hostile runtime may."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.called: list[str] = []

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        del disconnect, name
        self.called.append(call.method)
        return self._answer if call.method != "aenv/function" else b'{"data":1}'

    def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        raise NotImplementedError

    async def cancel(self, target: str, name: str) -> None:
        raise NotImplementedError


def request(path: str) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    return Request(scope, receive)


async def ask(sandbox: Sandbox, path: str) -> Any:
    async def find(_: Request) -> Target:
        return Target("i-1", is_agent=False)

    async def send(_: Message) -> None:
        raise AssertionError

    response = await FunctionProxy(find, sandbox).serve(request(path), send)
    return json.loads(bytes(response.body))


def listing(*endpoints: str) -> bytes:
    functions = [
        {"name": f"f{number}", "method": "GET", "endpoint": endpoint, "inputSchema": {}}
        for number, endpoint in enumerate(endpoints)
    ]
    return json.dumps({"functions": functions, "health": []}).encode()


MANY = "/" + "".join(f"{{a{number}:path}}x" for number in range(30))


@pytest.mark.parametrize(
    "endpoint", [MANY, MANY.replace(":path", ""), "/{a}-{b}", "/{a:path}/{b:path}"]
)
async def test_the_path_of_a_function_does_not_make_the_gateway_search(endpoint: str) -> None:
    """Invariant 15: with a regular expression of this kind one request takes hours of all."""
    assert not is_simple(endpoint)
    sandbox = Sandbox(listing(endpoint))
    with pytest.raises(ToolNotFound):
        await ask(sandbox, "/" + "x" * 20_000 + "y")


@pytest.mark.parametrize("endpoint", ["/notes/{day}/{page:int}", "/files/{path:path}", "/plain"])
async def test_usual_paths_are_served(endpoint: str) -> None:
    assert is_simple(endpoint)
    path = endpoint.replace("{day}", "may").replace("{page:int}", "3").replace("{path:path}", "a/b")
    assert await ask(Sandbox(listing(endpoint)), path) == {"success": True, "data": 1}


@pytest.mark.parametrize(
    "answer",
    [
        listing(*(f"/f{number}" for number in range(MAX_FUNCTIONS + 1))),
        listing("/" + "a" * MAX_LISTING_BYTES),
        listing("/" + "a" * 2000),
        b"[]",
        b"7",
        b'{"functions": 7}',
        b'{"functions": [{"name": "f"}], "health": []}',
        b'{"functions": [], "health": "none"}',
        b"[" * 100_000,
        b"not JSON",
    ],
)
async def test_a_listing_that_is_none_is_the_error_of_its_environment(answer: bytes) -> None:
    """Invariant 15: no failure of the gateway, and no long work for it."""
    with pytest.raises(ConfigError, match=r"lists? its functions"):
        await ask(Sandbox(answer), "/functions/f")


@pytest.mark.parametrize("answer", [b'{"data":7}', b'{"data":{"status":[]}}', b"{}"])
async def test_a_health_check_that_is_none_is_the_error_of_its_environment(answer: bytes) -> None:
    class Sick(Sandbox):
        async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
            if call.method == "aenv/functions":
                return listing()
            return await super().call(call, disconnect, name)

    with pytest.raises(ConfigError, match="health check"):
        await ask(Sick(answer), "/health")


def test_a_query_of_many_keys_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 15: reading all of it for each key took the loop seconds."""

    def getlist(*_: Any) -> list[str]:
        raise AssertionError("it reads the whole query")

    monkeypatch.setattr(QueryParams, "getlist", getlist)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [],
             "query_string": b"a=1&b=2&a=3&kinds=[1]"}  # fmt: skip
    schema = {"properties": {"kinds": {"type": ["array", "null"]}, "b": {"type": [{}]}}}
    found = query_arguments(Request(scope), schema)
    assert found == {"a": ["1", "3"], "b": "2", "kinds": [1]}
