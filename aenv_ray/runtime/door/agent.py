"""An agent as an environment: the tool `chat`, a history for each conversation, and a reset.

``serve_agent(agent)`` in a module of a project registers it; `aenv_ray.agent_env` writes such a
project. Agents of frameworks are recognised by their class and methods, so that no framework is
imported here.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from aenv_ray.runtime.api.decorators import (
    register_function,
    register_reset,
    register_reward,
    register_tool,
)
from aenv_ray.runtime.door.calls import current_call

ChatTurn = dict[str, Any]
"""``{"role": "user", "content": "…"}``, as in OpenAI's API."""
Reward = Callable[[list[ChatTurn]], Any]
"""Returns the reward of a conversation; may be async."""
CHAT_S: Final = 600.0
ENDPOINT_S: Final = 300.0
_READ_BYTES: Final = 10_000
_SHOWN_CHARACTERS: Final = 300


class Conversation(Protocol):
    """One conversation with an agent."""

    def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        """Yield the pieces of the answer to the last message of a history."""


@dataclass(frozen=True)
class ChatEndpoint:
    """An agent behind an OpenAI-compatible endpoint.

    Args:
        url: Up to ``/v1``.
        model: The model's name at the endpoint.
        key_env: Variable of the instance with the key; a missing one sends none.
        system: A first message, which tells the model what to do. "": none.
    """

    url: str
    model: str = "default"
    key_env: str = "MODEL_KEY"
    system: str = ""


@dataclass
class _Talk:
    """A conversation with its messages; these are answered one after another."""

    conversation: Conversation
    history: list[ChatTurn] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


def serve_agent(agent: Any, reward: Reward | None = None) -> None:
    """Register an agent as this environment's tool `chat`.

    Registered are also a reset, which forgets all conversations, the functions `history` and
    `forget`, which take the name of a conversation, and the reward.

    Args:
        agent: A callable that takes the messages of a conversation and returns the answer: sync,
            async, or an async generator of its pieces; a `ChatEndpoint`; or an agent of a
            framework: an `Agent` of the OpenAI Agents SDK, a runnable of LangChain or LangGraph,
            or a `ChatAgent` of CAMEL.
        reward: Takes the messages of the conversation. None: the environment has no reward.

    Raises:
        TypeError: It is not one of the supported kinds.
    """
    start = starter(agent)
    talks: dict[str, _Talk] = {}

    @register_tool(timeout=CHAT_S)
    async def chat(message: str, conversation: str = "") -> str:
        """Send a message to the agent, and return its answer.

        Pieces of the answer are reported as progress while it is made.

        Args:
            message: What the user says.
            conversation: Name of the conversation; each has its own history.
        """
        if conversation not in talks:
            talks[conversation] = _Talk(start())
        talk = talks[conversation]
        async with talk.turn:
            asked: list[ChatTurn] = [*talk.history, {"role": "user", "content": message}]
            pieces: list[str] = []
            async for piece in talk.conversation.answer(copy.deepcopy(asked)):
                pieces.append(piece)
                current_call().progress(len(pieces), message=piece)
            answer = "".join(pieces)
            # Only now: a message that got no answer is not part of the conversation.
            talk.history = [*asked, {"role": "assistant", "content": answer}]
        return answer

    @register_function
    def history(conversation: str = "") -> list[ChatTurn]:
        """Return the messages of a conversation."""
        return talks[conversation].history if conversation in talks else []

    @register_function
    def forget(conversation: str = "") -> int:
        """Forget a conversation, and return how many messages it had."""
        talk = talks.pop(conversation, None)
        return len(talk.history) if talk else 0

    @register_reset
    def reset() -> None:
        """Forget all conversations."""
        talks.clear()

    if reward is not None:
        given = reward

        @register_reward(name="reward")
        async def score(conversation: str = "") -> Any:
            """Return the reward of a conversation."""
            value = given(copy.deepcopy(history(conversation)))
            return await value if inspect.isawaitable(value) else value


def starter(agent: Any) -> Callable[[], Conversation]:
    """Return what starts conversations with an agent.

    Raises:
        TypeError: It is of no kind that `serve_agent` knows.
    """
    packages = {cls.__module__.partition(".")[0] for cls in type(agent).__mro__}
    if isinstance(agent, ChatEndpoint):
        return lambda: _Endpoint(agent)
    if "agents" in packages and hasattr(agent, "instructions"):
        return lambda: _OpenAIAgent(agent)
    if "langgraph" in packages and hasattr(agent, "astream"):
        return lambda: _Graph(agent)
    if hasattr(agent, "ainvoke") and hasattr(agent, "astream"):
        return lambda: _Runnable(agent)
    if hasattr(agent, "clone") and hasattr(agent, "astep"):
        return lambda: _Camel(agent.clone(with_memory=False))
    if callable(agent) and not isinstance(agent, type):
        return lambda: _Callable(agent)
    raise TypeError(
        f"{type(agent).__name__} is not an agent: pass a callable that takes messages, a "
        "ChatEndpoint, or an agent of the OpenAI Agents SDK, LangChain, LangGraph or CAMEL"
    )


class _Callable:
    def __init__(self, function: Callable[[list[ChatTurn]], Any]) -> None:
        self._function = function

    async def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        call = getattr(self._function, "__call__", self._function)  # noqa: B004  # an object's
        if inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(call):
            yield str(await self._function(history))
            return
        if inspect.isasyncgenfunction(self._function) or inspect.isasyncgenfunction(call):
            async for piece in self._function(history):
                yield str(piece)
            return
        value = await asyncio.to_thread(self._function, history)
        yield str(await value if inspect.isawaitable(value) else value)


class _OpenAIAgent:
    """An `Agent` of the OpenAI Agents SDK, which keeps its tool calls between messages."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._items: list[Any] = []

    async def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        from agents import Runner  # type: ignore[import-not-found,unused-ignore]

        run = Runner.run_streamed(self._agent, [*self._items, history[-1]])
        streamed = ""
        async for event in run.stream_events():
            data: Any = getattr(event, "data", None)
            if getattr(data, "type", "") == "response.output_text.delta":
                streamed += data.delta
                yield data.delta
        self._items = run.to_input_list()
        final = str(run.final_output)
        if not streamed.endswith(final):
            yield final  # a structured output, or of a model that does not stream


class _Runnable:
    """A runnable of LangChain that takes messages, such as a chat model or a chain."""

    def __init__(self, runnable: Any) -> None:
        self._runnable = runnable

    async def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        async for chunk in self._runnable.astream(history):
            if text := _text(chunk):
                yield text


class _Graph:
    """A graph of LangGraph whose state has ``messages``; these include its tool calls."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._messages: list[Any] = []

    async def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        given = {"messages": [*self._messages, history[-1]]}
        state = await self._graph.ainvoke(given)
        self._messages = list(state["messages"])
        yield _text(self._messages[-1])


class _Camel:
    """A `ChatAgent` of CAMEL, which keeps its history itself."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    async def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        response = await self._agent.astep(history[-1]["content"])
        if not response.msgs:
            raise RuntimeError(f"the agent gave no answer: {response.info}")
        yield str(response.msgs[0].content)


class _Endpoint:
    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def answer(self, history: list[ChatTurn]) -> AsyncIterator[str]:
        system = [{"role": "system", "content": self._endpoint.system}]
        pieces = self._pieces([*(system if self._endpoint.system else []), *history])
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def _pieces(self, messages: list[ChatTurn]) -> Iterator[str]:
        body = {"model": self._endpoint.model, "messages": messages, "stream": True}
        request = urllib.request.Request(
            f"{self._endpoint.url.rstrip('/')}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        key = os.environ.get(self._endpoint.key_env)
        if key:  # not to where the endpoint may redirect
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=ENDPOINT_S) as response:
                if "text/event-stream" not in response.headers.get("Content-Type", ""):
                    yield str(json.load(response)["choices"][0]["message"]["content"])
                    return
                for line in response:
                    data = line.decode().partition("data:")[2].strip()
                    if data and data != "[DONE]":
                        for choice in json.loads(data)["choices"]:
                            if text := choice["delta"].get("content"):
                                yield text
        except urllib.error.HTTPError as exc:
            with exc:
                said = exc.read(_READ_BYTES).decode(errors="replace")
            said = (said.replace(key, "[key]") if key else said)[:_SHOWN_CHARACTERS]
            raise RuntimeError(f"the endpoint answered HTTP {exc.code}: {said}") from None


def _text(message: Any) -> str:
    """Return the text of a message, or of a piece of one."""
    content = getattr(message, "content", message)
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content]
        return "".join(parts)
    return str(content)
