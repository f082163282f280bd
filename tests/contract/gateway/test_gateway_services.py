"""The control routes of services on a real hub: AEnvironment's shapes, rights, what cannot be."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from aenv_ray.hub.records import Role
from aenv_ray.hub.services import KIND, ServiceRecord
from tests.contract.gateway.asked_services import CREATE, KEEPS, error_of, made
from tests.contract.gateway.gateway_bench import Bench

pytestmark = pytest.mark.redis


async def test_a_service_has_the_fields_of_aenvironments_client(ann: httpx.AsyncClient) -> None:
    found = await made(ann, environment_variables={"KEY": "very-secret"})
    assert found["id"] == "desk"
    assert found["status"] == "Running"
    assert (found["replicas"], found["available_replicas"]) == (2, 2)
    assert found["service_url"] == "http://127.0.0.1:8081/services/desk"
    assert found["mcp_url"] == "http://127.0.0.1:8081/services/desk/mcp"
    assert (found["env"]["name"], found["env"]["version"]) == ("probe", "1.0.0")
    assert found["owner"] == "ann"
    assert found["pvc_name"] == ""
    assert {"created_at", "updated_at"} <= found.keys()
    again = (await ann.get("/env-service/desk")).json()["data"]
    assert again == found


async def test_no_response_contains_the_value_of_a_variable(ann: httpx.AsyncClient) -> None:
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
async def test_the_last_change_is_deployed(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A slow update is overtaken by a later one, and does not undo it."""
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


async def test_a_service_that_no_node_can_run_is_refused(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """At once, rather than by replicas that fail; what needs nothing new is not refused."""
    await made(ann)
    bench.fabric.engines = ("process",)
    fields = {"engine": "docker", "image": "one:1"}
    boxes = CREATE | {"service_name": "boxes"} | fields
    answer = await ann.post("/env-service", json=boxes)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert "1 with process" in error["message"]
    assert "choose an engine" in error["hint"]
    refused = await error_of(ann, "PUT", "/env-service/desk", **fields)
    assert refused == (503, "fabric_unavailable")
    assert (await ann.put("/env-service/desk", json={"replicas": 3})).status_code == 200
    (kept,) = (await ann.get("/env-service/*/list")).json()["data"]
    assert (kept["id"], kept["engine"], kept["replicas"]) == ("desk", "", 3)


async def test_which_changes_cause_a_rolling_update(bench: Bench, ann: httpx.AsyncClient) -> None:
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


async def test_a_service_belongs_to_its_owner(bench: Bench, ann: httpx.AsyncClient) -> None:
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


async def test_services_that_serve_lost_are_deployed_again(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
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
    updated = after.model_copy(update={"previous": before})
    await bench.hub.put_document(KIND, after.id, updated.model_dump(mode="json"))
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 409
    await bench.hub.put_document(KIND, after.id, after.model_dump(mode="json"))
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 200
