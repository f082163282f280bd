"""Environments for TRL's ``GRPOTrainer(environment_factory=…)``.

    environments = Environments(EpisodePool("mini-terminal"))
    trainer = GRPOTrainer(
        model, train_dataset=rows, environment_factory=environments,
        callbacks=[environments.callback()],
    )

TRL makes one object for each rollout of a batch, keeps all of them, and resets one after the other.
So each object reserves an instance when it is created: all instances start at the same time, before
the resets. A row of the dataset is a task: ``id``, ``setup``, ``reward``, ``seed`` and further
fields.

A void episode has the reward None: TRL leaves it out of the group's mean and gives it no advantage.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import io
import json
import operator
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from types import GenericAlias
from typing import Any, Final, Literal

from aenv_ray.client.openai_names import distinct_name
from aenv_ray.errors import AenvError
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool, SyncEpisode
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.schemas import JsonSchema
from aenv_ray.integrations.support.tools import (
    EnvironmentTools,
    FrameworkTool,
    framework_tools,
    identifier,
    images,
    is_identifier,
    model_text,
)
from aenv_ray.trajectories.schema import Task

require("trl", "trl", "1.16", "2")

from transformers import TrainerCallback  # noqa: E402

_RESERVED: Final = ("reset", "get_reward")
"""Methods that TRL calls itself."""
_TYPES: Final = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": type(None),
}


class ToolFailed(Exception):
    """A tool failed; TRL shows the message to the model."""


class Environments:
    """Makes the environments of a trainer.

    It can be pickled, as ``AsyncGRPOTrainer`` does; the copy has a pool of its own.

    Args:
        pool: Plays the episodes.
        only: Names of the tools to offer. None: all.
        observe: A tool that is called by each reset; its text is appended to the prompt. None: the
            result of the task's setup is, if that is text.
        timeout_s: Timeout of a call. None: 60.
        task: Makes a task of a row. None: all its columns but ``prompt`` are fields. (A `Dataset`
            gives each mapping in a column the keys of all rows; so look tasks up by their id.)
        is_async: For ``AsyncGRPOTrainer``, whose rollouts end one by one. Otherwise the first
            `get_reward` of a batch finishes the episodes of all, at once.
    """

    def __init__(
        self,
        pool: EpisodePool,
        *,
        only: Collection[str] | None = None,
        observe: str | None = None,
        timeout_s: float | None = None,
        task: Callable[[Mapping[str, Any]], Task | Mapping[str, Any]] | None = None,
        is_async: bool = False,
    ) -> None:
        self.pool = pool
        self.observe = observe
        self._only = only
        self._timeout_s = timeout_s
        self._task = task
        self._is_async = is_async
        self._listed: list[dict[str, Any]] = []
        self._type: type[TrlEnvironment] | None = None
        self._made: weakref.WeakSet[TrlEnvironment] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(
            Environments, only=self._only, observe=self.observe, timeout_s=self._timeout_s,
            task=self._task, is_async=self._is_async,
        )  # fmt: skip
        return made, (self.pool,)

    def __call__(self) -> TrlEnvironment:
        """Return an environment, as TRL does for each rollout.

        Raises:
            ConfigError: The environment has no such tool, or a schema contains itself.
            AenvError: The environment cannot be reached.
        """
        if self._type is None:
            self._listed = self.pool.list_tools()
            if self.observe is not None:  # a reset leaves out what it cannot observe
                framework_tools(self._listed, self.pool.env_name, only=[self.observe])
            self._type = self._made_type()
        made = self._type(self)
        self._made.add(made)
        self.pool.reserve()
        return made

    def _made_type(self) -> type[TrlEnvironment]:
        """Return a class with the tools as methods, since TRL looks at classes."""
        tools = framework_tools(
            self._listed, self.pool.env_name, only=self._only, naming=_naming, takes=_takes
        )
        return type("Rollout", (TrlEnvironment,), {tool.name: _method(tool) for tool in tools})

    def tools_of(self, episode: SyncEpisode) -> EnvironmentTools:
        """Return the tools of an episode."""
        tools = EnvironmentTools(
            episode, only=self._only, timeout_s=self._timeout_s, naming=_naming, takes=_takes
        )
        tools.offered(self._listed)
        return tools

    def task_of(self, row: Mapping[str, Any]) -> Task | Mapping[str, Any]:
        """Return the task of a row."""
        if self._task is not None:
            return self._task(row)
        fields = {name: value for name, value in row.items() if value is not None}
        fields.pop("prompt", None)
        return fields

    def finishing(self, environment: TrlEnvironment) -> Future[EpisodeOutcome] | None:
        """Finish the episode of an environment, and of the others if they end together."""
        if not self._is_async:
            for sibling in list(self._made):
                sibling._finishing()  # a public method would be a tool
        return environment._finishing()

    def callback(self) -> TrainerCallback:
        """Return a callback that marks records with the trainer's step as version of the policy."""
        return _Versions(self.pool)


class TrlEnvironment:
    """One rollout at a time; TRL resets it for the next one. Public methods are tools."""

    def __init__(self, made_by: Environments) -> None:
        self._made_by = made_by
        self._episode: SyncEpisode | None = None
        self._tools: EnvironmentTools | None = None
        self._outcome: Future[EpisodeOutcome] | None = None

    def reset(self, **row: Any) -> str | None:
        """Begin the episode of a row; return what the model sees besides its prompt."""
        if self._episode is not None and self._outcome is None:
            self._episode.abandon()
        made_by = self._made_by
        self._outcome = None
        self._episode = made_by.pool.begin_blocking(made_by.task_of(row))
        self._tools = made_by.tools_of(self._episode)
        if made_by.observe is None:
            found = self._episode.setup_result
            return found if isinstance(found, str) else None
        try:
            return model_text(self._episode.call_tool(made_by.observe))
        except AenvError:
            return None  # the outcome of the episode says what it is worth

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if self._tools is None:
            raise ToolFailed("the environment was not reset: call reset before a tool")
        result = await self._tools.call(name, arguments)
        if result.is_error:
            raise ToolFailed(model_text(result))
        shown = images(result)
        if not shown:
            return model_text(result)
        import PIL.Image  # TRL needs it for models that see

        blocks: list[dict[str, Any]] = [
            {"type": "image", "image": PIL.Image.open(io.BytesIO(base64.b64decode(data)))}
            for _, data in shown
        ]
        return [*blocks, {"type": "text", "text": result.text()}]

    def _finishing(self) -> Future[EpisodeOutcome] | None:
        if self._outcome is None and self._episode is not None:
            self._outcome = self._episode.submit(lambda episode: episode.finish())
        return self._outcome

    async def get_reward(self) -> float | None:
        """Return the reward; None if the episode is void."""
        finishing = self._made_by.finishing(self)
        return None if finishing is None else (await asyncio.wrap_future(finishing)).reward


class _Versions(TrainerCallback):
    """Tells a pool which step of the trainer's weights act."""

    def __init__(self, pool: EpisodePool) -> None:
        self._pool = pool

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step, before the trainer generates for it."""
        del args, control, kwargs
        self._pool.policy_version = int(state.global_step)


def _naming(name: str, taken: Mapping[str, str]) -> str:
    """Return the name of a method that TRL takes for a tool: public, and none of its own."""
    public = identifier(name.lstrip("_"), ())
    return distinct_name(public, name, {*taken, *_RESERVED})


def _takes(argument: str) -> bool:
    """Return whether a method can have an argument of this name."""
    return is_identifier(argument) and argument != "self"


def _method(tool: FrameworkTool) -> Callable[..., Any]:
    """Return a coroutine method from which transformers can make the schema of a tool."""
    properties: Mapping[str, JsonSchema] = tool.parameters["properties"]
    required = tool.parameters.get("required", ())

    async def method(self: TrlEnvironment, **arguments: Any) -> Any:
        return await self._call(tool.name, arguments)

    hints = {name: _hint(schema) for name, schema in properties.items()}
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[name],
            default=inspect.Parameter.empty if name in required else schema.get("default"),
        )
        for name, schema in properties.items()
    ]  # fmt: skip
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    lines = [_paragraph(tool.description) or tool.own_name]
    if properties:
        lines += ["", "Args:"]
        lines += [f"    {name}: {_described(name, schema)}" for name, schema in properties.items()]
    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = "\n".join(lines)
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature([receiver, *parameters])  # type: ignore[attr-defined]
    return method


def _paragraph(text: str) -> str:
    """Return text in one line, without what ends a section of a docstring."""
    return " ".join(text.split()).replace("Args:", "Args").replace("Returns:", "Returns")


def _described(name: str, schema: JsonSchema) -> str:
    """Return the description of a parameter, with the schema where its type does not show it."""
    text = _paragraph(str(schema.get("description") or name))
    is_nested = "properties" in json.dumps(schema)
    return f"{text} JSON Schema: {json.dumps(schema)}" if is_nested else text


def _hint(schema: JsonSchema) -> Any:
    """Return the type of which transformers makes the schema of a parameter."""
    choices = schema.get("enum", ())
    if choices and all(isinstance(one, str | int | float | bool) for one in choices):
        return Literal[tuple(choices)]
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if options:
        return functools.reduce(operator.or_, map(_hint, options))
    kind = schema.get("type")
    if isinstance(kind, list):
        return functools.reduce(operator.or_, (_hint({**schema, "type": one}) for one in kind))
    if kind == "array":
        items = schema.get("items")
        return GenericAlias(list, (_hint(items),)) if isinstance(items, dict) and items else list
    if kind == "object":
        return dict
    return _TYPES.get(str(kind), Any)
