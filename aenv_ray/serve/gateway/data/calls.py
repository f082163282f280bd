"""Calls to instances from the gateway's event loop: JSON text in, JSON text out, errors ours.

A replica keeps nothing of a call but its wait. What a call needs to be followed, or cancelled from
another replica, is at the instance's host (`aenv_ray.actors.calls.followed_calls`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from ray import exceptions as ray_exceptions

from aenv_ray.actors.calls.followed_calls import Reports
from aenv_ray.actors.calls.handle import host_of
from aenv_ray.actors.calls.parameters import call_id_of
from aenv_ray.actors.calls.wire import call_message
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    DeadlineExceeded,
    InstanceNotFound,
    SandboxLost,
)
from aenv_ray.ids import InstanceId
from aenv_ray.runtime.door.async_calls import CALL_ID, LONGEST_CALL_S, TIMEOUT_S, Departure
from aenv_ray.serve.gateway.data.call_batching import Carrier
from aenv_ray.serve.gateway.instances import Instances

HOST_GRACE_S: Final = 90.0
"""Beyond a call's own deadline: how long a host may take to be restarted and adopt (D7)."""
_MOST_CARRIERS: Final = 10_000


@dataclass(frozen=True)
class DataCall:
    """One call of a client."""

    instance_id: str
    method: str
    """A fast-door method."""
    params: Mapping[str, Any]
    """Without ``_meta``."""
    meta: Mapping[str, Any]
    """What the client says of the call: ``aenv/call_id``, ``aenv/timeout_s``."""
    session: str = ""
    """Of a call to a service: what it stays together with; empty: nothing."""

    @property
    def is_named(self) -> bool:
        """Whether the client gave it an id: then it means to ask again, whatever happens."""
        return self.meta.get(CALL_ID) is not None

    @property
    def what(self) -> str:
        """The call in words."""
        return f"{self.method} {self.params.get('name') or ''}".rstrip()

    @property
    def timeout_s(self) -> Any:
        """Seconds after which the runtime stops it, as the client wrote them."""
        return self.meta.get(TIMEOUT_S, LONGEST_CALL_S)

    def message(self) -> bytes:
        """Return it as it travels.

        Raises:
            ToolInputInvalid: The arguments are too large for one message.
            ConfigError: The timeout or the call id is none.
        """
        return call_message(
            InstanceId(self.instance_id),
            self.method,
            self.params,
            call_id_of(self.meta.get(CALL_ID)),
            self.timeout_s,
        )


class Calls(Protocol):
    """Where calls of clients go; see `DataCalls`."""

    async def call(self, call: DataCall, departure: Departure, name: str = "") -> bytes:
        """Run a call and return its result as JSON text.

        Args:
            call: The call.
            departure: Of its client.
            name: By which `cancel` stops it; empty: it cannot.
        """
        ...

    def follow(
        self, call: DataCall, name: str, departure: Departure
    ) -> AsyncGenerator[Reports | bytes]:
        """Run a call; yield what it reports, then its result."""
        ...

    async def cancel(self, instance_id: str, name: str) -> None:
        """Stop a call by its name."""
        ...


class DataCalls:
    """Brings calls to the hosts of instances.

    Args:
        fabric: Finds the hosts.

    Every call has an id, so Ray may send it again after the death of a host: no tool runs twice.
    A client that goes away, see `Departure`, has its call cancelled unless it named it.
    """

    def __init__(self, fabric: Instances) -> None:
        self._fabric = fabric
        self._carriers: OrderedDict[Any, Carrier] = OrderedDict()

    async def call(self, call: DataCall, departure: Departure, name: str = "") -> bytes:
        """Run a call and return its result as JSON text; see `Calls`.

        Raises:
            AenvError: The instance has ended, the runtime refused the call, and so on.
            CallCancelled: The client went away.
        """
        carrier = self._carrier(host_of(await self._fabric.handle(call.instance_id)))
        carried = carrier.send(call.message(), name)
        try:
            result: bytes = await self._wait(
                carried.result, lambda: carrier.drop(carried), call, departure
            )
            return result
        finally:
            carrier.forget(carried)

    def _carrier(self, host: Any) -> Carrier:
        carrier = self._carriers.get(host)
        if carrier is None:
            carrier = self._carriers[host] = Carrier(host.exchange.remote, host.drop.remote)
            if len(self._carriers) > _MOST_CARRIERS:
                self._carriers.popitem(last=False)  # its calls end as they would
        return carrier

    async def follow(
        self, call: DataCall, name: str, departure: Departure
    ) -> AsyncGenerator[Reports | bytes]:
        """Run a call; yield what it reports, in rounds, then its result as JSON text.

        Args:
            call: As for `call`.
            name: By which `cancel` stops it; empty: it cannot.
            departure: As for `call`.
        """
        handle = await self._fabric.handle(call.instance_id)
        message, token = call.message(), secrets.token_hex(16)
        while True:
            reference = host_of(handle).follow_json.remote(message, token, name)
            news: Reports | bytes = await self._wait(
                reference, partial(ray_api.cancel, reference), call, departure
            )
            yield news
            if isinstance(news, bytes):
                return

    async def cancel(self, instance_id: str, name: str) -> None:
        """Stop a call by its name, whichever replica it came through."""
        handle = await self._fabric.handle(instance_id)
        with ray_api.translated("cancelling", instance_id=instance_id):
            await host_of(handle).cancel_named.remote(name)

    async def _wait(
        self,
        outcome: Awaitable[Any],
        cancel: Callable[[], None],
        call: DataCall,
        departure: Departure,
    ) -> Any:
        if not call.is_named:
            departure.listen(cancel)
        try:
            with ray_api.translated(call.what, instance_id=call.instance_id):
                try:
                    async with asyncio.timeout(call.timeout_s + HOST_GRACE_S):
                        return await outcome
                except TimeoutError as exc:
                    if isinstance(exc, AenvError | ray_exceptions.RayError):
                        raise
                    raise DeadlineExceeded(
                        f"{call.what} on {call.instance_id} had no answer within "
                        f"{call.timeout_s + HOST_GRACE_S:g} s"
                    ) from exc
        except asyncio.CancelledError:
            if not call.is_named:
                cancel()
            raise
        except ray_exceptions.TaskCancelledError:
            raise CallCancelled(f"{call.what}: the client went away") from None
        except (SandboxLost, InstanceNotFound) as exc:
            if isinstance(exc, InstanceNotFound) or isinstance(
                exc.__cause__, ray_exceptions.RayError
            ):
                self._fabric.forget(call.instance_id)  # not where its host says why it ended
            raise
