"""Attacks on the next owner of a service's name, by deletions and updates that come late.

Serve knows an application by the name of its service only. Each test stops a change of Alice's just
before it reaches Serve, until her service is deleted and Bob has its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from aenv_ray.hub.services import ServiceRecord
from aenv_ray.serve.services import service
from aenv_ray.serve.services.apps import ServiceState, ServiceStatus
from aenv_ray.serve.services.service import Services
from aenv_ray.serve.services.storage import StorageRequest
from tests.attacks.owners import Cast

pytestmark = pytest.mark.redis

PATH = "/env-service/desk"


class Gate:
    """Stops the first call of a blocking method until it is opened."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.calls: list[Any] = []
        self._method = method
        self._came = threading.Event()
        self._opened = threading.Event()
        self._passed = threading.Event()

    def __call__(self, subject: Any, **options: Any) -> Any:
        self.calls.append(subject)
        if len(self.calls) > 1:
            return self._method(subject, **options)
        self._came.set()
        assert self._opened.wait(60)
        try:
            return self._method(subject, **options)
        finally:
            self._passed.set()

    def open(self) -> None:
        """Let the call pass."""
        self._opened.set()

    @contextlib.asynccontextmanager
    async def stopping(self, work: Awaitable[Any]) -> AsyncIterator[asyncio.Future[Any]]:
        """Run the block while `work` stands at the gate; then let `work` end."""
        running = asyncio.ensure_future(work)
        try:
            assert await asyncio.to_thread(self._came.wait, 60)
            yield running
        finally:
            self.open()
            assert await asyncio.to_thread(self._passed.wait, 60)
            await asyncio.wait([running])


def beside(cast: Cast) -> Services:
    """Return the services as another replica of the gateway has them."""
    known = cast.bench.gateway.services
    return Services(
        cast.bench.hub, known._resolve, known._clock, cast.bench.apps,
        cast.bench.storage_nodes.delete, known._check_engines, known._policy,
    )  # fmt: skip


async def create(http: httpx.AsyncClient, **fields: Any) -> None:
    body = {"envName": "probe", "service_name": "desk", "replicas": 1}
    answer = await http.post("/env-service", json=body | fields)
    assert answer.status_code == 200, answer.text


async def delete(http: httpx.AsyncClient) -> None:
    answer = await http.delete(PATH)
    assert answer.status_code == 200, answer.text


async def passed_on(cast: Cast) -> None:
    """Have Alice delete her service, and Bob take its name."""
    await delete(cast.alice)
    await create(cast.bob)


async def check_bobs(cast: Cast) -> None:
    """Check that the service is Bob's, and runs."""
    record = await cast.bench.gateway.services.records.get("desk")
    assert record.owner == "bob"
    assert cast.bench.apps.deployed["desk"].uid == record.uid
    assert (await cast.bob.get(PATH)).json()["data"]["status"] == "Running"


async def test_a_late_deletion_leaves_the_service_of_the_next_owner(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: two replicas of the gateway delete one service, and one of them is slow."""
    apps = cast.bench.apps
    await create(cast.alice)
    monkeypatch.setattr(apps, "delete", gate := Gate(apps.delete))
    other = beside(cast)
    async with gate.stopping(other.delete(await other.records.get("desk"))):
        await passed_on(cast)
    await check_bobs(cast)


@pytest.mark.parametrize("change", ["delete", "deploy"])
async def test_a_cancelled_change_leaves_the_service_of_the_next_owner(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Invariant 15: what it has begun comes to its end all the same."""
    apps = cast.bench.apps
    await create(cast.alice)
    other = beside(cast)
    record = await other.records.get("desk")
    work = (
        other.delete(record)
        if change == "delete"
        else other.update(record, wait=False, storage=StorageRequest(), replicas=2)
    )
    monkeypatch.setattr(apps, change, gate := Gate(getattr(apps, change)))
    async with gate.stopping(work) as changed:
        await passed_on(cast)
        changed.cancel()
        for _ in range(5):  # meanwhile it could look at the record, and end too early
            await check_bobs(cast)
    assert changed.cancelled()
    await check_bobs(cast)


async def test_concurrent_deletions_reach_serve_once(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: the first one frees the name, and another owner may have it at once."""
    apps, services = cast.bench.apps, cast.bench.gateway.services
    await create(cast.alice)
    monkeypatch.setattr(apps, "delete", gate := Gate(apps.delete))
    end, begun = services.delete, asyncio.Semaphore(0)

    async def ended(record: ServiceRecord, **options: Any) -> None:
        begun.release()
        await end(record, **options)

    monkeypatch.setattr(services, "delete", ended)
    async with gate.stopping(cast.alice.delete(PATH)) as first:
        others = [asyncio.ensure_future(cast.alice.delete(PATH)) for _ in range(4)]
        for _ in (first, *others):
            await begun.acquire()
    answers = [(await one).status_code for one in (first, *others)]
    assert (answers, gate.calls) == ([200, 404, 404, 404, 404], ["desk"])
    await create(cast.bob)
    await check_bobs(cast)


async def test_a_late_update_leaves_the_service_of_the_next_owner(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: it finds no service of its own, and deletes what it has deployed."""
    apps = cast.bench.apps
    await create(cast.alice)
    monkeypatch.setattr(apps, "deploy", update := Gate(apps.deploy))
    async with update.stopping(cast.alice.put(PATH, json={"replicas": 2})) as updated:
        await delete(cast.alice)
        monkeypatch.setattr(apps, "delete", deletion := Gate(apps.delete))
        update.open()
        async with deletion.stopping(updated):
            await create(cast.bob)
    await check_bobs(cast)


async def test_a_start_of_a_gateway_leaves_the_service_of_the_next_owner(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: a gateway that starts deploys what Serve has lost, as it was a while ago."""
    apps = cast.bench.apps
    await create(cast.alice)
    deployed: list[str] = []
    deploy = apps.deploy

    def noted(record: ServiceRecord, *, wait: bool) -> None:
        deployed.append(record.owner)
        deploy(record, wait=wait)

    def states(records: Sequence[ServiceRecord]) -> list[ServiceState]:
        return [ServiceState(status=ServiceStatus.TERMINATED) for _ in records]

    with monkeypatch.context() as patched:
        patched.setattr(apps, "deploy", noted)
        patched.setattr(apps, "states", gate := Gate(states))
        async with gate.stopping(beside(cast).restore()) as restored:
            await passed_on(cast)
        restored.result()
    assert deployed == ["bob"]
    await check_bobs(cast)


async def test_a_late_rollback_leaves_the_service_of_the_next_owner(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: Alice's code would run in the service of Bob, and get its variables."""
    monkeypatch.setattr(service, "_ROLLBACK_POLL_S", 3600.0)  # below, one turn of its watching
    apps, services = cast.bench.apps, cast.bench.gateway.services
    await create(cast.alice, storage_size="10Gi")
    apps.broken_by = "BAD"
    answer = await cast.alice.put(PATH, json={"environment_variables": {"BAD": "x"}})
    assert answer.status_code == 200, answer.text
    updated = await services.records.get("desk")
    monkeypatch.setattr(apps, "deploy", gate := Gate(apps.deploy))
    async with gate.stopping(services._rollbacks.settle(updated)) as rolled_back:
        await passed_on(cast)
    assert rolled_back.result()
    assert gate.calls[0].taken_back
    await check_bobs(cast)
