"""Resources, prompts, log messages and questions to the calling MCP client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client

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
        assert len(await instance.list_resources()) == 2
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
