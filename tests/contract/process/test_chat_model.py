"""Code in a sandbox asks a chat model through its host, and nothing else in the sandbox can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.door import CHAT_METHOD
from aenv_ray.errors import AenvError, EndpointUnavailable, FunctionFailed, SandboxDiedInside
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, value_of
from tests.contract.process.node import Node

TOOLS = """
import os
import subprocess
from aenv_ray.runtime import chat_model, register_tool

was_available_at_import = chat_model.is_available()

@register_tool
def available() -> list[bool]:
    return [was_available_at_import, chat_model.is_available()]

@register_tool
def ask(text: str, timeout_s: float = 20.0) -> str:
    messages = [{"role": "user", "content": text}]
    answer = chat_model.complete(messages, timeout_s=timeout_s, temperature=0.0)
    return answer["choices"][0]["message"]["content"]

@register_tool
def ask_in_a_child(text: str) -> str:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ask(text, 1.0)
            code = 0
        finally:
            os._exit(code)
    return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
async def sandbox(own_node: Node, tmp_path: Any) -> AsyncIterator[Sandbox]:
    engine = own_node.engine(HostId("host-chat"))
    bench = Bench(engine, tmp_path)
    yield await bench.start(bench.project({"tools.py": TOOLS}))
    await engine.stop([row.instance_id for row in await engine.running()])
    await engine.close()


async def test_the_host_answers_what_code_asks(sandbox: Sandbox) -> None:
    asked: list[Any] = []

    async def answer(params: dict[str, Any]) -> bytes:
        asked.append(params)
        said = {"choices": [{"message": {"content": "Hello to you"}}]}
        return json.dumps(said).encode() if params else b"{}"

    assert await value_of(sandbox, "available") == [False, False]
    sandbox.services = {CHAT_METHOD: answer}
    assert await value_of(sandbox, "available") == [False, True]
    assert await value_of(sandbox, "ask", text="Hello") == "Hello to you"
    messages = [{"role": "user", "content": "Hello"}]
    assert asked[-1] == {"body": {"messages": messages, "temperature": 0.0}, "timeout_s": 20.0}


async def test_a_process_of_the_agent_cannot_ask(sandbox: Sandbox) -> None:
    """Invariant 15 of a key's use: a fork has the code, but not the host's connection."""
    asked: list[Any] = []

    async def answer(params: dict[str, Any]) -> bytes:
        asked.append(params)
        return b"{}"

    sandbox.services = {CHAT_METHOD: answer}
    assert await value_of(sandbox, "ask_in_a_child", text="Hello") != "0"


async def test_a_project_that_does_not_request_it_may_not_ask(sandbox: Sandbox) -> None:
    with pytest.raises(FunctionFailed, match="may not ask a chat model") as raised:
        await value_of(sandbox, "ask", text="Hello")
    assert "deployConfig.chatModel" in str(raised.value.hint)


async def test_a_failure_reaches_the_caller_and_a_request_that_times_out_is_ended(
    sandbox: Sandbox,
) -> None:
    ended = asyncio.Event()

    async def fail(params: dict[str, Any]) -> bytes:
        raise EndpointUnavailable("it is down")

    async def hang(params: dict[str, Any]) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b"{}"

    sandbox.services = {CHAT_METHOD: fail}
    # The sandbox is not believed; a host ends the instance itself.
    with pytest.raises(SandboxDiedInside, match="it is down"):
        await value_of(sandbox, "ask", text="Hello")
    sandbox.services = {CHAT_METHOD: hang}
    with pytest.raises(AenvError, match="did not answer"):
        await value_of(sandbox, "ask", text="Hello", timeout_s=-4.5)
    async with asyncio.timeout(10):
        await ended.wait()
