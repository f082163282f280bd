"""Engines on a node for one test each, and how a sandbox on one ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol, TypeVar

from aenv_ray.engines.base import EndCause, Engine, Sandbox
from aenv_ray.ids import HostId

E_co = TypeVar("E_co", bound=Engine, covariant=True)
_WITHIN_S = 60.0


class HasEngines(Protocol[E_co]):
    def engine(self, host_id: HostId, **options: Any) -> E_co: ...


def new_host() -> HostId:
    """Return the id of a host that is no other's."""
    return HostId(f"host-{uuid.uuid4().hex[:8]}")


@contextlib.asynccontextmanager
async def engine_on(node: HasEngines[E_co], **options: Any) -> AsyncIterator[E_co]:
    """Yield an engine with its own host; its sandboxes are stopped afterwards."""
    engine = node.engine(new_host(), **options)
    try:
        yield engine
        await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    finally:
        await engine.close()


@contextlib.contextmanager
def filled(address: str) -> Iterator[None]:
    """Connect to a Unix socket that accepts nothing, until no further connection can wait."""
    with contextlib.ExitStack() as waiting:
        while True:
            sock = waiting.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            try:
                sock.connect(address)
            except BlockingIOError:
                break
        yield


async def end_of(sandbox: Sandbox) -> str:
    """Return why a sandbox ended, as soon as that is reported."""
    told: asyncio.Future[EndCause] = asyncio.get_running_loop().create_future()
    sandbox.on_end(told.set_result)
    async with asyncio.timeout(_WITHIN_S):
        return str(await told)
