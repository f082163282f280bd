"""An instance reached through a gateway: what `Environment` uses outside the cluster.

Tools, functions, rewards and health use the protocol of an environment server, with a header that
names the instance; everything else uses the gateway's own routes. A tool call carries a call id, so
it can be sent again when the connection or a replica of the gateway fails, and still runs once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import math
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import httpx

from aenv_ray.actors.calls.parameters import exec_arguments, write_arguments
from aenv_ray.actors.calls.wire import exec_result
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.gateway import Gateway
from aenv_ray.client.gateway_http import GATEWAY_PORTS, AsyncGatewayHttp, GatewayHttp
from aenv_ray.client.over_http import HttpInstance, read_result
from aenv_ray.errors import GONE, AenvError, InstanceNotFound
from aenv_ray.ids import new_call_id
from aenv_ray.models import ExecResult, FileEntry, InstanceInfo, InstanceStatus
from aenv_ray.runtime.door.async_calls import CALL_ID

logger = logging.getLogger(__name__)

_RESPONSE_S: Final = 90.0
_ATTEMPTS: Final = 10
"""With their pauses, a minute: long enough for a lost head, with its gateway, to be replaced."""
_CREATE_S: Final = 330.0
"""Longer than a create may take in the cluster, so that the cluster's own error arrives."""
_CREATES: set[asyncio.Task[list[dict[str, Any]]]] = set()
"""Keeps create requests alive until they are answered, even if their callers were cancelled."""


class GatewayInstance(HttpInstance):
    """One instance behind a gateway. Use it on one event loop.

    Args:
        url: The gateway's address, see `aenv_ray.client.gateway_http.parse_url`.
        token: The instance owner's or an administrator's; None sends none.
        instance_id: The instance.

    Raises:
        ConfigError: The address is invalid.
    """

    def __init__(self, url: str, token: str | None, instance_id: str) -> None:
        headers = {"AEnvCore-EnvInstance-ID": instance_id}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # A second client: the header of the first would route every path to the instance.
        self._gateway = _connect(url, token)
        super().__init__(url, headers=headers, ports=GATEWAY_PORTS)
        self.instance_id: str = instance_id
        self._path = f"/instances/{instance_id}"

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
        """Create an instance. If cancelled, the instance is released as soon as it exists.

        Args:
            url: The gateway's address.
            token: An owner's or an administrator's.
            environment: ``name@version`` or ``name``.
            options: The instance's options.
            actor: ``shared`` or ``dedicated``; None lets the gateway choose.

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
        # Sent without an idempotency key: the gateway undoes a create whose client disconnects.
        create = asyncio.create_task(_create(url, token, wish))
        _CREATES.add(create)
        create.add_done_callback(_CREATES.discard)
        try:
            (made,) = await asyncio.shield(create)
        except asyncio.CancelledError:
            # The response may be on its way; the gateway cannot know that nobody reads it.
            create.add_done_callback(functools.partial(_undo, url, token))
            raise
        return cls(url, token, made["id"])

    @classmethod
    async def attach(cls, url: str, token: str | None, instance_id: str) -> GatewayInstance:
        """Return a live instance.

        Raises:
            InstanceNotFound: No instance has this id, or it has ended.
        """
        instance = cls(url, token, instance_id)
        try:
            info = await instance.info()
            if info.status is not InstanceStatus.RUNNING:
                raise InstanceNotFound(f"{instance_id} has ended", hint="create a new instance")
        except BaseException as exc:
            await instance.close()
            if isinstance(exc, GONE):
                raise InstanceNotFound(
                    exc.message, instance_id=instance_id, hint=exc.hint
                ) from None
            raise
        return instance

    # --- calls ----------------------------------------------------------------------------------

    def _unreachable(self, exc: Exception) -> AenvError:
        return self._gateway.policy.unreachable(exc)

    def _meta(self, timeout_s: float) -> dict[str, Any]:
        return {**super()._meta(timeout_s), CALL_ID: new_call_id()}

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and again with the same call id if its response was lost."""

        async def once() -> dict[str, Any]:
            return await super(GatewayInstance, self)._request(method, params)

        return await self._gateway.repeat(once, repeatable=True)

    async def _exchange(
        self, method: str, path: str, arguments: Mapping[str, Any], timeout_s: float, name: str
    ) -> httpx.Response:
        """Send a call of a function or reward; again only if it was refused or not sent."""

        async def once() -> httpx.Response:
            response = await super(GatewayInstance, self)._exchange(
                method, path, arguments, timeout_s, name
            )
            if response.status_code == 429:
                read_result(response, name)
            return response

        return await self._gateway.repeat(once, repeatable=False)

    # --- commands and files ---------------------------------------------------------------------

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
        done = await self._control("POST", "/exec", json=body, timeout_s=timeout_s + _RESPONSE_S)
        return exec_result(done)

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:  # noqa: D102
        params = {"path": path, "offset": str(offset)}
        if length is not None:
            params["length"] = str(length)
        url = f"{self._path}/files"
        async with self._gateway.stream("GET", url, params=params) as response:
            return await response.aread()

    async def write_file(  # noqa: D102
        self, path: str, data: bytes | str, append: bool = False, mode: int | None = None
    ) -> int:
        checked = write_arguments(path, data, append, mode, self.instance_id)
        params = {"path": path, "append": str(append).lower()}
        if mode is not None:
            params["mode"] = f"{mode:o}"
        content = base64.b64decode(checked["data"])
        written = await self._control(
            "PUT", "/files", params=params, content=content, repeatable=not append
        )
        return int(written["size_bytes"])

    async def list_files(self, path: str = ".") -> list[FileEntry]:  # noqa: D102
        listed = await self._control("GET", "/files/list", params={"path": path})
        return [FileEntry.model_validate(entry) for entry in listed]

    async def logs(self, tail: int | None, follow: bool) -> AsyncGenerator[str, None]:  # noqa: D102
        params = {"follow": str(follow).lower()}
        if tail is not None:
            params["tail"] = str(tail)
        url = f"{self._path}/logs"
        async with self._gateway.stream("GET", url, params=params, timeout_s=math.inf) as response:
            async for piece in response.aiter_text():
                yield piece

    # --- life -----------------------------------------------------------------------------------

    async def info(self) -> InstanceInfo:  # noqa: D102
        return InstanceInfo.model_validate(await self._control("GET", "/info"))

    async def renew(self, ttl: str | float) -> InstanceInfo:  # noqa: D102
        await self._control("POST", "/renew", json={"ttl": ttl})
        return await self.info()

    async def release(self) -> None:  # noqa: D102
        with contextlib.suppress(*GONE):
            await self._control("DELETE", "")

    async def close(self) -> None:  # noqa: D102
        await super().close()
        await self._gateway.close()

    async def _control(self, method: str, path: str, **request: Any) -> Any:
        return await self._gateway.data(method, f"{self._path}{path}", **request)


def _connect(url: str, token: str | None) -> AsyncGatewayHttp:
    return AsyncGatewayHttp(url, token, timeout_s=_RESPONSE_S, attempts=_ATTEMPTS)


async def _create(url: str, token: str | None, wish: Mapping[str, Any]) -> list[dict[str, Any]]:
    gateway = _connect(url, token)
    try:
        # Sent once: the caller retries, with its own number of attempts.
        made: list[dict[str, Any]] = await gateway.data(
            "POST", "/instances", json=wish, timeout_s=_CREATE_S, attempts=1
        )
        return made
    finally:
        await gateway.close()


def _undo(url: str, token: str | None, create: asyncio.Task[list[dict[str, Any]]]) -> None:
    """End the instances of a create whose caller was cancelled."""
    if create.cancelled() or create.exception() is not None:
        return
    ids = [str(one["id"]) for one in create.result()]
    # In a thread, because the event loop may end now.
    threading.Thread(target=_end, args=(url, token, ids), name="aenv-undo").start()


def _end(url: str, token: str | None, ids: Sequence[str]) -> None:
    try:
        with Gateway(GatewayHttp(url, token)) as gateway:
            for instance_id in ids:
                gateway.delete(instance_id)
    except AenvError as exc:
        logger.warning("instances %s may live until their TTL ends: %s", ", ".join(ids), exc)
