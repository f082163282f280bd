"""Environments for verifiers, which evaluates and trains on tasksets.

A taskset of verifiers is a module. Write one, for example ``terminal.py``:

    from aenv_ray.integrations.verifiers import AenvEnv, AenvTaskset

    __all__ = ["AenvEnv", "AenvTaskset"]

    PYTHONPATH=. vf-eval terminal --env.taskset.environment mini-terminal

The harness of verifiers plays: it gets the environment's tools over MCP. The reward of the
environment is that of the rollout. A void episode is an error of the rollout, which verifiers can
retry and which has no reward.

For the reverse, a taskset of verifiers as an environment of ours, see
`aenv_ray.integrations.verifiers_tasksets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Final, Self

import uvicorn

from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool, LiveEpisode
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import EnvironmentTools, FrameworkTool
from aenv_ray.models import ToolResult
from aenv_ray.sampling.tasks.environment_tasks import tasks_of
from aenv_ray.sampling.tasks.feed import load_tasks

require("verifiers", "verifiers", "0.4", "0.5")

import verifiers.v1 as vf  # noqa: E402
from mcp.server.lowlevel import Server  # noqa: E402
from mcp.server.transport_security import TransportSecuritySettings  # noqa: E402
from mcp_types import CallToolResult, ListToolsResult, Tool  # noqa: E402
from pydantic import Field  # noqa: E402
from verifiers.v1.harnesses.null.harness import NullHarnessConfig  # noqa: E402
from verifiers.v1.mcp import SharedToolServer  # noqa: E402
from verifiers.v1.runtimes import runtime_is_local  # noqa: E402

_STOP_S: Final = 10.0
_TOOLS: Final = ""
"""Name of the server of the tools: with this one, harnesses do not prefix their names."""


class AenvData(vf.TaskData):
    """A task, as verifiers records it."""

    task: dict[str, Any]
    """As in `aenv_ray.sample`."""


class AenvConfig(vf.TasksetConfig):
    """Where the tasks come from, and how they are played."""

    environment: str = ""
    """``name@version``, ``name``, or the path of a project."""
    tasks: str | list[dict[str, Any]] | None = None
    """File or data set, as in `aenv_ray.sample`, or the tasks; None: those that it brings."""
    only: list[str] | None = None
    """Names of the tools to offer. None: all."""
    timeout_s: float | None = None
    """Timeout of a call. None: 60."""
    pool: dict[str, Any] = Field(default_factory=dict)
    """Options of the `EpisodePool`."""


class AenvTask(vf.Task[AenvData, vf.State, vf.TaskConfig]):
    """One task; `AenvEnv` gives each run of it an episode."""

    rollout: RolloutEpisode | None = None

    @property
    def key(self) -> str:
        """The id of the task."""
        return str(self.data.id)

    def with_rollout(self, rollout: RolloutEpisode) -> Self:
        """Return a copy that is played in an episode of `rollout`."""
        clone = copy.copy(self)
        clone.rollout = rollout
        return clone

    def _rollout(self) -> RolloutEpisode:
        if self.rollout is None:
            raise ConfigError(
                f"task {self.data.id!r} has no environment",
                hint="export AenvEnv from the module of the taskset, next to AenvTaskset",
            )
        return self.rollout

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Begin an episode: a run that is retried has a new one."""
        del trace, runtime
        await self._rollout().begin()

    @vf.stop
    async def episode_over(self, trace: vf.Trace) -> bool:
        """Whether the sandbox is gone, so that the model need not go on."""
        del trace
        return self._rollout().is_over

    @vf.reward
    async def environment_reward(
        self, trace: vf.Trace, runtime: vf.Runtime
    ) -> float | dict[str, float]:
        """Return the environment's reward; no entry if the task has none.

        Raises:
            RolloutError: The episode is void.
        """
        del runtime  # without this parameter, offline scoring would call it too
        outcome = await self._rollout().finish()
        record = outcome.episode
        trace.info["aenv"] = {"status": record.status.value, "instance_id": record.instance_id}
        if outcome.is_void:
            raise vf.SandboxError(
                f"the episode of task {record.task_id!r} is void: {record.error or 'no reward'}"
            )
        return {} if outcome.reward is None else outcome.reward


class AenvTaskset(vf.Taskset[AenvTask, AenvConfig]):
    """The tasks of an environment."""

    def load(self) -> Iterator[AenvTask]:
        """Yield the tasks.

        Raises:
            ConfigError: There are none, or one has no instruction.
            AenvError: The environment does not exist.
        """
        config = self.config
        if not config.environment:
            raise ConfigError(
                "the taskset names no environment",
                hint="--env.taskset.environment name@version",
            )
        given = config.tasks
        if isinstance(given, list):
            found = load_tasks(given)
        else:
            found = list(tasks_of(config.environment, given, {}, {}))
        for task in found:
            if not task.instruction:
                raise ConfigError(
                    f"task {task.id!r} has no instruction, which verifiers gives to the model",
                    hint="give tasks with an instruction",
                )
            fields = task.model_dump(mode="json", exclude_defaults=True)
            data = AenvData(id=task.id, name=task.id, prompt=task.instruction, task=fields)
            yield AenvTask(data, config.task)


class AenvEnvConfig(vf.EnvConfig):
    """One agent, which by default has the environment's tools and no others."""

    agent: vf.AgentConfig = vf.AgentConfig(
        harness=NullHarnessConfig(id="null"), runtime=vf.SubprocessConfig()
    )


class AenvEnv(vf.Env[AenvEnvConfig]):
    """Plays each task as an episode of an environment.

    Raises:
        ConfigError: The taskset is not an `AenvTaskset`, or the agent's program runs where it
            cannot reach the tools.
    """

    _tool_server: RolloutServer | None = None

    def __init__(self, config: AenvEnvConfig) -> None:
        super().__init__(config)
        if not isinstance(self.taskset, AenvTaskset):
            raise ConfigError(
                f"AenvEnv plays no {type(self.taskset).__name__}",
                hint="export AenvTaskset from the module of the taskset",
            )
        if not runtime_is_local(config.agent.runtime):
            raise ConfigError(
                f"a program in the runtime {config.agent.runtime.type!r} cannot reach the tools, "
                "which this process serves on its loopback interface",
                hint="--env.agent.runtime.type subprocess, docker, podman or apptainer",
            )

    async def start(self) -> None:
        """Serve the tools, for all episodes of this process."""
        given = self.taskset.config
        self._tool_server = RolloutServer(EpisodePool(given.environment, **given.pool))
        await self._tool_server.open()

    async def stop(self) -> None:
        """End the episodes and the server."""
        server, self._tool_server = self._tool_server, None
        if server is not None:
            await server.close()

    async def run(self, task: AenvTask, agents: vf.Agents) -> None:
        """Play one episode."""
        assert self._tool_server is not None, "verifiers calls start() first"
        given = self.taskset.config
        playing = self._tool_server.rollout(task.data.task, given.only, given.timeout_s)
        async with playing as (rollout, url):
            server = SharedToolServer(url=url, local=True)
            await agents.agent.run(task.with_rollout(rollout), tools={_TOOLS: server})


class RolloutEpisode:
    """The episode of one rollout; if verifiers retries the rollout, another one.

    Args:
        pool: Plays the episodes.
        task: As in `aenv_ray.sample`.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: 60.
    """

    def __init__(
        self,
        pool: EpisodePool,
        task: dict[str, Any],
        only: Collection[str] | None,
        timeout_s: float | None,
    ) -> None:
        self._pool = pool
        self._task = task
        self._only = only
        self._timeout_s = timeout_s
        self._episode: LiveEpisode | None = None
        self._tools: EnvironmentTools | None = None
        self._offered: list[FrameworkTool] = []
        self.is_over = False
        """Whether a call has found the episode ended."""

    async def begin(self) -> None:
        """Begin an episode; one that still runs is abandoned.

        Raises:
            ConfigError: The task is wrong, `only` names a tool that the environment lacks, or a
                schema contains itself.
            AenvError: The environment does not exist.
        """
        await self.leave()
        self._offered = []
        self._episode = episode = await self._pool.begin(self._task)
        self._tools = EnvironmentTools(episode, only=self._only, timeout_s=self._timeout_s)
        self.is_over = not episode.has_begun
        if self.is_over:
            return
        try:
            self._offered = await self._tools.load()
        except ConfigError:
            raise
        except AenvError:
            self.is_over = True  # `finish` says why

    def list_tools(self) -> list[Tool]:
        """Return the tools; none if the episode has ended before it began."""
        return [
            Tool(name=tool.name, description=tool.description, input_schema=tool.parameters)
            for tool in self._offered
        ]

    async def call(self, name: str, arguments: dict[str, Any] | None) -> ToolResult:
        """Call a tool; after the end of the episode, the result is an error."""
        ended = ToolResult([{"type": "text", "text": "the episode has ended"}], is_error=True)
        if self._tools is None or self.is_over:
            return ended
        try:
            return await self._tools.call(name, arguments)
        except AenvError:
            self.is_over = True  # `finish` says why
            return ended

    async def finish(self) -> EpisodeOutcome:
        """Run the reward, and return the outcome.

        Raises:
            ConfigError: No episode was begun.
        """
        if self._episode is None:
            raise ConfigError(
                "no episode was begun", hint="call Task.setup first, as verifiers does"
            )
        return await self._episode.finish()

    async def leave(self) -> None:
        """Abandon the episode, unless it has ended."""
        episode, self._episode, self._tools = self._episode, None, None
        if episode is not None and not self._pool.is_closed:
            await episode.abandon()


_current: ContextVar[RolloutEpisode] = ContextVar("aenv_verifiers_rollout")


class RolloutServer:
    """An MCP server on the loopback interface, with a secret address for each rollout.

    Args:
        pool: Plays the episodes; closed with the server.
    """

    def __init__(self, pool: EpisodePool) -> None:
        self._pool = pool
        self._rollouts: dict[str, RolloutEpisode] = {}
        server: Server[Any] = Server("aenv", on_list_tools=_list_tools, on_call_tool=_call_tool)
        # Programs in containers come with other host names; web pages do not know the addresses.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        self._mcp = server.streamable_http_app(
            json_response=True, stateless_http=True, transport_security=security
        )
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    async def open(self) -> None:
        """Begin to serve."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        up = asyncio.Event()
        config = uvicorn.Config(self._answer, interface="asgi3", log_level="error", lifespan="on")
        self._server = _Server(config, up)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._serving.add_done_callback(lambda _: up.set())
        await up.wait()
        if self._serving.done():
            self._serving.result()
            raise ConfigError(
                f"the server of the environment's tools did not start at {self._url}",
                hint="see the log of uvicorn",
            )

    async def close(self) -> None:
        """End the server and all episodes."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._serving
        await asyncio.to_thread(self._pool.close)

    @contextlib.asynccontextmanager
    async def rollout(
        self, task: dict[str, Any], only: Collection[str] | None, timeout_s: float | None
    ) -> AsyncIterator[tuple[RolloutEpisode, str]]:
        """Yield a rollout and the address of its tools; afterwards, its episode has ended."""
        rollout = RolloutEpisode(self._pool, task, only, timeout_s)
        name = secrets.token_urlsafe(24)
        self._rollouts[name] = rollout
        try:
            yield rollout, f"{self._url}/{name}/mcp"
        finally:
            del self._rollouts[name]
            await rollout.leave()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._mcp(scope, receive, send)
            return
        name, _, path = scope["path"].removeprefix("/").partition("/")
        rollout = self._rollouts.get(name)
        if rollout is None:
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        token = _current.set(rollout)
        try:
            await self._mcp(
                {**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, send
            )
        finally:
            _current.reset(token)


class _Server(uvicorn.Server):
    """Sets `up` once it serves; leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, up: asyncio.Event) -> None:
        super().__init__(config)
        self._up = up

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set()


async def _list_tools(context: Any, params: Any) -> ListToolsResult:
    del context, params
    return ListToolsResult(tools=_current.get().list_tools())


async def _call_tool(context: Any, params: Any) -> CallToolResult:
    del context
    result = await _current.get().call(params.name, params.arguments)
    return CallToolResult.model_validate({"content": result.content, "isError": result.is_error})
