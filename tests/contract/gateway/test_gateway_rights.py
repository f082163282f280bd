"""Who may do what at the gateway, and what its metrics and logs reveal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway.routes.routing import ControlRoute
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.contract.gateway.gateway_bench import CREATE, Bench, a_gateway, created

pytestmark = pytest.mark.redis


# --- who may do what -----------------------------------------------------------------------------


async def test_every_route_but_health_needs_a_token(bench: Bench) -> None:
    async with bench.client(None) as http:
        assert (await http.get("/health")).status_code == 200
        for method, path in [("GET", "/env/"), ("POST", "/env-instance"), ("GET", "/metrics")]:
            assert (await http.request(method, path)).status_code == 401
    async with bench.client("guessed") as http:
        assert (await http.get("/env/")).status_code == 401


async def test_an_owner_sees_and_ends_its_own_instances_only(
    ann: httpx.AsyncClient, bob: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    made = await created(ann)
    path = f"/instances/{made['id']}"
    assert (await bob.get(path)).status_code == 404
    assert (await bob.delete(path)).status_code == 404
    assert (await bob.post(f"{path}/exec", json={"command": "true"})).status_code == 404
    assert (await bob.get("/instances")).json()["data"] == []
    assert (await bob.get("/instances?owner=ann")).status_code == 403
    assert (await bob.post("/instances", json=CREATE | {"owner": "ann"})).status_code == 403
    assert len((await admin.get("/instances?owner=ann")).json()["data"]) == 1
    assert (await admin.delete(path)).status_code == 200


async def test_an_agent_may_use_no_control_route(bench: Bench, ann: httpx.AsyncClient) -> None:
    """Invariant 8."""
    made = await created(ann)
    answer = await ann.post(f"/instances/{made['id']}/token", json={})
    agent = answer.json()["data"]["token"]
    async with bench.client(agent) as http:
        for route in bench.gateway.control_api.routes:
            if not isinstance(route, ControlRoute) or not route.guards:
                continue
            path = route.path.replace("{id}", made["id"]).replace("{name}", "probe")
            path = path.replace("{version}", "1.0.0").replace("{reference}", "*")
            answer = await http.request(route.method, path)
            assert answer.status_code == 403, f"{route.method} {path}"


async def test_a_revoked_token_is_refused(
    bench: Bench, ann: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    made = await admin.post("/tokens", json={"role": "owner", "owner": "carl", "note": "laptop"})
    token = made.json()["data"]
    async with bench.client(token["token"]) as http:
        assert (await http.get("/env/")).status_code == 200
        await ann.delete(f"/tokens/{token['id']}")  # not hers: nothing happens
        assert (await http.get("/env/")).status_code == 200
        await admin.delete(f"/tokens/{token['id']}")
        assert (await http.get("/env/")).status_code == 401
    assert "token" not in (await admin.get("/tokens")).json()["data"][0]


@pytest.mark.parametrize(
    "field",
    [
        {"labels": {str(n): "" for n in range(101)}},
        {"labels": {"k": "v" * 1001}},
        {"labels": {"": "v"}},
        {"owner": "o" * 201},
        {"datasource": "d" * 1001},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_the_stored_fields_of_an_instance_have_limits(
    ann: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    refused = await ann.post("/instances", json=CREATE | field)
    assert refused.status_code == 400
    assert f"field {next(iter(field))}" in refused.json()["message"]


async def test_a_token_over_its_request_rate_gets_a_retry_time(root: Path) -> None:
    settings = GatewaySettings(requests_per_s=0.01, burst=2)
    async with a_gateway(root, settings) as bench, bench.owner("ann") as http:
        answers = [await http.get("/env/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) >= 1
    assert answers[2].json()["error"]["code"] == "rate_limited"


async def test_a_body_beyond_the_limit_is_not_read(root: Path) -> None:
    settings = GatewaySettings(max_body_bytes=100)
    async with a_gateway(root, settings) as bench, bench.owner("ann") as http:
        answer = await http.post("/env-instance", content=b" " * 101)
    assert answer.status_code == 413


# --- about itself --------------------------------------------------------------------------------


async def test_metrics_have_bounded_labels(
    bench: Bench, ann: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    made = await created(ann)
    await ann.get("/env/none")
    await bench.gateway.sweep.once()
    text = (await admin.get("/metrics")).text
    assert 'aenv_gateway_instances{environment="probe"} 1.0' in text
    assert 'route="POST /env-instance",status="200"' in text
    assert 'aenv_gateway_errors_total{error="environment_not_found"} 1.0' in text
    assert 'aenv_gateway_create_seconds_count{phase="start"} 1.0' in text
    assert made["id"] not in text


async def test_the_errors_of_every_door_are_counted_and_logged(
    bench: Bench, ann: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """In an MCP session the status of a failed call is 200."""
    made = await created(ann)
    refused: list[Any] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        refused.append(message)

    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    session, named = {"mcp-session-id": "s"}, {"AEnvCore-EnvInstance-ID": made["id"]}
    path = f"/instances/{made['id']}/mcp"
    wrong = call | {"params": {"name": "add", "arguments": {"a": "x"}}}
    answer = await ann.post(path, json=wrong, headers=session)
    assert answer.json()["result"]["isError"]  # the model's error, not one of the gateway
    await bench.fabric.release([made["id"]])
    right = call | {"params": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    with caplog.at_level("INFO", logger="aenv_ray.access"):
        statuses = [
            (await ann.post(path, json=right, headers=session)).status_code,
            (await ann.post("/functions/f", json={}, headers=named)).status_code,
            (await ann.get("/services/none/functions/f")).status_code,
            (await ann.post("/task/reward", content=b"[]", headers=named)).status_code,
        ]
        await bench.gateway.app(
            {
                "type": "websocket", "path": "/instances/none/ports/80/", "query_string": b"",
                "headers": [(b"authorization", ann.headers["authorization"].encode())],
                "subprotocols": [], "extensions": {"websocket.http.response": {}},
            },
            receive, send,
        )  # fmt: skip
        bench.gateway.access_log.flush()
    assert statuses == [200, 404, 404, 400]
    lines = [json.loads(line) for record in caplog.records for line in record.message.splitlines()]
    gone = "instance_not_found"
    codes = [gone, gone, "service_not_found", "tool_input_invalid", gone]
    assert refused[0]["status"] == 404
    assert [(line["owner"], line["error"]) for line in lines] == [("ann", code) for code in codes]
    counted = bench.gateway.metrics.text().decode()
    assert 'aenv_gateway_errors_total{error="instance_not_found"} 3.0' in counted
    assert counted.count("aenv_gateway_errors_total{") == 3


async def test_the_access_log_holds_no_secret(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 10."""
    secret = await bench.token(Role.PUBLISHER, "ann")
    with caplog.at_level("INFO", logger="aenv_ray.access"):
        async with bench.client(secret) as http:
            made = await created(http, environment_variables={"KEY": "hunter2"})
        bench.gateway.access_log.flush()
    assert '"route":"POST /env-instance"' in caplog.text
    assert '"owner":"ann"' in caplog.text
    for hidden in (secret, "hunter2", made["ip"]):
        assert hidden not in caplog.text
