"""The decorators that register what an environment offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from aenv_ray.runtime.api.registry import Completions, get_registry

F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_tool(function: F) -> F: ...
@overload
def register_tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
    input_schema: Mapping[str, Any] | None = None,
) -> Callable[[F], F]: ...
def register_tool(
    function: Any = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
    input_schema: Mapping[str, Any] | None = None,
) -> Any:
    """Register a function as a tool for agents. The function itself is not changed.

    Args:
        function: Sync (runs in a thread) or async.
        name: The tool's name. None: the function's name.
        description: Description for the model. None: the docstring up to its first section.
        timeout: Seconds after which a call is stopped. None: only the caller's timeout applies.
        idempotent: Whether a second call with the same arguments has no further effect.
        input_schema: JSON Schema of the arguments, shown to callers as it is. The arguments are
            still checked against the function's signature; one that takes ``**arguments`` checks
            them itself. None: the schema of the signature.

    Raises:
        ValueError: The name is taken, or `timeout` is not positive.
    """

    def register(target: F) -> F:
        get_registry().add_tool(
            target,
            name=name,
            description=description,
            timeout_s=timeout,
            idempotent=idempotent,
            schema=input_schema,
        )
        return target

    return register(function) if function is not None else register


def register_resource(
    uri: str,
    *,
    name: str | None = None,
    description: str | None = None,
    mime_type: str = "",
    timeout: float | None = None,
    completions: Completions | None = None,
) -> Callable[[F], F]:
    """Register a function that reads a resource, which MCP clients list and read.

    It returns text, bytes, an `EmbeddedResource`, or any JSON value.

    Args:
        uri: Such as ``note://today``, or a template such as ``note://{day}``, whose names are the
            parameters of the function.
        name: None: the function's name.
        description: None: the docstring up to its first section.
        mime_type: "" chooses by what the function returns.
        timeout: Seconds after which a read is stopped. None: only the caller's timeout applies.
        completions: Values for parameters of a template, which clients offer to their users: a
            list, of which those with the same beginning are offered, or a function, sync or async,
            that takes ``value``, the beginning, and, if it likes, ``arguments``, those already
            given, and returns a list.

    Raises:
        ValueError: The URI is taken or has no scheme, its names are not the function's parameters,
            `completions` names another parameter, or `timeout` is not positive.
        TypeError: A function of completions has other parameters.
    """

    def register(target: F) -> F:
        get_registry().add_resource(
            target,
            uri,
            name=name,
            description=description,
            mime_type=mime_type,
            timeout_s=timeout,
            completions=completions,
        )
        return target

    return register


@overload
def register_prompt(function: F) -> F: ...
@overload
def register_prompt(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    completions: Completions | None = None,
) -> Callable[[F], F]: ...
def register_prompt(
    function: Any = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    completions: Completions | None = None,
) -> Any:
    """Register a function that writes a prompt, which MCP clients list and get.

    It returns text, an `Image`, `Audio` or `EmbeddedResource`, a `PromptMessage`, or a list of
    these; what is not a `PromptMessage` is a message of the user. Clients send arguments as text.

    Args:
        function: Sync or async.
        name: None: the function's name.
        description: None: the docstring up to its first section.
        timeout: Seconds after which a call is stopped. None: only the caller's timeout applies.
        completions: Values for arguments, as for `register_resource`.

    Raises:
        ValueError: The name is taken, `completions` names an argument that it lacks, or `timeout`
            is not positive.
        TypeError: A function of completions has other parameters.
    """

    def register(target: F) -> F:
        get_registry().add_prompt(
            target, name=name, description=description, timeout_s=timeout, completions=completions
        )
        return target

    return register(function) if function is not None else register


@overload
def register_reward(function: F) -> F: ...
@overload
def register_reward(
    *,
    name: str | None = None,
    timeout: float | None = None,
    default: bool = False,
    keep_processes: bool = False,
) -> Callable[[F], F]: ...
def register_reward(
    function: Any = None,
    *,
    name: str | None = None,
    timeout: float | None = None,
    default: bool = False,
    keep_processes: bool = False,
) -> Any:
    """Register a function as a reward.

    A call without a reward's name runs the one marked `default`, otherwise the first.

    Args:
        function: Returns any JSON value; usually a number or ``{"score": …}``.
        name: None: the function's name.
        timeout: Seconds after which a call is stopped. None: only the caller's timeout applies.
        default: Whether calls without a name run this reward.
        keep_processes: Let the processes that the agent has started continue while the reward runs,
            for example a server that the reward needs. By default they are ended first, so that an
            agent cannot keep the reward from running. Processes that were started before the first
            tool call always continue.

    Raises:
        ValueError: The name is taken, or a second reward is marked `default`.
    """

    def register(target: F) -> F:
        get_registry().add_reward(
            target,
            name=name,
            timeout_s=timeout,
            default=default,
            keep_processes=keep_processes,
        )
        return target

    return register(function) if function is not None else register


@overload
def register_function(function: F) -> F: ...
@overload
def register_function(
    *, endpoint: str | None = None, method: str = "POST", timeout: float | None = None
) -> Callable[[F], F]: ...
def register_function(
    function: Any = None,
    *,
    endpoint: str | None = None,
    method: str = "POST",
    timeout: float | None = None,
) -> Any:
    """Register a function for the trainer, not for the agent; it is also served over HTTP.

    Args:
        function: Returns any JSON value.
        endpoint: Path at the public door. None: ``/functions/<name>``.
        method: GET, POST, PUT, PATCH or DELETE.
        timeout: Seconds after which a call is stopped. None: only the caller's timeout applies.

    Raises:
        ValueError: The name or the route is taken, or the method is unknown.
    """

    def register(target: F) -> F:
        get_registry().add_function(target, endpoint=endpoint, method=method, timeout_s=timeout)
        return target

    return register(function) if function is not None else register


@overload
def register_health(function: F) -> F: ...
@overload
def register_health() -> Callable[[F], F]: ...
def register_health(function: Any = None) -> Any:
    """Register a function as the environment's health check.

    It returns ``{"status": "healthy" | "success", …}``. Any other status, or an exception, means
    unhealthy.

    Raises:
        ValueError: Another health check is registered.
    """

    def register(target: F) -> F:
        get_registry().set_health(target)
        return target

    return register(function) if function is not None else register


@overload
def register_reset(function: F) -> F: ...
@overload
def register_reset(
    *,
    state: Sequence[str] = (),
    keep_files: Sequence[str] = (),
    timeout: float | None = None,
) -> Callable[[F], F]: ...
def register_reset(
    function: Any = None,
    *,
    state: Sequence[str] = (),
    keep_files: Sequence[str] = (),
    timeout: float | None = None,
) -> Any:
    """Register a function that prepares a used instance for its next episode.

    Before it runs, the runtime ends all calls and processes of the last episode and removes the
    files that it created in the work directory, ``/tmp`` and ``/dev/shm``. The function clears what
    the module holds. Afterwards the runtime checks that nothing is left; an instance that is not
    clean is not used again.

    Args:
        function: Sync or async; takes ``task`` (JSON data of the next task, or None) and ``seed``
            (int, or None), or either, or neither. It can start the task.
        state: Variables that must have their first values after it has run: ``"board"`` in its own
            module, or ``"module.board"``.
        keep_files: Paths in the work directory that it restores itself, for example a cache: the
            runtime neither removes nor checks them.
        timeout: Seconds after which it is stopped. None: only the caller's timeout applies.

    Raises:
        ValueError: Another reset is registered, a path is not in the work directory, or `timeout`
            is not positive.
        TypeError: The function has other parameters.
    """

    def register(target: F) -> F:
        get_registry().set_reset(target, state=state, keep_files=keep_files, timeout_s=timeout)
        return target

    return register(function) if function is not None else register


@overload
def register_tasks(function: F) -> F: ...
@overload
def register_tasks(*, timeout: float | None = None) -> Callable[[F], F]: ...
def register_tasks(function: Any = None, *, timeout: float | None = None) -> Any:
    """Register a function that returns or yields the environment's tasks, for the sampler.

    Each is a mapping in the form of a sampler's task: ``id``, and what the policy, the setup and
    the reward need. There may be any number of tasks: they are listed in pages.

    Args:
        function: Sync, without arguments. Returns an iterable, or is a generator.
        timeout: Seconds after which listing a page is stopped. None: the caller's timeout applies.

    Raises:
        ValueError: Another such function is registered, or `timeout` is not positive.
        TypeError: The function takes arguments, or is async.
    """

    def register(target: F) -> F:
        get_registry().set_tasks(target, timeout_s=timeout)
        return target

    return register(function) if function is not None else register
