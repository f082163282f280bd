"""Agent environments as A2A agents: an ASGI application over an instance with a tool `chat`.

    env = aenv_ray.create(agent_env(helper, name="helper"))
    uvicorn.run(application(env, url="http://agents.example:9000"), port=9000)

It serves the agent card, and A2A's JSON-RPC methods: send, stream, get and cancel. A context of
A2A is a conversation of the agent, and its tasks are messages in it. Of a service, it is a session
as well, so that all its messages reach the same sandbox. Tasks are kept in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol, Self

from starlette.applications import Starlette

from aenv_ray import Environment
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.ray_shell import ray_api, ray_serve
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.support.requirement import require
from aenv_ray.models import ToolResult
from aenv_ray.runtime.door.agent import CHAT_S

require("a2a-sdk", "a2a", "1.0", "2")

from a2a.helpers.proto_helpers import new_task, new_text_message, new_text_part  # noqa: E402
from a2a.server.agent_execution import AgentExecutor, RequestContext  # noqa: E402
from a2a.server.events import EventQueue  # noqa: E402
from a2a.server.request_handlers import DefaultRequestHandler  # noqa: E402
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes  # noqa: E402
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater  # noqa: E402
from a2a.types import (  # noqa: E402
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    TaskState,
)

_TEXT: Final = "text/plain"
_ANSWER: Final = "answer"


class ServiceResponse(Awaitable[ToolResult], Protocol):
    """The result of a call of a service, once it is there."""

    def cancel(self) -> None:
        """Stop the call."""
        ...


class ServiceCall(Protocol):
    """A call of a service, sent with ``remote``."""

    def remote(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> ServiceResponse:
        """Send the call."""
        ...


class ServiceHandle(Protocol):
    """What `aenv_ray.serve.deploy` returns: the handle of a service."""

    app_name: str

    @property
    def call_tool(self) -> ServiceCall:
        """Calls a tool of one of its sandboxes."""
        ...

    def options(self, *, session_id: str) -> Self:
        """Return a handle whose calls reach the same sandbox."""
        ...


Served = EnvHandle | Environment | ServiceHandle


def application(
    environment: Served,
    *,
    url: str,
    name: str = "",
    version: str = "1.0.0",
    description: str = "An agent that answers messages",
) -> Starlette:
    """Return an ASGI application that answers A2A for an agent.

    Args:
        environment: An instance or a service of `aenv_ray.agent_env`, or of another environment
            whose tool ``chat`` takes ``message`` and ``conversation``. Pieces of an answer are
            streamed from the handle of an instance; an `Environment` and a service have the whole
            answer as one piece.
        url: Where clients reach the application.
        name: Name of the agent. "": that of the environment, or of the service's application.
        version: Version of the agent.
        description: Description for the agent card.

    Raises:
        ConfigError: The A2A SDK is missing, or of another version; or there is no agent to serve.
    """
    own = _name_of(environment)
    card = AgentCard(
        name=name or own,
        description=description,
        version=version,
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=False),
        default_input_modes=[_TEXT],
        default_output_modes=[_TEXT],
        skills=[AgentSkill(id="chat", name="chat", description=description, tags=["chat"])],
    )
    handler = DefaultRequestHandler(
        agent_executor=_Executor(environment), task_store=InMemoryTaskStore(), agent_card=card
    )
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/")]
    return Starlette(routes=routes)


def _name_of(environment: Served) -> str:
    if isinstance(environment, EnvHandle):
        return environment.reference
    if isinstance(environment, Environment):
        return environment.env_name
    if not hasattr(environment, "app_name"):
        raise ConfigError(
            f"{type(environment).__name__} {str(environment)[:100]!r} answers no messages",
            hint="pass a handle of aenv_ray.create or aenv_ray.serve.deploy, or an Environment",
        )
    return environment.app_name


class _Executor(AgentExecutor):
    """Answers a message by a call of `chat`; cancelling a task cancels the call."""

    def __init__(self, environment: Served) -> None:
        self._environment = environment

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task_id, context_id = str(context.task_id), str(context.context_id)
        if context.current_task is None:
            submitted = TaskState.TASK_STATE_SUBMITTED
            await event_queue.enqueue_event(new_task(task_id, context_id, submitted))
        updater = TaskUpdater(event_queue, task_id, context_id)
        await updater.start_work()
        text = context.get_user_input()
        if not text:
            await updater.reject(new_text_message("the message has no text"))
            return
        pieces = 0
        try:
            async with aclosing(_pieces(self._environment, text, context_id)) as found:
                async for piece in found:
                    await updater.add_artifact(
                        [new_text_part(piece)], artifact_id=_ANSWER, append=pieces > 0
                    )
                    pieces += 1
        except AenvError as exc:
            await updater.failed(new_text_message(exc.message_and_hint))
            return
        except _Raised as exc:
            await updater.failed(new_text_message(str(exc)))
            return
        await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        # The SDK cancels `execute` afterwards.
        await TaskUpdater(event_queue, str(context.task_id), str(context.context_id)).cancel()


class _Raised(Exception):
    """The agent raised; the text is its message."""


async def _pieces(
    environment: Served, message: str, conversation: str
) -> AsyncGenerator[str, None]:
    """Yield the pieces of an agent's answer.

    Raises:
        AenvError: The call failed.
        _Raised: The agent raised.
    """
    arguments = {"message": message, "conversation": conversation}
    streamed = ""
    if isinstance(environment, EnvHandle):
        references = environment.stream_tool.remote("chat", arguments, CHAT_S)
        result: Any = None
        try:
            async for reference in references:
                with ray_api.translated("chat", instance_id=environment.instance_id):
                    result = await reference
                if not isinstance(result, ToolResult):
                    _, _, piece = result
                    streamed += piece
                    yield piece
        finally:
            ray_api.cancel(references)
    elif isinstance(environment, Environment):
        result = await environment.call_tool("chat", arguments, CHAT_S)
    else:
        # Clients choose the names of contexts, which may be longer than those of sessions.
        session = hashlib.sha256(conversation.encode()).hexdigest()
        handle = environment.options(session_id=session)
        response = handle.call_tool.remote("chat", arguments, CHAT_S)
        try:
            with ray_serve.translated_call("chat"):
                result = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
    if result.is_error:
        raise _Raised(result.text())
    answer = result.text()
    if answer != streamed:  # a slow reader misses the oldest pieces
        yield answer if not streamed else f"\n{answer}"
