"""An environment as an OpenEnv server, for OpenEnv's clients and the trainers that use them.

    uvicorn.run(openenv.application("mini-terminal"), port=8000)

``reset`` begins an episode; its option ``task`` is as in `aenv_ray.sample`. Steps are the actions
``list_tools`` and ``call_tool``. Calling the tool ``finish_episode`` ends the episode, and has its
reward. A void episode has no reward, and ``void``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.client.openai_names import openai_name
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool, LiveEpisode
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import EnvironmentTools, framework_tools, model_text
from aenv_ray.models import ToolResult

require("openenv-core", "openenv", "0.3", "1")

from openenv.core.env_server.http_server import create_fastapi_app  # noqa: E402
from openenv.core.env_server.interfaces import Environment  # noqa: E402
from openenv.core.env_server.mcp_types import (  # noqa: E402
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from openenv.core.env_server.types import Action, Observation, State  # noqa: E402

FINISH: Final = "finish_episode"
"""Name of the tool that ends an episode."""
SESSIONS: Final = 64


class EpisodeObservation(Observation):
    """What a reset shows."""

    task_id: str
    instruction: str
    setup: Any = None
    """What the task's setup returned."""


class StepObservation(CallToolObservation):
    """What a call shows."""

    void: bool = False
    """Whether the episode has ended without a result."""


class EpisodeEnvironment(Environment):
    """The episodes of one session, one after the other.

    Args:
        pool: Plays them.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call, unless a step has its own. None: 60.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        pool: EpisodePool,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._only = only
        self._timeout_s = timeout_s
        self._episode: LiveEpisode | None = None
        self._tools: EnvironmentTools | None = None
        self._state = State()

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> EpisodeObservation:
        """Begin an episode; one that still runs is abandoned.

        Raises:
            ConfigError: The task is wrong.
        """
        await self._abandon()
        task = dict(options.get("task") or {})
        if seed is not None:
            task["seed"] = seed
        self._episode = episode = await self._pool.begin(task)
        self._tools = EnvironmentTools(
            episode, only=self._only, timeout_s=self._timeout_s, naming=_naming
        )
        self._state = State(episode_id=episode_id or episode.instance_id, step_count=0)
        return EpisodeObservation(
            task_id=episode.task.id,
            instruction=episode.task.instruction,
            setup=episode.setup_result,
        )

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **options: Any
    ) -> Observation:
        """List the tools, call one, or end the episode.

        Raises:
            ConfigError: `only` names a tool that the environment lacks, or a schema contains
                itself.
        """
        del timeout_s, options
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=await self._offered())
        assert isinstance(action, CallToolAction), "OpenEnv parses actions as these"
        self._state.step_count += 1
        episode, tools = self._episode, self._tools
        if episode is None or tools is None:
            return _failed(action.tool_name, "there is no episode; reset begins one")
        if action.tool_name == FINISH:
            return self._ended(FINISH, await episode.finish())
        try:
            await tools.load()
            result = await tools.call(action.tool_name, action.arguments)
        except ConfigError:
            raise
        except AenvError as exc:
            return self._ended(action.tool_name, await episode.finish(), exc.message)
        if result.is_error:
            return _failed(action.tool_name, model_text(result))
        return StepObservation(tool_name=action.tool_name, result=_shown(result))

    def _ended(self, tool: str, outcome: EpisodeOutcome, why: str | None = None) -> StepObservation:
        self._episode = None
        error = None
        if why is not None:
            error = ToolError(error_type=ToolErrorType.TRANSPORT_ERROR, message=why)
        return StepObservation(
            tool_name=tool, done=True, reward=outcome.reward, void=outcome.is_void, error=error,
            result=outcome.episode.status.value,
        )  # fmt: skip

    async def _offered(self) -> list[Tool]:
        listed = await asyncio.to_thread(self._pool.list_tools)
        tools = framework_tools(listed, self._pool.env_name, only=self._only, naming=_naming)
        end = Tool(name=FINISH, description="End the episode.", input_schema={"type": "object"})
        offered = [
            Tool(name=tool.name, description=tool.description, input_schema=tool.parameters)
            for tool in tools
        ]
        return [*offered, end]

    async def _abandon(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.abandon()

    # --- what OpenEnv calls without a loop -------------------------------------------------------

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> EpisodeObservation:
        """Do the same as `reset_async`; blocks."""
        return self._pool.run(self.reset_async(seed, episode_id, **options))

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        """Do the same as `step_async`; blocks."""
        return self._pool.run(self.step_async(action, timeout_s, **options))

    @property
    def state(self) -> State:
        """The episode's id, and its number of calls."""
        return self._state

    def close(self) -> None:
        """Abandon the episode, if the session has left it."""
        if self._episode is not None and not self._pool.is_closed:
            self._pool.run(self._abandon())


def _naming(name: str, taken: Mapping[str, str]) -> str:
    """Return a name for a tool that is not that of the tool which ends the episode."""
    return openai_name(name, {**taken, FINISH: ""})


def _failed(tool: str, why: str) -> StepObservation:
    error = ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=why)
    return StepObservation(tool_name=tool, error=error)


def _shown(result: ToolResult) -> Any:
    """Return the data of a result, or its blocks, as MCP has them, if one is not text."""
    if any(block.get("type") != "text" for block in result.content):
        return result.content
    return model_text(result) if result.data is None else result.data


def application(
    environment: str | Path,
    *,
    only: Collection[str] | None = None,
    timeout_s: float | None = None,
    sessions: int = SESSIONS,
    **options: Any,
) -> Any:
    """Return the ASGI application of a server.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: 60.
        sessions: Maximum number of clients at a time.
        options: The options of the `EpisodePool`, which is closed when the process exits.
    """
    pool = EpisodePool(environment, **options)
    return create_fastapi_app(
        lambda: EpisodeEnvironment(pool, only=only, timeout_s=timeout_s),
        CallToolAction, CallToolObservation, max_concurrent_envs=sessions,
    )  # fmt: skip
