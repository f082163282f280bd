"""Resources, prompts, log messages and questions to the calling MCP client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client
from mcp_types import PromptReference, ResourceTemplateReference

from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import ToolNotFound
from tests.e2e.serving import serving
from tests.e2e.test_public_door import fast_door

pytestmark = pytest.mark.e2e
PROJECT = Path(__file__).parents[1] / "fixtures" / "projects" / "mcp-features"


async def test_resources_prompts_logs_and_questions_reach_clients(tmp_path: Path) -> None:
    """Both doors list and read alike; a session also gets logs and answers for its user."""
    logged: list[Any] = []

    async def on_log(message: Any) -> None:
        logged.append(message.data["msg"])

    async def answer(message: str, kind: Any, params: Any, context: Any) -> dict[str, str]:
        return {"username": message}

    with serving(PROJECT, tmp_path) as server:
        read = fast_door(server, "resources/read", {"uri": "test://template/1%202/data"})
        (part,) = read["result"]["contents"]
        assert '"id":"1 2"' in part["text"]
        instance = HttpInstance(server.url)
        (contents,) = await instance.read_resource("test://template/1%202/data", 30.0)
        assert (contents.content, contents.mime_type) == (part["text"], "application/json")
        (binary,) = await instance.read_resource("test://static-binary", 30.0)
        assert isinstance(binary.content, bytes)
        assert len(await instance.list_resources()) == 3
        (template,) = await instance.list_resource_templates()
        assert template["uriTemplate"] == "test://template/{id}/data"
        prompt = await instance.get_prompt("test_prompt_with_arguments", {"arg1": "x", "arg2": "y"})
        assert "arg2='y'" in prompt.messages[0]["content"]["text"]
        assert len(await instance.list_prompts()) == 4
        with pytest.raises(ToolNotFound, match="test://none"):
            await instance.read_resource("test://none", 30.0)
        plain = await instance.call_tool("test_tool_with_logging", {})
        assert not plain.is_error
        await instance.close()
        refusal = fast_door(
            server, "tools/call", {"name": "test_sampling", "arguments": {"prompt": "?"}}
        )
        assert refusal["error"]["data"]["code"] == "caller_unsupported"
        url = f"{server.url}/mcp"
        async with Client(
            url, mode="legacy", timeout=30, log_handler=on_log, elicitation_handler=answer
        ) as client:
            await client.call_tool("test_tool_with_logging")
            asked = await client.call_tool("test_elicitation", {"message": "Ann"})
        assert logged == [
            f"Tool execution {step}" for step in ("started", "processing data", "completed")
        ]
        assert 'action=accept, content={"username": "Ann"}' in asked.content[0].text


@pytest.mark.filterwarnings("ignore:resources/:mcp.shared.exceptions.MCPDeprecationWarning")
async def test_a_session_is_told_when_a_resource_changes(tmp_path: Path) -> None:
    """The notification arrives on its GET stream, whichever client changed the resource."""
    told: list[str] = []
    changed = asyncio.Event()

    async def on_message(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/resources/updated":
            told.append(str(message.params.uri))
            changed.set()

    with serving(PROJECT, tmp_path) as server:
        url = f"{server.url}/mcp"
        async with Client(url, mode="legacy", timeout=30, message_handler=on_message) as client:
            await client.session.subscribe_resource("test://watched-resource")
            change = {"name": "change_watched", "arguments": {"text": "second"}}
            fast_door(server, "tools/call", change)
            async with asyncio.timeout(30):
                await changed.wait()
            assert told == ["test://watched-resource"]
            await client.session.unsubscribe_resource("test://watched-resource")
            await client.call_tool("change_watched", {"text": "third"})
            assert len(told) == 1


async def test_arguments_are_completed(tmp_path: Path) -> None:
    with serving(PROJECT, tmp_path) as server:
        url = f"{server.url}/mcp"
        async with Client(url, timeout=30) as client:
            prompt = PromptReference(name="test_prompt_with_arguments")
            done = await client.complete(prompt, {"name": "arg1", "value": "test"})
            assert done.values == ["test", "testing"]
            done = await client.complete(
                prompt, {"name": "arg2", "value": "x"}, context_arguments={"arg1": "y"}
            )
            assert done.values == ["x after y"]
            template = ResourceTemplateReference(uri="test://template/{id}/data")
            done = await client.complete(template, {"name": "id", "value": "7"})
            assert (len(done.values), done.total, done.has_more) == (100, 150, True)
        params = {"ref": {"type": "ref/prompt", "name": "no"}, "argument": {"name": "x"}}
        refused = fast_door(server, "completion/complete", params)
        assert refused["error"]["data"]["code"] == "tool_not_found"
