"""Calls to services: what their replicas are told, and what happens if they cannot be asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.calls.json_calls import JsonCall
from aenv_ray.actors.ray_shell import ray_serve
from aenv_ray.errors import FabricUnavailable, SandboxLost, ServiceUnavailable, is_infrastructure
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.serve.services import calls as service_calls
from aenv_ray.serve.services.calls import ServiceCalls, service_target
from aenv_ray.serve.services.service_replica import (
    SERVICE_LABEL,
    SERVICE_UID,
    UID_LABEL,
    ServiceReplica,
)

NOTHING: Any = None
WEATHER = service_target("weather", "alice's", "1")


async def test_a_service_that_is_not_deployed_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the service's state, not the cluster's, whose alert counts `fabric_unavailable`."""

    def own_handle(name: str) -> None:
        raise FabricUnavailable(f"there is no application {name}")

    monkeypatch.setattr(ray_serve, "own_handle", own_handle)
    with pytest.raises(ServiceUnavailable, match="is not deployed") as raised:
        await ServiceCalls(NOTHING, NOTHING).sandbox(WEATHER, "")
    assert raised.value.code == "service_unavailable"
    assert is_infrastructure(raised.value), "as before"


class Sandboxes:
    """The sandboxes of the cluster; one ends while it is asked."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, str]] = []

    async def list_instances(self) -> list[Any]:
        live = [
            ("of-replica", "weather", "alice's"), ("dying", "weather", "alice's"),
            ("next-owners", "weather", "bob's"), ("other", "news", "alice's"),
        ]  # fmt: skip
        found = [
            SimpleNamespace(
                id=name, requested_id=None, labels={SERVICE_LABEL: service, UID_LABEL: uid}
            )
            for name, service, uid in live
        ]
        earlier = SimpleNamespace(
            id="earlier-version's", requested_id=None, labels={SERVICE_LABEL: "weather"}
        )
        pooled = SimpleNamespace(id="pooled", requested_id="draining", labels=found[0].labels)
        return [*found, earlier, pooled, SimpleNamespace(id="x", requested_id=None, labels={})]

    async def cancel(self, instance_id: str, name: str) -> None:
        if instance_id == "dying":
            raise SandboxLost("it died", instance_id=instance_id)
        self.cancelled.append((instance_id, name))


@pytest.mark.parametrize("replicas", ["answer", "do not answer", "are all being stopped"])
async def test_a_cancellation_reaches_sandboxes_of_replicas_that_are_being_stopped(
    monkeypatch: pytest.MonkeyPatch, replicas: str
) -> None:
    """Invariant 11: Serve asks only the others, and the calls of those run on.

    Invariant 15: no sandbox of another service that has the name by now is asked.
    """
    failures = {
        "do not answer": FabricUnavailable("no answer"),
        "are all being stopped": ServiceUnavailable("it is not deployed"),
    }
    failure = failures.get(replicas)

    def results(timeout_s: float) -> list[str]:
        assert timeout_s > 0
        if failure is not None:
            raise failure
        return ["of-replica"]

    def own_handle(name: str) -> Any:
        if isinstance(failure, ServiceUnavailable):
            raise FabricUnavailable(f"there is no application {name}")

        def broadcast(*asked: str) -> Any:
            assert asked == ("cancel_named", "named", "alice's")
            return SimpleNamespace(results=results)

        return SimpleNamespace(broadcast=broadcast)

    monkeypatch.setattr(ray_serve, "own_handle", own_handle)
    sandboxes: Any = Sandboxes()
    cancel = ServiceCalls(sandboxes, sandboxes).cancel(WEATHER, "named")
    draining = [("draining", "named"), ("earlier-version's", "named")]
    if failure is None:
        await cancel
        assert sorted(sandboxes.cancelled) == draining
    else:
        with pytest.raises(type(failure)):
            await cancel
        assert sorted(sandboxes.cancelled) == [*draining, ("of-replica", "named")]


# --- which service a call means ------------------------------------------------------------------


class Response:
    """What Serve's handle returns: awaited for one answer, or iterated."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def cancel(self) -> None:
        raise AssertionError("nobody cancels it")

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from asyncio.sleep(0).__await__()
        return self._answer()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield self._answer()


class Handle:
    """Serve's handle of a service, which notes what a replica is asked.

    Args:
        is_earlier: Its replicas are of an earlier version, which knows no uids.
    """

    def __init__(self, *, is_earlier: bool = False) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.is_ended = False
        self._is_earlier = is_earlier
        self._method = ""

    def options(self, *, method_name: str = "", session_id: str = "", stream: bool = False) -> Any:
        del session_id, stream
        self._method = method_name or self._method
        return self

    @contextlib.asynccontextmanager
    async def choose_replica(self, *arguments: Any) -> AsyncIterator[tuple[Any, ...]]:
        yield arguments

    def dispatch(self, selection: tuple[Any, ...], *arguments: Any) -> Any:
        assert selection == arguments
        return self.remote(*arguments)

    def remote(self, *arguments: Any) -> Any:
        self.asked.append((self._method, arguments))
        method = self._method

        def answer() -> Any:
            self._check(arguments)
            return "s-1" if method == "sandbox" else b"{}"

        return Response(answer)

    def broadcast(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, arguments))

        def results(timeout_s: float) -> list[str]:
            assert timeout_s > 0
            self._check(arguments[1:])
            return []

        return SimpleNamespace(results=results)

    def _check(self, arguments: tuple[Any, ...]) -> None:
        if self._is_earlier and arguments == ("alice's",):
            raise TypeError("takes 1 positional argument but 2 were given")

    def shutdown(self) -> None:
        self.is_ended = True


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    found = Handle()
    monkeypatch.setattr(ray_serve, "own_handle", lambda _: found)
    return found


async def test_replicas_are_told_which_service_a_call_means(handle: Handle) -> None:
    """Invariant 15: Serve knows it by its name, which another owner may have by then.

    A client cannot choose another one.
    """
    sandboxes: Any = Sandboxes()
    calls = ServiceCalls(sandboxes, sandboxes)
    call = JsonCall(WEATHER, "tools/list", {}, {SERVICE_UID: "bob's", "more": 1})
    meta = {SERVICE_UID: "alice's", "more": 1}
    assert await calls.call(call, Disconnect()) == b"{}"
    async with contextlib.aclosing(calls.follow(call, "named", Disconnect())) as rounds:
        assert [news async for news in rounds] == [b"{}"]
    assert await calls.sandbox(WEATHER, "") == "s-1"
    await calls.cancel(WEATHER, "named")
    assert handle.asked == [
        ("call_json", ("tools/list", {}, meta)),
        ("follow_json", ("tools/list", {}, meta, "named")),
        ("sandbox", ("alice's",)),
        ("cancel_named", ("named", "alice's")),
    ]


async def test_replicas_of_an_earlier_version_answer_in_an_upgrade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ignore the uid in a call, and reject it as an argument."""
    handle = Handle(is_earlier=True)
    monkeypatch.setattr(ray_serve, "own_handle", lambda _: handle)
    sandboxes: Any = Sandboxes()
    calls = ServiceCalls(sandboxes, sandboxes)
    assert await calls.sandbox(WEATHER, "") == "s-1"
    await calls.cancel(WEATHER, "named")
    assert handle.asked[1::2] == [("sandbox", ()), ("cancel_named", ("named",))]


class Replica:
    """A replica of bob's service ``weather``; none of its parts may be asked."""

    _record = SimpleNamespace(id="weather", uid="bob's")
    call_json, follow_json = ServiceReplica.call_json, ServiceReplica.follow_json
    sandbox, cancel_named = ServiceReplica.sandbox, ServiceReplica.cancel_named
    _placed, _check_uid = ServiceReplica._placed, ServiceReplica._check_uid


async def test_a_replica_refuses_what_is_for_another_service_of_its_name() -> None:
    """Invariant 15: a former owner's calls may have waited until this replica was there."""
    replica: Any = Replica()
    meta = {SERVICE_UID: "alice's"}

    async def follow() -> None:
        async for _ in replica.follow_json("tools/list", {}, meta, "named"):
            raise AssertionError("it is refused")

    for refused in (
        replica.call_json("tools/list", {}, meta), follow(), replica.sandbox("alice's"),
        replica.cancel_named("named", "alice's"),
    ):  # fmt: skip
        with pytest.raises(ServiceUnavailable, match="another service weather got the call"):
            await refused
    replica._check_uid("bob's")
    replica._check_uid("")  # of a handle in the cluster, or of a gateway of an earlier version


# --- handles -------------------------------------------------------------------------------------


async def test_handles_of_services_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: an owner may create and call any number of services, one after another."""
    made: list[Handle] = []

    def own_handle(app: str) -> Handle:
        assert app
        made.append(Handle())
        return made[-1]

    monkeypatch.setattr(ray_serve, "own_handle", own_handle)
    monkeypatch.setattr(service_calls, "MAX_HANDLES", 10)
    calls = ServiceCalls(NOTHING, NOTHING)
    for number in range(25):
        target = service_target(f"desk-{number}", "alice's", "1")
        async with asyncio.TaskGroup() as group:  # one handle for all of them
            for _ in range(3):
                group.create_task(calls.sandbox(target, ""))
    used = [handle for handle in made if handle.asked]
    assert len(used) == 25
    async with asyncio.timeout(60):
        while sum(handle.is_ended for handle in used) < 15:  # noqa: ASYNC110  # threads end them
            await asyncio.sleep(0)
    assert [handle.is_ended for handle in used] == [True] * 15 + [False] * 10
