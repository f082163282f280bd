"""The handle: a small picklable reference through which any Ray code uses an instance (D1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec

from aenv_ray import units
from aenv_ray.actors.calls.parameters import (
    call_id_of,
    call_pairs,
    exec_arguments,
    object_of,
    write_arguments,
)
from aenv_ray.actors.calls.wire import call_message
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import ConfigError, ToolNotFound
from aenv_ray.ids import InstanceId
from aenv_ray.runtime.door.calls import DEFAULT_TIMEOUT_S

P = ParamSpec("P")

EXEC_TIMEOUT_S: Final = 60.0
FILE_TIMEOUT_S: Final = 60.0
BEHIND_S: Final = 0.0002
"""A call sent this soon after the one before was not waited for: a round trip takes longer."""
LOG_PIECES_AHEAD: Final = 16
"""Pieces of a log that wait for their reader, each at most some ten kB."""


class RemoteMethod(Generic[P]):
    """A method of a handle: ``.remote(...)`` sends it and returns a Ray ``ObjectRef``."""

    __slots__ = ("_send",)

    def __init__(self, send: Callable[P, Any]) -> None:
        self._send = send

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Send the call; `ray.get` or ``await`` the returned reference for its result."""
        return self._send(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Refuse a call that forgot ``.remote``."""
        raise TypeError("methods of a handle are remote: write env.method.remote(...)")


class EnvHandle:
    """An instance, as seen from any Ray driver, task or actor.

    Every attribute below is called with ``.remote(...)`` and gives an ``ObjectRef``:

        ray.get(env.call_tool.remote("echo", {"text": "hi"}))

    What `ray.get` raises are the classes of `aenv_ray.errors`; after the death of a node or long
    after a release it is Ray's own ``ActorDiedError`` or ``ActorUnschedulableError``.

    Attributes:
        instance_id: ``<name>-<suffix>``.
        reference: ``name@version`` of its environment.
    """

    __slots__ = (
        "_controller",
        "_host",
        "_last_sent_at",
        "_now",
        "_send_call",
        "instance_id",
        "reference",
    )

    def __init__(
        self,
        instance_id: InstanceId,
        reference: str,
        host: Any,
        controller: Any,
        clock: Clock | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.reference = reference
        self._host = host
        self._controller = controller
        self._send_call: Callable[[bytes], Any] | None = None
        self._now = (clock or SystemClock()).now
        self._last_sent_at = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return (EnvHandle, (self.instance_id, self.reference, self._host, self._controller))

    def __repr__(self) -> str:
        return f"EnvHandle({self.instance_id!r})"

    def _call(
        self,
        method: str,
        params: dict[str, Any],
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> Any:
        message = self._message(method, params, timeout_s, call_id)
        if self._send_call is None:
            self._send_call = self._host.call.remote  # Ray makes a method anew each time
        return self._send_call(message)

    def _message(
        self,
        method: str,
        params: dict[str, Any],
        timeout_s: float | None,
        call_id: str | None = None,
    ) -> bytes:
        seconds = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        now = self._now()
        sent_at = now if 0.0 <= now - self._last_sent_at < BEHIND_S else 0.0
        self._last_sent_at = now
        return call_message(self.instance_id, method, params, call_id_of(call_id), seconds, sent_at)

    # --- tools, functions, rewards --------------------------------------------------------------

    @property
    def call_tool(self) -> RemoteMethod[...]:
        """``(name, arguments=None, timeout_s=60, call_id=None)`` → `ToolResult`.

        A tool that raises is a result with ``is_error``. Raises ToolNotFound, ToolInputInvalid,
        ToolTimeout, SandboxLost, InstanceExpired, InstanceReleased, CallOutcomeUnknown.
        """
        return RemoteMethod(self._call_tool)

    def _call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> Any:
        bare = bare_tool_name(name, self.reference)
        params = {"name": bare, "arguments": object_of(bare, arguments)}
        return self._call("tools/call", params, timeout_s, call_id)

    @property
    def call_tools(self) -> RemoteMethod[...]:
        """``(calls, parallel=False, timeout_s=60, call_id=None)`` → list of results.

        `calls` are ``(name, arguments)`` pairs, run in order, or all at once when `parallel`. One
        round trip for all. Each item is a `ToolResult` or the error that kept it from having one;
        `timeout_s` bounds them together.
        """
        return RemoteMethod(self._call_tools)

    def _call_tools(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        parallel: bool = False,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> Any:
        items = [
            {"name": bare_tool_name(name, self.reference), "arguments": arguments}
            for name, arguments in call_pairs(calls)
        ]
        return self._call(
            "aenv/call_tools", {"calls": items, "parallel": parallel}, timeout_s, call_id
        )

    @property
    def stream_tool(self) -> RemoteMethod[...]:
        """``(name, arguments=None, timeout_s=60)`` → a generator of references.

        It yields a ``(progress, total, message)`` tuple for every report that the tool makes, then
        its `ToolResult`.
        """
        return RemoteMethod(self._stream_tool)

    def _stream_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        bare = bare_tool_name(name, self.reference)
        params = {"name": bare, "arguments": object_of(bare, arguments)}
        return self._host.stream.remote(self._message("tools/call", params, timeout_s))

    @property
    def list_tools(self) -> RemoteMethod[[]]:
        """``()`` → list of MCP tool objects: ``name, description, inputSchema``."""
        return RemoteMethod(lambda: self._call("tools/list", {}))

    @property
    def list_functions(self) -> RemoteMethod[[]]:
        """``()`` → ``{"total", "functions", "reward", "health"}``, as AEnvironment lists them."""
        return RemoteMethod(lambda: self._call("aenv/functions", {}))

    @property
    def call_function(self) -> RemoteMethod[...]:
        """``(name, arguments=None, timeout_s=60, call_id=None)`` → what the function returned.

        Raises FunctionFailed when the function raised, and the errors of `call_tool`.
        """
        return RemoteMethod(self._call_function)

    def _call_function(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> Any:
        params = {"name": name, "arguments": object_of(name, arguments)}
        return self._call("aenv/function", params, timeout_s, call_id)

    @property
    def call_reward(self) -> RemoteMethod[...]:
        """``(arguments=None, name=None, timeout_s=60, call_id=None)`` → what the reward returned.

        `name` None is the default reward. A reward that raises, or returns NaN, is a FunctionFailed
        and never a number.
        """
        return RemoteMethod(self._call_reward)

    def _call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> Any:
        params = {"name": name, "arguments": object_of(name or "reward", arguments)}
        return self._call("aenv/reward", params, timeout_s, call_id)

    @property
    def check_health(self) -> RemoteMethod[...]:
        """``(arguments=None, timeout_s=60)`` → ``{"status": "healthy" | …, …}``."""
        return RemoteMethod(
            lambda arguments=None, timeout_s=None: self._call(
                "aenv/health", {"arguments": object_of("health", arguments)}, timeout_s
            )
        )

    # --- commands and files ---------------------------------------------------------------------

    @property
    def exec(self) -> RemoteMethod[...]:
        """``(command, cwd=None, env=None, stdin=None, timeout_s=60)`` → `ExecResult`.

        `command` is a list of arguments, or text for a shell. A failing or missing program is a
        result. Raises ToolTimeout after `timeout_s`; everything the command started is then dead.
        """
        return RemoteMethod(self._exec)

    def _exec(
        self,
        command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        arguments = exec_arguments(command, cwd, env, stdin)
        seconds = EXEC_TIMEOUT_S if timeout_s is None else timeout_s
        return self._call("aenv/exec", {"arguments": arguments}, seconds)

    @property
    def read_file(self) -> RemoteMethod[...]:
        """``(path, offset=0, length=None)`` → bytes. Raises FileAccessError."""
        return RemoteMethod(
            lambda path, offset=0, length=None: self._call(
                "aenv/read_file",
                {"arguments": {"path": path, "offset": offset, "length": length}},
                FILE_TIMEOUT_S,
            )
        )

    @property
    def write_file(self) -> RemoteMethod[...]:
        """``(path, data, append=False, mode=None)`` → size in bytes. Raises FileAccessError.

        `data` is bytes or text. Directories are made; the file is replaced whole.
        """
        return RemoteMethod(self._write_file)

    def _write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> Any:
        arguments = write_arguments(path, data, append, mode, self.instance_id)
        return self._call("aenv/write_file", {"arguments": arguments}, FILE_TIMEOUT_S)

    @property
    def list_files(self) -> RemoteMethod[...]:
        """``(path=".")`` → list of `FileEntry`. Raises FileAccessError."""
        return RemoteMethod(
            lambda path=".": self._call(
                "aenv/list_files", {"arguments": {"path": path}}, FILE_TIMEOUT_S
            )
        )

    @property
    def logs(self) -> RemoteMethod[...]:
        """``(tail=None, follow=False)`` → a generator of references to pieces of text.

        What the instance printed: the last `tail` lines, or all that is kept, and with `follow`
        what it prints from then on, until it ends. Raises SandboxLost, InstanceExpired and
        InstanceReleased when it has ended. After the death of its host, pieces may be missing.
        """
        return RemoteMethod(self._logs)

    def _logs(self, tail: Any = None, follow: bool = False) -> Any:
        if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 0):
            raise ConfigError(f"tail {tail!r} is not a number of lines, 0 or more")
        # A reader that is slow holds its generator back, not the node's memory.
        method = self._host.logs.options(_generator_backpressure_num_objects=LOG_PIECES_AHEAD)
        return method.remote(self.instance_id, tail, follow)

    # --- life -----------------------------------------------------------------------------------

    @property
    def info(self) -> RemoteMethod[[]]:
        """``()`` → `InstanceInfo`; renews nothing."""
        return RemoteMethod(lambda: self._host.control.remote("info", self.instance_id))

    @property
    def renew(self) -> RemoteMethod[...]:
        """``(ttl="30m")`` → `InstanceInfo` with the deadline moved to `ttl` from now."""
        return RemoteMethod(
            lambda ttl="30m": self._host.control.remote(
                "renew", self.instance_id, units.parse_duration_s(ttl, what="ttl")
            )
        )

    @property
    def release(self) -> RemoteMethod[[]]:
        """``()`` → None, once the sandbox is gone. From every state, any number of times."""
        return RemoteMethod(lambda: self._controller.release.remote([self.instance_id]))


def host_of(handle: EnvHandle) -> Any:
    """Return the Ray actor that has the instance, for callers that pass JSON on, as the gateway."""
    return handle._host


def bare_tool_name(name: str, reference: str) -> str:
    """Return a tool's own name from ``env@version/tool`` or ``tool``.

    Raises:
        ToolNotFound: The prefix names another environment.
        ConfigError: The name is no text.
    """
    if not isinstance(name, str):
        raise ConfigError(f"tool name {name!r} is not text")
    prefix, slash, rest = name.partition("/")
    if not slash or "@" not in prefix:
        # A tool's own name may hold a slash; a prefix without version is the environment's name.
        return rest if slash and prefix == reference.partition("@")[0] else name
    # An environment may have been named without its version.
    if reference not in (prefix, prefix.partition("@")[0]):
        raise ToolNotFound(
            f"tool {name!r} is not of environment {reference!r}",
            tool_name=name,
            hint=f"write {reference}/{rest} or just {rest}",
        )
    return rest
