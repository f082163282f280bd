"""`AsyncEnvHandle`: an `EnvHandle` whose methods are coroutines.

`Environment`, the sampler and the gateway reach instances through it. Its calls to an instance on
the same node go to the sandbox directly, after a few calls through the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from aenv_ray.actors.calls.call_batching import Send
from aenv_ray.actors.calls.handle import EnvHandle, host_of, set_seed, with_sender
from aenv_ray.actors.calls.introduction import Introduction
from aenv_ray.actors.calls.json_calls import HOST_GRACE_S
from aenv_ray.actors.calls.local_door import LocalDoor, NotDirect
from aenv_ray.actors.calls.wire import CallMessage, decode_json
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.driver_api import connector
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.instance_batches import InstanceBatches
from aenv_ray.actors.fabric.references import resolve_environment
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.client.tool_callbacks import Answering, ToolCallbacks
from aenv_ray.errors import AenvError, InternalError
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    InstanceInfo,
    LogMessage,
    PromptMessages,
    Question,
    ResetResult,
    ResourceContents,
    TaskPage,
    ToolResult,
)
from aenv_ray.project.project import Project

T = TypeVar("T")


class AsyncEnvHandle:
    """One instance reached through Ray; methods raise `AenvError` and never Ray's exceptions.

    Args:
        handle: The instance's handle; `create` and `attach` obtain one.
        call_host: Sends a message to the instance's host and returns the result's value. None:
            each message is a task of its own.
        introduction: To its sandbox, if the host has given one already.
    """

    url: str = ""
    """Empty: the instance is not reached by HTTP."""

    callbacks: ToolCallbacks | None = None
    """What is offered to its tools."""

    digest: str = ""
    """Digest of the environment's content; empty if this process did not create the instance."""

    def __init__(
        self,
        handle: EnvHandle,
        call_host: Send | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        self.instance_id: str = handle.instance_id
        self._call_host: Send = call_host or host_of(handle).call.remote
        self.handle = with_sender(handle, self._send)
        self._introduction = introduction
        self._door: LocalDoor | None = None

    @classmethod
    async def create(cls, environment: str, options: CreateOptions) -> AsyncEnvHandle:
        """Create an instance. If cancelled, the create is undone.

        Raises:
            AenvError: As `aenv_ray.create`.
        """
        connect = connector()

        def resolve() -> tuple[Fabric, Project]:
            fabric = connect()
            with fabric.gate:
                return fabric, resolve_environment(environment, lambda: fabric)

        return await cls.create_of(*await asyncio.to_thread(resolve), options)

    @classmethod
    async def create_of(
        cls, fabric: Fabric, source: Project, options: CreateOptions
    ) -> AsyncEnvHandle:
        """Create an instance of a project; otherwise like `create`. It occupies no thread."""
        with fabric.gate:  # else it could use Ray after a shutdown, which would start another
            batches = InstanceBatches(fabric, source, options, {})
            (made,) = await batches.create_group(1)
        created = cls(batches.handle(made), introduction=made.introduction)
        created.digest = source.digest
        return created

    @classmethod
    async def attach(cls, instance_id: str) -> AsyncEnvHandle:
        """Return a handle to a live instance.

        Raises:
            InstanceNotFound: No live instance has this id.
        """
        connect = connector()
        return cls(await asyncio.to_thread(lambda: connect().get(instance_id)))

    async def connect_directly(self) -> bool:
        """Connect to the sandbox now instead of after the first calls; return whether it worked.

        It works only if this process is on the sandbox's node. Calls then bypass the host.
        """
        return await self._local_door().open()

    def _local_door(self) -> LocalDoor:
        """Return the door for the running loop, which may not be that of an earlier call."""
        if self._door is None or self._door.loop is not asyncio.get_running_loop():
            if self._door is not None:
                self._door.close()
            self._door = LocalDoor(self.handle, introduction=self._introduction)
            self._introduction = None
        return self._door

    def _send(self, message: bytes) -> Awaitable[Any]:
        door = self._local_door()
        if door.is_open:
            return self._send_directly(door, message)
        door.note_call_by_host()
        return self._call_host(message)

    async def _send_directly(self, door: LocalDoor, message: bytes) -> Any:
        call = CallMessage.decode(message)
        try:
            return decode_json(call.method, await door.request(call))
        except NotDirect:
            door.note_call_by_host()
        sent = self._call_host(message)
        try:
            return await sent
        except asyncio.CancelledError:
            ray_api.cancel(sent)
            raise

    async def _wait(self, reference: Awaitable[T], what: str, deadline_s: float) -> T:
        return await ray_api.wait_async(
            reference, what, deadline_s + HOST_GRACE_S, instance_id=self.instance_id
        )

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools: ``name, description, inputSchema``."""
        return await self._wait(self.handle.list_tools.remote(), "tools/list", 60.0)

    async def list_resources(self) -> list[dict[str, Any]]:
        """Return the resources: ``uri, name, description``."""
        return await self._wait(self.handle.list_resources.remote(), "resources/list", 60.0)

    async def list_resource_templates(self) -> list[dict[str, Any]]:
        """Return the resources with parameters: ``uriTemplate, name, description``."""
        reference = self.handle.list_resource_templates.remote()
        return await self._wait(reference, "resources/templates/list", 60.0)

    async def read_resource(self, uri: str, timeout_s: float) -> list[ResourceContents]:
        """Read a resource."""
        reference = self.handle.read_resource.remote(uri, timeout_s)
        return await self._cancellable(reference, f"resource {uri!r}", timeout_s)

    async def list_prompts(self) -> list[dict[str, Any]]:
        """Return the prompts: ``name, description, arguments``."""
        return await self._wait(self.handle.list_prompts.remote(), "prompts/list", 60.0)

    async def get_prompt(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> PromptMessages:
        """Fill in a prompt."""
        reference = self.handle.get_prompt.remote(name, arguments, timeout_s)
        return await self._cancellable(reference, f"prompt {name!r}", timeout_s)

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None,
        timeout_s: float,
        call_id: str | None = None,
    ) -> ToolResult:
        """Call a tool; a tool that raises is a result."""
        if self.callbacks is not None and self.callbacks.offers:
            return await self._call_answering(self.callbacks, name, arguments, timeout_s)
        reference = self.handle.call_tool.remote(name, arguments, timeout_s, call_id)
        return await self._cancellable(reference, f"tool {name!r}", timeout_s)

    async def _call_answering(
        self,
        callbacks: ToolCallbacks,
        name: str,
        arguments: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> ToolResult:
        """Call a tool, which may ask its caller."""

        async def send(question: Question, result: dict[str, Any] | None) -> None:
            await self._wait(self.handle.answer.remote(question, result), "an answer", 60.0)

        what = f"tool {name!r}"
        references = self.handle.stream_tool.remote(name, arguments, timeout_s, callbacks.offers)
        try:
            async with Answering(callbacks, send) as answering:
                while True:
                    reference = await self._wait(anext(references, None), what, timeout_s)
                    if reference is None:
                        raise InternalError(f"{what}: the messages ended without a result")
                    item = await self._wait(reference, what, timeout_s)
                    if isinstance(item, ToolResult):
                        return item
                    if isinstance(item, LogMessage | Question):
                        await answering.take(item)
        finally:
            ray_api.cancel(references)

    async def _cancellable(self, reference: Awaitable[T], what: str, deadline_s: float) -> T:
        try:
            return await self._wait(reference, what, deadline_s)
        except asyncio.CancelledError:
            ray_api.cancel(reference)
            raise

    async def call_tools(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        parallel: bool,
        timeout_s: float,
    ) -> list[ToolResult | AenvError]:
        """Call several tools in one round trip."""
        reference = self.handle.call_tools.remote(calls, parallel, timeout_s)
        return await self._cancellable(reference, "call_tools", timeout_s)

    async def list_functions(self) -> dict[str, Any]:
        """Return functions, rewards and health checks."""
        return await self._wait(self.handle.list_functions.remote(), "functions", 60.0)

    async def call_function(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float, method: str = "POST"
    ) -> Any:
        """Call a function; `method` is used only over HTTP."""
        del method
        reference = self.handle.call_function.remote(name, arguments, timeout_s)
        return await self._cancellable(reference, f"function {name!r}", timeout_s)

    async def call_reward(
        self, arguments: Mapping[str, Any], name: str | None, timeout_s: float
    ) -> Any:
        """Call a reward."""
        reference = self.handle.call_reward.remote(arguments, name, timeout_s)
        return await self._cancellable(reference, f"reward {name or 'default'!r}", timeout_s)

    async def reset(self, task: Any, seed: int | None, timeout_s: float) -> ResetResult:
        """Reset the instance; see `EnvHandle.reset`."""
        reference = self.handle.reset.remote(task, seed, timeout_s)
        return await self._cancellable(reference, "reset", timeout_s)

    async def set_seed(self, seed: int, timeout_s: float) -> None:
        """Set the seed of an episode that does not begin with a reset; see `set_seed`."""
        await self._cancellable(set_seed(self.handle, seed), "seed", timeout_s)

    async def list_tasks(self, offset: int, limit: int) -> TaskPage:
        """Return a page of the environment's tasks."""
        return await self._wait(self.handle.list_tasks.remote(offset, limit), "tasks", 60.0)

    async def check_health(self, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return ``{"success": True, "data": {"status": …}}``, as the HTTP server does."""
        reference = self.handle.check_health.remote(arguments, timeout_s)
        data = await self._wait(reference, "health", timeout_s)
        return {"success": True, "data": data}

    async def exec(
        self, command: str | Sequence[str], timeout_s: float, **options: Any
    ) -> ExecResult:
        """Run a command."""
        reference = self.handle.exec.remote(command, timeout_s=timeout_s, **options)
        return await self._cancellable(reference, "exec", timeout_s)

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or `length` bytes of it from `offset`."""
        reference = self.handle.read_file.remote(path, offset, length)
        return await self._wait(reference, f"reading {path!r}", 60.0)

    async def write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> int:
        """Write a file; returns its size."""
        reference = self.handle.write_file.remote(path, data, append, mode)
        return await self._wait(reference, f"writing {path!r}", 60.0)

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """List a directory."""
        return await self._wait(self.handle.list_files.remote(path), "list_files", 60.0)

    async def logs(self, tail: int | None, follow: bool) -> AsyncGenerator[str, None]:
        """Yield what the instance printed."""
        references = self.handle.logs.remote(tail, follow)
        try:
            async for reference in references:
                with ray_api.translated("logs", instance_id=self.handle.instance_id):
                    piece: str = await reference
                if piece:
                    yield piece
        finally:
            ray_api.cancel(references)  # otherwise the host streams until the instance ends

    async def info(self) -> InstanceInfo:
        """Return the instance's state, deadline and placement."""
        if self._door is not None and self._door.loop is asyncio.get_running_loop():
            await self._door.report()
        return await self._wait(self.handle.info.remote(), "info", 60.0)

    async def renew(self, ttl: str | float) -> InstanceInfo:
        """Move the deadline to `ttl` from now."""
        return await self._wait(self.handle.renew.remote(ttl), "renew", 60.0)

    async def release(self) -> None:
        """End the instance; works in every state, any number of times."""
        await self._wait(self.handle.release.remote(), "release", 60.0)

    async def close(self) -> None:
        """Close the direct connection; running calls continue through the host."""
        if self._door is not None:
            self._door.close()
            self._door = None
