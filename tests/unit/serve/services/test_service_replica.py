"""A replica of a service notes ends of calls, and keeps no sandbox that it cannot use."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.calls.json_calls import JsonCall
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    FabricUnavailable,
    FunctionFailed,
    ToolTimeout,
)
from aenv_ray.project.config import DeployChanges
from aenv_ray.runtime.door.async_calls import CALL_ID
from aenv_ray.serve.services import service_replica
from aenv_ray.serve.services.service_replica import ServiceReplica


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
