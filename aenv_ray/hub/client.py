"""The client of the hub actor.

Every operation of the hub is idempotent. This client is the only layer that retries: while the
actor or its Redis does not answer, for up to `PATIENCE_S`; then it raises FabricUnavailable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import EnvironmentNotFound, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    Lease,
    LeaseQuery,
    Page,
    Quota,
    Role,
    TokenRecord,
)
from aenv_ray.hub.tokens import new_token, secret_hash
from aenv_ray.models import InstanceStatus

COMPARE_PATIENCE_S: Final = 60.0
"""Patience for `compare`, which waits for hosts that do not answer."""
PATIENCE_S: Final = 20.0
"""Ray restarts a dead hub within two seconds, and the hub its Redis within one."""
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0

Result = TypeVar("Result")


class HubClient(Hub):
    """`Hub` through the hub actor; picklable, and usable in any event loop.

    Args:
        actor: The hub actor.
        find: Returns the current hub actor, or None.
        clock: For the times of tokens.
    """

    def __init__(
        self, actor: Any, find: Callable[[], Any | None], clock: Clock | None = None
    ) -> None:
        self._actor = actor
        self._find = find
        self._clock = clock or SystemClock()

    def check(self, deadline_s: float) -> None:
        """Wait until the hub and its Redis answer; blocks.

        Raises:
            ConfigError: Redis refuses the connection, or no redis-server was found.
            FabricUnavailable: They do not answer within `deadline_s`.
        """
        blocking(self._ask("ping", patience_s=deadline_s))

    async def _ask(
        self, method: str, *arguments: Any, patience_s: float = PATIENCE_S, **options: Any
    ) -> Any:
        """Return the answer of the hub; retry while it is unavailable."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout_at(until):
                    return await self._once(method, *arguments, **options)
            except TimeoutError:
                raise FabricUnavailable(
                    f"the hub did not answer {method!r} within {patience_s:g} s",
                    hint="check whether the cluster is busy or Redis is down: aenv hub status",
                ) from None
            except FabricUnavailable:
                if loop.time() + pause_s >= until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _once(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            with ray_api.translated("asking the hub"):
                if method == "compare":
                    return await self._actor.compare.remote()
                return await self._actor.call.remote(method, *arguments, **options)
        except FabricUnavailable:
            # The actor may have been killed and created anew.
            self._actor = await asyncio.to_thread(self._find) or self._actor
            raise

    # --- environments -----------------------------------------------------------------------

    async def push(self, entry: EnvironmentVersion) -> EnvironmentVersion:  # noqa: D102
        return _typed(await self._ask("push", entry), EnvironmentVersion)

    async def environment(  # noqa: D102
        self, name: str, version: str | None = None
    ) -> EnvironmentVersion:
        return _typed(await self._ask("environment", name, version), EnvironmentVersion)

    async def versions(self, name: str) -> tuple[EnvironmentVersion, ...]:  # noqa: D102
        return tuple(await self._ask("versions", name))

    async def environments(self, query: EnvironmentQuery) -> Page[EnvironmentVersion]:  # noqa: D102
        return _typed(await self._ask("environments", query), Page)

    async def set_status(  # noqa: D102
        self, name: str, version: str, status: EnvironmentStatus
    ) -> EnvironmentVersion:
        return _typed(await self._ask("set_status", name, version, status), EnvironmentVersion)

    async def delete_environment(self, name: str, version: str) -> None:  # noqa: D102
        await self.environment(name, version)
        try:
            await self._ask("delete_environment", name, version)
        except EnvironmentNotFound:
            return  # it existed a moment ago: an answer was lost, or somebody else deleted it

    # --- leases -----------------------------------------------------------------------------

    async def admit(self, leases: Sequence[Lease]) -> None:  # noqa: D102
        await self._ask("admit", list(leases))

    async def exchange(self, instance_ids: Sequence[str], leases: Sequence[Lease]) -> None:
        """Replace leases by others; see `Leases.exchange`."""
        await self._ask("exchange", list(instance_ids), list(leases))

    async def compare(self) -> None:
        """Have the hub compare the leases of Ray code with the running instances now."""
        await self._ask("compare", patience_s=COMPARE_PATIENCE_S)

    async def lease(self, instance_id: str) -> Lease:  # noqa: D102
        return _typed(await self._ask("lease", instance_id), Lease)

    async def lease_of_capability(self, capability: str) -> Lease:  # noqa: D102
        return _typed(await self._ask("lease_of_capability", capability), Lease)

    async def leases(self, query: LeaseQuery) -> Page[Lease]:  # noqa: D102
        return _typed(await self._ask("leases", query), Page)

    async def update_lease(  # noqa: D102
        self,
        instance_id: str,
        *,
        status: InstanceStatus | None = None,
        deadline: float | None = None,
        reason: str | None = None,
        engine: str | None = None,
    ) -> Lease:
        changed = await self._ask(
            "update_lease", instance_id,
            status=status, deadline=deadline, reason=reason, engine=engine,
        )  # fmt: skip
        return _typed(changed, Lease)

    async def end_leases(self, instance_ids: Sequence[str]) -> None:  # noqa: D102
        await self._ask("end_leases", list(instance_ids))

    async def remember_all(  # noqa: D102
        self, values: Mapping[str, str], ttl_s: float
    ) -> dict[str, str]:
        return dict(await self._ask("remember_all", dict(values), ttl_s))

    # --- quotas and tokens ------------------------------------------------------------------

    async def set_quota(self, quota: Quota) -> None:  # noqa: D102
        await self._ask("set_quota", quota)

    async def delete_quota(self, subject: str) -> None:  # noqa: D102
        await self._ask("delete_quota", subject)

    async def quotas(self) -> dict[str, tuple[int, int]]:  # noqa: D102
        return dict(await self._ask("quotas"))

    async def create_token(  # noqa: D102
        self,
        role: Role,
        owner: str,
        *,
        instance_id: str | None = None,
        ttl_s: float | None = None,
        note: str = "",
    ) -> tuple[str, TokenRecord]:
        # Generated here: a retry after a lost answer sends the same token, and the secret does
        # not pass through an actor.
        secret, record = new_token(
            role, owner, now=self._clock.now(), instance_id=instance_id, ttl_s=ttl_s, note=note
        )
        await self._ask("keep_token", secret_hash(secret), record)
        return secret, record

    async def adopt_token(self, secret: str, role: Role, owner: str, *, note: str = "") -> None:
        """Store a token whose secret was generated elsewhere, for example by an operator.

        Raises:
            ConfigError: The role is agent.
            FabricUnavailable: The hub does not answer.
        """
        _, record = new_token(role, owner, now=self._clock.now(), note=note)
        await self._ask("keep_token", secret_hash(secret), record)

    async def check_token(self, secret: str) -> TokenRecord | None:  # noqa: D102
        record = await self._ask("check_hash", secret_hash(secret))
        return None if record is None else _typed(record, TokenRecord)

    async def tokens(self, owner: str | None = None) -> tuple[TokenRecord, ...]:  # noqa: D102
        return tuple(await self._ask("tokens", owner))

    async def revoke_token(self, token_id: str) -> None:  # noqa: D102
        await self._ask("revoke_token", token_id)

    # --- the rest ---------------------------------------------------------------------------

    async def put_document(  # noqa: D102
        self, kind: str, name: str, document: dict[str, Any]
    ) -> None:
        await self._ask("put_document", kind, name, document)

    async def replace_document(  # noqa: D102
        self, kind: str, name: str, old: dict[str, Any], new: dict[str, Any]
    ) -> bool:
        return bool(await self._ask("replace_document", kind, name, old, new))

    async def documents(self, kind: str) -> dict[str, dict[str, Any]]:  # noqa: D102
        return dict(await self._ask("documents", kind))

    async def delete_document(self, kind: str, name: str) -> None:  # noqa: D102
        await self._ask("delete_document", kind, name)

    async def status(self) -> dict[str, Any]:  # noqa: D102
        return dict(await self._ask("status"))


def _typed(value: Any, kind: type[Result]) -> Result:
    assert isinstance(value, kind)
    return value


def blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result; blocks, also in a thread with a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as exc:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(exc)

    thread = threading.Thread(target=run, name="aenv-hub")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
