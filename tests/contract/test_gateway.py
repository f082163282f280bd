"""The gateway's control side, on a real hub and a real host: routes, rights, creates, endings."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.actors.create_options import CreateOptions
from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable, SandboxStartFailed
from aenv_ray.hub.records import LeaseQuery, Quota, Role
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.creation import Creator, Wish
from aenv_ray.serve.replicas import Replicas
from aenv_ray.serve.settings import GatewaySettings
from tests.contract.gateway_bench import TOOLS, Bench, a_gateway

pytestmark = pytest.mark.redis

CREATE = {"envName": "probe@1.0.0"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
async def bench(root: Path) -> AsyncIterator[Bench]:
    async with a_gateway(root) as made:
        yield made


@pytest.fixture
async def ann(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.owner("ann") as http:
        yield http


@pytest.fixture
async def bob(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.owner("bob") as http:
        yield http


@pytest.fixture
async def admin(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.client(await bench.token(Role.ADMIN, "root")) as http:
        yield http


async def created(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/env-instance", json=CREATE | fields)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()["data"]
    return data


# --- AEnvironment's contract ---------------------------------------------------------------------


async def test_an_instance_as_aenvironments_client_makes_it(ann: httpx.AsyncClient) -> None:
    """Its client reads these fields, all of them text, and polls until ``Running``."""
    made = await created(
        ann, ttl="10m", arguments=[], datasource="", labels={"a": "b"},
        environment_variables={"envNAME": "probe", "SECRET": "hunter2"},
    )  # fmt: skip
    assert made["status"] == "Running"
    assert made["ip"].isalnum()
    assert made["ip"] == made["ip"].lower()
    assert made["env"]["name"] == "probe"
    assert made["env"]["version"] == "1.0.0"
    assert made["labels"] == {"a": "b"}
    assert made["mcp_url"] == f"http://gateway:8081/instances/{made['id']}/mcp"
    again = await ann.get(f"/env-instance/{made['id']}")
    assert again.json()["data"]["ip"] == made["ip"]
    for reference in ("*", "probe", "probe@1.0.0"):
        listed = (await ann.get(f"/env-instance/{reference}/list")).json()["data"]
        assert [one["id"] for one in listed] == [made["id"]]
        assert listed[0]["ip"] == ""  # the capability is in no listing
    assert (await ann.get("/env-instance/probe@2.0.0/list")).json()["data"] == []
    ended = await ann.delete(f"/env-instance/{made['id']}")
    assert ended.json()["success"] is True
    assert (await ann.get(f"/env-instance/{made['id']}")).status_code == 404
    assert "hunter2" not in again.text


async def test_an_unknown_environment_is_404_and_a_path_is_no_reference(
    ann: httpx.AsyncClient,
) -> None:
    assert (await ann.post("/env-instance", json={"envName": "none@1"})).status_code == 404
    assert (await ann.post("/env-instance", json={"envName": "../probe"})).status_code == 400
    assert (
        await ann.post("/env-instance", json={"envName": "probe", "ttl": "x"})
    ).status_code == 400


async def test_environments_are_listed_as_envhub_lists_them(ann: httpx.AsyncClient) -> None:
    listed = await ann.get("/env/", params={"limit": 100, "offset": 0})
    assert listed.headers["x-total-count"] == "1"
    (entry,) = listed.json()["data"]
    assert (entry["id"], entry["status"], entry["status_name"]) == ("probe-1.0.0", 6, "Ready")
    assert (await ann.get("/env/probe/1.0.0")).json()["data"]["name"] == "probe"
    assert (await ann.get("/env/probe")).json()["data"]["version"] == "1.0.0"
    assert (await ann.get("/env/probe/1.0.0/status")).json()["data"] == {"status": "Ready"}
    exists = (await ann.get("/env/probe/9.9.9/exists")).json()["data"]
    assert exists["exists"] is False
    assert (await ann.get("/env/probe/9.9.9")).status_code == 404
    assert (await ann.get("/env/?text=nothing")).json()["data"] == []
    assert (await ann.get("/env/?unknown=1")).status_code == 400


async def test_a_released_version_stays(ann: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    assert (await bob.post("/env/probe/1.0.0/release")).status_code == 403
    assert (await ann.post("/env/probe/1.0.0/release")).json()["data"] is True
    assert (await ann.get("/env/probe/1.0.0/status")).json()["data"] == {"status": "Released"}


async def test_a_version_in_use_cannot_be_deleted(ann: httpx.AsyncClient) -> None:
    made = await created(ann)
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 409
    await ann.delete(f"/instances/{made['id']}")
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 200


# --- publishing ----------------------------------------------------------------------------------


def an_archive(root: Path, name: str = "mine", version: str = "1.0.0", mode: str = "w:gz") -> bytes:
    """Return an archive as AEnvironment's CLI makes it."""
    config = {"name": name, "version": version, "deployConfig": {"network": "none"}}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for path, text in [("config.json", json.dumps(config)), ("src/a.py", TOOLS)]:
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def test_an_archive_is_uploaded_published_and_downloaded(
    ann: httpx.AsyncClient, root: Path
) -> None:
    archive = an_archive(root)
    digest = hashlib.sha256(archive).hexdigest()
    assert (await ann.head(f"/artifacts/{digest}")).status_code == 404
    assert (await ann.put(f"/artifacts/{'0' * 64}", content=archive)).status_code == 422
    kept = await ann.put(f"/artifacts/{digest}", content=archive)
    assert kept.json()["data"] == {"digest": digest, "size_bytes": len(archive)}
    head = await ann.head(f"/artifacts/{digest}")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(archive)))
    assert (await ann.get(f"/artifacts/{digest}")).content == archive
    entry = (await ann.post("/publish", json={"archive": digest})).json()["data"]
    assert (entry["name"], entry["owner"]) == ("mine", "ann")
    again = (await ann.post("/publish", json={"archive": digest})).json()["data"]
    assert again["created_at"] == entry["created_at"]
    assert (await ann.post("/publish", json={"archive": "1" * 64})).status_code == 404


async def test_aenvironments_push_with_the_hubs_storage(
    bench: Bench, ann: httpx.AsyncClient, bob: httpx.AsyncClient, root: Path
) -> None:
    """It signs, uploads without a token, and sends its config.json."""
    config = {"name": "mine", "version": "1.0.0", "deployConfig": {"network": "none"}, "x": 1}
    url = (await ann.post("/env/mine/1.0.0/sign?style=write")).json()["data"]
    async with bench.client(None) as nobody:
        sent = await nobody.put(url, content=an_archive(root))
        assert sent.status_code == 200
        other = url.replace("/mine/", "/other/")
        assert (await nobody.put(other, content=b"")).status_code == 403
    assert (await ann.post("/env/", json=config)).json()["data"] is True
    entry = (await ann.get("/env/mine/1.0.0")).json()["data"]
    assert entry["archive_bytes"] > 0
    read = (await bob.post("/env/mine/1.0.0/sign?style=read")).json()["data"]
    async with bench.client(None) as nobody:
        assert len((await nobody.get(read)).content) == entry["archive_bytes"]


async def test_aenvironments_push_without_an_archive(ann: httpx.AsyncClient) -> None:
    config = {"name": "bare", "version": "1.0.0", "codeUrl": "/home/ann/bare.zip", "x": 1}
    assert (await ann.post("/env", json=config)).json()["data"] is True
    assert (await ann.put("/env/bare/1.0.0", json=config)).status_code == 200
    changed = config | {"codeUrl": "/elsewhere"}
    assert (await ann.put("/env/bare/1.0.0", json=changed)).status_code == 409
    assert (await ann.put("/env/bare/2.0.0", json=config)).status_code == 400
    assert (await ann.post("/env/", json={"name": "No Name"})).status_code == 400
    assert (await ann.get("/env/bare")).json()["data"]["code_url"] == "/home/ann/bare.zip"


# --- who may what --------------------------------------------------------------------------------


async def test_nobody_gets_in_without_a_token(bench: Bench) -> None:
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


async def test_an_agent_may_nothing_here(bench: Bench, ann: httpx.AsyncClient) -> None:
    """Invariant 8."""
    made = await created(ann)
    answer = await ann.post(f"/instances/{made['id']}/token", json={})
    agent = answer.json()["data"]["token"]
    async with bench.client(agent) as http:
        for endpoint in bench.gateway.endpoints:
            if endpoint.access in {"public", "capability"}:
                continue
            path = endpoint.path.replace("{id}", made["id"]).replace("{name}", "probe")
            path = path.replace("{version}", "1.0.0").replace("{reference}", "*")
            answer = await http.request(endpoint.method, path)
            assert answer.status_code == 403, f"{endpoint.method} {path}"


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


async def test_a_token_that_asks_too_much_is_told_to_wait(root: Path) -> None:
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


# --- creating ------------------------------------------------------------------------------------


async def test_a_group_is_made_whole_or_not_at_all(bench: Bench, ann: httpx.AsyncClient) -> None:
    answer = await ann.post("/instances", json=CREATE | {"count": 3})
    assert [one["status"] for one in answer.json()["data"]] == ["Running"] * 3
    await bench.hub.set_quota(Quota(subject="owner:ann", max_instances=5))
    refused = await ann.post("/instances", json=CREATE | {"count": 3})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert len(await bench.fabric.list_instances()) == 3


async def test_a_failed_create_gives_its_place_back(bench: Bench, ann: httpx.AsyncClient) -> None:
    await bench.hub.set_quota(Quota(subject="owner:ann", max_instances=1))
    bench.fabric.failure = SandboxStartFailed("its code does not load")
    assert (await ann.post("/instances", json=CREATE)).status_code == 502
    bench.fabric.failure = None
    assert (await ann.post("/instances", json=CREATE)).status_code == 200


async def test_a_full_host_is_tried_once_more(bench: Bench, ann: httpx.AsyncClient) -> None:
    bench.fabric.failure = CapacityExceeded("full")
    assert (await ann.post("/instances", json=CREATE)).status_code == 429
    assert (await bench.hub.leases(LeaseQuery())).total == 0


async def test_a_slow_create_is_told_pending_and_watched(root: Path) -> None:
    async with a_gateway(root, GatewaySettings(create_wait_s=0)) as bench:
        bench.fabric.gate.clear()
        async with bench.owner("ann") as http:
            made = await created(http)
            assert (made["status"], made["ip"]) == ("Pending", "")
            watching = asyncio.create_task(http.get(f"/instances/{made['id']}?wait_s=20"))
            events = asyncio.create_task(http.get(f"/instances/{made['id']}/events"))
            bench.fabric.gate.set()
            running = (await watching).json()["data"]
            assert running["status"] == "Running"
            assert running["ip"] != ""
            await http.delete(f"/instances/{made['id']}")
            text = (await events).text
    assert text.startswith("event: status\ndata: {")
    assert '"status":"Terminated"' in text


async def test_a_slow_create_that_fails_says_why(root: Path) -> None:
    async with a_gateway(root, GatewaySettings(create_wait_s=0)) as bench:
        bench.fabric.gate.clear()
        async with bench.owner("ann") as http:
            made = await created(http)
            bench.fabric.failure = SandboxStartFailed("its code does not load")
            bench.fabric.gate.set()
            failed = (await http.get(f"/env-instance/{made['id']}?wait_s=20")).json()["data"]
    assert (failed["status"], failed["reason"]) == ("Failed", "its code does not load")


async def test_the_same_key_gives_the_same_instance(
    bench: Bench, ann: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    """A lost answer, asked for again, also while the first is under way."""
    key = {"Idempotency-Key": "k1"}
    bench.fabric.gate.clear()
    both = [asyncio.create_task(ann.post("/instances", json=CREATE, headers=key)) for _ in range(2)]
    await bench.fabric.asked.wait()
    bench.fabric.gate.set()
    ids = {(await one).json()["data"][0]["id"] for one in both}
    again = await ann.post("/instances", json=CREATE, headers=key)
    assert {again.json()["data"][0]["id"]} == ids
    assert len(bench.fabric.created) == 1
    other = await ann.post("/instances", json=CREATE | {"ttl": "5m"}, headers=key)
    assert other.status_code == 400
    hers = await bob.post("/instances", json=CREATE, headers=key)
    assert {hers.json()["data"][0]["id"]} != ids
    await ann.delete(f"/instances/{ids.pop()}")
    gone = await ann.post("/instances", json=CREATE, headers=key)
    assert gone.status_code == 410


async def test_a_key_whose_create_failed_is_free_again(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "k1"}
    bench.fabric.failure = FabricUnavailable("away")
    assert (await ann.post("/instances", json=CREATE, headers=key)).status_code == 503
    bench.fabric.failure = None
    assert (await ann.post("/instances", json=CREATE, headers=key)).status_code == 200


async def test_a_create_whose_client_left_is_undone(bench: Bench, ann: httpx.AsyncClient) -> None:
    """AEnvironment's client sends a create again after a timeout, without a key."""
    bench.fabric.gate.clear()
    body = b'{"envName": "probe"}'
    secret = ann.headers["authorization"]
    sent = [
        {"type": "http.request", "body": body, "more_body": False},
    ]
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nobody reads an answer")

    scope = {
        "type": "http", "method": "POST", "path": "/env-instance", "raw_path": b"/env-instance",
        "query_string": b"", "headers": [(b"authorization", secret.encode())],
        "server": ("gateway", 8080), "scheme": "http", "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    request = asyncio.create_task(bench.gateway.app(scope, receive, send))  # type: ignore[arg-type]
    await bench.fabric.asked.wait()
    left.set()
    await request
    bench.fabric.gate.set()
    assert (await bench.hub.leases(LeaseQuery())).total == 0
    assert await bench.fabric.list_instances() == []


# --- living --------------------------------------------------------------------------------------


async def test_renew_exec_and_logs(ann: httpx.AsyncClient) -> None:
    made = await created(ann, ttl="10m")
    path = f"/instances/{made['id']}"
    renewed = (await ann.post(f"{path}/renew", json={"ttl": "2h"})).json()["data"]
    assert renewed["deadline"] > made["deadline"]
    ran = (await ann.post(f"{path}/exec", json={"command": ["echo", "hi"]})).json()["data"]
    assert (ran["exit_code"], ran["stdout"], ran["encoding"]) == (0, "hi\n", "utf-8")
    raw = (await ann.post(f"{path}/exec", json={"command": "printf '\\377'"})).json()["data"]
    assert (raw["stdout"], raw["encoding"]) == ("/w==", "base64")
    late = await ann.post(f"{path}/exec", json={"command": "sleep 60", "timeout": 0.2})
    assert late.status_code == 504


async def test_lists_have_pages_and_filters(ann: httpx.AsyncClient, bench: Bench) -> None:
    for n in range(3):
        await created(ann, labels={"n": str(n)})
    page = await ann.get("/instances?limit=2")
    assert page.headers["x-total-count"] == "3"
    rest = await ann.get("/instances", params={"limit": 2, "cursor": page.headers["x-next-cursor"]})
    assert "x-next-cursor" not in rest.headers
    assert len({i["id"] for i in page.json()["data"] + rest.json()["data"]}) == 3
    for query, count in [("label=n=1", 1), ("status=Running", 3), ("env=other", 0)]:
        assert len((await ann.get(f"/instances?{query}")).json()["data"]) == count


async def test_quotas_and_the_hub_are_the_administrators(
    ann: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    assert (await ann.put("/quotas/owner:ann", json={"max_instances": 9})).status_code == 403
    assert (await admin.put("/quotas/owner:ann", json={"max_instances": 9})).status_code == 200
    assert (await admin.put("/quotas/owner:bob", json={"max_instances": 1})).status_code == 200
    label = "/quotas/label:path=a%2Fb"
    assert (await admin.put(label, json={"max_instances": 1})).status_code == 200
    assert (await admin.delete(label)).status_code == 200
    assert (await admin.put("/quotas/ann", json={"max_instances": 9})).status_code == 400
    await created(ann)
    assert (await ann.get("/quotas")).json()["data"] == [
        {"subject": "owner:ann", "instances": 1, "max_instances": 9}
    ]
    assert (await admin.delete("/quotas/owner:ann")).status_code == 200
    assert (await ann.get("/hub")).status_code == 403
    assert (await admin.get("/hub")).json()["data"]["redis_version"]


# --- endings -------------------------------------------------------------------------------------


async def test_no_lease_outlives_its_instance(bench: Bench, ann: httpx.AsyncClient) -> None:
    made = await created(ann)
    await bench.gateway.sweep.once()
    assert (await bench.hub.lease(made["id"])).status is InstanceStatus.RUNNING
    await bench.fabric.release([made["id"]])  # by Ray code, behind the gateway's back
    shown = (await ann.get(f"/instances/{made['id']}")).json()["data"]
    assert shown["status"] == "Terminated"
    await bench.gateway.sweep.once()
    assert (await ann.get(f"/instances/{made['id']}")).status_code == 404


async def test_what_a_dead_replica_was_making_ends(root: Path) -> None:
    """Its client has no answer, and may ask again with its key."""
    async with a_gateway(root, GatewaySettings(create_wait_s=0, sweep_s=60)) as bench:
        await bench.gateway.replicas.beat()
        async with bench.owner("ann") as http:
            made = await created(http)
            lease = await bench.hub.lease(made["id"])
            orphan = lease.model_copy(
                update={
                    "id": "probe-orphan22", "made_by": "gateway-dead", "capability": "iorphan",
                    "status": InstanceStatus.PENDING,
                }
            )  # fmt: skip
            await bench.hub.admit([orphan])
            await bench.gateway.sweep.once()
            found = await bench.hub.leases(LeaseQuery())
    assert [one.id for one in found.items] == [made["id"]]


async def test_a_key_outlives_the_replica_that_had_it_first(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """The repeat makes another instance, and what the first one makes too late ends at once."""
    deps = bench.gateway.deps
    others = Replicas(bench.hub, deps.clock, "dead", 1.0)
    dead = Creator(bench.hub, bench.fabric, deps.resolve, deps.clock, others, lambda *_: None)
    bench.fabric.gate.clear()
    options = CreateOptions(
        actor="shared", lifetime="detached", owner="ann", engine=None, idle_timeout=None
    )
    first = asyncio.create_task(dead.create_once(Wish("probe", options, 1, "ann"), "k", 60))
    await bench.fabric.asked.wait()
    await bench.gateway.sweep.once()
    key = {"Idempotency-Key": "k"}
    repeat = asyncio.create_task(ann.post("/instances", json={"envName": "probe"}, headers=key))
    bench.fabric.gate.set()
    answer = await repeat
    assert answer.status_code == 200, answer.text
    with pytest.raises(AenvError):
        await first
    (lease,) = (await bench.hub.leases(LeaseQuery())).items
    assert lease.id == answer.json()["data"][0]["id"]
    assert [info.id for info in await bench.fabric.list_instances()] == [lease.id]


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


async def test_the_access_log_holds_no_secret(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 10."""
    secret = await bench.token(Role.OWNER, "ann")
    with caplog.at_level("INFO", logger="aenv_ray.access"):
        async with bench.client(secret) as http:
            made = await created(http, environment_variables={"KEY": "hunter2"})
    assert '"route": "POST /env-instance"' in caplog.text
    assert '"owner": "ann"' in caplog.text
    for hidden in (secret, "hunter2", made["ip"]):
        assert hidden not in caplog.text
