"""`Environment`: an instance as an async context manager, in AEnvironment's shape.

    async with Environment("mini-terminal@1.0.0") as env:
        result = await env.call_tool("execute_command", {"command": "uname"})

The settings choose how the instance is reached: ``DUMMY_INSTANCE_IP`` names one server that
``aenv run`` started; else ``aenv_url`` or ``AENV_SYSTEM_URL`` names a gateway; else Ray is used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from aenv_ray.actors.calls.handle import TASKS_PER_PAGE, bare_tool_name
from aenv_ray.actors.calls.parameters import call_pairs, object_of
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.backend import EnvironmentBackend
from aenv_ray.client.circuit import CircuitBreaker
from aenv_ray.client.openai_names import OpenAIToolNames, openai_arguments
from aenv_ray.client.tool_callbacks import OnElicit, OnLog, OnSample, ToolCallbacks
from aenv_ray.client.waiting import Wait, expect_healthy
from aenv_ray.config import read_settings
from aenv_ray.errors import (
    GONE,
    AenvError,
    ConfigError,
    DeadlineExceeded,
    FunctionFailed,
    ResetFailed,
    ToolTimeout,
)
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    InstanceInfo,
    PromptMessages,
    ResetResult,
    ResourceContents,
    TaskPage,
    ToolResult,
)

logger = logging.getLogger("aenv_ray")

T = TypeVar("T")
BackendT = TypeVar("BackendT", bound=EnvironmentBackend)

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
"""With the default number of attempts a minute: in this time, a lost head is replaced, and with it
its gateway."""


class Environment:
    """One instance of an environment.

    Args:
        env_name: ``name@version``, ``name``, or, over Ray, the path of a project.
        datasource: Set in the instance as ``AENV_DATASOURCE``.
        ttl: None: the project's ``deployConfig.ttl``, else 30 minutes.
        environment_variables: Added to the project's variables.
        arguments: ``sys.argv[1:]`` of the instance's code.
        aenv_url: A gateway's address. None: ``AENV_SYSTEM_URL``.
        timeout: Default timeout of a call, in seconds.
        startup_timeout: Seconds from the create request until the instance is healthy.
        max_retries: Create attempts beyond the first, if the fabric is full or unreachable.
        api_key: Token for a gateway. None: ``AENV_API_KEY``.
        skip_for_healthy: Do not wait for the health check.
        owner: The owner of the instance, whose quota it counts towards.
        labels: Shown in listings and usable as filters.
        actor: ``dedicated`` or ``shared``. None: dedicated over Ray, else the gateway chooses.
        engine: None: chosen by project and cluster.
        idle_timeout: Ends the instance after this long without a call.
        seed: Seed of the first episode, see `aenv_ray.create`.
        on_log: Takes the log messages of tools, each a `LogMessage`. It may be async.
        on_elicit: Answers questions of tools to the user: takes the text and a JSON Schema, and
            returns the values by name, or None to decline. It may be async.
        on_sample: Answers requests of tools to a model: takes MCP's parameters, and returns the
            text. It may be async. An exception of these functions cancels the call and is raised
            by it.

    Methods may be called concurrently. The first call creates the instance if neither
    ``async with`` nor `initialize` did.
    """

    def __init__(  # noqa: PLR0913  # AEnvironment's parameters, in its order, are a contract
        self,
        env_name: str,
        datasource: str = "",
        ttl: str | float | None = None,
        environment_variables: Mapping[str, str] | None = None,
        arguments: Sequence[str] | None = None,
        aenv_url: str | None = None,
        timeout: float = 60.0,
        startup_timeout: float = 500.0,
        max_retries: int = 10,
        api_key: str | None = None,
        skip_for_healthy: bool = False,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        actor: str | None = None,
        engine: str | None = None,
        idle_timeout: str | float | None = None,
        seed: int | None = None,
        on_log: OnLog | None = None,
        on_elicit: OnElicit | None = None,
        on_sample: OnSample | None = None,
    ) -> None:
        _check_numbers(timeout, startup_timeout, max_retries)
        self.env_name = str(env_name)
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_retries = max_retries
        self.skip_for_healthy = skip_for_healthy
        self._api_key = api_key
        self._url = aenv_url
        self._actor = actor
        self._options = CreateOptions(
            actor=actor or "dedicated", ttl=ttl, idle_timeout=idle_timeout, engine=engine,
            environment_variables=environment_variables, arguments=arguments, labels=labels,
            owner=owner, datasource=datasource, seed=seed,
        )  # fmt: skip
        self._callbacks = ToolCallbacks(on_log, on_elicit, on_sample)
        self._instance: EnvironmentBackend | None = None
        self._attach_to: str | None = None
        self._initializing = asyncio.Lock()
        self._wait = Wait(self.env_name, startup_timeout)
        self._breaker = CircuitBreaker()
        self._openai = OpenAIToolNames()

    @classmethod
    async def attach(cls, instance_id: str, **options: Any) -> Environment:
        """Return an environment on a live instance; leaving it releases the instance.

        Raises:
            InstanceNotFound: No live instance has this id.
        """
        name = instance_id.rpartition("-")[0]
        environment = cls(name, **options)
        environment._attach_to = instance_id
        await environment.initialize()
        return environment

    # --- life -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Environment:
        await self.initialize()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.release()

    async def initialize(self) -> bool:
        """Create the instance and wait until it is healthy; returns True.

        Raises:
            AenvError: As `aenv_ray.create`; no instance is left.
            DeadlineExceeded: `startup_timeout` passed.
        """
        async with self._initializing:
            if self._instance is not None:
                return True
            self._breaker.reset()
            self._wait = Wait(f"an instance of {self.env_name}", self.startup_timeout)
            async with self._within(self.startup_timeout, "raise startup_timeout"):
                self._instance = await self._open()
            self._instance.callbacks = self._callbacks
            return True

    @asynccontextmanager
    async def _within(self, seconds: float, hint: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as exc:
            if isinstance(exc, AenvError):
                raise
            why = f": {self._wait.why}" if self._wait.why else ""
            raise DeadlineExceeded(
                f"{self.env_name} was not ready within {seconds:g} s{why}", hint=hint
            ) from exc

    async def _open(self) -> EnvironmentBackend:
        """Return a healthy instance; if it does not become healthy, none is left."""
        settings = read_settings()
        backend: EnvironmentBackend
        if settings.dummy_instance is not None:
            # Imported here: a driver on Ray need not load an HTTP client.
            from aenv_ray.client.over_http import HttpInstance

            server = HttpInstance(settings.dummy_instance)
            if not self.skip_for_healthy:
                await _release_on_failure(server, server.wait_healthy(wait=self._wait))
            return server
        gateway = self._url or settings.system_url
        if gateway is not None:
            from aenv_ray.client.over_gateway import GatewayInstance

            token = self._api_key or settings.api_key
            if self._attach_to is not None:
                return await GatewayInstance.attach(gateway, token, self._attach_to)
            backend = await self._create(
                lambda: GatewayInstance.create(
                    gateway, token, self.env_name, self._options, actor=self._actor
                )
            )
        elif self._attach_to is not None:
            return await AsyncEnvHandle.attach(self._attach_to)
        else:
            backend = await self._create(
                lambda: AsyncEnvHandle.create(self.env_name, self._options)
            )
        if not self.skip_for_healthy:
            await _release_on_failure(backend, _check_health(backend, self.timeout))
        return backend

    async def _create(self, create: Callable[[], Awaitable[BackendT]]) -> BackendT:
        """Create the instance; try again after transient errors."""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self.max_retries + 1):
            try:
                return await create()
            except AenvError as exc:
                asked_s = getattr(exc, "retry_after_s", 0.0)
                is_last = attempt == self.max_retries or asked_s > self._wait.remaining_s
                if not exc.retryable or is_last:
                    raise
                self._wait.goes_on(exc.message_and_hint)
            await asyncio.sleep(max(pause_s, asked_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError

    async def wait_for_ready(self, timeout: float = 300.0) -> None:
        """Create the instance if necessary and wait until it is healthy.

        Raises:
            DeadlineExceeded: `timeout` seconds passed.
        """
        async with self._within(timeout, "wait longer"):
            await self.initialize()

    async def release(self) -> None:
        """End the instance, any number of times; `initialize` then creates a new one."""
        async with self._initializing:
            instance, self._instance = self._instance, None
        self._breaker.reset()
        if instance is not None:
            try:
                await instance.release()
            finally:
                await instance.close()

    async def destroy(self) -> None:
        """End the instance; same as `release`."""
        await self.release()

    async def renew(self, ttl: str | float = "30m") -> InstanceInfo:
        """Move the deadline to `ttl` from now, unless it is later already."""
        return await self._run(lambda instance: instance.renew(ttl))

    async def get_env_info(self) -> dict[str, Any]:
        """Return ``name, instance_id, status, ip, created_at, updated_at`` and further fields."""
        instance = await self._ready()
        if instance.instance_id is None:
            return {
                "name": self.env_name, "instance_id": "test", "status": "Running",
                "ip": instance.url, "created_at": "", "updated_at": "",
            }  # fmt: skip
        info = await instance.info()
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.created_at))
        return {
            "name": self.env_name, "instance_id": info.id, "status": info.status.value,
            "ip": "", "created_at": created, "updated_at": created,
            **info.model_dump(mode="json", exclude={"id", "status", "created_at"}),
        }  # fmt: skip

    @property
    def instance_id(self) -> str | None:
        """The instance's id; None before `initialize`, and for an ``aenv run`` server."""
        return None if self._instance is None else self._instance.instance_id

    # --- calls ----------------------------------------------------------------------------------

    async def _ready(self) -> EnvironmentBackend:
        while self._instance is None:
            await self.initialize()
        return self._instance

    async def _run(self, call: Callable[[EnvironmentBackend], Coroutine[Any, Any, T]]) -> T:
        """Make a call through the circuit breaker."""
        self._breaker.check()
        instance = await self._ready()
        try:
            result = await call(instance)
        except BaseException as exc:
            self._breaker.record(exc)
            raise
        self._breaker.record(None)
        return result

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return ``{"name": "<env_name>/<tool>", "description", "inputSchema"}`` of each tool."""
        tools = await self._run(lambda instance: instance.list_tools())
        return [{**tool, "name": f"{self.env_name}/{tool['name']}"} for tool in tools]

    async def list_resources(self) -> list[dict[str, Any]]:
        """Return ``{"uri", "name", "description", "mimeType"}`` of each resource."""
        return await self._run(lambda instance: instance.list_resources())

    async def list_resource_templates(self) -> list[dict[str, Any]]:
        """Return ``{"uriTemplate", "name", …}`` of each resource whose URI has parameters."""
        return await self._run(lambda instance: instance.list_resource_templates())

    async def read_resource(self, uri: str, timeout: float | None = None) -> list[ResourceContents]:
        """Return what the resource at a URI contains, usually one part.

        Raises:
            ToolNotFound: The environment has no such resource.
            FunctionFailed: Its function raised.
        """
        seconds = self.timeout if timeout is None else timeout
        return await self._run(lambda instance: instance.read_resource(uri, seconds))

    async def list_prompts(self) -> list[dict[str, Any]]:
        """Return ``{"name", "description", "arguments"}`` of each prompt."""
        return await self._run(lambda instance: instance.list_prompts())

    async def get_prompt(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> PromptMessages:
        """Return a prompt with its arguments filled in.

        Raises:
            ToolNotFound: The environment has no such prompt.
            ToolInputInvalid: The arguments do not fit.
            FunctionFailed: Its function raised.
        """
        seconds = self.timeout if timeout is None else timeout
        given = object_of(name, arguments)
        return await self._run(lambda instance: instance.get_prompt(name, given, seconds))

    async def call_tool(
        self,
        tool_name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> ToolResult:
        """Call a tool, named ``<tool>`` or ``<env_name>/<tool>``.

        Raises:
            ToolNotFound: No such tool, or the prefix names another environment.
            ToolInputInvalid: The arguments do not fit the tool's schema.
            ToolTimeout: The tool was stopped after `timeout` seconds.
            AenvError: The infrastructure failed; see `aenv_ray.errors.INFRASTRUCTURE`.
        """
        name = bare_tool_name(tool_name, self.env_name)
        seconds = self.timeout if timeout is None else timeout
        given = object_of(name, arguments)
        return await self._run(lambda i: i.call_tool(name, given, seconds))

    async def call_tools(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        parallel: bool = False,
        timeout: float | None = None,
    ) -> list[ToolResult | AenvError]:
        """Call several tools in one round trip, in order or all at once.

        Each item is a result, or the error for which the call has none.
        """
        seconds = self.timeout if timeout is None else timeout
        named = [(bare_tool_name(name, self.env_name), given) for name, given in call_pairs(calls)]
        return await self._run(lambda i: i.call_tools(named, parallel, seconds))

    async def list_functions(self) -> dict[str, Any]:
        """Return ``{"total", "functions", "reward", "health"}``."""
        return await self._run(lambda instance: instance.list_functions())

    async def call_function(
        self,
        function_name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        method: str = "POST",
    ) -> Any:
        """Call a function and return its result.

        Raises:
            FunctionFailed: It raised.
        """
        seconds = self.timeout if timeout is None else timeout
        given = object_of(function_name, arguments)
        return await self._run(lambda i: i.call_function(function_name, given, seconds, method))

    async def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> Any:
        """Call a reward, by default the default one, and return its result.

        Raises:
            FunctionFailed: It raised, or returned NaN.
        """
        seconds = self.timeout if timeout is None else timeout
        given = object_of(name or "reward", arguments)
        return await self._run(lambda i: i.call_reward(given, name, seconds))

    async def reset(
        self, task: Any = None, seed: int | None = None, timeout: float | None = None
    ) -> ResetResult:
        """Begin the next episode: reset the instance, or replace it if it cannot be made clean.

        A new instance is reset, too, so the environment's function runs in any case. An instance
        that was attached to is never replaced.

        Args:
            task: JSON data for the environment's function.
            seed: Seed for the environment's function, and its `current_call().seed`.
            timeout: Seconds for the function. None: that of the environment.

        Returns:
            The result for the instance that is used from now on, and whether it is another one.

        Raises:
            ToolNotFound: The environment registers no reset.
            ResetFailed: The instance is not clean, nor is a new one; or it was attached to.
            FunctionFailed: The function raised in a new instance, too.
            ConfigError: The instance is not reached over Ray.
        """
        seconds = self.timeout if timeout is None else timeout
        try:
            result = await self._run(lambda i: i.reset(task, seed, seconds))
            if result.clean:
                return result
        except (FunctionFailed, ToolTimeout, *GONE) as exc:
            if self._attach_to is not None:
                raise
            logger.info("an instance of %s is replaced: %s", self.env_name, exc)
        else:
            if self._attach_to is not None:
                raise self._not_clean(result)
        await self.release()
        result = await self._run(lambda i: i.reset(task, seed, seconds))
        if not result.clean:
            raise self._not_clean(result)
        return result.model_copy(update={"replaced": True})

    def _not_clean(self, result: ResetResult) -> ResetFailed:
        return ResetFailed(
            f"{self.instance_id} is not clean after a reset: {'; '.join(result.reasons)}",
            instance_id=self.instance_id,
            hint="release it and create another",
        )

    async def list_tasks(self) -> list[dict[str, Any]]:
        """Return all tasks that the environment brings.

        Raises:
            ToolNotFound: It registers none.
            FunctionFailed: Its function raised.
            ConfigError: The instance is not reached over Ray.
        """
        tasks: list[dict[str, Any]] = []
        offset: int | None = 0
        while offset is not None:
            page = await self._run(partial(_task_page, offset))
            tasks += page.tasks
            offset = page.next_offset
        return tasks

    async def check_health(
        self, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return ``{"success": True, "data": {"status": …}}``."""
        seconds = self.timeout if timeout is None else timeout
        given = object_of("health", arguments)
        instance = await self._ready()
        return await instance.check_health(given, seconds)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox; a failing command is a result."""
        seconds = self.timeout if timeout is None else timeout
        return await self._run(lambda i: i.exec(command, seconds, cwd=cwd, env=env, stdin=stdin))

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file of the sandbox."""
        return await self._run(lambda i: i.read_file(path, offset, length))

    async def write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> int:
        """Write a file of the sandbox; returns its size."""
        return await self._run(lambda i: i.write_file(path, data, append, mode))

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """List a directory of the sandbox."""
        return await self._run(lambda i: i.list_files(path))

    async def logs(
        self, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the output of the instance, in pieces that may end within a line.

            async for piece in env.logs(tail=10, follow=True):
                print(piece, end="")

        Args:
            follow: Continue with new output until the instance ends.
            tail: Start with this many of the last lines. None: all that are stored.

        Raises:
            AenvError: The instance has ended.
        """
        instance = await self._ready()
        async with aclosing(instance.logs(tail, follow)) as pieces:
            async for piece in pieces:
                yield piece

    # --- OpenAI ---------------------------------------------------------------------------------

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI function tools, under names that OpenAI accepts.

        `tool_of_openai_name` maps such a name back to the tool's name.
        """
        self._openai = OpenAIToolNames(await self._run(lambda instance: instance.list_tools()))
        return self._openai.listed

    def tool_of_openai_name(self, name: str) -> str:
        """Return the name of the tool that `list_openai_tools` listed under `name`.

        Raises:
            ToolNotFound: It listed none.
        """
        return self._openai.own_name(name)

    async def call_openai_tool(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Call a tool as a model requests it: OpenAI name, arguments as JSON text or object.

        Raises:
            ToolNotFound: No such name.
            ToolInputInvalid: The text is not a JSON object, or does not fit the tool's schema.
        """
        own = self.tool_of_openai_name(name)
        return await self.call_tool(own, openai_arguments(own, arguments))


async def _task_page(offset: int, instance: EnvironmentBackend) -> TaskPage:
    return await instance.list_tasks(offset, TASKS_PER_PAGE)


async def _check_health(instance: EnvironmentBackend, timeout_s: float) -> None:
    data = (await instance.check_health({}, timeout_s))["data"]
    hint = f"read its log: aenv instance logs {instance.instance_id}"
    expect_healthy(data, instance.instance_id, hint=hint)


async def _release_on_failure(
    instance: EnvironmentBackend, check: Coroutine[Any, Any, object]
) -> None:
    try:
        await check
    except BaseException:
        await asyncio.shield(instance.release())
        await instance.close()
        raise


def _check_numbers(timeout_s: object, startup_timeout_s: object, max_retries: object) -> None:
    for what, seconds in (("timeout", timeout_s), ("startup_timeout", startup_timeout_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(
                f"invalid {what} {seconds!r}: expected a number of seconds above 0",
                hint="leave it out for the default",
            )
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise ConfigError(
            f"invalid max_retries {max_retries!r}: expected a whole number of at least 0",
            hint="pass 0 for no retries",
        )
