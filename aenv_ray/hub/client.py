"""The client of the hub actor.

Every operation of the hub is idempotent. This client is the only layer that retries: while the
Redis does not answer, for up to `PATIENCE_S`, and while the actor itself does not, for up to
`AWAY_S`; then it raises FabricUnavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, ParamSpec, TypeVar, cast

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import EnvironmentNotFound, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import KeyGroup, TokenRecord

COMPARE_PATIENCE_S: Final = 60.0
"""Patience for `compare`, which waits for hosts that do not answer."""
PATIENCE_S: Final = 60.0
"""A hub restarts its Redis within a second, and Kubernetes another one within half a minute."""
AWAY_S: Final = 120.0
"""A hub on a head that was lost is back with the head."""
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
NOTICE_S: Final = 3.0
"""A wait for Redis is logged after this time."""

logger = logging.getLogger("aenv_ray")

P = ParamSpec("P")
R = TypeVar("R")
Result = TypeVar("Result")


def _forwarded(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method of `HubClient` that has the hub actor run this one."""
    name = method.__name__

    @functools.wraps(method, updated=())  # without the mark of an abstract method
    async def ask(self: HubClient, *arguments: Any, **options: Any) -> Any:
        return await self._ask(name, *arguments, **options)

    return cast("Callable[P, R]", ask)


class RedisOutage:
    """Logs that the hub's Redis is down and that it answers again, for all clients of a process.

    There is one line for each, however many operations wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        """When the first operation began to wait; None unless that was logged."""

    def waiting(self, error: FabricUnavailable, begin: float, now: float) -> None:
        """Note that an operation that began at `begin` still waits because of `error`."""
        if now - begin < NOTICE_S:
            return
        with self._lock:
            is_first, self._since = self._since is None, self._since or begin
        if is_first:
            logger.warning(
                "the hub is unavailable, and what needs it waits for up to %g s: %s; instances, "
                "and calls to them, continue", PATIENCE_S, error.message,
            )  # fmt: skip

    def answered(self, now: float) -> None:
        """Note that the hub has answered."""
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            logger.warning("the hub answers again after %.0f s", now - since)


_OUTAGE: Final = RedisOutage()


class HubClient(Hub):
    """`Hub` through the hub actor; picklable, and usable in any event loop."""

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
        self, method: str, *arguments: Any, patience_s: float | None = None, **options: Any
    ) -> Any:
        """Return the answer of the hub; retry while it is unavailable.

        `patience_s` replaces `PATIENCE_S` and `AWAY_S`.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        away_s = AWAY_S if patience_s is None else patience_s
        redis_s = PATIENCE_S if patience_s is None else patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout_at(begin + away_s):
                    answer = await self._once(method, *arguments, **options)
            except TimeoutError:
                raise FabricUnavailable(
                    f"the hub did not answer {method!r} within {away_s:g} s",
                    hint="check whether Ray's head is down or the cluster busy: aenv hub status",
                ) from None
            except FabricUnavailable as exc:
                limit_s = away_s if ray_api.is_from_ray(exc) else redis_s
                if loop.time() + pause_s >= begin + limit_s:
                    raise
                if not ray_api.is_from_ray(exc):
                    _OUTAGE.waiting(exc, begin, loop.time())
            else:
                _OUTAGE.answered(loop.time())
                return answer
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

    # --- the interface ----------------------------------------------------------------------

    push = _forwarded(Hub.push)
    name = _forwarded(Hub.name)
    grant = _forwarded(Hub.grant)
    environment = _forwarded(Hub.environment)
    environments = _forwarded(Hub.environments)
    set_status = _forwarded(Hub.set_status)
    keep_artifact = _forwarded(Hub.keep_artifact)
    has_artifact = _forwarded(Hub.has_artifact)
    artifacts_held = _forwarded(Hub.artifacts_held)
    versions_of_archive = _forwarded(Hub.versions_of_archive)
    artifacts_before = _forwarded(Hub.artifacts_before)
    forget_artifact = _forwarded(Hub.forget_artifact)
    artifact_deleted = _forwarded(Hub.artifact_deleted)
    artifact_stays = _forwarded(Hub.artifact_stays)
    admit = _forwarded(Hub.admit)
    lease = _forwarded(Hub.lease)
    lease_of_capability = _forwarded(Hub.lease_of_capability)
    leases = _forwarded(Hub.leases)
    update_lease = _forwarded(Hub.update_lease)
    exchange = _forwarded(Hub.exchange)
    end_leases = _forwarded(Hub.end_leases)
    replace_remembered = _forwarded(Hub.replace_remembered)
    set_quota = _forwarded(Hub.set_quota)
    delete_quota = _forwarded(Hub.delete_quota)
    quotas = _forwarded(Hub.quotas)
    keep_token = _forwarded(Hub.keep_token)
    check_hash = _forwarded(Hub.check_hash)
    tokens = _forwarded(Hub.tokens)
    revoke_token = _forwarded(Hub.revoke_token)
    keep_record = _forwarded(Hub.keep_record)
    audit_log = _forwarded(Hub.audit_log)
    put_document = _forwarded(Hub.put_document)
    replace_document = _forwarded(Hub.replace_document)
    documents = _forwarded(Hub.documents)
    status = _forwarded(Hub.status)

    async def delete_environment(self, name: str, version: str) -> None:  # noqa: D102
        await self.environment(name, version)
        try:
            await self._ask("delete_environment", name, version)
        except EnvironmentNotFound:
            return  # it existed a moment ago: an answer was lost, or somebody else deleted it

    # In an upgrade, the head is the last: for a while an older hub serves newer gateways and hosts.

    async def remember_all(  # noqa: D102
        self, values: Mapping[str, str], ttl_s: float, group: KeyGroup | None = None
    ) -> dict[str, str]:
        return dict(await self._in_group("remember_all", (values, ttl_s), group))

    async def shorten(  # noqa: D102
        self, keys: Sequence[str], ttl_s: float, group: KeyGroup | None = None
    ) -> None:
        await self._in_group("shorten", (keys, ttl_s), group)

    async def _in_group(self, name: str, arguments: tuple[Any, ...], group: KeyGroup | None) -> Any:
        if group is not None:
            with contextlib.suppress(TypeError):  # this hub has no groups yet
                return await self._ask(name, *arguments, group)
        return await self._ask(name, *arguments)

    async def delete_document(  # noqa: D102
        self, kind: str, name: str, old: dict[str, Any] | None = None
    ) -> bool:
        if old is not None:
            with contextlib.suppress(TypeError):  # this hub does not compare
                return bool(await self._ask("delete_document", kind, name, old))
        await self._ask("delete_document", kind, name)
        return True

    async def token(self, token_id: str) -> TokenRecord | None:  # noqa: D102
        try:
            return cast("TokenRecord | None", await self._ask("token", token_id))
        except AttributeError:  # this hub lists them only
            return next((one for one in await self.tokens() if one.id == token_id), None)

    async def compare(self) -> None:
        """Have the hub compare the leases of Ray code with the running instances now."""
        await self._ask("compare", patience_s=COMPARE_PATIENCE_S)


def blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result; blocks, also in a thread with a running event loop.

    Ctrl-C cancels it, and is raised once it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[Callable[[], object]] = Future()
    ended: Future[Result] = Future()

    async def cancellable() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def run() -> None:
        try:
            ended.set_result(asyncio.run(cancellable()))
        except BaseException as exc:  # noqa: BLE001  # raised again in the caller's thread
            ended.set_exception(exc)

    try:
        threading.Thread(target=run, name="aenv-hub").start()
        # Not `Thread.join`: interrupted, it takes the thread for ended (python/cpython#90882).
        wait([ended])
    except BaseException:
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has just ended
            started.result()()
        wait([ended])
        raise
    return ended.result()
