"""`EnvHandle`: a picklable reference to an instance, for any Ray driver, task or actor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    get_args,
    overload,
)

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
from aenv_ray.errors import AenvError, ConfigError, ToolNotFound
from aenv_ray.ids import InstanceId
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    InstanceInfo,
    PromptMessages,
    Question,
    ResetResult,
    ResourceContents,
    TaskPage,
    ToolResult,
)
from aenv_ray.runtime.door.caller import DEFAULT_TIMEOUT_S
from aenv_ray.runtime.door.caller_link import ANSWER, OFFERS
from aenv_ray.runtime.door.dispatch import SEED_METHOD

if TYPE_CHECKING:
    from ray import ObjectRef, ObjectRefGenerator

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Offer = Literal["logging", "elicitation", "sampling"]
"""What a caller may offer to a tool."""

EXEC_TIMEOUT_S: Final = 60.0
FILE_TIMEOUT_S: Final = 60.0
TASKS_PER_PAGE: Final = 1000
PIPELINED_WITHIN_S: Final = 0.0002
"""Calls this close together are pipelined: a caller that awaits each result cannot be as fast."""
LOG_PIECES_AHEAD: Final = 16
"""Number of log pieces, of up to about 10 kB each, that Ray buffers for a slow reader before it
pauses the host."""


class RemoteMethod(Generic[P, R_co]):
    """A bound method of a handle; ``.remote(...)`` sends the call without waiting for it."""

    __slots__ = ("_handle", "_send")

    def __init__(self, handle: EnvHandle, send: Callable[Concatenate[EnvHandle, P], R_co]) -> None:
        self._handle = handle
        self._send = send

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Send the call; pass the returned reference to `ray.get`, or await it."""
        return self._send(self._handle, *args, **kwargs)

    if not TYPE_CHECKING:  # a type checker reports the call itself

        def __call__(self, *args, **kwargs):
            """Raise TypeError: the caller forgot ``.remote``."""
            raise TypeError("methods of a handle are remote: write env.method.remote(...)")


class remote_method(Generic[P, R_co]):
    """Turn a method into an attribute that is called with ``.remote(...)``.

    The method's parameters and return type are those of ``.remote``.
    """

    def __init__(self, send: Callable[Concatenate[EnvHandle, P], R_co]) -> None:
        self._send = send
        self.__doc__ = send.__doc__
        self.__wrapped__ = send

    @overload
    def __get__(self, handle: None, owner: type[EnvHandle]) -> Self: ...
    @overload
    def __get__(self, handle: EnvHandle, owner: type[EnvHandle]) -> RemoteMethod[P, R_co]: ...
    def __get__(
        self, handle: EnvHandle | None, owner: type[EnvHandle]
    ) -> Self | RemoteMethod[P, R_co]:
        return self if handle is None else RemoteMethod(handle, self._send)


class EnvHandle:
    """An instance, reachable from any Ray driver, task or actor.

    Every method is called with ``.remote(...)`` and returns an ``ObjectRef``:

        ray.get(env.call_tool.remote("echo", {"text": "hi"}))

    ``.remote`` itself raises ToolInputInvalid or ConfigError when a parameter has the wrong type;
    all other errors are raised by `ray.get` and ``await``. Every method that calls into the sandbox
    can raise SandboxLost, InstanceExpired, InstanceReleased and CallOutcomeUnknown. After the death
    of a node, or long after a release, Ray raises its own ``ActorDiedError`` or
    ``ActorUnschedulableError`` instead.

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
        self._send_call: Callable[[bytes], ObjectRef[Any]] | None = None
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
    ) -> ObjectRef[Any]:
        message = self._message(method, params, timeout_s, call_id)
        if self._send_call is None:
            self._send_call = self._host.call.remote  # Ray builds the method at every access
        return self._send_call(message)

    def _message(
        self,
        method: str,
        params: dict[str, Any],
        timeout_s: float | None,
        call_id: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> bytes:
        seconds = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        now = self._now()
        sent_at = now if 0.0 <= now - self._last_sent_at < PIPELINED_WITHIN_S else 0.0
        self._last_sent_at = now
        return call_message(
            self.instance_id, method, params, call_id_of(call_id), seconds, sent_at, meta
        )

    # --- tools, functions, rewards --------------------------------------------------------------

    @remote_method
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> ObjectRef[ToolResult]:
        """Call a tool.

        Args:
            name: ``tool``, or ``name@version/tool`` with the environment of this instance.
            arguments: Arguments by parameter name. None: no arguments.
            timeout_s: Seconds after which the runtime stops the tool. None means 60.
            call_id: Calls with the same id run once and share one result. None makes a new id.

        Returns:
            The result. A tool that raises gives a result with ``is_error``.

        Raises:
            ToolNotFound: The environment has no tool of this name.
            ToolInputInvalid: The arguments do not match the tool's schema.
            ToolTimeout: The tool ran longer than `timeout_s`, and was stopped.
        """
        bare = bare_tool_name(name, self.reference)
        params = {"name": bare, "arguments": object_of(bare, arguments)}
        return self._call("tools/call", params, timeout_s, call_id)

    @remote_method
    def call_tools(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any] | None]],
        parallel: bool = False,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> ObjectRef[list[ToolResult | AenvError]]:
        """Call several tools in one round trip.

        Args:
            calls: ``(name, arguments)`` pairs.
            parallel: Run all of them at once instead of one after another.
            timeout_s: Seconds for all calls together. None means 60.
            call_id: As for `call_tool`, for the batch as a whole.

        Returns:
            One item per call, in order: its result, or the error that prevented a result.

        Raises:
            ToolTimeout: The batch ran longer than `timeout_s`, and was stopped.
        """
        items = [
            {"name": bare_tool_name(name, self.reference), "arguments": arguments}
            for name, arguments in call_pairs(calls)
        ]
        params = {"calls": items, "parallel": parallel}
        return self._call("aenv/call_tools", params, timeout_s, call_id)

    @remote_method
    def stream_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        offers: Collection[Offer] = (),
    ) -> ObjectRefGenerator:
        """Call a tool and follow its progress.

        Args:
            name: As for `call_tool`.
            arguments: Arguments by parameter name. None: no arguments.
            timeout_s: Seconds after which the runtime stops the tool. None means 60.
            offers: What the caller offers to the tool: ``logging`` gives it its log messages;
                ``elicitation`` and ``sampling`` its questions, which `answer` answers.

        Returns:
            References to one ``(progress, total, message)`` tuple per progress report, to a
            `LogMessage` or `Question` for each, and at the end to the `ToolResult`.

        Raises:
            ToolNotFound, ToolInputInvalid, ToolTimeout: As `call_tool`.
        """
        bare = bare_tool_name(name, self.reference)
        params = {"name": bare, "arguments": object_of(bare, arguments)}
        if isinstance(offers, str) or set(offers) - set(get_args(Offer)):
            known = ", ".join(get_args(Offer))
            raise ConfigError(f"invalid offers {offers!r}: expected a list of {known}")
        meta = {OFFERS: list(offers)} if offers else None
        sent: ObjectRefGenerator = self._host.stream.remote(
            self._message("tools/call", params, timeout_s, meta=meta)
        )
        return sent

    @remote_method
    def answer(
        self, question: Question, result: Mapping[str, Any] | None = None, error: str = ""
    ) -> ObjectRef[dict[str, Any]]:
        """Answer a question that `stream_tool` yielded.

        Args:
            question: The question.
            result: As in MCP: ``action`` and ``content`` of an elicitation, or ``content`` and
                ``model`` of a message. None: the question is refused.
            error: Why it is refused.

        Returns:
            ``accepted``: whether the tool still waited for it.

        Raises:
            ToolInputInvalid: The result is not a mapping.
        """
        told: dict[str, Any] = {"result": result} if result is not None else {}
        if result is None:
            told = {"error": {"code": -32603, "message": error or "the caller refused it"}}
        return self._call(ANSWER, {"arguments": {"question": question.id, "answer": told}})

    @remote_method
    def list_tools(self) -> ObjectRef[list[dict[str, Any]]]:
        """List the tools.

        Returns:
            MCP tool objects: ``name``, ``description``, ``inputSchema``.
        """
        return self._call("tools/list", {})

    @remote_method
    def list_resources(self) -> ObjectRef[list[dict[str, Any]]]:
        """List the resources with a fixed URI.

        Returns:
            MCP resource objects: ``uri``, ``name``, ``description``, ``mimeType``.
        """
        return self._call("resources/list", {})

    @remote_method
    def list_resource_templates(self) -> ObjectRef[list[dict[str, Any]]]:
        """List the resources whose URI has parameters.

        Returns:
            MCP objects: ``uriTemplate``, ``name``, ``description``, ``mimeType``.
        """
        return self._call("resources/templates/list", {})

    @remote_method
    def read_resource(
        self, uri: str, timeout_s: float | None = None
    ) -> ObjectRef[list[ResourceContents]]:
        """Read a resource.

        Args:
            uri: URI of the resource, with the parameters of a template filled in.
            timeout_s: Seconds after which the runtime stops the read. None means 60.

        Returns:
            Its parts; usually one.

        Raises:
            ToolNotFound: The environment has no resource at this URI.
            FunctionFailed: The resource's function raised.
            ToolTimeout: It was stopped.
        """
        return self._call("resources/read", {"uri": uri}, timeout_s)

    @remote_method
    def list_prompts(self) -> ObjectRef[list[dict[str, Any]]]:
        """List the prompts.

        Returns:
            MCP prompt objects: ``name``, ``description``, ``arguments``.
        """
        return self._call("prompts/list", {})

    @remote_method
    def get_prompt(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ObjectRef[PromptMessages]:
        """Fill in a prompt.

        Args:
            name: Name of the prompt.
            arguments: Arguments by parameter name. None: no arguments.
            timeout_s: Seconds after which the runtime stops the prompt. None means 60.

        Returns:
            Its messages.

        Raises:
            ToolNotFound: The environment has no prompt of this name.
            FunctionFailed: The prompt's function raised.
            ToolInputInvalid, ToolTimeout: As `call_tool`.
        """
        params = {"name": name, "arguments": object_of(name, arguments)}
        return self._call("prompts/get", params, timeout_s)

    @remote_method
    def list_functions(self) -> ObjectRef[dict[str, Any]]:
        """List functions, rewards and health checks.

        Returns:
            ``{"total", "functions", "reward", "health"}``, as AEnvironment lists them.
        """
        return self._call("aenv/functions", {})

    @remote_method
    def call_function(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> ObjectRef[Any]:
        """Call a function of the environment.

        Args:
            name: Name of the function.
            arguments: Arguments by parameter name. None: no arguments.
            timeout_s: Seconds after which the runtime stops the function. None means 60.
            call_id: As for `call_tool`.

        Returns:
            The function's return value.

        Raises:
            FunctionFailed: The function raised.
            ToolNotFound, ToolInputInvalid, ToolTimeout: As `call_tool`.
        """
        params = {"name": name, "arguments": object_of(name, arguments)}
        return self._call("aenv/function", params, timeout_s, call_id)

    @remote_method
    def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> ObjectRef[Any]:
        """Compute a reward.

        Args:
            arguments: Arguments by parameter name. None: no arguments.
            name: Name of the reward. None: the default reward.
            timeout_s: Seconds after which the runtime stops the reward. None means 60.
            call_id: As for `call_tool`.

        Returns:
            The reward's return value.

        Raises:
            FunctionFailed: The reward raised, or returned NaN.
            ToolNotFound, ToolInputInvalid, ToolTimeout: As `call_tool`.
        """
        params = {"name": name, "arguments": object_of(name or "reward", arguments)}
        return self._call("aenv/reward", params, timeout_s, call_id)

    @remote_method
    def reset(
        self,
        task: Any = None,
        seed: int | None = None,
        timeout_s: float | None = None,
        call_id: str | None = None,
    ) -> ObjectRef[ResetResult]:
        """Prepare the instance for another episode, and check that nothing of the last is left.

        All other calls are cancelled, and the processes and files of the last episode are removed.
        TTL and idle timeout are not extended. A call with the id of an earlier call is refused.

        Args:
            task: JSON data for the environment's function.
            seed: Seed for the environment's function, and its `current_call().seed`.
            timeout_s: Seconds after which the runtime stops the function. None means 60.
            call_id: As for `call_tool`.

        Returns:
            Whether the instance is clean. If it is not, it can only be reset again or released.

        Raises:
            ToolNotFound: The environment registers no reset.
            FunctionFailed: Its function raised; the instance is not clean.
            CallCancelled: Another reset is under way.
            ToolTimeout: It was stopped; the instance is not clean.
        """
        arguments = object_of("reset", {"task": task, "seed": seed})
        return self._call("aenv/reset", {"arguments": arguments}, timeout_s, call_id)

    @remote_method
    def list_tasks(self, offset: int = 0, limit: int = TASKS_PER_PAGE) -> ObjectRef[TaskPage]:
        """List tasks that the environment brings.

        Args:
            offset: Number of the first task, from 0.
            limit: Maximum number of tasks, from 1 to 10,000; if tasks are large, a page has fewer.

        Returns:
            The tasks, and where the next page begins.

        Raises:
            ToolNotFound: The environment registers no tasks.
            FunctionFailed: Its function raised, or yielded something else than objects.
        """
        return self._call("aenv/tasks", {"arguments": {"offset": offset, "limit": limit}})

    @remote_method
    def check_health(
        self, arguments: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> ObjectRef[dict[str, Any]]:
        """Run the environment's health check.

        Args:
            arguments: Arguments by parameter name. None: no arguments.
            timeout_s: Seconds after which the runtime stops the check. None means 60.

        Returns:
            ``{"status": "healthy" | …, …}``.
        """
        params = {"arguments": object_of("health", arguments)}
        return self._call("aenv/health", params, timeout_s)

    # --- commands and files ---------------------------------------------------------------------

    @remote_method
    def exec(
        self,
        command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
    ) -> ObjectRef[ExecResult]:
        """Run a command in the sandbox.

        Args:
            command: A list of arguments, or a string for the shell.
            cwd: Working directory. None means the environment's.
            env: Variables added to the environment's.
            stdin: Input of the command. None means empty.
            timeout_s: Seconds after which the command is killed. None means 60.

        Returns:
            Exit code and output. A program that fails or does not exist gives a result too.

        Raises:
            ToolTimeout: The command ran longer than `timeout_s`; its processes were killed.
        """
        arguments = exec_arguments(command, cwd, env, stdin)
        seconds = EXEC_TIMEOUT_S if timeout_s is None else timeout_s
        return self._call("aenv/exec", {"arguments": arguments}, seconds)

    @remote_method
    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> ObjectRef[bytes]:
        """Read a file of the sandbox.

        Args:
            path: Absolute, or relative to the environment's working directory.
            offset: First byte to read.
            length: Number of bytes. None means up to the end.

        Returns:
            The bytes.

        Raises:
            FileAccessError: The file cannot be read.
        """
        arguments = {"path": path, "offset": offset, "length": length}
        return self._call("aenv/read_file", {"arguments": arguments}, FILE_TIMEOUT_S)

    @remote_method
    def write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> ObjectRef[int]:
        """Write a file of the sandbox, creating missing directories.

        Args:
            path: Absolute, or relative to the environment's working directory.
            data: Bytes, or text that is encoded as UTF-8.
            append: Append to the file instead of replacing it as a whole.
            mode: Permission bits, such as ``0o755``. None means those of the existing file.

        Returns:
            The size of the file in bytes.

        Raises:
            FileAccessError: The file cannot be written, or the data exceed one call.
        """
        arguments = write_arguments(path, data, append, mode, self.instance_id)
        return self._call("aenv/write_file", {"arguments": arguments}, FILE_TIMEOUT_S)

    @remote_method
    def list_files(self, path: str = ".") -> ObjectRef[list[FileEntry]]:
        """List a directory of the sandbox.

        Args:
            path: Absolute, or relative to the environment's working directory.

        Returns:
            Its entries.

        Raises:
            FileAccessError: The directory cannot be read.
        """
        return self._call("aenv/list_files", {"arguments": {"path": path}}, FILE_TIMEOUT_S)

    @remote_method
    def logs(self, tail: int | None = None, follow: bool = False) -> ObjectRefGenerator:
        """Read the output of the instance.

        Args:
            tail: Number of last lines to begin with. None means all that is retained.
            follow: Continue with new output until the instance ends.

        Returns:
            References to pieces of text. A slow reader pauses the producer (with Ray 2.57 or
            later). After the death of the host, pieces may be missing.

        Raises:
            SandboxLost, InstanceExpired, InstanceReleased: The instance has ended.
        """
        from aenv_ray.actors.ray_shell import ray_api

        _check_tail(tail)
        method = ray_api.with_backpressure(self._host.logs, LOG_PIECES_AHEAD)
        sent: ObjectRefGenerator = method.remote(self.instance_id, tail, follow)
        return sent

    # --- life -----------------------------------------------------------------------------------

    @remote_method
    def info(self) -> ObjectRef[InstanceInfo]:
        """Return the state of the instance; does not extend its deadline.

        Raises:
            InstanceNotFound: The instance ended long ago.
        """
        sent: ObjectRef[InstanceInfo] = self._host.info.remote(self.instance_id)
        return sent

    @remote_method
    def renew(self, ttl: str | float = "30m") -> ObjectRef[InstanceInfo]:
        """Extend the deadline of the instance to `ttl` from now.

        Args:
            ttl: ``"30m"`` or seconds. A `ttl` that ends before the current deadline does nothing.

        Returns:
            The state of the instance, with the new deadline.

        Raises:
            SandboxLost, InstanceExpired, InstanceReleased: The instance has ended.
        """
        seconds = units.parse_duration_s(ttl, what="ttl")
        sent: ObjectRef[InstanceInfo] = self._host.renew.remote(self.instance_id, seconds)
        return sent

    @remote_method
    def release(self) -> ObjectRef[None]:
        """End the instance. Works in every state, any number of times.

        Returns:
            None, once the sandbox is gone.
        """
        from aenv_ray.actors.ray_shell import ray_api

        host = ray_api.actor_id(self._host)
        sent: ObjectRef[None] = self._controller.release.remote([self.instance_id], host)
        return sent


def _check_tail(tail: object) -> None:
    if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 0):
        raise ConfigError(
            f"invalid tail {tail!r}: expected a number of lines, 0 or more",
            hint="leave it out to read all lines",
        )


def with_sender(handle: EnvHandle, send: Callable[[bytes], Any]) -> EnvHandle:
    """Return a handle to the same instance that sends its calls another way.

    Args:
        handle: Handle of the instance.
        send: Receives the message of each call, and returns an awaitable of the result's value.
    """
    copy = EnvHandle(handle.instance_id, handle.reference, handle._host, handle._controller)
    copy._send_call = send
    return copy


def host_of(handle: EnvHandle) -> Any:
    """Return the Ray actor that hosts the instance, for callers that exchange JSON with it."""
    return handle._host


def set_seed(handle: EnvHandle, seed: int) -> ObjectRef[Any]:
    """Set the seed of an episode that does not begin with a reset.

    Raises:
        ConfigError: The instance has an older runtime, which does not know the method.
    """
    return handle._call(SEED_METHOD, {"arguments": {"seed": seed}})


def bare_tool_name(name: str, reference: str) -> str:
    """Return the tool's own name, given ``env@version/tool`` or ``tool``.

    Raises:
        ToolNotFound: The prefix names another environment.
        ConfigError: The name is not a string.
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"invalid tool name {name!r}: expected a string",
            hint="pass the tool's name, as list_tools() returns it",
        )
    prefix, slash, rest = name.partition("/")
    if not slash or "@" not in prefix:
        # A tool's own name may contain a slash; a prefix without a version is an environment name.
        return rest if slash and prefix == reference.partition("@")[0] else name
    # The instance may have been created without naming a version.
    if reference not in (prefix, prefix.partition("@")[0]):
        raise ToolNotFound(
            f"tool {name!r} does not belong to environment {reference!r}",
            tool_name=name,
            hint=f"write {reference}/{rest} or just {rest}",
        )
    return rest
