"""Attacks of one owner on another, and of low roles, through the gateway's routes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.actors.calls.port_stream import PortStream
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import Forbidden, PolicyRefused, Unauthorized
from aenv_ray.hub import core
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.records import EVERYBODY, AuditRecord, EnvironmentQuery, NameRecord, Right, Role
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.models import ExecResult
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project import project
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.creation import Creation
from aenv_ray.serve.gateway.data.ports import PortProxy
from aenv_ray.serve.gateway.data.sandbox import PIECE_BYTES
from aenv_ray.serve.gateway.routes.admin import POOLS
from aenv_ray.serve.gateway.routes.routing import AUDITED, ControlRoute
from aenv_ray.serve.services.service_replica import SERVICE_LABEL
from tests.attacks.owners import SECRET, Cast, archived, push
from tests.contract.gateway.gateway_bench import TOOLS
from tests.contract.hub.hub_contract import START_S, entry
from tests.contract.hub.redis_servers import emptied
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis


# --- names ---------------------------------------------------------------------------------------


async def test_nobody_publishes_under_the_name_of_another_owner(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15: Alice's `create helper` must never run Bob's code."""
    taken = await push(cast.bob, archived(tmp_path, "helper", "99.0.0"))
    assert (taken.status_code, "aenv grant helper bob publish" in taken.text) == (403, True)
    by_config = {"name": "helper", "version": "98.0.0"}
    assert (await cast.bob.post("/env", json=by_config)).status_code == 403
    assert (await cast.bob.put("/env/helper/98.0.0", json=by_config)).status_code == 403
    assert (await cast.alice.get("/env/helper")).json()["data"]["version"] == "1.0.0"
    assert await cast.bench.hub.has_artifact("alice", cast.archive)


async def test_nobody_takes_the_name_of_a_built_in_environment(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15: settings of the operator, such as AENV_ALLOW_CHAT_MODELS, mean the built-in."""
    by_config = {"name": "tau2", "version": "9.0.0"}
    for http in (cast.alice, cast.bob):
        taken = await push(http, archived(tmp_path, "tau2", "9.0.0", chatModel=True))
        assert (taken.status_code, "built-in environment" in taken.text) == (403, True)
        assert (await http.post("/env", json=by_config)).status_code == 403
    assert (await cast.bench.hub.name("tau2")).owner is None
    published = await push(cast.admin, archived(tmp_path, "tau2", "9.0.0"))
    assert published.status_code == 200
    assert (await cast.admin.put("/names/tau2/grants/bob", json={"right": "publish"})).is_success
    assert (await push(cast.alice, archived(tmp_path, "tau2", "9.1.0"))).status_code == 403
    assert (await push(cast.bob, archived(tmp_path, "tau2", "9.1.0"))).status_code == 200


async def test_the_name_of_a_built_in_environment_is_not_its_earlier_owners(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: a release may add a built-in whose name a publisher has."""
    monkeypatch.setattr(project, "_builtins", lambda: (("helper", tmp_path),))
    taken = await push(cast.alice, archived(tmp_path, "helper", "2.0.0", chatModel=True))
    assert (taken.status_code, "built-in environment" in taken.text) == (403, True)
    for name in ("alice", "bob", "*"):
        granted = await cast.alice.put(f"/names/helper/grants/{name}", json={"right": "publish"})
        assert granted.status_code == 403
    assert (await cast.alice.put("/names/helper/grants/*", json={"right": "use"})).is_success
    assert (await push(cast.alice, archived(tmp_path, "helper", "2.0.0"))).status_code == 403
    path = "/names/helper/grants/alice"
    assert (await cast.admin.put(path, json={"right": "publish"})).is_success
    assert (await push(cast.alice, archived(tmp_path, "helper", "2.0.0"))).status_code == 200


async def test_a_grant_lets_another_owner_publish_until_it_is_revoked(
    cast: Cast, tmp_path: Path
) -> None:
    """Invariant 15, what it allows."""
    assert (await cast.bob.put("/names/helper/grants/bob", json={"right": "publish"})).status_code
    assert (await push(cast.bob, archived(tmp_path, "helper", "2.0.0"))).status_code == 403
    granted = await cast.alice.put("/names/helper/grants/bob", json={"right": "publish"})
    assert granted.json()["data"]["grants"] == {"bob": "publish"}
    assert (await push(cast.bob, archived(tmp_path, "helper", "2.0.0"))).status_code == 200
    assert (await cast.bob.delete("/env/helper/1.0.0")).status_code == 403
    assert (await cast.alice.delete("/env/helper/2.0.0")).status_code == 200
    assert (await cast.alice.delete("/names/helper/grants/bob")).status_code == 200
    assert (await push(cast.bob, archived(tmp_path, "helper", "3.0.0"))).status_code == 403


async def test_an_environment_is_invisible_to_other_owners(cast: Cast) -> None:
    """Invariant 15: no route reveals its existence or its archive to another owner."""
    reads = (
        "/env/helper", "/env/helper/1.0.0", "/env/helper/versions", "/env/helper/1.0.0/status",
        "/env/helper/1.0.0/functions", "/names/helper", f"/artifacts/{cast.archive}",
    )  # fmt: skip
    await cast.bench.hub.put_document(POOLS, "helper@1.0.0", {"count": 1})
    assert "helper" in (await cast.alice.get("/pools")).text
    for http in (cast.bob, cast.user):
        for path in reads:
            assert (await http.get(path)).status_code == 404, path
        listed = await http.get("/env?limit=1000")
        assert "helper" not in listed.text
        assert int(listed.headers["X-Total-Count"]) == len(listed.json()["data"])
        assert (await http.get("/env?text=helper")).json()["data"] == []
        exists = await http.get("/env/helper/1.0.0/exists")
        assert exists.json()["data"]["exists"] is False
        assert (await http.head(f"/artifacts/{cast.archive}")).status_code == 404
        assert (await http.post("/env/helper/1.0.0/sign?style=read")).status_code == 404
        body = {"envName": "helper@1.0.0"}
        assert (await http.post("/env-instance", json=body)).status_code == 404
        assert (await http.post("/env-service", json=body)).status_code == 404
        assert (await http.post("/env/helper/1.0.0/release")).status_code in (403, 404)
        assert (await http.delete("/env/helper/1.0.0")).status_code in (403, 404)
        assert "helper" not in (await http.get("/pools")).text
    stolen = await cast.bob.post("/publish", json={"archive": cast.archive})
    assert stolen.status_code == 404
    assert (await cast.alice.get(f"/artifacts/{cast.archive}")).status_code == 200


async def test_a_grant_to_everybody_shares_an_environment(cast: Cast) -> None:
    """Invariant 15, what it allows; variables stay hidden, in listings from the owner too."""
    await cast.alice.put("/names/helper/grants/*", json={"right": "use"})
    for http in (cast.bob, cast.user):
        shown = await http.get("/env/helper/1.0.0")
        assert (shown.status_code, SECRET in shown.text) == (200, False)
        assert (await http.get(f"/artifacts/{cast.archive}")).status_code == 200
        assert (await http.get("/names/helper")).status_code == 403
    for http in (cast.alice, cast.bob, cast.user, cast.admin):
        for path in ("/env", "/env/helper/versions"):
            found = await http.get(path)
            assert ("helper" in found.text, SECRET in found.text) == (True, False)
    assert SECRET in (await cast.alice.get("/env/helper/1.0.0")).text
    await cast.alice.delete("/names/helper/grants/*")
    assert (await cast.bob.get("/env/helper/1.0.0")).status_code == 404


async def test_nothing_starts_without_the_right_to_use_it(cast: Cast) -> None:
    """Invariant 15: also of an environment that the gateway could resolve, or that runs already."""
    body = {"envName": "probe@1.0.0"}
    kept = await cast.bob.post("/env-service", json=body)
    assert kept.status_code == 200, kept.text
    assert (await cast.admin.delete("/names/probe/grants/*")).status_code == 200
    refused = [
        await cast.bob.post("/env-instance", json=body),
        await cast.bob.post("/env-service", json=body),
        await cast.bob.put(f"/env-service/{kept.json()['data']['id']}", json=body),
        await cast.bob.post("/env/probe/1.0.0/sign?style=read"),
    ]
    for answer in refused:
        assert answer.status_code == 404, answer.text
        assert "environment_not_found" in answer.text
    assert (await cast.admin.post("/env-instance", json=body)).status_code == 200


async def test_a_revoked_grant_starts_no_further_sandboxes_of_a_service(cast: Cast) -> None:
    """Invariant 15: those of an update that does not name the environment are new instances too."""
    body = {"envName": "probe@1.0.0", "replicas": 0}
    paused, running = [
        (await cast.bob.post("/env-service", json=body | {"replicas": n})).json()["data"]["id"]
        for n in (0, 2)
    ]
    assert (await cast.admin.delete("/names/probe/grants/*")).status_code == 200
    for service, change in (
        (paused, {"replicas": 1}), (running, {"replicas": 3}), (running, {"autoscale": "1:9"}),
        (running, {"environment_variables": {"A": "b"}}), (running, {"engine": "process"}),
        (running, {"replicas": 1, "port": 80}),
    ):  # fmt: skip
        refused = await cast.bob.put(f"/env-service/{service}", json=change)
        assert (refused.status_code, "environment_not_found" in refused.text) == (404, True), change
    for fewer in (1, 0):
        changed = await cast.bob.put(f"/env-service/{running}", json={"replicas": fewer})
        assert changed.json()["data"]["replicas"] == fewer
    assert (await cast.admin.put(f"/env-service/{running}", json={"replicas": 1})).is_success
    for service in (paused, running):
        assert (await cast.bob.delete(f"/env-service/{service}")).status_code == 200


async def test_a_built_in_does_not_open_another_owners_version(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: everybody may use the built-in, and not what is published under its name."""
    source = _built_in(cast, tmp_path, monkeypatch)
    for http in (cast.bob, cast.user):
        refused = await http.post("/env/helper/1.0.0/sign?style=read")
        assert (refused.status_code, "environment_not_found" in refused.text) == (404, True)
        assert (await http.head(f"/artifacts/{cast.archive}")).status_code == 404
        for path in ("", "/1.0.0", "/1.0.0/status", "/1.0.0/functions", "/versions"):
            assert (await http.get(f"/env/helper{path}")).status_code == 404, path
        for change in ("status", "release"):
            answer = await http.post(f"/env/helper/1.0.0/{change}", json={"status": "Failed"})
            assert answer.status_code in (403, 404)
        assert (await http.delete("/env/helper/1.0.0")).status_code in (403, 404)
        assert (await http.get("/names/helper")).status_code == 404
        made = await http.post("/env-instance", json={"envName": "helper"})
        served = await http.post("/env-service", json={"envName": "helper"})
        assert (made.status_code, served.status_code) == (200, 200), made.text + served.text
        shown = [
            made,
            served,
            await http.get(f"/instances/{made.json()['data']['id']}"),
            await http.get("/instances"),
            await http.get(f"/env-service/{served.json()['data']['id']}"),
            await http.get("/env-service/*/list"),
        ]
        for answer in shown:
            assert source.digest in answer.text
            for secret in (cast.archive, "alice", "KEY", "OLD"):
                assert secret not in answer.text, answer.url
    mine = (await cast.alice.post("/env/helper/1.0.0/sign?style=read")).json()["data"]
    assert (await _fetched(cast, mine)).status_code == 200


async def test_a_signed_url_opens_no_more_than_its_token_does_now(
    cast: Cast, tmp_path: Path
) -> None:
    """Invariant 15: not what a grant has opened until it was revoked, nor for a revoked token."""
    assert (await cast.alice.put("/names/helper/grants/bob", json={"right": "use"})).is_success
    read = (await cast.bob.post("/env/helper/1.0.0/sign?style=read")).json()["data"]
    assert (await _fetched(cast, read)).status_code == 200
    assert (await cast.alice.delete("/names/helper/grants/bob")).is_success
    refused = await _fetched(cast, read)
    assert (refused.status_code, "environment_not_found" in refused.text) == (404, True)
    by_admin = (await cast.admin.post("/env/helper/1.0.0/sign?style=read")).json()["data"]
    assert (await _fetched(cast, by_admin)).status_code == 200

    made = (await cast.admin.post("/tokens", json={"owner": "alice", "role": "publisher"})).json()
    async with cast.bench.client(made["data"]["token"]) as leaked:
        read = (await leaked.post("/env/helper/1.0.0/sign?style=read")).json()["data"]
        write = (await leaked.post("/env/helper/2.0.0/sign?style=write")).json()["data"]
    assert (await _fetched(cast, read)).status_code == 200
    assert (await cast.alice.delete(f"/tokens/{made['data']['id']}")).json()["data"] is True
    assert (await _fetched(cast, read)).status_code == 403
    async with cast.bench.client(None) as nobody:
        data = archived(tmp_path, "helper", "2.0.0")
        assert (await nobody.put(write, content=data)).status_code == 403
    assert not await cast.bench.hub.has_artifact("alice", hashlib.sha256(data).hexdigest())


async def test_what_a_leaked_token_could_copy_ends_with_it(cast: Cast) -> None:
    """Invariant 15: agent tokens, and the addresses of instances, in AEnvironment's headers."""
    made = (await cast.admin.post("/tokens", json={"owner": "alice"})).json()["data"]
    instance = (await cast.alice.post("/env-instance", json={"envName": "probe@1.0.0"})).json()
    base, ping = f"/instances/{instance['data']['id']}", {"jsonrpc": "2.0", "id": 1}

    async def reached(secret: str | None, address: str | None = None) -> int:
        headers = {} if address is None else {"AEnvCore-MCPProxy-URL": f"http://{address}:8081"}
        path = f"{base}/mcp" if address is None else "/mcp"
        async with cast.bench.client(secret) as http:
            answer = await http.post(path, headers=headers, json=ping | {"method": "ping"})
        return answer.status_code

    async with cast.bench.client(made["token"]) as leaked:
        copied = (await leaked.post(f"{base}/token")).json()["data"]["token"]
        address = (await leaked.get(base)).json()["data"]["ip"]
    mine = (await cast.alice.post(f"{base}/token")).json()["data"]["token"]
    by_admin = await cast.admin.post(
        "/tokens",
        json={"owner": "alice", "role": "agent", "instance_id": instance["data"]["id"]},
    )
    assert await reached(copied) == await reached(None, address) == 200
    assert (await cast.alice.delete(f"/tokens/{made['id']}")).json()["data"] is True
    assert await reached(copied) == await reached(None, address) == 401
    assert await reached(mine) == await reached(None, instance["data"]["ip"]) == 200
    (admin,) = await cast.bench.hub.tokens("root")
    assert by_admin.json()["data"]["made_by"] == admin.id


async def test_what_a_revoked_token_has_begun_to_read_ends(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: a leaked token is worth nothing once it is revoked."""
    made = (await cast.admin.post("/tokens", json={"owner": "alice"})).json()["data"]
    output, bytes_read = _Pieces(), _Pieces()

    async def logs(self: AsyncEnvHandle, tail: int | None, follow: bool) -> AsyncIterator[str]:
        del self, tail, follow
        while True:
            yield await output.next()

    async def read(self: PortStream) -> bytes:
        del self
        return (await bytes_read.next()).encode()

    async def nothing(*_: Any) -> None: ...

    monkeypatch.setattr(AsyncEnvHandle, "logs", logs)
    monkeypatch.setattr(PortStream, "read", read)
    for name in ("open", "write", "close"):
        monkeypatch.setattr(PortStream, name, nothing)
    monkeypatch.setattr(PortProxy, "_check_declared", nothing)
    instance = (await cast.alice.post("/env-instance", json={"envName": "probe@1.0.0"})).json()
    base = f"/instances/{instance['data']['id']}"
    async with cast.bench.client(made["token"]) as leaked, asyncio.timeout(30):
        events = asyncio.create_task(leaked.get(f"{base}/events"))
        followed = asyncio.create_task(leaked.get(f"{base}/logs?follow=true"))
        port = asyncio.create_task(leaked.get(f"{base}/ports/80/"))
        await output.give("before")
        await bytes_read.give("HTTP/1.1 200 OK\r\n\r\nbefore")
        assert (await cast.alice.delete(f"/tokens/{made['id']}")).json()["data"] is True
        output.pieces.put_nowait("after")
        bytes_read.pieces.put_nowait("after")
        assert (await followed).text == "before"
        with pytest.raises(Unauthorized):
            await port
        told = (await events).text
    assert '"status":"Running"' in told
    assert '"code":"unauthorized"' in told
    assert (await cast.alice.get(base)).json()["data"]["status"] == "Running"


async def test_what_a_revoked_token_has_begun_to_run_tells_it_nothing(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: calls over MCP, also by an address or by an agent, functions, files, exec."""
    made = (await cast.admin.post("/tokens", json={"owner": "alice"})).json()["data"]
    calls = _Calls(monkeypatch)
    base = await _instance(cast)
    accept = {"Accept": "application/json, text/event-stream"}
    async with (
        cast.bench.client(made["token"]) as leaked, cast.bench.client(None) as nobody,
        asyncio.timeout(30), asyncio.TaskGroup() as group,
    ):  # fmt: skip
        secret = (await leaked.post(f"{base}/token")).json()["data"]["token"]
        agent = {"Authorization": f"Bearer {secret}", **accept}
        url = f"http://{(await leaked.get(base)).json()['data']['ip']}:8081"
        addressed = {"AEnvCore-MCPProxy-URL": url, **accept}
        waiting = {
            "by token": leaked.post(f"{base}/mcp", json=PLAIN),
            "by address": nobody.post("/mcp", json=PLAIN, headers=addressed),
            "by agent": nobody.post(f"{base}/mcp", json=PLAIN, headers=agent),
            "reward": nobody.post("/task/reward", headers=addressed),
            "exec": leaked.post(f"{base}/exec", json={"command": "cat"}),
            "followed": leaked.post(f"{base}/mcp", json=FOLLOWED, headers=accept),
            "followed by address": nobody.post("/mcp", json=FOLLOWED, headers=addressed),
        }
        asked = {name: group.create_task(request) for name, request in waiting.items()}
        file = group.create_task(_refused(leaked.get(f"{base}/files?path=f")))
        await calls.contents.give("before")
        for _ in waiting:
            await calls.running.acquire()
        assert (await cast.alice.delete(f"/tokens/{made['id']}")).json()["data"] is True
        calls.are_over.set()
        calls.contents.pieces.put_nowait("after")
        assert await file
        answers = {name: await task for name, task in asked.items()}
    for name, answer in answers.items():
        assert "unauthorized" in answer.text, name
        assert "after" not in answer.text, name
        assert ("before" in answer.text) == name.startswith("followed"), name
    assert calls.cancelled == 2


async def test_a_revoked_token_runs_nothing_by_a_body_that_it_holds_back(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: a piece a minute keeps a request waiting for as long as its sender wants."""
    made = (await cast.admin.post("/tokens", json={"owner": "alice"})).json()["data"]
    calls = _Calls(monkeypatch)
    base = await _instance(cast)
    begun, is_revoked = asyncio.Semaphore(0), asyncio.Event()

    async def held(body: Any) -> AsyncIterator[bytes]:
        data = json.dumps(body).encode()
        yield data[:1]
        begun.release()
        await is_revoked.wait()
        yield data[1:]

    async with (
        cast.bench.client(made["token"]) as leaked, cast.bench.client(None) as nobody,
        asyncio.timeout(30), asyncio.TaskGroup() as group,
    ):  # fmt: skip
        url = f"http://{(await leaked.get(base)).json()['data']['ip']}:8081"
        addressed = {"AEnvCore-MCPProxy-URL": url}
        requests = [
            leaked.post("/instances", content=held({"envName": "probe@1.0.0"})),
            leaked.post(f"{base}/exec", content=held({"command": "cat"})),
            leaked.put(f"{base}/files?path=f", content=held("text")),
            leaked.post(f"{base}/mcp", content=held(PLAIN)),
            nobody.post("/task/reward", content=held({}), headers=addressed),
        ]
        tasks = [group.create_task(request) for request in requests]
        for _ in tasks:
            await begun.acquire()
        assert (await cast.alice.delete(f"/tokens/{made['id']}")).json()["data"] is True
        is_revoked.set()
        for task in tasks:
            answer = await task
            assert answer.status_code == 401, answer.url
    assert calls.running.locked()  # nothing has begun
    assert len((await cast.alice.get("/instances")).json()["data"]) == 1


async def _instance(cast: Cast) -> str:
    """Return the path of a new instance of Alice."""
    made = await cast.alice.post("/env-instance", json={"envName": "probe@1.0.0"})
    return f"/instances/{made.json()['data']['id']}"


PLAIN = {
    "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t", "arguments": {}},
}  # fmt: skip
FOLLOWED = PLAIN | {"params": {"name": "t", "arguments": {}, "_meta": {"progressToken": "p"}}}


class _Calls:
    """What an instance is asked for; it answers once `are_over` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = asyncio.Semaphore(0)
        """Released by each that begins."""
        self.are_over = asyncio.Event()
        self.cancelled = 0
        self.contents = _Pieces()
        monkeypatch.setattr(InstanceCalls, "call", self._call)
        monkeypatch.setattr(InstanceCalls, "follow", self._follow)
        for name in ("exec", "read_file", "write_file"):
            monkeypatch.setattr(AsyncEnvHandle, name, getattr(self, f"_{name}"))

    async def _end(self) -> None:
        self.running.release()
        await self.are_over.wait()

    async def _call(self, *_: object) -> bytes:
        await self._end()
        return b'{"data":"after"}'

    async def _follow(self, *_: object) -> AsyncGenerator[Any]:
        try:
            yield [[1.0, None, "before"]]
            await self._end()
            yield [[2.0, None, "after"]]
            raise AssertionError
        finally:
            self.cancelled += 1

    async def _exec(self, *_: object, **__: object) -> ExecResult:
        await self._end()
        return ExecResult(exit_code=0, stdout=b"after", stderr=b"")

    async def _read_file(self, *_: object) -> bytes:
        return (await self.contents.next()).encode().ljust(PIECE_BYTES)

    async def _write_file(self, *_: object) -> int:
        self.running.release()
        return 4


async def _refused(request: Awaitable[httpx.Response]) -> bool:
    """Return whether the connection breaks because the token is no longer valid."""
    with pytest.raises(Unauthorized):
        await request
    return True


class _Pieces:
    """What an instance sends, piece by piece."""

    def __init__(self) -> None:
        self.pieces = asyncio.Queue[str]()
        self._asked = asyncio.Queue[None]()

    async def next(self) -> str:
        self._asked.put_nowait(None)
        return await self.pieces.get()

    async def give(self, piece: str) -> None:
        """Give a piece, and return once the next one is asked for."""
        await self._asked.get()
        self.pieces.put_nowait(piece)
        await self._asked.get()


async def _fetched(cast: Cast, signed: str) -> httpx.Response:
    """Return the answer to somebody without a token."""
    async with cast.bench.client(None) as nobody:
        return await nobody.get(signed)


def _built_in(cast: Cast, root: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Make a built-in environment of the version that Alice has published with other content."""
    archived(root / "built-in", "helper")
    directory = root / "built-in" / "helper-1.0.0"
    (directory / "src" / "tools.py").write_text(TOOLS)
    monkeypatch.setattr(project, "_builtins", lambda: (("helper", directory),))

    async def resolve(reference: str) -> Project:
        return project.resolve(reference)

    gateway = cast.bench.gateway
    object.__setattr__(gateway.deps, "resolve", resolve)
    gateway.creator._resolve = gateway.services._resolve = resolve
    return project.load(directory)


async def test_names_without_an_owner_belong_to_their_first_publisher(
    module_redis: RedisServer,
) -> None:
    """Invariant 15 for a hub whose names have no owners yet: another owner cannot take one over."""
    server = await emptied(module_redis)
    hub = HubCore(server.connect(), FakeClock(START_S), where="test")
    try:
        await hub.push(entry("helper", "1.0.0", owner="alice"))
        await hub._ask("hdel", hub._keys.owners, "helper")  # as an earlier version left it
        before = NameRecord(name="helper", owner="alice", grants={EVERYBODY: Right.USE})
        assert await hub.name("helper") == before
        with pytest.raises(Forbidden):
            await hub.push(entry("helper", "99.0.0", owner="bob"))
        assert (await hub.environments(EnvironmentQuery(visible_to="bob"))).total == 1
        await hub.push(entry("helper", "1.1.0", owner="alice"))
        assert await hub.name("helper") == before
        await hub.grant("helper", EVERYBODY, None)
        assert (await hub.environments(EnvironmentQuery(visible_to="bob"))).total == 0
    finally:
        await hub.close()


@pytest.mark.parametrize("label", ["aenv.service", "aenv.replica", "aenv.outer", "aenv.made-by"])
async def test_labels_of_the_fabric_are_reserved(cast: Cast, label: str) -> None:
    """Invariant 15: with another owner's service, the replicas would wait until it ends."""
    body = {"envName": "probe", "labels": {label: "notes"}}
    for path, more in (("/env-instance", {}), ("/instances", {"count": 2})):
        refused = await cast.bob.post(path, json=body | more)
        assert refused.status_code == 400, refused.text
        assert f"label '{label}' is reserved" in refused.text
    listed = await cast.bench.gateway.deps.fabric.list_instances()
    assert not any(label in info.labels for info in listed)


async def test_a_service_shows_no_log_of_a_former_service_of_its_name(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: sandboxes of a deleted service finish their calls, and its name is free."""
    creator = cast.bench.gateway.creator
    for owner in ("alice", "bob"):
        options = CreateOptions(
            actor="shared", lifetime="detached", owner=owner, engine=None, idle_timeout=None,
            fabric_labels={SERVICE_LABEL: "desk"},
        )  # fmt: skip
        await creator.create(Creation("probe", options, 1, owner), 60.0)

    async def output(*_: object) -> AsyncGenerator[str]:
        yield "secret\n"

    monkeypatch.setattr(AsyncEnvHandle, "logs", output)
    owners = {info.id: info.owner for info in await cast.bench.fabric.list_instances()}
    assert sorted(filter(None, owners.values())) == ["alice", "bob"]
    desk = {"envName": "probe", "service_name": "desk"}
    assert (await cast.bob.post("/env-service", json=desk)).status_code == 200
    lines = (await cast.bob.get("/env-service/desk/logs")).text.splitlines()
    assert [owners[line.partition(":")[0]] for line in lines] == ["bob"]


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.USER, Role.PUBLISHER])
async def test_a_role_cannot_use_the_routes_of_a_higher_one(cast: Cast, role: Role) -> None:
    """Every route checks the role before it reads the body."""
    async with cast.bench.client(await cast.bench.token(role, "zoe")) as http:
        for route in cast.bench.gateway.control_api.routes:
            if not isinstance(route, ControlRoute) or not route.guards:
                continue
            if route.path.endswith("/sign"):
                continue  # its style decides, see the next test
            path = route.path.replace("{name}", "helper").replace("{version}", "1.0.0")
            path = path.replace("{id}", "x").replace("{digest}", "0" * 64)
            path = path.replace("{owner:path}", "zoe").replace("{reference}", "*")
            path = path.replace("{subject:path}", "owner:zoe")
            answer = await http.request(route.method, path, content=b"{}")
            is_refused = answer.status_code == 403 and "needs a token with role" in answer.text
            least = route.guards[0].least
            assert is_refused == (not role.includes(least)), f"{route.method} {route.path}"


async def test_new_tokens_have_the_lowest_role(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15; tokens with the earlier role owner may still publish."""
    made = (await cast.admin.post("/tokens", json={"owner": "carl"})).json()["data"]
    assert made["role"] == "user"
    old = (await cast.admin.post("/tokens", json={"owner": "carl", "role": "owner"})).json()["data"]
    assert old["role"] == "publisher"
    data = archived(tmp_path, "mine")
    async with cast.bench.client(made["token"]) as http:
        assert (await push(http, data)).status_code == 403
        assert (await http.post("/env/mine/1.0.0/sign?style=write")).status_code == 403
        assert (
            await http.post("/tokens", json={"owner": "carl", "role": "admin"})
        ).status_code == 403
        assert (await http.delete(f"/tokens/{old['id']}")).json()["data"] is False
    async with cast.bench.client(old["token"]) as http:
        assert (await push(http, data)).status_code == 200


# --- policy --------------------------------------------------------------------------------------


async def test_the_policy_is_checked_at_publish_at_create_and_for_services(
    cast: Cast, tmp_path: Path
) -> None:
    """The operator decides, and a refusal names the setting."""
    deps, now = cast.bench.gateway.deps, [Policy()]
    object.__setattr__(deps, "policy", lambda: now[0])
    cast.bench.gateway.creator._policy = lambda: now[0]
    cast.bench.gateway.services._policy = lambda: now[0]
    now[0] = STRICT
    config = {"name": "mine", "deployConfig": {"network": "host"}}
    refused = [
        await cast.alice.post("/env", json=config),
        await cast.alice.post("/env-instance", json={"envName": "probe"}),
        await cast.alice.post("/env-service", json={"envName": "probe"}),
        await cast.alice.post("/env-instance", json={"envName": "probe", "ttl": "30d"}),
    ]
    for answer in refused:
        assert answer.status_code == 403, answer.text
        assert answer.json()["error"]["code"] == PolicyRefused.code
        assert "AENV_" in answer.json()["error"]["hint"]


# --- audit log -----------------------------------------------------------------------------------


async def test_changes_of_rights_are_in_the_audit_log(cast: Cast, tmp_path: Path) -> None:
    """Refused attempts are too; secrets are not (invariant 10), and others cannot read it."""
    await push(cast.bob, archived(tmp_path, "helper", "99.0.0"))
    made = (await cast.admin.post("/tokens", json={"owner": "eve"})).json()["data"]
    await cast.admin.delete(f"/tokens/{made['id']}")
    await cast.alice.put("/names/helper/grants/bob", json={"right": "use"})
    log = (await cast.admin.get("/audit")).json()["data"]
    found = [(r["actor"], r["action"], r["subject"], r["outcome"]) for r in log]
    assert found == [
        ("alice", "grant.set", "helper", "ok"),
        ("root", "token.revoke", made["id"], "ok"),
        ("root", "token.create", made["id"], "ok"),
        ("bob", "publish", "", "forbidden"),
        ("alice", "publish", "helper@1.0.0", "ok"),
    ]
    assert log[0]["detail"] == {"owner": "bob", "right": "use"}
    assert made["token"] not in json.dumps(log)
    older = (await cast.admin.get(f"/audit?before={log[1]['id']}&limit=2")).json()["data"]
    assert [r["id"] for r in older] == [r["id"] for r in log[2:4]]
    for http in (cast.alice, cast.user):
        assert (await http.get("/audit")).status_code == 403


async def test_refused_attempts_are_recorded_and_displace_nothing(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A low role cannot hide its attempts, or push its actions out of the log."""
    monkeypatch.setattr(core, "AUDIT_KEPT", dict.fromkeys(core.AUDIT_KEPT, 100))
    refused = [
        await cast.user.post("/publish", json={"archive": cast.archive}),
        await cast.user.post("/tokens", json={"owner": "eve"}),
        await cast.user.put("/quotas/owner:una", json={"max_instances": 9}),
    ]
    assert {answer.status_code for answer in refused} == {403}
    assert (await cast.user.delete("/tokens/unknown")).json()["data"] is False
    log = (await cast.admin.get("/audit")).json()["data"]
    assert [(r["actor"], r["role"], r["action"], r["subject"], r["outcome"]) for r in log[:4]] == [
        ("una", "user", "token.revoke", "unknown", "not_found"),
        ("una", "user", "quota.set", "owner:una", "forbidden"),
        ("una", "user", "token.create", "", "forbidden"),
        ("una", "user", "publish", "", "forbidden"),
    ]
    for _ in range(500):
        await cast.bench.hub.record(AuditRecord(actor="una", action="publish", outcome="forbidden"))
    log = list(await cast.bench.hub.audit_log(1000))
    assert len(log) < 400
    assert (log[-1].action, log[-1].subject, log[-1].outcome) == ("publish", "helper@1.0.0", "ok")
    async with cast.bench.client("wrong") as nobody:
        assert (await nobody.post("/tokens", json={"owner": "eve"})).status_code == 401
    assert await cast.bench.hub.audit_log(1) == tuple(log[:1])


async def test_audit_records_of_a_low_role_displace_none_of_a_higher_one(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent tokens, which every owner creates, push no publish or grant out of the log."""
    monkeypatch.setattr(core, "AUDIT_KEPT", dict.fromkeys(core.AUDIT_KEPT, 100))
    made = (await cast.admin.post("/tokens", json={"owner": "eve"})).json()["data"]["id"]
    for role, actions in (
        (Role.USER, ["token.create", "token.revoke"]),
        (Role.PUBLISHER, ["token.create", "token.revoke"]),
        (Role.PUBLISHER, ["grant.set"]),
    ):
        for number in range(500):
            action = actions[number % len(actions)]
            await cast.bench.hub.record(AuditRecord(actor="una", role=role, action=action))
        log = await cast.bench.hub.audit_log(1000)
        assert ("token.create", made) in [(r.action, r.subject) for r in log]
        is_kept = ("publish", "helper@1.0.0") in [(r.action, r.subject) for r in log]
        assert is_kept or actions == ["grant.set"]  # publishers share their part of the log
    assert len(log) < 600
    assert sorted(log, key=lambda r: r.id and tuple(map(int, r.id.split("-")))) == list(log[::-1])


def test_every_audited_route_exists(cast: Cast) -> None:
    routes = cast.bench.gateway.control_api.routes
    names = {f"{r.method} {r.path}" for r in routes if isinstance(r, ControlRoute)}
    assert set(AUDITED) <= names


# --- addresses -----------------------------------------------------------------------------------


async def test_urls_in_responses_ignore_the_host_header(cast: Cast) -> None:
    """Invariant 10: a signed URL, which is a credential, is not sent to another machine."""
    for host in ("evil.example:8080", "evil.example", "a@evil.example"):
        headers = {"Host": host}
        signed = await cast.alice.post("/env/helper/1.0.0/sign?style=read", headers=headers)
        assert "evil" not in signed.text


async def test_the_host_header_does_not_replace_the_path_that_was_signed(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: so does Starlette before 1.0.1 (CVE-2026-48710)."""

    def url(self: HTTPConnection) -> URL:
        return URL(f"http://{self.headers['host']}{self.scope['path']}")

    assert (await push(cast.bob, archived(tmp_path, "mine"))).is_success
    monkeypatch.setattr(HTTPConnection, "url", property(url))
    for style, method in (("read", "GET"), ("write", "PUT")):
        made = await cast.bob.post(f"/env/mine/1.0.0/sign?style={style}")
        signed = URL(made.json()["data"])
        async with cast.bench.client(None) as http:
            for stolen in ("helper", "mine"):
                answer = await http.request(
                    method,
                    f"/archives/{stolen}/1.0.0?{signed.query}",
                    headers={"Host": f"x{signed.path}?"},
                    content=b"" if method == "GET" else b"archive",
                )
                assert answer.status_code == (403 if stolen == "helper" else 200), answer.text
