"""Calls of a service's former owner on a real Serve, which finds services by their names only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import aenv_ray
from aenv_ray import serve as services
from aenv_ray.actors.calls.json_calls import InstanceCalls, JsonCall
from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.ray_shell import ray_serve
from aenv_ray.errors import ServiceUnavailable
from aenv_ray.hub import hub_actor
from aenv_ray.hub.services import ServiceRecord, ServiceRecords
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.serve.services import calls as service_calls
from aenv_ray.serve.services.apps import app_name
from aenv_ray.serve.services.calls import ServiceCalls, service_target
from aenv_ray.serve.services.service_replica import UID_LABEL
from tests.ray.faults import eventually
from tests.ray.services.services import WIDE_S, ServiceGateway, sandboxes

pytestmark = [pytest.mark.redis, pytest.mark.timeout(400)]

SOURCE = """
import os
from aenv_ray.runtime import register_function, register_health


@register_health
def health() -> dict:
    return {"status": "unhealthy" if "SICK" in os.environ else "healthy", "message": "as told"}


@register_function
def secret() -> str:
    return os.environ["SECRET"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    config = '{"name": "judge", "version": "1.0.0", "deployConfig": {"network": "host"}}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "src" / "tools.py").write_text(SOURCE)
    return tmp_path


def deployed(root: Path, owner: str, *, wait: bool, **variables: str) -> None:
    services.deploy(
        root, name="judge", owner=owner, environment_variables=variables, wait=wait,
        healthy_within_s=WIDE_S,
    )  # fmt: skip


async def target_of(name: str) -> tuple[str, ServiceRecord]:
    record = await ServiceRecords(hub_actor.ensure_hub()).get(name)
    return service_target(record.id, record.uid, record.revision), record


def waiting(handle: Any) -> int:
    """Return how many calls of a handle wait for a replica."""
    router = handle._router and handle._router._asyncio_router._request_router
    return 0 if router is None else int(router.num_pending_requests)


async def test_waiting_calls_do_not_reach_the_service_of_the_next_owner(
    service_gateway: ServiceGateway, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: Ann's calls wait for a replica that is never healthy, until Bob has the name.

    Serve gives them to Bob's first replica, with his variables.
    """
    monkeypatch.setattr(service_calls, "_REPLICA_WAIT_S", WIDE_S)
    fabric = AsyncFabric(driver_api.init())
    calls = ServiceCalls(fabric, InstanceCalls(fabric.handle, fabric.forget))
    await asyncio.to_thread(deployed, root, "ann", wait=False, SICK="yes")
    former, _ = await target_of("judge")
    call = JsonCall(former, "aenv/function", {"name": "secret", "arguments": {}}, {})

    async def follow() -> Any:
        return [news async for news in calls.follow(call, "named", Disconnect())]

    def is_deployed() -> bool:
        return app_name("judge") in ray_serve.applications()

    await asyncio.to_thread(eventually, is_deployed, WIDE_S)
    waits = [
        asyncio.ensure_future(work)
        for work in (calls.call(call, Disconnect()), follow(), calls.sandbox(former, ""))
    ]
    try:
        handle = await calls._handle_of("judge")
        await asyncio.to_thread(eventually, lambda: waiting(handle) == len(waits), WIDE_S)
        url = f"http://127.0.0.1:{service_gateway.settings.port}/env-service/judge"
        headers = {"Authorization": f"Bearer {service_gateway.token}"}
        async with httpx.AsyncClient(headers=headers, timeout=WIDE_S) as http:
            assert (await http.delete(url)).status_code == 200
        await asyncio.to_thread(deployed, root, "bob", wait=True, SECRET="bob's")
        for one in waits:
            with pytest.raises(ServiceUnavailable, match="another service judge got the call"):
                await one
        current, record = await target_of("judge")
        assert record.owner == "bob"
        answer = await calls.call(JsonCall(current, call.method, call.params, {}), Disconnect())
        assert b"bob's" in answer
        assert await calls.sandbox(current, "") in sandboxes("judge")
        labels = [one.labels for one in aenv_ray.list_instances() if one.owner == "bob"]
        assert [one[UID_LABEL] for one in labels] == [record.uid]
        with pytest.raises(TypeError):  # as a replica of an earlier version refuses the uid
            await handle.sandbox.remote(record.uid, "more")
    finally:
        for one in waits:
            one.cancel()
        await asyncio.to_thread(services.remove, "judge")


async def test_a_handle_that_was_ended_still_serves_its_calls(
    service_gateway: ServiceGateway, root: Path
) -> None:
    """One that is evicted from the cache of a gateway may have calls that run."""
    del service_gateway
    await asyncio.to_thread(deployed, root, "bob", wait=True, SECRET="bob's")
    try:
        handle = await asyncio.to_thread(ray_serve.own_handle, app_name("judge"))
        assert await handle.call_function.remote("secret") == "bob's"
        await asyncio.to_thread(ray_serve.end_handle, handle)
        assert await handle.call_function.remote("secret") == "bob's"
        assert ray_serve.app_handle(app_name("judge")) is not handle
    finally:
        await asyncio.to_thread(services.remove, "judge")
