"""The environment that a policy acts on: on the loop, or in a thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.loop_thread import blocking
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    CallCancelled,
    ConfigError,
    InstanceReleased,
    ToolError,
    as_tool_error,
)
from aenv_ray.ids import new_call_id
from aenv_ray.models import ExecResult, ToolResult
from aenv_ray.sampling.attribution import CallClock, PolicyActivity
from aenv_ray.trajectories.attachments import TEXT_LIMIT, attached, attachment_of
from aenv_ray.trajectories.schema import Attachment, Generation, Step, Usage

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0
_NO_RESULT: Final[tuple[type[AenvError], ...]] = (ToolError, *INFRASTRUCTURE)
"""What a call raises that was made, or refused because of its tool or arguments."""
_CANCELLED: Final = "the call was cancelled, or its episode ended, before it had a result"
ATTACHMENTS_BYTES: Final = 128 << 20
"""Total size of one episode's attachments. They are in the runner's memory until the episode ends,
and an agent that used it up would end the episodes of others."""


@dataclass
class EpisodeLog:
    """What an episode's record says of the policy: its steps, and what it noted itself."""

    steps: list[Step] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Attachment | None = None
    usage: Usage | None = None
    generation: Generation | None = None
    policy_versions: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    """When the episode began."""
    contents: dict[str, bytes] = field(default_factory=dict)
    """Contents of the attachments, by digest."""
    unrecorded_calls: int = 0
    """Calls that act and are not steps."""
    contents_bytes: int = 0
    """Their size."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of `Episode`."""
        return {
            "steps": tuple(self.steps),
            "messages": tuple(self.messages),
            "tools": self.tools,
            "usage": self.usage,
            "generation": self.generation,
            "policy_versions": tuple(self.policy_versions),
            "unrecorded_calls": self.unrecorded_calls,
        }


class _Call(NamedTuple):
    """A tool call that is under way."""

    tool: str
    arguments: Mapping[str, Any] | None
    id: str
    started: float
    timeout_s: float


class EpisodeEnv:
    """The environment of one episode for an async policy: tools, commands and files.

    Rewards, functions and release are left to the sampler (invariant 8).

    Args:
        instance: Where the policy acts.
        log: Receives what the episode's record says of the policy.
        blocked_s: See `CallClock`.
    """

    def __init__(
        self,
        instance: AsyncEnvHandle,
        log: EpisodeLog,
        blocked_s: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        self._instance = instance
        self._log = log
        self.failure: AenvError | None = None
        """The first infrastructure failure, or the end of the sandbox; it ends the episode even if
        the policy ignores it."""
        self._call_failures: list[AenvError] = []
        """What calls of the policy raised."""
        self.instance_id = str(instance.handle.instance_id)
        self.setup_result: Any = None
        """What the task's setup returned; None without one."""
        self._clock = CallClock(blocked_s)
        self._under_way = 0
        self._tool_calls: dict[str, _Call] = {}
        """Tool calls that are under way, by id."""
        self._has_ended = False
        self._policy_s = 0.0

    def end(self) -> bool:
        """Refuse later calls, any number of times; return whether no call is under way.

        Tool calls that are under way become steps without a result.
        """
        self._has_ended = True
        for call in list(self._tool_calls.values()):
            self._note_cancelled(call)
        return not self._under_way

    @contextmanager
    def policy_time(self) -> Iterator[None]:
        """Measure the policy, which acts in this block; setup and reward are not its time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._policy_s = time.perf_counter() - began

    def activity(self) -> PolicyActivity:
        """Return what the policy has done, once it has ended."""
        busy_s = self._clock.busy_s(time.perf_counter())
        return PolicyActivity(self._clock.has_acted, busy_s, self._policy_s)

    def cause_of(self, exc: Exception) -> Exception:
        """Return what made a policy raise: a call, as `ToolError`, or else the policy itself.

        What a call raises is the answer of the sandbox, whatever its type: an agent can cause it.
        """
        leaves = list(_leaves(exc))
        answers = [one for one in self._call_failures if any(one is leaf for leaf in leaves)]
        is_answer = all(any(leaf is one for one in answers) for leaf in leaves)
        return as_tool_error(answers[0]) if is_answer else exc

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools: ``name, description, inputSchema``."""
        return await self._answered(self._instance.list_tools())

    async def _noting(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call and record an infrastructure failure, which a policy may suppress."""
        if self._has_ended:
            call.close()
            raise CallCancelled(
                f"the episode on {self.instance_id} has ended",
                hint="make no calls after the policy has returned",
            )
        self._under_way += 1
        try:
            return await call
        except INFRASTRUCTURE as exc:
            self.failure = self.failure or exc
            raise
        finally:
            self._under_way -= 1

    async def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call as `_noting` does, and record what it raises for `cause_of`."""
        try:
            return await self._noting(call)
        except AenvError as exc:
            self._call_failures.append(exc)
            raise

    async def _acting(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call as `_answered` does, and measure it."""
        if self._has_ended:
            return await self._answered(call)  # which refuses it: the policy does not act
        self._clock.begin(time.perf_counter())
        try:
            return await self._answered(call)
        finally:
            self._clock.end(time.perf_counter())

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> ToolResult:
        """Call a tool; the call is a step of the episode.

        Raises:
            ToolError: The call was refused or stopped; the episode can continue.
            SandboxDiedInside: The call, or what ran in the sandbox, ended it: the episode is over.
            AenvError: The infrastructure failed. Do not catch it: the sampler restarts the episode.
        """
        call = _Call(name, arguments, new_call_id(), time.perf_counter(), timeout_s)
        calling = self._instance.call_tool(name, arguments, timeout_s, call.id)
        if not self._has_ended:
            self._tool_calls[call.id] = call
        try:
            result = await self._acting(calling)
            self._note(call, result.text(), result.is_error, None, result.content)
        except _NO_RESULT as exc:
            self._note(call, exc.message, True, exc.code)
            raise
        except asyncio.CancelledError:
            self._note_cancelled(call)
            raise
        finally:
            self._tool_calls.pop(call.id, None)
        return result

    def _note_cancelled(self, call: _Call) -> None:
        self._note(call, _CANCELLED, True, CallCancelled.code)

    def _note(
        self,
        call: _Call,
        text: str,
        is_error: bool,
        error: str | None,
        content: Sequence[Any] = (),
    ) -> None:
        """Make a call a step, unless it is one already, or came after the end of the episode."""
        if self._tool_calls.pop(call.id, None) is None:
            return
        attachments, lost = self._keep(attached(content, text))
        if len(text) > TEXT_LIMIT:
            text = f"{text[:TEXT_LIMIT]}\n[truncated: {len(text)} characters]"
        if lost:
            text += f"\n[not attached: {lost} bytes; an episode may have {ATTACHMENTS_BYTES}]"
        self._log.steps.append(
            Step(
                tool=call.tool,
                # Other arguments were refused; the text says so.
                arguments=dict(call.arguments) if isinstance(call.arguments, Mapping) else {},
                text=text,
                is_error=is_error,
                error=error,
                duration_s=time.perf_counter() - call.started,
                call_id=call.id,
                started_s=call.started - self._log.began,
                timeout_s=call.timeout_s,
                attachments=tuple(attachments),
            )
        )

    def _keep(self, found: Mapping[Attachment, bytes]) -> tuple[list[Attachment], int]:
        """Keep attachments, as far as the episode has room; return these, and how much is lost."""
        contents, kept, lost = self._log.contents, list[Attachment](), 0
        for one, data in found.items():
            if one.digest not in contents:
                if self._log.contents_bytes + len(data) > ATTACHMENTS_BYTES:
                    lost += len(data)
                    continue
                contents[one.digest] = data
                self._log.contents_bytes += len(data)
            kept.append(one)
        return kept, lost

    def record_message(self, message: Mapping[str, Any]) -> None:
        """Add a chat message, in OpenAI's format, to the episode's record.

        Raises:
            ConfigError: It is not JSON.
        """
        try:
            self._log.messages.append(json.loads(json.dumps(message, allow_nan=False)))
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"the message to record is not JSON: {exc}",
                hint="pass strings, numbers, lists and dicts with string keys",
            ) from exc

    def record_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Put the tools that a model has, in OpenAI's format, into the episode's record.

        They are an attachment, which episodes with the same tools share. A later list replaces it.

        Raises:
            ConfigError: They are not JSON.
        """
        try:
            data = json.dumps(list(tools), allow_nan=False).encode()
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"the tools to record are not JSON: {exc}",
                hint='pass a list of {"type": "function", "function": {...}}',
            ) from exc
        kept, _ = self._keep({attachment_of(data, "application/json"): data})
        self._log.tools = kept[0] if kept else None

    def record_usage(
        self, *, prompt_tokens: int = 0, completion_tokens: int = 0, cost: float | None = None
    ) -> None:
        """Add an answer of a model to the usage in the episode's record.

        Args:
            prompt_tokens: Tokens that the model read.
            completion_tokens: Tokens that it wrote.
            cost: Its cost; None if it is not known.
        """
        added = Usage(
            requests=1,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=cost,
        )
        self._log.usage = added if self._log.usage is None else self._log.usage + added

    def record_generation(self, generation: Generation) -> None:
        """Put the tokens of the episode into its record."""
        self._log.generation = generation

    def record_policy_version(self, version: int) -> None:
        """Note the version of the weights that act now, unless it is the one noted last."""
        if self._log.policy_versions[-1:] != [version]:
            self._log.policy_versions.append(version)

    async def exec(self, command: str | list[str], timeout_s: float = CALL_TIMEOUT_S) -> ExecResult:
        """Run a command; this is not a step, so the episode cannot be replayed."""
        self._log.unrecorded_calls += 1
        return await self._acting(self._instance.exec(command, timeout_s))

    async def read_file(self, path: str) -> bytes:
        """Read a file of the sandbox."""
        return await self._acting(self._instance.read_file(path))

    async def write_file(self, path: str, data: bytes | str) -> int:
        """Write a file of the sandbox; returns its size. Not a step, as `exec`."""
        self._log.unrecorded_calls += 1
        return await self._acting(self._instance.write_file(path, data))


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for one in exc.exceptions:
            yield from _leaves(one)
    else:
        yield exc


class SyncEpisodeEnv:
    """`EpisodeEnv` for a sync policy: the same methods, blocking."""

    list_tools = blocking(EpisodeEnv.list_tools)
    call_tool = blocking(EpisodeEnv.call_tool)
    exec = blocking(EpisodeEnv.exec)
    read_file = blocking(EpisodeEnv.read_file)
    write_file = blocking(EpisodeEnv.write_file)

    def __init__(self, env: EpisodeEnv, loop: asyncio.AbstractEventLoop) -> None:
        self._env = env
        self._loop = loop
        self._abandoned = False
        self._calls: set[Future[Any]] = set()
        self.instance_id = env.instance_id

    def submit(self, call: Callable[[EpisodeEnv], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a call of the episode in the background; cancelling the future cancels it."""
        if self._abandoned:
            raise InstanceReleased(
                "the episode has ended",
                instance_id=self.instance_id,
                hint="call tools only while the policy runs",
            )
        future = asyncio.run_coroutine_threadsafe(call(self._env), self._loop)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def record_message(self, message: Mapping[str, Any]) -> None:
        """Like `EpisodeEnv.record_message`."""
        self._env.record_message(message)

    def record_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Like `EpisodeEnv.record_tools`."""
        self._env.record_tools(tools)

    def record_usage(
        self, *, prompt_tokens: int = 0, completion_tokens: int = 0, cost: float | None = None
    ) -> None:
        """Like `EpisodeEnv.record_usage`."""
        self._env.record_usage(
            prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost
        )

    def abandon(self) -> None:
        """Cancel the policy's running calls and refuse further ones."""
        self._abandoned = True
        for future in list(self._calls):
            future.cancel()
