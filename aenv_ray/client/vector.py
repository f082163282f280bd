"""`vector`: many instances of an environment, stepped together.

A step calls one tool on every instance. The calls to the instances of a node travel together, and
those to instances on this node go to the sandboxes directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from aenv_ray.actors.calls.call_batching import BatchClients
from aenv_ray.actors.calls.handle import EnvHandle, host_of, with_sender
from aenv_ray.actors.fabric import driver_api
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.loop_thread import LoopThread
from aenv_ray.errors import AenvError, ConfigError, DeadlineExceeded
from aenv_ray.models import ToolResult
from aenv_ray.units import counted

if TYPE_CHECKING:
    from ray import ObjectRef

StepOutcome = ToolResult | AenvError
"""The result of a call, or the error that prevented one."""
Arguments = Mapping[str, Any] | None
"""The arguments of one call, by parameter name."""

STEP_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Ready:
    """The outcome of one call."""

    index: int
    """The index of the instance in the vector."""
    outcome: StepOutcome


class VectorEnvironment:
    """Instances of one environment, addressed by their index.

    Blocking methods may be called from any thread; their ``…_async`` twins are for event loops.
    The error of one instance does not affect the others: it takes the place of its result.

    Attributes:
        handles: The instances, in order.
    """

    def __init__(self, handles: Sequence[EnvHandle]) -> None:
        self.handles: tuple[EnvHandle, ...] = tuple(handles)
        self._loop = LoopThread("aenv-vector")
        self._calls: list[AsyncEnvHandle] = []
        self._pending: dict[asyncio.Future[StepOutcome], int] = {}
        """Calls of `send` without the outcome that `recv` returns, with their instances."""
        self._stepping: dict[int, asyncio.Task[Any]] = {}
        """The steps under way, by the instances that they call."""
        self._loop.wait(self._open())

    async def _open(self) -> None:
        sender = BatchClients()
        self._calls = [AsyncEnvHandle(handle, sender.to(handle)) for handle in self.handles]

    def __len__(self) -> int:
        return len(self.handles)

    # --- all at once --------------------------------------------------------------------------

    def step(
        self,
        tool: str,
        arguments: Sequence[Arguments],
        *,
        indices: Sequence[int] | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> list[StepOutcome]:
        """Call a tool on instances and wait for all of them.

        Args:
            tool: Name of the tool.
            arguments: Arguments for each instance.
            indices: The instances, without repetition. None: all.
            timeout_s: Seconds for each call.

        Returns:
            The outcomes, in the order of `indices`.

        Raises:
            ConfigError: The numbers of arguments and instances differ, an index is invalid, or a
                call to one of the instances is under way.
        """
        self._check_open()
        return self._loop.wait(self._step(tool, arguments, indices, timeout_s))

    async def step_async(
        self,
        tool: str,
        arguments: Sequence[Arguments],
        *,
        indices: Sequence[int] | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> list[StepOutcome]:
        """As `step`; cancelling cancels the calls, whose end the next step waits for."""
        self._check_open()
        step = self._step(tool, arguments, indices, timeout_s)
        return await self._loop.run(step)

    async def _step(
        self,
        tool: str,
        arguments: Sequence[Arguments],
        indices: Sequence[int] | None,
        timeout_s: float,
    ) -> list[StepOutcome]:
        chosen = await self._chosen(arguments, indices)
        step = asyncio.current_task()
        assert step is not None
        self._stepping |= dict.fromkeys(chosen, step)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._call(index, tool, one, timeout_s))
                    for index, one in zip(chosen, arguments, strict=True)
                ]
        finally:
            for index in chosen:
                del self._stepping[index]
        return [task.result() for task in tasks]

    async def _call(
        self, index: int, tool: str, arguments: Arguments, timeout_s: float
    ) -> StepOutcome:
        try:
            return await self._calls[index].call_tool(tool, arguments, timeout_s)
        except AenvError as exc:
            return exc

    def step_refs(
        self,
        tool: str,
        arguments: Sequence[Arguments],
        *,
        indices: Sequence[int] | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> list[ObjectRef[StepOutcome]]:
        """Call a tool on instances; the outcomes stay in Ray's object store.

        Pass the references to the tasks and actors that use the observations: large ones then do
        not travel through this process. There is one Ray task for each host; its references become
        ready together. Wait for them before the next call to their instances: this process does not
        learn when they are ready, and refuses no call meanwhile.

        Args:
            tool: Name of the tool.
            arguments: Arguments for each instance.
            indices: The instances, without repetition. None: all.
            timeout_s: Seconds for each call.

        Returns:
            A reference to each outcome, in the order of `indices`. If a host dies for good,
            `ray.get` of its references raises Ray's ``ActorDiedError``.

        Raises:
            ConfigError: As `step`.
            ToolInputInvalid: The arguments of a call cannot be encoded; no call is made.
        """
        self._check_open()
        groups: dict[Any, list[tuple[int, bytes]]] = {}
        for position, index in enumerate(self._loop.wait(self._chosen(arguments, indices))):
            handle, sent = self.handles[index], groups.setdefault(host_of(self.handles[index]), [])
            message = _message(handle, tool, arguments[position], timeout_s)
            sent.append((position, message))
        references: dict[int, ObjectRef[StepOutcome]] = {}
        for host, sent in groups.items():
            call_all = host.call_all.options(num_returns=len(sent))
            made = call_all.remote([message for _, message in sent])
            found = [made] if len(sent) == 1 else made
            references |= {position: ref for (position, _), ref in zip(sent, found, strict=True)}
        return [references[position] for position in range(len(references))]

    # --- as they become ready -----------------------------------------------------------------

    def send(
        self,
        tool: str,
        arguments: Sequence[Arguments],
        *,
        indices: Sequence[int] | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """Call a tool on instances without waiting; `recv` returns the outcomes.

        The arguments and errors are those of `step`.
        """
        self._check_open()
        self._loop.wait(self._send(tool, arguments, indices, timeout_s))

    async def _send(
        self,
        tool: str,
        arguments: Sequence[Arguments],
        indices: Sequence[int] | None,
        timeout_s: float,
    ) -> None:
        chosen = await self._chosen(arguments, indices)
        for index, one in zip(chosen, arguments, strict=True):
            task = asyncio.get_running_loop().create_task(self._call(index, tool, one, timeout_s))
            self._pending[task] = index

    def recv(self, min_ready: int = 1, *, timeout_s: float = STEP_TIMEOUT_S) -> list[Ready]:
        """Wait until calls of `send` have outcomes, and return all outcomes that there are.

        Args:
            min_ready: How many to wait for; fewer if fewer calls are under way.
            timeout_s: Longest wait. The calls continue after that.

        Returns:
            The outcomes, in the order of the instances; each is returned once.

        Raises:
            ConfigError: `min_ready` is less than 1, or no call is under way.
            DeadlineExceeded: Fewer were ready in time.
        """
        self._check_open()
        return self._loop.wait(self._recv(min_ready, timeout_s), self._take_back)

    async def recv_async(
        self, min_ready: int = 1, *, timeout_s: float = STEP_TIMEOUT_S
    ) -> list[Ready]:
        """As `recv`; cancelling leaves the calls under way."""
        self._check_open()
        return await self._loop.run(self._recv(min_ready, timeout_s), self._take_back)

    async def _recv(self, min_ready: int, timeout_s: float) -> list[Ready]:
        if min_ready < 1 or not self._pending:
            what = f"min_ready {min_ready}" if min_ready < 1 else "no call is under way"
            raise ConfigError(f"nothing to receive: {what}", hint="call send() first")
        wanted = min(min_ready, len(self._pending))
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (ready := sum(task.done() for task in self._pending)) < wanted:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"only {ready} of {counted(wanted, 'instance')} became ready within "
                    f"{timeout_s:g} s",
                    hint="call recv() again: their calls continue",
                )
            waiting = [task for task in self._pending if not task.done()]
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        done = [(task, index) for task, index in self._pending.items() if task.done()]
        for task, _ in done:
            del self._pending[task]
        return sorted((Ready(index, task.result()) for task, index in done), key=lambda r: r.index)

    async def _take_back(self, received: list[Ready]) -> None:
        """Keep outcomes that did not reach the caller for the next `recv`."""
        for ready in received:
            future: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
            future.set_result(ready.outcome)
            self._pending[future] = ready.index

    async def _chosen(
        self, arguments: Sequence[Arguments], indices: Sequence[int] | None
    ) -> Sequence[int]:
        """Return the instances to call, after checking that they can be called."""
        chosen = range(len(self.handles)) if indices is None else indices
        if len(arguments) != len(chosen):
            raise ConfigError(
                f"{len(arguments)} arguments for {counted(len(chosen), 'instance')}",
                hint="pass one mapping, or None, for each instance",
            )
        known = set(range(len(self.handles)))
        if len(set(chosen)) < len(chosen) or not known.issuperset(chosen):
            raise ConfigError(
                f"invalid indices {list(chosen)}: expected different numbers from 0 to "
                f"{len(self.handles) - 1}",
                hint="leave indices out for all instances",
            )
        # The caller of a cancelled step cannot wait for the end of its calls.
        steps = {self._stepping[index] for index in chosen if index in self._stepping}
        if cancelled := [step for step in steps if step.cancelling()]:
            await asyncio.wait(cancelled, timeout=STEP_TIMEOUT_S)
        busy = sorted({*self._stepping, *self._pending.values()}.intersection(chosen))
        if busy:
            raise ConfigError(
                f"calls to the instances {busy} are under way",
                hint="wait for the step that makes them, or recv() the outcomes of send() first",
            )
        return chosen

    # --- end ------------------------------------------------------------------------------------

    def release(self) -> None:
        """End all instances and cancel calls under way, any number of times."""
        if self._loop.is_closed:
            return
        try:
            driver_api.release_many(self.handles)
        finally:
            self._loop.wait(self._close())
            self._loop.close()

    async def release_async(self) -> None:
        """As `release`."""
        await asyncio.to_thread(self.release)

    async def _close(self) -> None:
        pending, self._pending = list(self._pending), {}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=STEP_TIMEOUT_S)
        for one in self._calls:
            await one.close()

    def _check_open(self) -> None:
        if self._loop.is_closed:
            raise ConfigError("this vector was released", hint="create a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.release_async()


def _message(handle: EnvHandle, tool: str, arguments: Arguments, timeout_s: float) -> bytes:
    """Return the message of a tool call, which checks its arguments."""
    messages: list[bytes] = []
    with_sender(handle, messages.append).call_tool.remote(tool, arguments, timeout_s)
    return messages[0]


def vector(
    environment: str | Path,
    count: int,
    *,
    actor: Literal["dedicated", "shared"] = "shared",
    **options: Any,
) -> VectorEnvironment:
    """Create `count` instances, all or none, to be stepped together.

    Args:
        environment: As in `aenv_ray.create`.
        count: Number of instances, at least 1.
        actor: As in `aenv_ray.create`, but shared by default.
        options: The other options of `aenv_ray.create`; ``queue_timeout`` is how long to wait until
            the cluster has room for all of them.

    Raises:
        AenvError: As `aenv_ray.create_many`; nothing is left behind.
    """
    return VectorEnvironment(driver_api.create_many(environment, count, actor=actor, **options))
