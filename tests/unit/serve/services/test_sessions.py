"""Sessions of services, and the calls whose ids replicas remember."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from aenv_ray.errors import (
    CallOutcomeUnknown,
    ConfigError,
    FabricUnavailable,
    SessionLost,
)
from aenv_ray.hub.records import KeyGroup
from aenv_ray.serve.services import sessions as service_sessions
from aenv_ray.serve.services.sessions import Sessions
from tests.fake_clock import FakeClock


class Memory:
    """The idempotency keys of a hub."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.kept: dict[str, str] = {}
        self.kept_until: dict[str, float] = {}
        self.shortened: list[str] = []
        self.requests = 0
        self.failure: FabricUnavailable | None = None

    async def remember(
        self, key: str, value: str, ttl_s: float, group: KeyGroup | None = None
    ) -> str:
        return (await self.remember_all({key: value}, ttl_s, group))[key]

    async def remember_all(
        self, values: Mapping[str, str], ttl_s: float, group: KeyGroup | None = None
    ) -> dict[str, str]:
        assert ttl_s > 0
        assert group is None or group.name.endswith(":ann")
        self.requests += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        for key, value in values.items():
            if key not in self.kept or self.kept_until[key] <= self.clock.now():
                self.kept[key], self.kept_until[key] = value, self.clock.now() + ttl_s
        return {key: self.kept[key] for key in values}

    async def replace_remembered(
        self, key: str, old: str, new: str, ttl_s: float, group: KeyGroup
    ) -> str:
        assert group.name == "service-sessions:ann"
        self.requests += 1
        await asyncio.sleep(0)
        if self.kept.get(key, old) == old:
            self.kept[key], self.kept_until[key] = new, self.clock.now() + ttl_s
        return self.kept[key]

    async def shorten(self, keys: Sequence[str], ttl_s: float, group: KeyGroup) -> None:
        assert group.name == "service-calls:ann"
        for key in keys:
            self.kept_until[key] = min(self.kept_until[key], self.clock.now() + ttl_s)
        self.shortened += keys


class Fleet:
    """Replicas of one service, each with a sandbox; any replica may receive any call."""

    def __init__(self) -> None:
        self.alive = {"one", "two", "three"}
        self.hub: Any = Memory()
        self.sessions = {
            name: Sessions(self.hub, "ann", "uid", self._is_alive) for name in self.alive
        }

    async def _is_alive(self, instance_id: str) -> bool:
        return instance_id in self.alive

    async def holder(self, at: str, session: str = "s") -> str:
        return await self.sessions[at].holder(session, at)


async def test_a_session_keeps_its_sandbox_whichever_replica_gets_the_call() -> None:
    fleet = Fleet()
    assert [await fleet.holder(at) for at in ("one", "two", "three", "one")] == ["one"] * 4
    assert await fleet.holder("two", session="other") == "two"


async def test_session_lost_is_raised_once() -> None:
    fleet = Fleet()
    await fleet.holder("one")
    fleet.alive.remove("one")
    with pytest.raises(SessionLost):
        await fleet.holder("two")
    assert [await fleet.holder(at) for at in ("three", "two", "three")] == ["three"] * 3
    fleet.alive.remove("three")
    fleet.sessions["two"] = Sessions(fleet.hub, "ann", "uid", fleet._is_alive)  # a new replica
    with pytest.raises(SessionLost):
        await fleet.holder("two")
    assert await fleet.holder("two") == "two"


async def test_session_lost_during_a_call_is_not_raised_again() -> None:
    fleet = Fleet()
    await fleet.holder("one")
    await fleet.holder("two")
    fleet.alive.remove("one")
    assert isinstance(await fleet.sessions["two"].note_gone("s", "one"), SessionLost)
    assert await fleet.sessions["two"].note_gone("s", "one") is None
    assert await fleet.holder("three") == "three"
    assert await fleet.holder("two") == "three"


async def test_one_of_many_callers_learns_that_a_session_is_lost() -> None:
    """The others find the session bound anew, all to the same sandbox."""
    fleet = Fleet()
    await fleet.holder("one")
    fleet.alive.remove("one")
    calls = [fleet.holder(at) for at in ("two", "three") * 10]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, SessionLost) for one in found) == 1
    assert len({one for one in found if isinstance(one, str)}) == 1
    assert len(fleet.hub.kept) == 1


async def test_the_error_of_a_lost_session_survives_a_lost_answer_of_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client of the hub repeats the request, after another caller has bound the session."""
    fleet = Fleet()
    await fleet.holder("one")
    fleet.alive.remove("one")
    replace = fleet.hub.replace_remembered

    async def repeated(*arguments: Any) -> str:
        monkeypatch.setattr(fleet.hub, "replace_remembered", replace)
        await replace(*arguments)
        assert await fleet.holder("three") == "three"
        again: str = await replace(*arguments)
        return again

    monkeypatch.setattr(fleet.hub, "replace_remembered", repeated)
    with pytest.raises(SessionLost):
        await fleet.holder("two")
    assert await fleet.holder("two") == "three"


async def test_sessions_that_an_earlier_version_bound_are_found_or_lost() -> None:
    """A replica of that version may serve the same service for a while, during an upgrade."""
    fleet = Fleet()
    key = "service-session:uid:0:s"
    await fleet.hub.remember(key, "one", 60.0)
    await fleet.hub.remember(f"{key}:told", "0123456789abcdef", 60.0)
    await fleet.hub.remember("service-session:uid:1:s", "two", 60.0)
    assert await fleet.holder("two") == "one"
    fleet.alive.remove("one")
    with pytest.raises(SessionLost):
        await fleet.holder("three")
    assert [await fleet.holder(at) for at in ("three", "one")] == ["three", "three"]
    await fleet.holder("two", session="new")
    assert fleet.hub.kept["service-session:uid:0:new"] == "two", "that version reads it"
    with pytest.raises(SessionLost):  # the key is that of a mark
        await fleet.holder("two", session="s:told")
    assert await fleet.holder("two", session="s:told") == "two"


async def test_a_call_id_never_begins_in_a_second_sandbox() -> None:
    """Invariant 1: it is unknown whether the call ran in the first one."""
    fleet = Fleet()
    assert await fleet.sessions["one"].holder_of_call("c", "one", 60.0) == "one"
    assert await fleet.sessions["two"].holder_of_call("c", "two", 60.0) == "one"
    fleet.alive.remove("one")
    for _ in range(2):
        with pytest.raises(CallOutcomeUnknown):
            await fleet.sessions["two"].holder_of_call("c", "two", 60.0)


async def test_a_call_id_is_known_as_long_as_the_call_may_run() -> None:
    """Invariant 1: a client repeats a long call, and another replica receives it."""
    fleet = Fleet()
    one, two = fleet.sessions["one"], fleet.sessions["two"]
    async with asyncio.TaskGroup() as group:  # the ids are recorded together
        group.create_task(one.holder_of_call("first", "one", 60.0))
        await asyncio.sleep(0)
        group.create_task(one.holder_of_call("short", "one", 60.0))
        group.create_task(one.holder_of_call("long", "one", 7200.0))
        group.create_task(one.holder_of_call("other", "one", 60.0))
    fleet.hub.clock.advance(7200.0 + 600.0)
    assert await two.holder_of_call("long", "two", 7200.0) == "one"
    assert await two.holder_of_call("first", "two", 60.0) == "two"


async def test_ids_of_calls_that_have_ended_are_kept_for_minutes_whatever_their_timeouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 7: a client sends any number of calls, each with a timeout of a day."""
    monkeypatch.setattr(service_sessions, "_ENDED_S", 0.0)
    fleet = Fleet()
    one, two = fleet.sessions["one"], fleet.sessions["two"]
    names = [f"c-{number}" for number in range(5)]
    for name in (*names, "runs"):
        await one.holder_of_call(name, "one", 86_400.0)
    fleet.hub.clock.advance(7200.0)
    for name in names:
        one.note_ended(name)
    async with asyncio.timeout(10):
        while len(fleet.hub.shortened) < len(names):  # noqa: ASYNC110  # turns of the loop send it
            await asyncio.sleep(0)
    fleet.hub.clock.advance(service_sessions.CALL_KEPT_S - 1.0)
    assert await two.holder_of_call(names[0], "two", 60.0) == "one"
    fleet.hub.clock.advance(1.0)
    assert {await two.holder_of_call(name, "two", 60.0) for name in names} == {"two"}
    assert await two.holder_of_call("runs", "two", 60.0) == "one"


async def test_concurrent_call_ids_share_requests_to_the_hub() -> None:
    """One request for the first call, and one for all calls that arrive in the meantime."""
    fleet = Fleet()
    sessions = fleet.sessions["one"]
    async with asyncio.TaskGroup() as group:
        first = group.create_task(sessions.holder_of_call("first", "one", 60.0))
        while not fleet.hub.requests:  # noqa: ASYNC110  # a turn of the loop sends it
            await asyncio.sleep(0)
        others = [
            group.create_task(sessions.holder_of_call(f"c-{n}", "one", 60.0)) for n in range(50)
        ]
        again = group.create_task(sessions.holder_of_call("c-0", "one", 60.0))
    assert [task.result() for task in (first, *others, again)] == ["one"] * 52
    assert fleet.hub.requests == 2
    assert len(fleet.hub.kept) == 51


async def test_no_shared_request_to_the_hub_belongs_to_the_task_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray cancels with a task all that it has started; it finds the task in the context."""
    monkeypatch.setattr(service_sessions, "_ENDED_S", 0.0)
    task = contextvars.ContextVar("task", default="none")
    seen: list[str] = []
    fleet = Fleet()
    remember_all, shorten = fleet.hub.remember_all, fleet.hub.shorten

    async def remember(*arguments: Any) -> dict[str, str]:
        seen.append(task.get())
        found: dict[str, str] = await remember_all(*arguments)
        return found

    async def shortened(*arguments: Any) -> None:
        seen.append(task.get())
        await shorten(*arguments)

    monkeypatch.setattr(fleet.hub, "remember_all", remember)
    monkeypatch.setattr(fleet.hub, "shorten", shortened)
    task.set("a caller's")
    await fleet.sessions["one"].holder_of_call("c", "one", 60.0)
    fleet.sessions["one"].note_ended("c")
    async with asyncio.timeout(60):
        while not fleet.hub.shortened:  # noqa: ASYNC110  # turns of the loop bring it about
            await asyncio.sleep(0)
    assert seen == ["none", "none"]


async def test_a_failed_request_to_the_hub_fails_its_calls_only() -> None:
    fleet = Fleet()
    fleet.hub.failure = FabricUnavailable("the hub is restarting")
    for _ in range(2):
        with pytest.raises(FabricUnavailable):
            await fleet.sessions["one"].holder_of_call("c", "one", 60.0)
    fleet.hub.failure = None
    assert await fleet.sessions["one"].holder_of_call("c", "one", 60.0) == "one"


async def test_a_session_id_has_a_maximum_length() -> None:
    for name in ("x" * 201, "a\nb"):
        with pytest.raises(ConfigError):
            await Fleet().holder("one", session=name)
