"""The tools of an environment in the form that all adapters build on.

A model may cause some errors: it names a tool that does not exist, its arguments do not match, its
call takes too long, or the tool has no result for another reason. These become results with
`is_error`, so that the model can react. All other errors are raised, and end the framework's loop
if the framework lets them pass: they say nothing about the model, and the episode is void, unless
something in the sandbox has ended it (`SandboxDiedInside`).
"""

from __future__ import annotations

import asyncio
import keyword
import re
from collections.abc import (
    Callable,
    Collection,
    Container,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard, TypeVar, cast

from aenv_ray.client.environment import Environment
from aenv_ray.client.openai_names import distinct_name, openai_arguments, openai_name
from aenv_ray.client.sync import SyncEnvironment
from aenv_ray.errors import ConfigError, ToolError, ToolNotFound
from aenv_ray.integrations.support.schemas import JsonSchema, inlined
from aenv_ray.models import ToolResult

if TYPE_CHECKING:  # episodes need Ray, which a client of a server does not have
    from aenv_ray.integrations.episodes import LiveEpisode, SyncEpisode

BlockingEnvironment: TypeAlias = "SyncEnvironment | SyncEpisode"
AnyEnvironment: TypeAlias = "Environment | LiveEpisode | BlockingEnvironment"
Naming: TypeAlias = Callable[[str, Mapping[str, str]], str]
Takes: TypeAlias = Callable[[str], bool]
T = TypeVar("T")

_NO_IDENTIFIER_CHARACTER: Final = re.compile(r"\W", re.ASCII)


def _takes_all(name: str) -> bool:
    del name
    return True


@dataclass(frozen=True)
class FrameworkTool:
    """A tool as a framework sees it."""

    name: str
    """Legal for the framework."""
    own_name: str
    """In the environment."""
    description: str
    parameters: JsonSchema
    """Schema of the arguments, an object without references."""
    own_arguments: Mapping[str, str] = field(default_factory=dict)
    """Names of arguments in the environment, by those in the schema, where they differ."""


def identifier(name: str, taken: Container[str]) -> str:
    """Return `name` as a Python identifier that differs from those in `taken`."""
    legal = _NO_IDENTIFIER_CHARACTER.sub("_", name) or "tool"
    if legal[0].isdigit() or keyword.iskeyword(legal):
        legal = f"tool_{legal}"
    return distinct_name(legal, name, taken)


def is_identifier(name: str) -> bool:
    """Whether a name can be that of an argument in Python code."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def framework_tools(
    listed: Sequence[Mapping[str, Any]],
    env_name: str,
    *,
    only: Collection[str] | None = None,
    naming: Naming = openai_name,
    takes: Takes = _takes_all,
) -> list[FrameworkTool]:
    """Return the tools of a listing as a framework sees them.

    Args:
        listed: As `Environment.list_tools` returns them.
        env_name: The name of the environment.
        only: Names of the tools to offer. None: all.
        naming: Makes a name legal for the framework, different from those it has made.
        takes: Whether the framework takes the name of an argument; others get another name.

    Raises:
        ConfigError: `only` names a tool that is not listed, or a schema contains itself.
    """
    by_name = {tool["name"].removeprefix(f"{env_name}/"): tool for tool in listed}
    if only is not None and (missing := set(only) - by_name.keys()):
        raise ConfigError(
            f"{env_name} has no tool {sorted(missing)[0]!r}",
            hint=f"tools: {', '.join(sorted(by_name)) or 'none'}",
        )
    own: dict[str, str] = {}
    tools = []
    for name, tool in by_name.items():
        if only is not None and name not in only:
            continue
        legal = naming(name, own)
        own[legal] = name
        parameters, renamed = _renamed(inlined(tool["inputSchema"], name), takes)
        description = tool.get("description") or ""
        tools.append(FrameworkTool(legal, name, description, parameters, renamed))
    return tools


def _renamed(schema: JsonSchema, takes: Takes) -> tuple[JsonSchema, dict[str, str]]:
    """Return a schema without arguments whose names a framework does not take, and their names."""
    properties: Mapping[str, Any] = schema["properties"]
    own: dict[str, str] = {}
    for name in properties:
        if not takes(name):
            plain = _NO_IDENTIFIER_CHARACTER.sub("_", name)
            candidates = (plain, f"{plain}_", f"argument_{plain}")
            legal = next(filter(takes, candidates), candidates[-1])
            own[distinct_name(legal, name, {*properties, *own})] = name
    if not own:
        return schema, own
    legal_of = {name: legal for legal, name in own.items()}
    named = {legal_of.get(name, name): part for name, part in properties.items()}
    required = [legal_of.get(name, name) for name in schema.get("required", ())]
    return {**schema, "properties": named, "required": required}, own


class EnvironmentTools:
    """Lists and calls the tools of one environment.

    Args:
        environment: An `Environment` or `LiveEpisode`; or a `SyncEnvironment` or `SyncEpisode`,
            whose calls may also be awaited.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.
        naming: Makes a name legal for the framework, different from those it has made.
        takes: Whether the framework takes the name of an argument; others get another name.

    Calls may run concurrently. Cancelling a call cancels the tool.
    """

    def __init__(
        self,
        environment: AnyEnvironment,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
        naming: Naming = openai_name,
        takes: Takes = _takes_all,
    ) -> None:
        self.environment = environment
        self._only = None if only is None else frozenset(only)
        self._timeout_s = timeout_s
        self._naming = naming
        self._takes = takes
        self._offered: dict[str, FrameworkTool] = {}

    async def load(self) -> list[FrameworkTool]:
        """Return the tools; their names become callable.

        Raises:
            ConfigError: `only` names a tool that the environment lacks, or a schema contains
                itself.
            AenvError: The environment cannot be reached.
        """
        if _is_async(self.environment):
            return self.offered(await self.environment.list_tools())
        return self.offered(await asyncio.to_thread(self._sync().list_tools))

    def load_blocking(self) -> list[FrameworkTool]:
        """Do the same as `load`; needs a `SyncEnvironment`."""
        return self.offered(self._sync().list_tools())

    def offered(self, listed: Sequence[Mapping[str, Any]]) -> list[FrameworkTool]:
        """Do the same as `load` with a list of the tools that the caller has."""
        tools = framework_tools(
            listed, self.environment.env_name, only=self._only, naming=self._naming,
            takes=self._takes,
        )  # fmt: skip
        self._offered = {tool.name: tool for tool in tools}
        return tools

    async def call(self, name: str, arguments: str | Mapping[str, Any] | None) -> ToolResult:
        """Call a tool by its framework name.

        Args:
            name: As in `FrameworkTool.name`.
            arguments: An object, or its JSON text.

        Returns:
            The result; one with `is_error` if the tool failed, does not exist, does not take these
            arguments, or did not end in time.

        Raises:
            SandboxDiedInside: Something in the sandbox ended it, which is the episode's outcome.
            AenvError: The infrastructure failed; the episode is void.
        """
        try:
            own, given = self._checked(name, arguments)
            if _is_async(self.environment):
                return await self.environment.call_tool(own, given, self._timeout_s)
            call = asyncio.wrap_future(
                self._sync().submit(lambda env: env.call_tool(own, given, self._timeout_s))
            )
            return await call
        except ToolError as exc:
            return _failed(exc)

    def call_blocking(self, name: str, arguments: str | Mapping[str, Any] | None) -> ToolResult:
        """Do the same as `call`; needs a `SyncEnvironment`."""
        try:
            own, given = self._checked(name, arguments)
            return self._sync().call_tool(own, given, self._timeout_s)
        except ToolError as exc:
            return _failed(exc)

    def _checked(
        self, name: str, arguments: str | Mapping[str, Any] | None
    ) -> tuple[str, Mapping[str, Any]]:
        tool = self._offered.get(name)
        if tool is None:
            known = ", ".join(self._offered) or "none"
            raise ToolNotFound(f"there is no tool {name!r}; tools: {known}", tool_name=name)
        given = openai_arguments(tool.own_name, {} if arguments is None else arguments)
        return tool.own_name, {
            tool.own_arguments.get(argument, argument): value for argument, value in given.items()
        }

    def _sync(self) -> BlockingEnvironment:
        if not _is_async(self.environment):
            return cast("BlockingEnvironment", self.environment)
        raise ConfigError(
            f"{self.environment.env_name}: this framework calls tools without an event loop",
            hint="pass a SyncEnvironment instead of an Environment",
        )


def _is_async(environment: AnyEnvironment) -> TypeGuard[Environment | LiveEpisode]:
    return not hasattr(environment, "submit")


def _failed(error: ToolError) -> ToolResult:
    return ToolResult([{"type": "text", "text": error.message_and_hint}], is_error=True)


def field_of(item: Any, name: str) -> Any:
    """Return a field of a model's answer, which is an object of a package or a mapping."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


async def at_once(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of calls that are made at the same time.

    Raises:
        Exception: The first that one of them raised; the others were cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def model_text(result: ToolResult) -> str:
    """Return what a model reads that accepts only text; other blocks are named."""
    parts = []
    for block in result.content:
        if block.get("type") == "text":
            parts.append(str(block.get("text", "")))
        else:
            parts.append(f"[{block.get('type', 'content')}: {block.get('mimeType', 'unknown')}]")
    return "\n".join(parts)


def images(result: ToolResult) -> list[tuple[str, str]]:
    """Return media type and base64 data of each image in a result."""
    return [
        (str(block.get("mimeType", "image/png")), str(block["data"]))
        for block in result.content
        if block.get("type") == "image" and block.get("data")
    ]
