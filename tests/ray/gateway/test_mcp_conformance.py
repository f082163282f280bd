"""The official conformance suite of MCP through a gateway, and what tools tell and ask callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import uvicorn
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport
from mcp_types import PromptReference, ResourceTemplateReference
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import aenv_ray
from aenv_ray import Environment
from aenv_ray.errors import ConfigError, FunctionFailed
from aenv_ray.hub.records import Role
from aenv_ray.models import LogMessage, Question, ToolResult
from tests.conftest import require
from tests.fixtures.mcp_conformance import conformance_command, failures
from tests.ray.gateway.data_gateway import GatewayBench

PROJECT = Path(__file__).parents[2] / "fixtures" / "projects" / "mcp-features"
SCENARIOS = 32
NOT_FOR_GATEWAYS = {"dns-rebinding-protection"}
"""Of servers on a local machine without tokens, which a browser could reach."""
STEPS = [f"Tool execution {step}" for step in ("started", "processing data", "completed")]


@pytest.fixture
def bench(gateway: GatewayBench) -> GatewayBench:
    gateway.projects["mcp-features"] = PROJECT
    return gateway


@pytest.fixture(params=["ray", "gateway"])
def place(request: pytest.FixtureRequest, bench: GatewayBench) -> dict[str, Any]:
    """Return the arguments of an `Environment`."""
    if request.param == "ray":
        return {"env_name": str(PROJECT), "actor": "shared"}
    token = bench.token(Role.PUBLISHER)
    return {"env_name": "mcp-features", "aenv_url": bench.url, "api_key": token}


@contextlib.contextmanager
def with_token(url: str, token: str) -> Iterator[str]:
    """Yield the address of a proxy that adds a token, which the suite cannot send."""
    http = httpx.AsyncClient(timeout=None)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        async with http:
            yield

    async def forward(request: Request) -> StreamingResponse:
        headers = {k: v for k, v in request.headers.items() if k not in {"host", "content-length"}}
        headers["authorization"] = f"Bearer {token}"
        sent = http.build_request(
            request.method, url, headers=headers, content=await request.body()
        )
        answer = await http.send(sent, stream=True)
        kept = {k: v for k, v in answer.headers.items() if k != "transfer-encoding"}
        over = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=over)

    routes = [Route("/mcp", forward, methods=["GET", "POST", "DELETE"])]
    app = Starlette(routes=routes, lifespan=lifespan)
    settings = uvicorn.Config(app, port=0, loop="asyncio", log_level="error")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.timeout(600)
async def test_the_scenarios_pass_through_the_gateway(bench: GatewayBench, tmp_path: Path) -> None:
    command, refusal = conformance_command()
    require("mcp-conformance", command is not None, refusal)
    token = bench.token(Role.PUBLISHER)
    async with Environment("mcp-features", aenv_url=bench.url, api_key=token) as env:
        url = f"{bench.url}/instances/{env.instance_id}/mcp"
        with with_token(url, token) as proxied:
            failed, count = await asyncio.to_thread(failures, proxied, tmp_path / "results")
    assert {
        name: checks
        for name, checks in failed.items()
        if not any(other in name for other in NOT_FOR_GATEWAYS)
    } == {}
    assert count == SCENARIOS


async def test_tools_log_and_ask_their_callers(place: dict[str, Any]) -> None:
    """Callbacks of an `Environment` get messages, and answer for its user and its model."""
    logged: list[LogMessage] = []
    asked: list[Any] = []

    async def on_elicit(message: str, schema: Any) -> Any:
        asked.append(sorted(schema["properties"]))
        return {"username": message} if message != "No?" else None

    def on_sample(params: Any) -> str:
        return f"I say {params['messages'][0]['content']['text']}"

    async with Environment(
        **place, on_log=logged.append, on_elicit=on_elicit, on_sample=on_sample
    ) as env:
        await env.call_tool("test_tool_with_logging")
        assert [(one.level, one.text) for one in logged] == [("info", step) for step in STEPS]
        assert logged[0].data == {"step": "started"}
        said = await env.call_tool("test_elicitation", {"message": "Ann"})
        assert 'action=accept, content={"username": "Ann"}' in said.text()
        assert asked == [["email", "username"]]
        declined = await env.call_tool("test_elicitation", {"message": "No?"})
        assert "action=decline" in declined.text()
        sampled = await env.call_tool("test_sampling", {"prompt": "yes"})
        assert sampled.text() == "LLM response: I say yes"


async def test_callers_that_offer_nothing_are_not_asked(place: dict[str, Any]) -> None:
    async with Environment(**place) as env:
        assert not (await env.call_tool("test_tool_with_logging")).is_error
        with pytest.raises(aenv_ray.AenvError, match="offers no elicitation"):
            await env.call_tool("test_elicitation", {"message": "Ann"})


async def test_an_exception_of_a_callback_cancels_the_call(place: dict[str, Any]) -> None:
    def on_elicit(message: str, schema: Any) -> Any:
        raise LookupError("there is no user")

    async with Environment(**place, on_elicit=on_elicit) as env:
        with pytest.raises(LookupError, match="no user"):
            await env.call_tool("test_elicitation", {"message": "Ann"})
        assert (await env.call_tool("test_simple_text")).text().startswith("This is a simple")


def test_a_handle_streams_questions_and_answers_them(cluster: Any) -> None:
    del cluster
    env = aenv_ray.create(str(PROJECT), actor="shared")
    items: list[Any] = []
    given = {"message": "Ann"}
    for reference in env.stream_tool.remote("test_elicitation", given, offers=["elicitation"]):
        item = ray.get(reference)
        items.append(item)
        if isinstance(item, Question):
            assert item.params["message"] == "Ann"
            answered = ray.get(env.answer.remote(item, {"action": "accept", "content": {"x": 1}}))
            assert answered == {"accepted": True}
            assert ray.get(env.answer.remote(item, {"action": "cancel"})) == {"accepted": False}
    assert isinstance(items[-1], ToolResult)
    assert 'action=accept, content={"x": 1}' in items[-1].text()
    references = env.stream_tool.remote("test_elicitation", given, offers=["elicitation"])
    question = ray.get(next(references))
    ray.get(env.answer.remote(question, error="nobody is here"))
    with pytest.raises(FunctionFailed, match="nobody is here"):
        ray.get(next(references))
    with pytest.raises(ConfigError, match="invalid offers"):
        env.stream_tool.remote("test_elicitation", given, offers=["telepathy"])  # type: ignore[list-item]
    ray.get(env.release.remote())


@pytest.mark.filterwarnings("ignore:resources/:mcp.shared.exceptions.MCPDeprecationWarning")
async def test_subscribed_clients_are_told_of_updates(bench: GatewayBench) -> None:
    """A session behind a gateway, which keeps no connection, receives updates with its calls."""
    told: list[str] = []

    async def on_message(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/resources/updated":
            told.append(str(message.params.uri))

    token = bench.token(Role.PUBLISHER)
    async with Environment("mcp-features", aenv_url=bench.url, api_key=token) as env:
        url = f"{bench.url}/instances/{env.instance_id}/mcp"
        transport = StreamableHttpTransport(url, headers={"Authorization": f"Bearer {token}"})
        async with Client(transport, mode="legacy", timeout=30, message_handler=on_message) as one:
            await one.session.subscribe_resource("test://watched-resource")
            await one.call_tool("change_watched", {"text": "second"})
            assert told == ["test://watched-resource"]
            await env.call_tool("change_watched", {"text": "third"})  # by somebody else
            assert len(told) == 1
            await one.call_tool("test_simple_text")
            assert len(told) == 2
            await one.session.unsubscribe_resource("test://watched-resource")
            await one.call_tool("change_watched", {"text": "fourth"})
            assert len(told) == 2


async def test_arguments_are_completed(bench: GatewayBench) -> None:
    token = bench.token(Role.PUBLISHER)
    async with Environment("mcp-features", aenv_url=bench.url, api_key=token) as env:
        url = f"{bench.url}/instances/{env.instance_id}/mcp"
        transport = StreamableHttpTransport(url, headers={"Authorization": f"Bearer {token}"})
        async with Client(transport, timeout=30) as client:
            prompt = PromptReference(name="test_prompt_with_arguments")
            done = await client.complete(prompt, {"name": "arg1", "value": "test"})
            assert done.values == ["test", "testing"]
            template = ResourceTemplateReference(uri="test://template/{id}/data")
            done = await client.complete(template, {"name": "id", "value": "7"})
            assert (len(done.values), done.total, done.has_more) == (100, 150, True)
