"""An instance reached through a gateway: what `Environment` uses outside of the cluster.

Tools, functions, rewards and health go the way they go to an environment server, with a header that
names the instance; the rest are the gateway's own routes. A tool call has an id of ours, so that it
is sent again when the connection or a replica of the gateway fails: it runs once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from aenv_ray.actors.calls.parameters import exec_arguments, write_arguments
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.gateway import Gateway
from aenv_ray.client.gateway_async import ANSWER_S, ATTEMPTS, AsyncGatewayHttp
from aenv_ray.client.gateway_http import GatewayHttp, parse_url, pause_before_retry
from aenv_ray.client.mcp_session import NOT_SENT
from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    FabricUnavailable,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
)
from aenv_ray.ids import new_call_id
from aenv_ray.models import ExecResult, FileEntry, InstanceInfo, InstanceStatus
from aenv_ray.runtime.door.async_calls import CALL_ID

logger = logging.getLogger(__name__)

_CREATE_S: Final = 330.0
"""Longer than a create may take in the cluster: its own errors come first."""
_ASKED: set[asyncio.Task[list[dict[str, Any]]]] = set()
"""Creates whose answers are awaited, be their callers there or not."""
_GONE: Final = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)


class GatewayInstance(HttpInstance):
    """One instance behind a gateway. Use it on one event loop.

    Args:
        url: The gateway's address, see `aenv_ray.client.gateway_http.parse_url`.
        token: Of the instance's owner, or an administrator's; None: none is sent.
        instance_id: Which one.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(self, url: str, token: str | None, instance_id: str) -> None:
        headers = {"AEnvCore-EnvInstance-ID": instance_id}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        super().__init__(parse_url(url), headers=headers)
        self.instance_id: str = instance_id
        self._path = f"/instances/{instance_id}"
        # Beside the other client, whose header would make every path one of the instance's.
        self._gateway = AsyncGatewayHttp(url, token)

    @classmethod
    async def create(
        cls,
        url: str,
        token: str | None,
        environment: str,
        options: CreateOptions,
        *,
        actor: str | None = None,
    ) -> GatewayInstance:
        """Make an instance. A cancelled creation leaves nothing behind.

        Args:
            url: The gateway's address.
            token: An owner's or an administrator's.
            environment: ``name@version`` or ``name``.
            options: Of the instance.
            actor: ``shared`` or ``dedicated``; None: the gateway chooses.

        Raises:
            AenvError: As `aenv_ray.create`, and Unauthorized, Forbidden, QuotaExceeded.
        """
        wish = {
            "envName": environment,
            "datasource": options.datasource,
            "ttl": options.ttl,
            "idle_timeout": options.idle_timeout,
            "engine": options.engine,
            "environment_variables": options.environment_variables,
            "arguments": options.arguments,
            "labels": options.labels,
            "owner": options.owner,
            "wait": True,
        }
        wish |= {} if actor is None else {"actor": actor}
        # Without an idempotency key: the gateway undoes a create whose client went away.
        asked = asyncio.create_task(_ask(url, token, wish))
        _ASKED.add(asked)
        asked.add_done_callback(_ASKED.discard)
        try:
            (made,) = await asyncio.shield(asked)
        except asyncio.CancelledError:
            # The answer may be on its way, and the gateway cannot know that nobody reads it.
            asked.add_done_callback(functools.partial(_undo, url, token))
            raise
        return cls(url, token, made["id"])

    @classmethod
    async def attach(cls, url: str, token: str | None, instance_id: str) -> GatewayInstance:
        """Return a live instance.

        Raises:
            InstanceNotFound: There is none of that id, or it has ended.
        """
        instance = cls(url, token, instance_id)
        try:
            info = await instance.info()
            if info.status is not InstanceStatus.RUNNING:
                raise InstanceNotFound(f"{instance_id} has ended", hint="create a new instance")
        except BaseException as exc:
            await instance.close()
            if isinstance(exc, _GONE):
                raise InstanceNotFound(
                    exc.message, instance_id=instance_id, hint=exc.hint
                ) from None
            raise
        return instance

    # --- calls ------------------------------------------------------------------------------

    def _unreachable(self, exc: Exception) -> AenvError:
        reason = str(exc) or type(exc).__name__
        return FabricUnavailable(
            f"the gateway at {self.url} cannot be reached: {reason}",
            hint="check AENV_SYSTEM_URL; instances live on until their TTL ends",
        )

    def _meta(self, timeout_s: float) -> dict[str, Any]:
        return {**super()._meta(timeout_s), CALL_ID: new_call_id()}

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, again with the same call id where its answer was lost."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await super()._request(method, params)
            except (CallOutcomeUnknown, FabricUnavailable, *NOT_SENT) as exc:
                lost = FabricUnavailable(str(exc))
                pause_s = pause_before_retry(lost, attempt=attempt, repeatable=True)
                if pause_s is None or attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError

    # --- commands and files -----------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        timeout_s: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run a command; never sent twice."""
        body = exec_arguments(command, cwd, env, stdin)
        body |= {"encoding": "base64", "timeout": timeout_s}
        told = await self._control("POST", "/exec", json=body, timeout_s=timeout_s + ANSWER_S)
        return ExecResult(
            exit_code=told["exit_code"],
            stdout=base64.b64decode(told["stdout"]),
            stderr=base64.b64decode(told["stderr"]),
            truncated=told["truncated"],
            duration_s=told["duration_s"],
        )

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file or a piece of it."""
        params = {"path": path, "offset": str(offset)}
        if length is not None:
            params["length"] = str(length)
        url = f"{self._path}/files"
        async with self._gateway.stream("GET", url, params=params) as response:
            return await response.aread()

    async def write_file(
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> int:
        """Write a file; returns its size."""
        checked = write_arguments(path, data, append, mode, self.instance_id)
        params = {"path": path, "append": str(append).lower()}
        if mode is not None:
            params["mode"] = f"{mode:o}"
        content = base64.b64decode(checked["data"])
        told = await self._control("PUT", "/files", params=params, content=content)
        return int(told["size_bytes"])

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """List a directory."""
        listed = await self._control("GET", "/files/list", params={"path": path})
        return [FileEntry.model_validate(entry) for entry in listed]

    async def logs(self, tail: int | None, follow: bool) -> AsyncGenerator[str, None]:
        """Yield what the instance printed."""
        params = {"follow": str(follow).lower()}
        if tail is not None:
            params["tail"] = str(tail)
        url = f"{self._path}/logs"
        async with self._gateway.stream("GET", url, params=params, timeout_s=None) as response:
            async for piece in response.aiter_text():
                yield piece

    # --- life -------------------------------------------------------------------------------

    async def info(self) -> InstanceInfo:
        """Return what is known of the instance."""
        return InstanceInfo.model_validate(await self._control("GET", "/info"))

    async def renew(self, ttl: str | float) -> InstanceInfo:
        """Move the deadline."""
        await self._control("POST", "/renew", json={"ttl": ttl})
        return await self.info()

    async def release(self) -> None:
        """End the instance; from every state, any number of times."""
        with contextlib.suppress(*_GONE):
            await self._control("DELETE", "")

    async def close(self) -> None:
        """End the session and close the connections; any number of times."""
        await super().close()
        await self._gateway.close()

    async def _control(self, method: str, path: str, **request: Any) -> Any:
        return await self._gateway.data(method, f"{self._path}{path}", **request)


async def _ask(url: str, token: str | None, wish: Mapping[str, Any]) -> list[dict[str, Any]]:
    gateway = AsyncGatewayHttp(url, token)
    try:
        made: list[dict[str, Any]] = await gateway.data(
            "POST", "/instances", json=wish, timeout_s=_CREATE_S
        )
        return made
    finally:
        await gateway.close()


def _undo(url: str, token: str | None, asked: asyncio.Task[list[dict[str, Any]]]) -> None:
    """End what a create made whose caller has left."""
    if asked.cancelled() or asked.exception() is not None:
        return
    ids = [str(one["id"]) for one in asked.result()]
    # In a thread: the loop may end now.
    threading.Thread(target=_end, args=(url, token, ids), name="aenv-undo").start()


def _end(url: str, token: str | None, ids: Sequence[str]) -> None:
    try:
        with Gateway(GatewayHttp(url, token)) as door:
            for instance_id in ids:
                door.delete(instance_id)
    except AenvError as exc:
        logger.warning("an instance may live on until its TTL ends: %s", exc)
