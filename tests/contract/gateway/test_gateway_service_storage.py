"""Storage of services by the control routes: whose it is, how it changes, how it goes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from aenv_ray.config import settings as process_settings
from aenv_ray.project import project
from aenv_ray.project.project import Project
from aenv_ray.serve.services import storage as service_storage
from aenv_ray.testing.contract_bench import eventually
from tests.contract.gateway.asked_services import CREATE, KEEPS, error_of, made
from tests.contract.gateway.gateway_bench import Bench

pytestmark = pytest.mark.redis


async def test_a_service_keeps_what_it_asks_for(bench: Bench, ann: httpx.AsyncClient) -> None:
    found = await made(ann, **KEEPS, mount_path="/data/")
    assert (found["storage_size"], found["mount_path"]) == ("10Gi", "/data")
    assert found["pvc_name"].startswith("aenv-desk-")
    storage = bench.apps.deployed["desk"].storage
    assert storage is not None
    assert not storage.is_shared


async def test_storage_stays_with_an_owner_and_a_name(bench: Bench, ann: httpx.AsyncClient) -> None:
    """A service of another owner, or of another name, does not see it."""
    first = await made(ann, **KEEPS)
    assert (await ann.delete("/env-service/desk")).status_code == 200
    again = await made(ann, **KEEPS | {"storage_size": "20Gi"})
    assert again["pvc_name"] == first["pvc_name"]
    assert again["storage_size"] == "20Gi"
    uid = bench.apps.deployed["desk"].storage
    await ann.delete("/env-service/desk?deleteStorage=false")
    async with bench.owner("bob") as bob:
        others = await made(bob, **KEEPS)
        assert others["pvc_name"] != first["pvc_name"]
        await bob.delete("/env-service/desk")
    named = await made(ann, **KEEPS, service_name="other", pvc_name=first["pvc_name"])
    assert named["pvc_name"] != first["pvc_name"]
    await made(ann, replicas=1, enable_storage=True)
    assert bench.apps.deployed["desk"].storage == uid
    assert bench.storage_nodes.deleted == []


async def test_deleted_storage_is_gone(bench: Bench, ann: httpx.AsyncClient) -> None:
    found = await made(ann, **KEEPS)
    before = bench.apps.deployed["desk"].storage
    assert (await ann.delete("/env-service/desk?deleteStorage=true")).status_code == 200
    await eventually(
        lambda: bench.storage_nodes.deleted == [found["pvc_name"]], "it is deleted", 60.0
    )
    # The record of it goes a moment after what it held.
    await eventually(lambda: _is_free(bench), "its name is free", 60.0)
    await made(ann, **KEEPS)
    after = bench.apps.deployed["desk"].storage
    assert before is not None
    assert after is not None
    assert before.uid != after.uid


async def _is_free(bench: Bench) -> bool:
    return not await bench.hub.documents("storage")


async def test_a_deletion_that_failed_is_finished_later(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    found = await made(ann, **KEEPS)
    bench.storage_nodes.is_away = True
    assert (await ann.delete("/env-service/desk?deleteStorage=true")).status_code == 200
    refused = await error_of(ann, "POST", "/env-service", **CREATE | KEEPS)
    assert refused == (409, "catalog_conflict")
    bench.storage_nodes.is_away = False
    await bench.gateway.services.restore()
    await eventually(
        lambda: found["pvc_name"] in bench.storage_nodes.deleted, "it is deleted", 60.0
    )


async def test_a_storage_has_one_writer(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(ann, **KEEPS)
    for change in ({"replicas": 2}, {"autoscale": "1:2"}):
        answer = await ann.put("/env-service/desk", json=change)
        assert answer.status_code == 400
        assert "a single writer" in answer.json()["error"]["message"]
    assert (await ann.put("/env-service/desk", json={"replicas": 0})).status_code == 200
    kept = bench.apps.deployed["desk"].storage
    many = process_settings().model_copy(update={"storage_access": "many"})
    monkeypatch.setattr(service_storage, "settings", lambda: many)
    assert (await ann.put("/env-service/desk", json={"replicas": 2})).status_code == 200
    shared = bench.apps.deployed["desk"].storage
    assert kept is not None
    assert shared == kept.model_copy(update={"is_shared": True})


async def test_an_update_that_never_becomes_healthy_is_undone(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """The old sandbox had to end first, so none is left to serve requests."""
    await made(ann, **KEEPS)
    before = bench.apps.deployed["desk"].revision
    bench.apps.broken_by = "BAD"
    for attempt in ("1", "2"):
        change = {"environment_variables": {"BAD": attempt}}
        assert (await ann.put("/env-service/desk", json=change)).status_code == 200
        await eventually(
            lambda: bench.apps.deployed["desk"].revision == before, "it is rolled back", 60.0
        )
        found = (await ann.get("/env-service/desk")).json()["data"]
        assert (found["status"], found["environment_variables"]) == ("Running", {})
        assert "was rolled back: BAD is set" in found["reason"]
    await ann.put("/env-service/desk", json={"environment_variables": {"GOOD": "1"}})
    await eventually(lambda: _is_settled(bench), "the update is seen through", 60.0)
    found = (await ann.get("/env-service/desk")).json()["data"]
    assert (found["reason"], found["environment_variables"]) == ("", {"GOOD": "***"})


async def _is_settled(bench: Bench) -> bool:
    return (await bench.gateway.services.records.get("desk")).previous is None


async def test_the_next_gateway_undoes_an_unfinished_update(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    await made(ann, **KEEPS)
    before = bench.apps.deployed["desk"].revision
    bench.apps.broken_by = "BAD"
    await ann.put("/env-service/desk", json={"environment_variables": {"BAD": "1"}})
    await bench.gateway.services.close()
    if bench.apps.deployed["desk"].revision != before:
        await bench.gateway.services.restore()
    await eventually(lambda: bench.apps.deployed["desk"].revision == before, "as before", 60.0)


async def test_a_storage_grows_and_moves_and_never_shrinks(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    await made(ann, **KEEPS)
    for change in (
        {"storage_size": "9Gi"}, {"storage_size": "much"}, {"enable_storage": False},
        {"mount_path": "/proc"}, {"mount_path": "data"}, {"engine": "kubernetes"},
    ):  # fmt: skip
        status, code = await error_of(ann, "PUT", "/env-service/desk", **change)
        assert (status, code) == (400, "config_error"), change
    body = {"storage_size": "11Gi", "mount_path": "/data"}
    found = (await ann.put("/env-service/desk", json=body)).json()["data"]
    assert (found["storage_size"], found["mount_path"]) == ("11Gi", "/data")
    await ann.delete("/env-service/desk")
    smaller = CREATE | KEEPS
    assert (await error_of(ann, "POST", "/env-service", **smaller))[0] == 400
    elsewhere = CREATE | {"replicas": 1, "enable_storage": True, "engine": "kubernetes"}
    assert (await error_of(ann, "POST", "/env-service", **elsewhere))[0] == 400
    assert bench.apps.deployed == {}


async def test_a_service_gets_storage_later(bench: Bench, ann: httpx.AsyncClient) -> None:
    await made(ann, replicas=1)
    found = (await ann.put("/env-service/desk", json={"enable_storage": True})).json()["data"]
    assert found["storage_size"] == "10Gi"
    assert bench.apps.deployed["desk"].storage is not None


async def test_an_environment_that_wants_storage_gets_it(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own word on the storage's name is nothing: all that come from one template say it."""
    root = tmp_path / "keeper"
    (root / "src").mkdir(parents=True)
    service = {
        "enableStorage": True, "storageSize": "2Gi", "mountPath": "/kept", "storageName": "aenv",
    }  # fmt: skip
    config = {"name": "probe", "deployConfig": {"service": service}}
    (root / "config.json").write_text(json.dumps(config))
    (root / "src" / "tools.py").write_text("")
    keeper = project.load(root)

    async def resolve(reference: str) -> Project:
        return keeper

    monkeypatch.setattr(bench.gateway.services, "_resolve", resolve)
    found = await made(ann, replicas=1)
    assert (found["storage_size"], found["mount_path"]) == ("2Gi", "/kept")
    other = await made(ann, replicas=1, service_name="other")
    assert other["pvc_name"] != found["pvc_name"]
    without = await made(ann, service_name="forgetful", enable_storage=False)
    assert without["pvc_name"] == ""
    status, _ = await error_of(ann, "POST", "/env-service", **CREATE | {"service_name": "two"})
    assert status == 400
