"""The agent of an episode of verifiers: the caller of the tools of this environment.

verifiers runs an agent's program and records what its model answers. This program has no model:
each call of a tool becomes an answer of the model that calls this tool, so that verifiers records,
limits and scores the episode as any other.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content

__all__ = ["RelayHarness"]

MODEL = "the-caller"


class Ended(Exception):
    """The episode has ended; the message says why."""


@dataclass
class Action:
    """What the caller did: it called a tool, or said something."""

    text: str = ""
    tool: str = ""
    """"": none."""
    arguments: dict[str, Any] = field(default_factory=dict)
    result: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The content of the tool's result; None after a text."""

    def message(self, number: int) -> dict[str, Any]:
        """Return it as an answer of a model."""
        if not self.tool:
            return {"role": "assistant", "content": self.text}
        function = {"name": self.tool, "arguments": json.dumps(self.arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class Seat:
    """Where the caller meets the program of the episode. Use it on one event loop."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """What the model was told last, before it is to act."""
        self._actions: asyncio.Queue[Action | None] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._answer: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._is_left = False
        self.episode: asyncio.Task[vf.Episode] | None = None

    # --- for the caller -------------------------------------------------------------------------

    async def begin(self, episode: "asyncio.Task[vf.Episode]") -> list[dict[str, Any]]:
        """Wait until the caller can act; return the messages.

        Raises:
            Ended: The episode ended before.
        """
        self.episode = episode
        await self._until(self._opened)
        return self.messages

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool of the taskset and return the content of its result.

        Raises:
            Ended: The episode has ended.
            ToolFailed: The tool failed.
        """
        async with self._turn:
            return await self._act(Action(tool=tool, arguments=arguments))

    async def say(self, text: str) -> str:
        """Say something; return what the user answers.

        Raises:
            Ended: The episode has ended, so that there is no answer.
        """
        async with self._turn:
            self._opened.clear()
            await self._act(Action(text=text))
            await self._until(self._opened)
            content = self.messages[-1].get("content") if self.messages else ""
            return content if isinstance(content, str) else json.dumps(content)

    async def leave(self) -> vf.Episode:
        """Stop acting, and return the episode with its rewards."""
        if self.episode is None:
            raise RuntimeError("no episode was begun: call the function begin first")
        self._is_left = True
        self._actions.put_nowait(None)
        return await asyncio.shield(self.episode)

    async def _act(self, action: Action) -> Any:
        if self.episode is None:
            raise Ended("no episode was begun: call the function begin first")
        if self._is_left:
            raise Ended("the episode has been scored")
        self._actions.put_nowait(action)
        await asyncio.wait([action.result, self.episode], return_when=asyncio.FIRST_COMPLETED)
        if action.result.done():
            return action.result.result()
        raise Ended(why(self.episode))

    async def _until(self, event: asyncio.Event) -> None:
        assert self.episode is not None
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([waiting, self.episode], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not event.is_set():
            raise Ended(why(self.episode))

    # --- for the program ------------------------------------------------------------------------

    def open(self, messages: list[dict[str, Any]]) -> None:
        """Let the caller act."""
        self.messages = messages
        self._opened.set()

    async def next_action(self) -> Action | None:
        """Return what the caller does; None once it has left."""
        return None if self._is_left and self._actions.empty() else await self._actions.get()

    def prepare(self, action: Action) -> None:
        """Have the model answer with an action."""
        self._answer = action.message(next(self._numbers))

    @contextlib.asynccontextmanager
    async def model(self) -> AsyncIterator[str]:
        """Yield the address of a model that answers as the caller acts."""

        async def complete(request: web.Request) -> web.Response:
            await request.read()
            reason = "tool_calls" if "tool_calls" in self._answer else "stop"
            choice = {"index": 0, "message": self._answer, "finish_reason": reason}
            completion = {
                "id": "relay", "object": "chat.completion", "created": 0, "model": MODEL,
                "choices": [choice],
            }  # fmt: skip
            return web.json_response(completion)

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


class ToolFailed(Exception):
    """A tool of the taskset failed; the message is the tool's."""


def why(episode: "asyncio.Task[vf.Episode]") -> str:
    """Return why an episode has ended."""
    if episode.cancelled():
        return "the episode was cancelled"
    if (error := episode.exception()) is not None:
        return f"the episode failed: {error!r}"
    found = episode.result()
    errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
    if errors:
        return f"the episode failed: {errors[-1].type}: {errors[-1].message}"
    stops = [trace.stop_condition for trace in found.traces if trace.stop_condition]
    return f"the episode has ended: {stops[-1] if stops else 'it is complete'}"


SEAT = Seat()
"""The seat of this instance."""


class RelayHarness(vf.Harness[vf.HarnessConfig]):
    """Does what the caller does."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Act until the caller has said something, has left, or verifiers stops the episode."""
        del runtime
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {
            "mcpServers": {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
        }
        async with contextlib.AsyncExitStack() as stack:
            tools, homes, connections = await connect_mcp(servers, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers))
            SEAT.open(messages)
            while (action := await SEAT.next_action()) is not None:
                SEAT.prepare(action)
                body = {"model": ctx.model, "messages": messages}
                response = await http.post(
                    f"{endpoint}/chat/completions", json=body | ({"tools": tools} if tools else {})
                )
                if response.is_error:
                    if trace.stop_condition is not None:
                        break
                    raise RuntimeError(f"verifiers refused the turn: {response.text[:500]}")
                answer = response.json()["choices"][0]["message"]
                messages.append(answer)
                if not answer.get("tool_calls"):
                    action.result.set_result(None)
                    break
                for call in answer["tool_calls"]:
                    messages.append(await _ran(call, action, homes, connections))
        return vf.ProgramResult(0, "", "")


async def _ran(
    call: dict[str, Any],
    action: Action,
    homes: dict[str, tuple[str, str]],
    connections: dict[str, Any],
) -> dict[str, Any]:
    """Run a tool call, tell the caller its result, and return the message with it."""
    name = call["function"]["name"]
    if name not in homes:
        content: Any = f"unknown tool {name!r}"
        is_error = True
    else:
        server, own = homes[name]
        arguments = json.loads(call["function"]["arguments"] or "{}")
        result = await connections[server].run(lambda client: client.call_tool(own, arguments))
        content, is_error = mcp_content_to_chat_content(result.content), bool(result.is_error)
    if not action.result.done():  # its call may have been cancelled
        if is_error:
            action.result.set_exception(ToolFailed(str(content)))
        else:
            action.result.set_result(content)
    return {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}
