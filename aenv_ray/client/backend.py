"""What `Environment` needs from an instance, however it is reached."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from aenv_ray.client.tool_callbacks import ToolCallbacks
from aenv_ray.errors import AenvError
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    InstanceInfo,
    PromptMessages,
    ResetResult,
    ResourceContents,
    TaskPage,
    ToolResult,
)


class EnvironmentBackend(Protocol):
    """One instance: over Ray, over a gateway, or an ``aenv run`` server.

    Methods raise `AenvError`. `timeout_s` bounds a call; a call that is cancelled is cancelled in
    the instance too. An ``aenv run`` server refuses commands, files, logs, `info` and `renew` with
    `ConfigError`.
    """

    callbacks: ToolCallbacks | None
    """What is offered to tools. Set before the first call."""

    @property
    def instance_id(self) -> str | None:
        """None for an ``aenv run`` server."""

    @property
    def url(self) -> str:
        """Address of the HTTP server; empty over Ray."""

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return MCP ``Tool`` objects: ``name``, ``description``, ``inputSchema``."""

    async def list_resources(self) -> list[dict[str, Any]]:
        """Return MCP ``Resource`` objects: ``uri``, ``name``, ``description``."""

    async def list_resource_templates(self) -> list[dict[str, Any]]:
        """Return MCP ``ResourceTemplate`` objects: ``uriTemplate``, ``name``, ``description``."""

    async def read_resource(self, uri: str, timeout_s: float) -> list[ResourceContents]:
        """Return what a resource contains."""

    async def list_prompts(self) -> list[dict[str, Any]]:
        """Return MCP ``Prompt`` objects: ``name``, ``description``, ``arguments``."""

    async def get_prompt(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> PromptMessages:
        """Return a prompt, filled in."""

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> ToolResult:
        """Call a tool; if the tool raises, the result has ``is_error`` set."""

    async def call_tools(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        parallel: bool,
        timeout_s: float,
    ) -> list[ToolResult | AenvError]:
        """Call several tools, in order or all at once, within `timeout_s` together."""

    async def list_functions(self) -> dict[str, Any]:
        """Return ``{"total", "functions", "reward", "health"}``."""

    async def call_function(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float, method: str = "POST"
    ) -> Any:
        """Return a function's result; `method` is the HTTP method."""

    async def call_reward(
        self, arguments: Mapping[str, Any], name: str | None, timeout_s: float
    ) -> Any:
        """Return a reward's result; `name` None is the default reward."""

    async def reset(self, task: Any, seed: int | None, timeout_s: float) -> ResetResult:
        """Reset the instance; only over Ray."""

    async def list_tasks(self, offset: int, limit: int) -> TaskPage:
        """Return a page of the environment's tasks; only over Ray."""

    async def check_health(self, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return ``{"success": True, "data": {"status": …}}``."""

    async def exec(
        self,
        command: str | Sequence[str],
        timeout_s: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run a command; a failing command is a result."""

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or `length` bytes of it from `offset`."""

    async def write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> int:
        """Write a file; returns its size."""

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """List a directory."""

    def logs(self, tail: int | None, follow: bool) -> AsyncGenerator[str, None]:
        """Yield what the instance printed."""

    async def info(self) -> InstanceInfo:
        """Return the instance's state, deadline and placement."""

    async def renew(self, ttl: str | float) -> InstanceInfo:
        """Move the deadline to `ttl` from now."""

    async def release(self) -> None:
        """End the instance, from every state, any number of times."""

    async def close(self) -> None:
        """Close the connections, any number of times."""
