"""Parts of services without Ray: sessions, the sandbox of a replica, records, states."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.calls.json_calls import JsonCall
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    FabricUnavailable,
    FunctionFailed,
    SandboxLost,
    SandboxStartFailed,
    SessionLost,
    ToolTimeout,
)
from aenv_ray.hub.records import KeyGroup
from aenv_ray.hub.services import Autoscale, ServiceRecord, check_name
from aenv_ray.project.config import DeployChanges
from aenv_ray.runtime.door.async_calls import CALL_ID
from aenv_ray.serve.services import sandbox as service_sandbox
from aenv_ray.serve.services import service_replica
from aenv_ray.serve.services import sessions as service_sessions
from aenv_ray.serve.services.apps import ServiceStatus, cause_in, status_of
from aenv_ray.serve.services.sandbox import ReplicaSandbox
from aenv_ray.serve.services.service_replica import ServiceReplica
from aenv_ray.serve.services.sessions import Sessions
from tests.fake_clock import FakeClock

# --- sessions ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("meta", "outcome", "ends"),
    [
        ({CALL_ID: "c"}, None, ["c"]),
        ({CALL_ID: "c"}, FunctionFailed("it raised"), ["c"]),
        ({CALL_ID: "c"}, ToolTimeout("the first call may still run"), []),
        ({CALL_ID: "c"}, CallOutcomeUnknown("no answer"), []),
        ({CALL_ID: "c"}, asyncio.CancelledError(), []),
        ({}, None, []),
    ],
)
async def test_a_replica_notes_that_a_call_with_an_id_has_ended(
    meta: dict[str, Any], outcome: BaseException | None, ends: list[str]
) -> None:
    noted: list[str] = []
    replica: Any = SimpleNamespace(_sessions=SimpleNamespace(note_ended=noted.append))
    call = JsonCall("one", "tools/call", {}, meta)
    passed = contextlib.suppress(AenvError, asyncio.CancelledError)
    with passed, ServiceReplica._noting_end(replica, call):
        if outcome is not None:
            raise outcome
    assert noted == ends


async def test_a_sandbox_whose_storage_cannot_be_recorded_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would have the storage until its lease ends, and no other could start."""
    released: list[str] = []

    async def placed(*_: object) -> tuple[Any, tuple[str, ...]]:
        return SimpleNamespace(is_made=False), ("n",)

    async def note_made(*_: object) -> None:
        raise FabricUnavailable("the hub does not answer")

    async def create_of(*_: object) -> Any:
        async def release() -> None:
            released.append("s-1")

        return SimpleNamespace(release=release)

    async def nothing() -> None:
        """There are no orphans."""

    monkeypatch.setattr(service_replica.service_storage, "placed", placed)
    monkeypatch.setattr(service_replica.service_storage, "note_made", note_made)
    monkeypatch.setattr(service_replica.operator_policy, "current", lambda: None)
    monkeypatch.setattr(service_replica, "likely_engine", lambda *_: "process")
    monkeypatch.setattr(service_replica.ray_api, "node_id", lambda: "n")
    monkeypatch.setattr(service_replica.AsyncEnvHandle, "create_of", create_of)
    record = SimpleNamespace(
        id="svc", uid="u", owner="ann", engine=None, environment_variables={},
        changes=DeployChanges(), storage=SimpleNamespace(),
    )  # fmt: skip
    replica: Any = SimpleNamespace(
        _record=record, _storages=None, _fabric=None, _project=None, _name="r", _end_orphans=nothing
    )
    with pytest.raises(FabricUnavailable, match="the hub"):
        await ServiceReplica._make(replica)
    assert released == ["s-1"]


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


# --- the sandbox ---------------------------------------------------------------------------------


class Box:
    """The instance of a replica."""

    def __init__(self, name: str, says: dict[str, object]) -> None:
        self.instance_id = name
        self.says = says
        self.is_gone = False
        self.is_released = False

    async def check_health(self, arguments: dict[str, object], timeout_s: float) -> Any:
        assert not arguments
        assert timeout_s > 0
        if self.is_gone:
            raise SandboxLost("it died", instance_id=self.instance_id)
        return {"success": True, "data": self.says}

    async def renew(self, ttl: str | float) -> Any:
        assert ttl

    async def release(self) -> None:
        self.is_released = True


class Boxes:
    def __init__(self) -> None:
        self.made: list[Box] = []
        self.says: dict[str, object] = {"status": "healthy"}

    async def make(self) -> Box:
        self.made.append(Box(f"box-{len(self.made)}", self.says))
        return self.made[-1]


class Hasty(FakeClock):
    """A clock that advances at every reading."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


async def test_a_dead_sandbox_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    boxes = Boxes()
    sandbox = ReplicaSandbox(boxes.make, FakeClock(), 5.0, "ann")
    await sandbox.open()
    boxes.made[0].is_gone = True
    await sandbox.check()
    assert (await sandbox.instance()).instance_id == "box-1"
    sandbox.lose("box-0")  # a late report about the first one
    (line,) = caplog.records
    assert (vars(line)["instance"], vars(line)["owner"]) == ("box-0", "ann")
    assert (await sandbox.instance()).instance_id == "box-1"
    await sandbox.close()
    assert boxes.made[1].is_released


async def test_the_health_check_fails_for_an_unhealthy_environment() -> None:
    boxes = Boxes()
    sandbox = ReplicaSandbox(boxes.make, FakeClock(), 5.0, "ann")
    await sandbox.open()
    boxes.made[0].says = {"status": "unhealthy", "message": "no model"}
    with pytest.raises(FunctionFailed, match="no model"):
        await sandbox.check()
    await sandbox.close()


async def test_a_sandbox_that_never_becomes_healthy_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_sandbox, "_POLL_S", 0.001)
    boxes = Boxes()
    boxes.says = {"status": "unhealthy", "message": "no model"}
    sandbox = ReplicaSandbox(boxes.make, Hasty(), 3.0, "ann")
    with pytest.raises(SandboxStartFailed, match="no model"):
        await sandbox.open()
    assert [box.is_released for box in boxes.made] == [True]


# --- records -------------------------------------------------------------------------------------


def test_only_changes_that_need_new_sandboxes_change_the_revision() -> None:
    record = ServiceRecord(
        id="desk", uid="u", reference="probe@1.0.0", digest="d", owner="ann", replicas=1,
        created_at=1.0, updated_at=1.0,
    )  # fmt: skip
    same = {"replicas": 3, "updated_at": 2.0, "autoscale": Autoscale.parse("1:2")}
    assert record.model_copy(update=same).revision == record.revision
    for changed in ({"digest": "e"}, {"environment_variables": {"A": "b"}}, {"engine": "docker"}):
        assert record.model_copy(update=changed).revision != record.revision
    assert "secret" not in repr(
        record.model_copy(update={"environment_variables": {"A": "secret"}})
    )


@pytest.mark.parametrize("text", ["", "1", "0:1", "2:1", "a:b", "1:2:3", "1:5000"])
def test_autoscale_is_two_numbers(text: str) -> None:
    with pytest.raises(ConfigError):
        Autoscale.parse(text)


@pytest.mark.parametrize("name", ["", "A", "a_b", "1a", "a-", "a" * 64, "a.b", "a/b", "a#b"])
def test_a_service_name_must_be_a_dns_label(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)


@pytest.mark.parametrize(
    ("application", "target", "available", "status"),
    [
        ("DEPLOYING", 2, 0, ServiceStatus.CREATING),
        ("DEPLOYING", 2, 1, ServiceStatus.UPDATING),
        ("RUNNING", 2, 2, ServiceStatus.RUNNING),
        ("RUNNING", 0, 0, ServiceStatus.PENDING),
        ("DEPLOY_FAILED", 2, 1, ServiceStatus.FAILED),
        ("UNHEALTHY", 2, 0, ServiceStatus.FAILED),
        ("DELETING", 2, 2, ServiceStatus.TERMINATED),
        ("DELETING", 0, 1, ServiceStatus.UPDATING),
    ],
)
def test_serve_statuses_map_to_aenvironments(
    application: str, target: int, available: int, status: ServiceStatus
) -> None:
    assert status_of(application, target, available) is status


def test_the_reason_is_the_cause_in_a_traceback() -> None:
    ours = "aenv_ray.errors.ConfigError: no\n\nDuring that:\naenv_ray.errors.SandboxLost: it\nwent"
    assert cause_in(f"failed 3 times.\nTraceback:\n  File x\n{ours}") == "SandboxLost: it\nwent"
    assert cause_in("a health check failed") == "a health check failed"
