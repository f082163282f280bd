"""`Environment`: an instance as an async context manager, in AEnvironment's shape.

    async with Environment("mini-terminal@1.0.0") as env:
        result = await env.call_tool("execute_command", {"command": "uname"})

Inside a Ray cluster, or with none around, it speaks Ray; with ``AENV_SYSTEM_URL`` set it speaks
HTTP to a gateway, and with ``DUMMY_INSTANCE_IP`` to one server that ``aenv run`` started.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from aenv_ray.actors.calls.handle import bare_tool_name
from aenv_ray.actors.calls.parameters import call_pairs, object_of
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.circuit import CircuitBreaker
from aenv_ray.client.openai_names import OpenAITools, openai_arguments
from aenv_ray.client.opening import check_numbers, open_instance
from aenv_ray.client.waiting import Wait
from aenv_ray.errors import AenvError, ConfigError, DeadlineExceeded
from aenv_ray.models import ExecResult, FileEntry, InstanceInfo, ToolResult

T = TypeVar("T")


class Environment:
    """One instance of an environment.

    Args:
        env_name: ``name@version``, ``name``, or, over Ray, a project's path.
        datasource: Given to the instance as ``AENV_DATASOURCE``.
        ttl: None: the project's ``deployConfig.ttl``, else 30 minutes.
        environment_variables: Added to the project's.
        arguments: ``sys.argv[1:]`` of the instance's code.
        aenv_url: A gateway, as ``AENV_SYSTEM_URL`` names it.
        timeout: Default seconds for a call.
        startup_timeout: Seconds for creation until healthy.
        max_retries: Attempts to create, beyond the first, when the fabric has no room or is away.
        api_key: Token for a gateway. None: ``AENV_API_KEY``.
        skip_for_healthy: Do not wait for the health check.
        owner: Whom the instance is accounted to.
        labels: For people and listings.
        actor: ``dedicated`` or ``shared``. None: over Ray dedicated, else the gateway chooses.
        engine: None chooses.
        idle_timeout: Ends the instance after this long without a call.

    Its methods may be called concurrently; the first one creates the instance if ``async with``
    or `initialize` did not.
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
    ) -> None:
        check_numbers(timeout, startup_timeout, max_retries)
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
            owner=owner, datasource=datasource,
        )  # fmt: skip
        self._instance: Any = None
        self._attach_to: str | None = None
        self._initializing = asyncio.Lock()
        self._wait = Wait(self.env_name, startup_timeout)
        self._breaker = CircuitBreaker()
        self._openai = OpenAITools()

    @classmethod
    async def attach(cls, instance_id: str, **options: Any) -> Environment:
        """Return an environment on a live instance; leaving it releases the instance.

        Raises:
            InstanceNotFound: No host has it.
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
        """Create the instance and wait until it is healthy; True when it is there.

        Raises:
            AenvError: As `aenv_ray.create`; nothing is left then.
            DeadlineExceeded: `startup_timeout` passed.
        """
        async with self._initializing:
            if self._instance is not None:
                return True
            self._breaker.reset()
            self._wait = Wait(f"an instance of {self.env_name}", self.startup_timeout)
            async with self._within(self.startup_timeout, "raise startup_timeout"):
                self._instance = await open_instance(
                    self.env_name,
                    self._options,
                    url=self._url,
                    api_key=self._api_key,
                    actor=self._actor,
                    attach_to=self._attach_to,
                    wait=self._wait,
                    health_timeout_s=None if self.skip_for_healthy else self.timeout,
                    max_retries=self.max_retries,
                )
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

    async def wait_for_ready(self, timeout: float = 300.0) -> None:
        """Create the instance if need be and wait until it is healthy.

        Raises:
            DeadlineExceeded: `timeout` seconds passed.
        """
        async with self._within(timeout, "wait longer"):
            await self.initialize()

    async def release(self) -> None:
        """End the instance. Any number of times; `initialize` then makes a new one."""
        async with self._initializing:
            instance, self._instance = self._instance, None
        self._breaker.reset()
        if instance is not None:
            try:
                await instance.release()
            finally:
                await instance.close()

    async def destroy(self) -> None:
        """End the instance; another name of `release`."""
        await self.release()

    async def renew(self, ttl: str | float = "30m") -> InstanceInfo:
        """Move the deadline to `ttl` from now."""
        return await self._run(lambda instance: instance.renew(ttl))

    async def get_env_info(self) -> dict[str, Any]:
        """Return ``name, instance_id, status, ip, created_at, updated_at`` and, if known, more."""
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
        """The instance's id; None before `initialize`, and of an ``aenv run`` server."""
        return getattr(self._instance, "instance_id", None)

    # --- calls ----------------------------------------------------------------------------------

    async def _ready(self) -> Any:
        if self._instance is None:
            await self.initialize()
        return self._instance

    async def _run(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Run one call through the circuit breaker."""
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

    async def call_tool(
        self,
        tool_name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> ToolResult:
        """Call a tool by its own name or as ``<env_name>/<tool>``.

        Raises:
            ToolNotFound: No such tool, or the prefix names another environment.
            ToolInputInvalid: The arguments do not fit.
            ToolTimeout: It was stopped after `timeout` seconds.
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

        Each item is a result or the error that kept the call from having one.
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
        """Call a function and return what it returned.

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
        """Call a reward, by default the default one, and return what it returned.

        Raises:
            FunctionFailed: It raised, or returned NaN: never a made-up number.
        """
        seconds = self.timeout if timeout is None else timeout
        given = object_of(name or "reward", arguments)
        return await self._run(lambda i: i.call_reward(given, name, seconds))

    async def check_health(
        self, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return ``{"success": True, "data": {"status": …}}``."""
        seconds = self.timeout if timeout is None else timeout
        given = object_of("health", arguments)
        instance = await self._ready()
        body: dict[str, Any] = await instance.check_health(given, seconds)
        return body

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox; a failing one is a result."""
        seconds = self.timeout if timeout is None else timeout
        return await self._in_sandbox(
            lambda i: i.exec(command, seconds, cwd=cwd, env=env, stdin=stdin)
        )

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file of the sandbox."""
        return await self._in_sandbox(lambda i: i.read_file(path, offset, length))

    async def write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> int:
        """Write a file of the sandbox; returns its size."""
        return await self._in_sandbox(lambda i: i.write_file(path, data, append, mode))

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """List a directory of the sandbox."""
        return await self._in_sandbox(lambda i: i.list_files(path))

    async def logs(
        self, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield what the instance printed, in pieces that may end within a line.

            async for piece in env.logs(tail=10, follow=True):
                print(piece, end="")

        Args:
            follow: Go on with what it prints from now on, until it ends.
            tail: Begin with so many of the last lines. None: all that is kept.

        Raises:
            AenvError: The instance has ended.
        """
        instance = await self._managed()
        async with aclosing(instance.logs(tail, follow)) as pieces:
            async for piece in pieces:
                yield piece

    async def _managed(self) -> Any:
        """Return an instance of the fabric, which has more than a public door."""
        instance = await self._ready()
        if instance.instance_id is None:
            raise ConfigError(
                "an `aenv run` server offers tools and functions, not commands, files and logs",
                hint="unset DUMMY_INSTANCE_IP to use an instance on Ray or behind a gateway",
            )
        return instance

    async def _in_sandbox(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        await self._managed()
        return await self._run(call)

    # --- OpenAI ---------------------------------------------------------------------------------

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI function tools, under names that OpenAI accepts.

        `tool_of_openai_name` gives the tool's own name back; `call_tool` takes either.
        """
        self._openai = OpenAITools(await self._run(lambda instance: instance.list_tools()))
        return self._openai.listed

    def tool_of_openai_name(self, name: str) -> str:
        """Return the tool's own name for a name from `list_openai_tools`.

        Raises:
            ToolNotFound: `list_openai_tools` gave no such name.
        """
        return self._openai.own_name(name)

    async def call_openai_tool(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Call a tool as a model asked for it: OpenAI name, arguments as JSON text or object.

        Raises:
            ToolNotFound: No such name.
            ToolInputInvalid: The text is no JSON object, or does not fit.
        """
        own = self.tool_of_openai_name(name)
        return await self.call_tool(own, openai_arguments(own, arguments))
