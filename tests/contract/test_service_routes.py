"""The control routes of services on a real hub: AEnvironment's shapes, rights, what cannot be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray import project
from aenv_ray.config import settings as process_settings
from aenv_ray.hub.records import Role
from aenv_ray.hub.services import ServiceRecord
from aenv_ray.project import Project
from aenv_ray.serve import service_storage
from aenv_ray.testing.contract_bench import eventually
from tests.contract.gateway_bench import Bench, a_gateway

pytestmark = pytest.mark.redis

CREATE = {"envName": "probe@1.0.0", "service_name": "desk", "replicas": 2}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with a_gateway(tmp_path) as made:
        yield made


@pytest.fixture
async def ann(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.owner("ann") as http:
        yield http


async def made(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/env-service", json=CREATE | fields)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()["data"]
    return data


async def error_of(http: httpx.AsyncClient, method: str, path: str, **body: Any) -> tuple[int, str]:
    answer = await http.request(method, path, json=body or None)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


async def test_a_service_has_the_fields_of_aenvironments_client(ann: httpx.AsyncClient) -> None:
    found = await made(ann, environment_variables={"KEY": "very-secret"})
    assert found["id"] == "desk"
    assert found["status"] == "Running"
    assert (found["replicas"], found["available_replicas"]) == (2, 2)
    assert found["service_url"] == "http://gateway:8081/services/desk"
    assert found["mcp_url"] == "http://gateway:8081/services/desk/mcp"
    assert (found["env"]["name"], found["env"]["version"]) == ("probe", "1.0.0")
    assert found["owner"] == "ann"
    assert found["pvc_name"] == ""
    assert {"created_at", "updated_at"} <= found.keys()
    again = (await ann.get("/env-service/desk")).json()["data"]
    assert again == found


async def test_no_answer_has_a_variables_value(ann: httpx.AsyncClient) -> None:
    """Invariant 10."""
    await made(ann, environment_variables={"KEY": "very-secret"})
    answers = [
        await ann.get("/env-service/desk"),
        await ann.get("/env-service/*/list"),
        await ann.put("/env-service/desk", json={"environment_variables": {"B": "very-secret"}}),
    ]
    assert all("very-secret" not in answer.text for answer in answers)
    assert answers[-1].json()["data"]["environment_variables"] == {"KEY": "***", "B": "***"}


async def test_lists_are_by_environment(ann: httpx.AsyncClient) -> None:
    await made(ann)
    for reference, count in {"*": 1, "probe": 1, "probe@1.0.0": 1, "probe@2.0.0": 0}.items():
        rows = (await ann.get(f"/env-service/{reference}/list")).json()["data"]
        assert len(rows) == count, reference


async def test_a_name_that_is_taken_is_refused(ann: httpx.AsyncClient) -> None:
    await made(ann)
    assert await error_of(ann, "POST", "/env-service", **CREATE) == (409, "catalog_conflict")
    first, second = await made(ann, service_name=None), await made(ann, service_name=None)
    assert first["id"] != second["id"]
    assert first["id"].startswith("probe-svc-")


async def test_changes_at_the_same_time_are_all_kept(bench: Bench, ann: httpx.AsyncClient) -> None:
    await made(ann)
    changes = [{"environment_variables": {f"V{number}": "x"}} for number in range(8)]
    answers = await asyncio.gather(*(ann.put("/env-service/desk", json=one) for one in changes))
    assert {answer.status_code for answer in answers} == {200}
    variables = {f"V{number}" for number in range(8)}
    kept = (await ann.get("/env-service/desk")).json()["data"]["environment_variables"]
    assert set(kept) == set(bench.apps.deployed["desk"].environment_variables) == variables


@pytest.mark.parametrize("other", ["change", "deletion"])
async def test_what_is_deployed_is_what_came_last(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """An update whose deployment takes long is overtaken meanwhile, and undoes nothing."""
    await made(ann)
    loop, deploy = asyncio.get_running_loop(), bench.apps.deploy

    def overtaken(record: ServiceRecord, *, wait: bool) -> None:
        monkeypatch.setattr(bench.apps, "deploy", deploy)
        meanwhile = (
            ann.put("/env-service/desk", json={"replicas": 5})
            if other == "change"
            else ann.delete("/env-service/desk")
        )
        answer = asyncio.run_coroutine_threadsafe(meanwhile, loop).result(60)
        assert answer.status_code == 200, answer.text
        deploy(record, wait=wait)

    monkeypatch.setattr(bench.apps, "deploy", overtaken)
    await ann.put("/env-service/desk", json={"replicas": 3})
    if other == "change":
        assert bench.apps.deployed["desk"].replicas == 5
    else:
        assert bench.apps.deployed == {}
        assert (await ann.get("/env-service/desk")).status_code == 404


async def test_what_cannot_be_is_refused(ann: httpx.AsyncClient) -> None:
    for fields in (
        {"service_name": "No_Name"}, {"replicas": -1}, {"autoscale": "4:1"}, {"autoscale": "x"},
        {"engine": "nothing"}, {"envName": "/etc"}, {"environment_variables": {"A=": "b"}},
        {"cpu": "many"}, {"memory": "-1"}, {"port": 70_000}, {"image": "other:1"},
        {"storage_size": "10Gi"}, {"storage_size": "x", "replicas": 1},
        {"mount_path": "/data", "replicas": 1}, {"enable_storage": False, "storage_size": "1Gi"},
    ):  # fmt: skip
        status, code = await error_of(ann, "POST", "/env-service", **{**CREATE, **fields})
        assert (status, code) == (400, "config_error"), fields
    missing = CREATE | {"envName": "nothing"}
    assert await error_of(ann, "POST", "/env-service", **missing) == (404, "environment_not_found")
    await made(ann)
    image = await error_of(ann, "PUT", "/env-service/desk", image="other:1")
    assert image == (400, "config_error")  # the process engine has none


async def test_what_rolls_and_what_does_not(bench: Bench, ann: httpx.AsyncClient) -> None:
    """Replicas are numbers; variables need other sandboxes."""
    await made(ann)
    before = bench.apps.deployed["desk"].revision
    await ann.put("/env-service/desk", json={"replicas": 5})
    assert bench.apps.deployed["desk"].replicas == 5
    assert bench.apps.deployed["desk"].revision == before
    await ann.put("/env-service/desk", json={"environment_variables": {"A": "b"}})
    assert bench.apps.deployed["desk"].revision != before
    assert bench.apps.deployed["desk"].replicas == 5


async def test_a_service_scales_between_numbers(bench: Bench, ann: httpx.AsyncClient) -> None:
    found = await made(ann, autoscale="1:4")
    assert found["autoscale"] == "1:4"
    assert (await ann.put("/env-service/desk", json={"autoscale": ""})).status_code == 200
    assert bench.apps.deployed["desk"].autoscale is None


async def test_a_parked_service_is_pending_and_says_how_to_go_on(ann: httpx.AsyncClient) -> None:
    await made(ann)
    parked = (await ann.put("/env-service/desk", json={"replicas": 0})).json()["data"]
    assert parked["status"] == "Pending"
    answer = await ann.get("/services/desk/health")
    assert answer.status_code == 409
    assert "--replicas 1" in answer.json()["hint"]


async def test_a_service_is_its_owners(bench: Bench, ann: httpx.AsyncClient) -> None:
    await made(ann)
    async with bench.owner("bob") as bob:
        for method, path in (
            ("GET", "/env-service/desk"), ("PUT", "/env-service/desk"),
            ("DELETE", "/env-service/desk"), ("GET", "/env-service/desk/logs"),
            ("GET", "/services/desk/health"), ("POST", "/services/desk/mcp"),
        ):  # fmt: skip
            answer = await bob.request(method, path, json={})
            assert answer.status_code == 404, path
        assert (await bob.get("/env-service/*/list")).json()["data"] == []
        status, _ = await error_of(bob, "POST", "/env-service", **CREATE, owner="ann")
        assert status == 403
    agent = await bench.token(Role.AGENT, "ann", instance_id="probe-1")
    async with bench.client(agent) as http:
        assert (await http.get("/env-service/desk")).status_code == 403
        assert (await http.get("/services/desk/health")).status_code == 403
    async with bench.client(None) as http:
        assert (await http.get("/services/desk/health")).status_code == 401
    async with bench.client(await bench.token(Role.ADMIN, "root")) as http:
        assert (await http.get("/env-service/desk")).status_code == 200


async def test_a_service_that_failed_says_why(bench: Bench, ann: httpx.AsyncClient) -> None:
    await made(ann)
    bench.apps.failure = "not healthy within 5 s: no model"
    found = (await ann.get("/env-service/desk")).json()["data"]
    assert (found["status"], found["reason"]) == ("Failed", bench.apps.failure)


async def test_a_deleted_service_is_gone_and_its_name_free(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    await made(ann, service_name="other")
    assert (await ann.delete("/env-service/other?deleteStorage=true")).json()["data"] is True
    assert bench.apps.deployed == {}
    assert await error_of(ann, "GET", "/env-service/other") == (404, "service_not_found")
    assert await error_of(ann, "DELETE", "/env-service/other") == (404, "service_not_found")
    await made(ann, service_name="other")


async def test_what_serve_lost_is_deployed_again(bench: Bench, ann: httpx.AsyncClient) -> None:
    """The hub outlives Ray."""
    await made(ann)
    record = bench.apps.deployed.pop("desk")
    assert (await ann.get("/env-service/desk")).json()["data"]["status"] == "Terminated"
    await bench.gateway.services.restore()
    assert bench.apps.deployed == {"desk": record}


async def test_resources_are_shown_and_change(bench: Bench, ann: httpx.AsyncClient) -> None:
    """AEnvironment's requests and limits are one number here; its limits go first."""
    found = await made(ann, cpu_request="1", cpu_limit="2", memory="2Gi", port=9000)
    assert (found["cpu"], found["memory"], found["port"]) == ("2", "2Gi", 9000)
    before = bench.apps.deployed["desk"].revision
    body = {"cpu": "", "memory_limit": "4Gi"}
    found = (await ann.put("/env-service/desk", json=body)).json()["data"]
    assert (found["cpu"], found["memory"], found["port"]) == ("", "4Gi", 9000)
    assert bench.apps.deployed["desk"].revision != before
    docker = await made(ann, service_name="boxes", engine="docker", image="one:1")
    assert docker["image"] == "one:1"
    found = (await ann.put("/env-service/boxes", json={"image": "two:1"})).json()["data"]
    assert found["image"] == "two:1"


async def test_an_engine_changes_as_an_image_does(bench: Bench, ann: httpx.AsyncClient) -> None:
    """Both at once as well: an image is nothing where nothing is a container."""
    await made(ann)
    before = bench.apps.deployed["desk"].revision
    assert (await error_of(ann, "PUT", "/env-service/desk", engine="none"))[0] == 400
    body = {"engine": "docker", "image": "one:1"}
    found = (await ann.put("/env-service/desk", json=body)).json()["data"]
    assert (found["engine"], found["image"]) == ("docker", "one:1")
    assert bench.apps.deployed["desk"].revision != before
    assert (await error_of(ann, "PUT", "/env-service/desk", engine=""))[0] == 400
    found = (await ann.put("/env-service/desk", json={"engine": "", "image": ""})).json()["data"]
    assert (found["engine"], found["image"]) == ("", "")
    assert bench.apps.deployed["desk"].revision == before


async def test_a_version_that_a_service_uses_is_not_deleted(ann: httpx.AsyncClient) -> None:
    """Also where there are no quotas, and one that is parked."""
    await made(ann, replicas=0)
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 409
    await ann.delete("/env-service/desk")
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 200


async def test_a_version_that_an_update_may_go_back_to_is_not_deleted(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    await made(ann, **KEEPS)
    records = bench.gateway.services.records
    before = await records.get("desk")
    after = before.model_copy(update={"reference": "probe@2.0.0"})
    await records.put(after.model_copy(update={"previous": before}))
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 409
    await records.put(after)
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 200


# --- storage ---------------------------------------------------------------------------------

KEEPS = {"replicas": 1, "storage_size": "10Gi"}


async def test_a_service_keeps_what_it_asks_for(bench: Bench, ann: httpx.AsyncClient) -> None:
    found = await made(ann, **KEEPS, mount_path="/data/")
    assert (found["storage_size"], found["mount_path"]) == ("10Gi", "/data")
    assert found["pvc_name"].startswith("aenv-desk-")
    storage = bench.apps.deployed["desk"].storage
    assert storage is not None
    assert not storage.is_shared


async def test_storage_stays_with_an_owner_and_a_name(bench: Bench, ann: httpx.AsyncClient) -> None:
    """Whoever else has a service of this name finds nothing of it; nor does another service."""
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
    assert bench.sites.deleted == []


async def test_deleted_storage_is_gone(bench: Bench, ann: httpx.AsyncClient) -> None:
    found = await made(ann, **KEEPS)
    before = bench.apps.deployed["desk"].storage
    assert (await ann.delete("/env-service/desk?deleteStorage=true")).status_code == 200
    await eventually(lambda: bench.sites.deleted == [found["pvc_name"]], "it is deleted", 60.0)
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
    bench.sites.is_away = True
    assert (await ann.delete("/env-service/desk?deleteStorage=true")).status_code == 200
    refused = await error_of(ann, "POST", "/env-service", **CREATE | KEEPS)
    assert refused == (409, "catalog_conflict")
    bench.sites.is_away = False
    await bench.gateway.services.restore()
    await eventually(lambda: found["pvc_name"] in bench.sites.deleted, "it is deleted", 60.0)


async def test_a_storage_has_one_writer(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(ann, **KEEPS)
    for change in ({"replicas": 2}, {"autoscale": "1:2"}):
        answer = await ann.put("/env-service/desk", json=change)
        assert answer.status_code == 400
        assert "one writer" in answer.json()["error"]["message"]
    assert (await ann.put("/env-service/desk", json={"replicas": 0})).status_code == 200
    kept = bench.apps.deployed["desk"].storage
    many = process_settings().model_copy(update={"storage_access": "many"})
    monkeypatch.setattr(service_storage, "settings", lambda: many)
    assert (await ann.put("/env-service/desk", json={"replicas": 2})).status_code == 200
    shared = bench.apps.deployed["desk"].storage
    assert kept is not None
    assert shared == kept.model_copy(update={"is_shared": True})


async def test_an_update_that_is_never_healthy_is_taken_back(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """The old sandbox had to end first, so nothing is left that could go on serving."""
    await made(ann, **KEEPS)
    before = bench.apps.deployed["desk"].revision
    bench.apps.broken_by = "BAD"
    for attempt in ("1", "2"):
        change = {"environment_variables": {"BAD": attempt}}
        assert (await ann.put("/env-service/desk", json=change)).status_code == 200
        await eventually(
            lambda: bench.apps.deployed["desk"].revision == before, "it is taken back", 60.0
        )
        found = (await ann.get("/env-service/desk")).json()["data"]
        assert (found["status"], found["environment_variables"]) == ("Running", {})
        assert "was taken back: BAD is set" in found["reason"]
    await ann.put("/env-service/desk", json={"environment_variables": {"GOOD": "1"}})
    await eventually(lambda: _is_settled(bench), "the update is seen through", 60.0)
    found = (await ann.get("/env-service/desk")).json()["data"]
    assert (found["reason"], found["environment_variables"]) == ("", {"GOOD": "***"})


async def _is_settled(bench: Bench) -> bool:
    return (await bench.gateway.services.records.get("desk")).previous is None


async def test_who_starts_next_takes_an_update_back(bench: Bench, ann: httpx.AsyncClient) -> None:
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
