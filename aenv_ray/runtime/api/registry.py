"""The registry of an environment's functions, which decorators fill and both doors serve."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

from aenv_ray.runtime.api.module_state import ModuleState
from aenv_ray.runtime.api.signature import Signature
from aenv_ray.runtime.faults import Fault

DEFAULT_REWARD_PATH = "/task/reward"
RESET_PARAMETERS = ("task", "seed")
"""What a reset is given."""
COMPLETION_PARAMETERS = ("value", "arguments")
"""What a function of completions is given: the beginning, and the other arguments."""
Completions = Mapping[str, Sequence[str] | Callable[..., Any]]
"""By parameter: its values, or a function that returns those with a beginning."""
HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Registered:
    """A registered function of the environment."""

    name: str
    function: Callable[..., Any]
    kind: str
    """``tool``, ``resource``, ``prompt``, ``completion``, ``reward``, ``function``, ``health``,
    ``reset`` or ``tasks``; ``builtin`` and, with an empty result, ``empty``."""
    description: str | None = None
    timeout_s: float | None = None
    """Seconds after which a call is stopped. None: only the caller's timeout applies."""
    idempotent: bool = False
    """Whether a repeated call has no further effect; MCP's ``idempotentHint``."""
    endpoint: str = ""
    """Path at the public door; unused for tools."""
    method: str = "POST"
    keeps_processes: bool = False
    """For a reward: whether the processes that tools have started continue while it runs."""
    state: tuple[str, ...] = ()
    """For a reset: variables of modules that must have their initial values afterwards."""
    kept_files: tuple[str, ...] = ()
    """For a reset: paths in the work directory that its function restores itself."""
    schema: Mapping[str, Any] | None = None
    """For a tool: the JSON Schema to show instead of the one derived from its signature."""
    uri: str = ""
    """For a resource: its URI, or a template such as ``note://{name}``."""
    mime_type: str = ""
    """For a resource: its MIME type; "" derives it from what the function returns."""
    uri_arguments: Mapping[str, str] | None = None
    """For a resource that is read: the arguments that its URI contains. For other functions:
    arguments that the call does not have under ``arguments``."""
    completions: Completions = field(default_factory=dict)
    """For a resource or prompt: values offered for its parameters."""
    is_forwarded: bool = False
    """Whether calls are forwarded to a server that checks the arguments."""

    @cached_property
    def signature(self) -> Signature:
        """Validator and schema, created at the first use."""
        return Signature(self.function)

    @cached_property
    def runnable(self) -> Callable[..., Any]:
        """What a call runs: the function, or for an async generator a function that collects it."""
        if not inspect.isasyncgenfunction(self.function):
            return self.function

        async def collect(**arguments: Any) -> list[Any]:
            return [item async for item in self.function(**arguments)]

        return collect

    @cached_property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        call = getattr(self.runnable, "__call__", None)  # noqa: B004  # an object with async __call__
        return inspect.iscoroutinefunction(self.runnable) or inspect.iscoroutinefunction(call)

    def mcp_tool(self) -> dict[str, Any]:
        """Return the MCP ``Tool`` object."""
        tool: dict[str, Any] = {
            "name": self.name,
            **self._described(),
            "inputSchema": self.schema or self.signature.schema,
        }
        if self.idempotent:
            tool["annotations"] = {"idempotentHint": True}
        return tool

    @property
    def is_template(self) -> bool:
        """For a resource: whether its URI has parameters."""
        return "{" in self.uri

    def mcp_resource(self) -> dict[str, Any]:
        """Return the MCP ``Resource`` or ``ResourceTemplate`` object."""
        resource = {
            "uriTemplate" if self.is_template else "uri": self.uri,
            "name": self.name,
            **self._described(),
        }
        return resource | ({"mimeType": self.mime_type} if self.mime_type else {})

    def mcp_prompt(self) -> dict[str, Any]:
        """Return the MCP ``Prompt`` object."""
        schema = self.signature.schema
        required = schema.get("required", ())
        arguments = [
            {"name": name, "required": name in required}
            | ({"description": about["description"]} if "description" in about else {})
            for name, about in schema.get("properties", {}).items()
        ]
        return {"name": self.name, **self._described(), "arguments": arguments}

    def _described(self) -> dict[str, str]:
        """Return the description; in MCP it is a text, or left out."""
        description = self.description or self.signature.description
        return {"description": description} if description else {}

    def read_at(self, uri: str) -> Registered | None:
        """Return the resource with the arguments in `uri`; None if it has another URI."""
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(self.uri))
        found = re.fullmatch(pattern, uri)
        if found is None:
            return None
        arguments = {name: unquote(value) for name, value in found.groupdict().items()}
        return replace(self, name=uri, uri_arguments=arguments)

    def listing(self) -> dict[str, Any]:
        """Return the entry for ``/functions/list``: AEnvironment's format plus the JSON Schema."""
        parameters = {
            name: {
                "type": "Any" if p.annotation is p.empty else str(p.annotation),
                "default": None if p.default is p.empty else str(p.default),
            }
            for name, p in inspect.signature(self.function).parameters.items()
        }
        return {
            "name": self.name,
            "endpoint": self.endpoint,
            "method": self.method,
            "description": self.description or self.signature.description or "",
            "parameters": parameters,
            "inputSchema": self.signature.schema,
            "is_async": self.is_async,
        }


@dataclass
class Registry:
    """All functions of one environment."""

    tools: dict[str, Registered] = field(default_factory=dict)
    resources: dict[str, Registered] = field(default_factory=dict)
    """By URI, or template of URIs."""
    prompts: dict[str, Registered] = field(default_factory=dict)
    rewards: dict[str, Registered] = field(default_factory=dict)
    functions: dict[str, Registered] = field(default_factory=dict)
    health: Registered | None = None
    reset: Registered | None = None
    reset_state: ModuleState | None = None
    """The first values of the variables that the reset declares; set by `note_state`."""
    tasks: Registered | None = None
    absence: str = ""
    """Why there are no functions, if the project's code cannot run here."""

    def add_tool(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        idempotent: bool = False,
        schema: Mapping[str, Any] | None = None,
    ) -> Registered:
        """Register a tool.

        Args:
            function: Sync or async.
            name: None: the function's name.
            description: None: from the docstring.
            timeout_s: Seconds after which a call is stopped. None: only the caller's applies.
            idempotent: Whether a second call with the same arguments has no further effect.
            schema: JSON Schema of the arguments, which a function that takes ``**arguments`` checks
                itself. None: of its signature.

        Raises:
            ValueError: The name is taken by another function, or `timeout_s` is not positive.
            TypeError: A parameter has a type without a JSON Schema.
        """
        entry = Registered(
            name=name or _name_of(function, "tool"),
            function=function,
            kind="tool",
            description=description,
            timeout_s=_positive(timeout_s),
            idempotent=idempotent,
            schema=schema,
        )
        return self._put(self.tools, entry)

    def add_resource(
        self,
        function: Callable[..., Any],
        uri: str,
        *,
        name: str | None = None,
        description: str | None = None,
        mime_type: str = "",
        timeout_s: float | None = None,
        completions: Completions | None = None,
    ) -> Registered:
        """Register a resource.

        Raises:
            ValueError: The URI is taken, has no scheme or is no template, its parameters are not
                those of the function, `completions` names another one, or `timeout_s` is not
                positive.
            TypeError: A parameter has a type without a JSON Schema, or a function of completions
                has other parameters.
        """
        entry = Registered(
            name=name or _name_of(function, "resource"),
            function=function,
            kind="resource",
            description=description,
            timeout_s=_positive(timeout_s),
            uri=uri,
            mime_type=mime_type,
            completions=_completions(completions or {}, re.findall(r"\{(\w+)\}", uri), uri),
        )
        if not re.match(r"[A-Za-z][\w+.-]*:", uri):
            raise ValueError(f"resource {uri!r} has no scheme, as in note://{{name}}")
        named, taken = re.findall(r"\{(\w+)\}", uri), _parameters_of(function)
        if re.search(r"[{}]", re.sub(r"\{\w+\}", "", uri)) or len(set(named)) < len(named):
            raise ValueError(
                f"resource {uri!r} is not a template: a parameter is {{name}}, and occurs once"
            )
        if set(named) - set(taken) or set(_parameters_of(function, required=True)) - set(named):
            raise ValueError(
                f"resource {uri!r} is read by {entry.name}({', '.join(taken)}): the URI and the "
                "function must have the same parameters"
            )
        return self._put(self.resources, entry, key=uri)

    def add_prompt(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        completions: Completions | None = None,
    ) -> Registered:
        """Register a prompt.

        Raises:
            ValueError: The name is taken, `completions` names a parameter that it lacks, or
                `timeout_s` is not positive.
            TypeError: A parameter has a type without a JSON Schema, or a function of completions
                has other parameters.
        """
        prompt_name = name or _name_of(function, "prompt")
        entry = Registered(
            name=prompt_name,
            function=function,
            kind="prompt",
            description=description,
            timeout_s=_positive(timeout_s),
            completions=_completions(completions or {}, _parameters_of(function), prompt_name),
        )
        return self._put(self.prompts, entry)

    def register(
        self, function: Callable[..., Any], name: str | None = None, description: str | None = None
    ) -> Registered:
        """Register a tool; AEnvironment's name for `add_tool`."""
        return self.add_tool(function, name=name, description=description)

    def add_reward(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout_s: float | None = None,
        default: bool = False,
        keep_processes: bool = False,
    ) -> Registered:
        """Register a reward. Calls without a name run the one marked `default`, or the first.

        Raises:
            ValueError: The name is taken, or a second reward is marked `default`.
            TypeError: A parameter has a type without a JSON Schema.
        """
        entry_name = name or _name_of(function, "reward")
        if default and self._default_reward not in (None, entry_name):
            raise ValueError(
                f"reward {entry_name!r} and {self._default_reward!r} are both marked default"
            )
        entry = Registered(
            name=entry_name,
            function=function,
            kind="reward",
            timeout_s=_positive(timeout_s),
            endpoint=DEFAULT_REWARD_PATH,
            keeps_processes=keep_processes,
        )
        self._put(self.rewards, entry)
        if default:
            self._default_reward = entry_name
        return entry

    def add_function(
        self,
        function: Callable[..., Any],
        *,
        endpoint: str | None = None,
        method: str = "POST",
        timeout_s: float | None = None,
    ) -> Registered:
        """Register a function; it is served at `endpoint`, by default ``/functions/<name>``.

        Raises:
            ValueError: The name or the endpoint is taken, or the HTTP method is unknown.
            TypeError: A parameter has a type without a JSON Schema.
        """
        if method.upper() not in HTTP_METHODS:
            known = ", ".join(HTTP_METHODS)
            raise ValueError(f"unknown method {method!r}: expected one of {known}")
        name = _name_of(function, "function")
        path = endpoint or f"/functions/{name}"
        if not path.startswith("/"):
            path = f"/{path}"
        for other in self.functions.values():
            same_route = (other.endpoint, other.method) == (path, method.upper())
            if same_route and not _same(other.function, function):
                raise ValueError(f"{method.upper()} {path} is already served by {other.name!r}")
        entry = Registered(
            name=name,
            function=function,
            kind="function",
            timeout_s=_positive(timeout_s),
            endpoint=path,
            method=method.upper(),
        )
        return self._put(self.functions, entry)

    def set_health(self, function: Callable[..., Any]) -> Registered:
        """Register the health check; there is at most one.

        Raises:
            ValueError: Another health check is registered.
        """
        name = _name_of(function, "health check")
        if self.health and not _same(self.health.function, function):
            raise ValueError(f"health check {name!r}: {self.health.name!r} is already registered")
        self.health = Registered(name, function, "health", endpoint="/health", method="GET")
        return self.health

    def set_reset(
        self,
        function: Callable[..., Any],
        *,
        state: Sequence[str] = (),
        keep_files: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Registered:
        """Register the reset; there is at most one.

        Raises:
            ValueError: Another reset is registered, a path leaves the work directory, or
                `timeout_s` is not positive.
            TypeError: The function has a parameter other than ``task`` and ``seed``.
        """
        name = _name_of(function, "reset")
        if self.reset and not _same(self.reset.function, function):
            raise ValueError(f"reset {name!r}: {self.reset.name!r} is already registered")
        others = [other for other in _parameters_of(function) if other not in RESET_PARAMETERS]
        if others:
            raise TypeError(
                f"reset {name!r} takes {', '.join(others)}: a reset is given only "
                f"{' and '.join(RESET_PARAMETERS)}"
            )
        self.reset = Registered(
            name,
            function,
            "reset",
            timeout_s=_positive(timeout_s),
            state=tuple(_qualified(variable, function) for variable in _texts(state, "state")),
            kept_files=tuple(_inner_path(path) for path in _texts(keep_files, "keep_files")),
        )
        return self.reset

    def set_tasks(
        self, function: Callable[..., Any], *, timeout_s: float | None = None
    ) -> Registered:
        """Register the function that yields the environment's tasks; there is at most one.

        Raises:
            ValueError: Another one is registered, or `timeout_s` is not positive.
            TypeError: The function takes arguments, or is async.
        """
        name = _name_of(function, "function of tasks")
        if self.tasks and not _same(self.tasks.function, function):
            raise ValueError(f"tasks {name!r}: {self.tasks.name!r} is already registered")
        if _parameters_of(function, required=True):
            raise TypeError(f"tasks {name!r}: the function is called without arguments")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"tasks {name!r}: write it with def, and return or yield the tasks")
        self.tasks = Registered(name, function, "tasks", timeout_s=_positive(timeout_s))
        return self.tasks

    def tool(self, name: str) -> Registered:
        """Return the tool.

        Raises:
            Fault: ``tool_not_found``; lists the known names.
        """
        return self._find(self.tools, name, "tool")

    def prompt(self, name: str) -> Registered:
        """Return the prompt.

        Raises:
            Fault: ``tool_not_found``; lists the known names.
        """
        return self._find(self.prompts, name, "prompt")

    def resource(self, uri: str) -> Registered:
        """Return the resource at a URI, with the arguments that the URI contains.

        Raises:
            Fault: ``tool_not_found``; lists the known URIs. ``tool_input_invalid``: it is too long.
        """
        if len(uri) > _MAX_URI_CHARACTERS:
            raise Fault(
                "tool_input_invalid",
                f"the URI has {len(uri)} characters, over {_MAX_URI_CHARACTERS}",
            )
        fixed_first = sorted(self.resources.values(), key=lambda entry: entry.is_template)
        for entry in fixed_first:
            found = entry.read_at(uri)
            if found is not None:
                return found
        return self._find(self.resources, uri, "resource")

    def completion(self, params: Mapping[str, Any]) -> Registered:
        """Return what completes an argument, for the parameters of ``completion/complete``.

        Raises:
            Fault: ``tool_not_found``: the prompt or resource is unknown. ``tool_input_invalid``:
                the parameters are malformed, or the argument is unknown.
        """
        about, argument = params.get("ref"), params.get("argument")
        context = params.get("context") or {}
        if not isinstance(about, dict) or not isinstance(argument, dict):
            raise Fault("tool_input_invalid", "completion needs ref and argument, two objects")
        if about.get("type") == "ref/prompt":
            entry = self.prompt(str(about.get("name")))
            known = _parameters_of(entry.function)
        else:
            uri = str(about.get("uri"))
            entry = self.resources.get(uri) or self.resource(uri)
            known = re.findall(r"\{(\w+)\}", entry.uri)
        name, value = argument.get("name"), argument.get("value", "")
        if name not in known:
            raise Fault(
                "tool_input_invalid",
                f"{entry.kind} {entry.name!r} has no argument {name!r}",
                f"its arguments are: {', '.join(known) or 'none'}",
            )
        source = entry.completions.get(str(name), ())
        function = source if callable(source) else _beginning_with(source)
        given = {"value": value, "arguments": context.get("arguments") or {}}
        taken = _parameters_of(function)
        return Registered(
            f"completions of {name}",
            function,
            "completion",
            timeout_s=entry.timeout_s,
            uri_arguments={key: given[key] for key in taken},
        )

    @property
    def completes(self) -> bool:
        """Whether any argument has completions."""
        return any(one.completions for one in (*self.resources.values(), *self.prompts.values()))

    def function(self, name: str) -> Registered:
        """Return the function.

        Raises:
            Fault: ``tool_not_found``; lists the known names.
        """
        return self._find(self.functions, name, "function")

    def reward(self, name: str | None = None) -> Registered:
        """Return the named reward, or the default one.

        Raises:
            Fault: ``tool_not_found``: unknown name, or the environment has no rewards.
        """
        name = name or self._default_reward or next(iter(self.rewards), None)
        if name is None and not self.absence:
            raise Fault(
                "tool_not_found",
                "the environment registers no reward",
                "decorate a function with @register_reward",
            )
        return self._find(self.rewards, name or "default", "reward")

    def _find(self, group: Mapping[str, Registered], name: str, kind: str) -> Registered:
        entry = group.get(name)
        if entry is not None:
            return entry
        if self.absence:
            raise Fault("tool_not_found", f"no {kind} {name!r}: {self.absence}", tool_name=name)
        known = ", ".join(sorted(group)) or "none"
        raise Fault(
            "tool_not_found",
            f"there is no {kind} {name!r}",
            f"the environment's {kind}s are: {known}",
            tool_name=name,
        )

    def listing(self) -> dict[str, Any]:
        """Return the ``data`` of ``/functions/list``, in AEnvironment's format."""
        functions = [entry.listing() for entry in self.functions.values()]
        rewards = [entry.listing() for entry in self.rewards.values()]
        health = [self.health.listing()] if self.health else []
        return {
            "total": len(functions) + len(rewards) + len(health),
            "functions": functions,
            "reward": rewards,
            "health": health,
        }

    def compile(self) -> None:
        """Create what calls need now, rather than at the first call.

        The forks of a template share what exists then.

        Raises:
            TypeError: A parameter has a type without a JSON Schema.
        """
        for entry in self.entries():
            entry.mcp_tool()
            _ = entry.is_async

    def entries(self) -> Iterator[Registered]:
        """Yield all functions."""
        for group in (self.tools, self.resources, self.prompts, self.rewards, self.functions):
            yield from group.values()
        yield from (one for one in (self.health, self.reset, self.tasks) if one)

    def note_state(self) -> None:
        """Note the values of the variables that the reset declares, once the project is loaded.

        Raises:
            TypeError: One does not exist, or holds too many values.
        """
        if self.reset:
            try:
                self.reset_state = ModuleState(self.reset.state)
            except (LookupError, ValueError) as exc:
                raise TypeError(f"reset {self.reset.name!r}: {exc}") from exc

    def clear(self) -> None:
        """Remove all functions; for tests and notebooks."""
        self.tools.clear()
        self.resources.clear()
        self.prompts.clear()
        self.rewards.clear()
        self.functions.clear()
        self.health = self.reset = self.tasks = None
        self.reset_state = None
        self._default_reward = None

    _default_reward: str | None = None
    """The reward that is marked as the default."""

    @staticmethod
    def _put(group: dict[str, Registered], entry: Registered, key: str = "") -> Registered:
        known = group.get(key or entry.name)
        if known and not _same(known.function, entry.function):
            raise ValueError(
                f"{entry.kind} {key or entry.name!r} is already registered by "
                f"{_where(known.function)}; {_where(entry.function)} needs another name"
            )
        group[key or entry.name] = entry
        return entry


_MAX_URI_CHARACTERS: Final = 2000
"""Matching a template with several parameters takes a power of the length, in one C call."""
_NAMED = ("tool", "reward", "resource", "prompt")
"""Kinds of functions whose decorators take a name."""


def _name_of(function: Any, kind: str) -> str:
    """Return the name of a function.

    Raises:
        TypeError: It is not a function, as in ``@register_tool("add")``, or has no name.
    """
    if not callable(function):
        raise TypeError(
            f"a {kind} must be a function, not {function!r}; pass settings by keyword, as in name=…"
        )
    name = getattr(function, "__name__", None)
    if name is None:
        way_out = "give it one with name=…" if kind in _NAMED else "write it with def"
        raise TypeError(f"{function!r} has no name: {way_out}")
    return str(name)


def _parameters_of(function: Callable[..., Any], *, required: bool = False) -> list[str]:
    """Return the names of a function's parameters, ``**kwargs`` aside."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
        and not (required and parameter.default is not parameter.empty)
    ]


def _completions(completions: Completions, parameters: Sequence[str], what: str) -> Completions:
    """Return checked completions."""
    for name, source in completions.items():
        if name not in parameters:
            raise ValueError(f"{what}: completions of {name!r}, which is not one of its parameters")
        if not callable(source):
            _texts(source, f"{what}: completions of {name!r}:")
            continue
        others = [one for one in _parameters_of(source) if one not in COMPLETION_PARAMETERS]
        if others:
            raise TypeError(
                f"{what}: the function of completions of {name!r} takes {', '.join(others)}; it is "
                f"given only {' and '.join(COMPLETION_PARAMETERS)}"
            )
    return completions


def _beginning_with(values: Sequence[str]) -> Callable[[str], list[str]]:
    def complete(value: str) -> list[str]:
        return [one for one in values if one.startswith(value)]

    return complete


def _texts(values: Sequence[str], what: str) -> Sequence[str]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{what} {values!r} is not a list of strings")
    return values


def _qualified(variable: str, function: Callable[..., Any]) -> str:
    """Return ``module.NAME`` for the name of a variable in the function's own module."""
    return variable if "." in variable else f"{function.__module__}.{variable}"


def _inner_path(text: str) -> str:
    """Return a path in the work directory, without redundant parts."""
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"keep_files: {text!r} is not a path inside the work directory")
    return str(path)


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two functions are one definition, for example of a notebook cell that ran again."""
    return _definition(one) == _definition(other)


def _definition(function: Callable[..., Any]) -> tuple[object, ...]:
    name = getattr(function, "__qualname__", id(function))
    return _where(function), getattr(function, "__module__", None), name


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _positive(timeout_s: float | None) -> float | None:
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout {timeout_s!r} is not a positive number of seconds")
    return timeout_s


_REGISTRY = Registry()
_other: ContextVar[Registry | None] = ContextVar("aenv_registry", default=None)


def get_registry() -> Registry:
    """Return the registry that the decorators fill; usually one per process."""
    other = _other.get()
    return _REGISTRY if other is None else other


@contextlib.contextmanager
def registering_in(registry: Registry) -> Iterator[None]:
    """Make decorators fill `registry` in this context, for several environments in one process."""
    token = _other.set(registry)
    try:
        yield
    finally:
        _other.reset(token)
