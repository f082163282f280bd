"""Quotas apply to instances that Ray code creates, and cost nothing where none is set."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.calls.handle import host_of
from aenv_ray.actors.fabric import quota_client
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.driver_api import init
from aenv_ray.actors.fabric.instance_batches import InstanceBatches
from aenv_ray.client import Environment
from aenv_ray.errors import EnvironmentInUse, QuotaExceeded, SandboxStartFailed
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.records import Lease, LeaseQuery, Quota
from aenv_ray.ids import InstanceId
from aenv_ray.project import project
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def started(cluster: Cluster) -> Iterator[HubClient]:
    del cluster
    init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quota_client, "FRESH_S", 0.0)
        yield hub_actor.ensure_hub()
    hub_actor.end_hub()


@pytest.fixture
def hub(started: HubClient) -> Iterator[HubClient]:
    yield started
    for subject in blocking(started.quotas()):
        blocking(started.delete_quota(subject))
    blocking(started.compare())


def limit(hub: HubClient, subject: str, count: int) -> None:
    blocking(hub.set_quota(Quota(subject=subject, max_instances=count)))


def used(hub: HubClient, subject: str) -> int:
    return blocking(hub.quotas())[subject][0]


def test_an_owner_cannot_exceed_its_quota(
    hub: HubClient, make: Callable[..., Any], density: str
) -> None:
    limit(hub, "owner:ann", 2)
    first = make(owner="ann", actor=density)
    make(owner="ann", actor=density)
    make(owner="bob")
    make()
    assert used(hub, "owner:ann") == 2
    with pytest.raises(QuotaExceeded, match="owner:ann") as caught:
        make(owner="ann", actor=density)
    assert caught.value.retry_after_s > 0
    with pytest.raises(QuotaExceeded):
        aenv_ray.create_many(PROBE, 3, owner="ann")
    ray.get(first.release.remote())
    again = make(owner="ann", actor=density)  # its place is seen to be free at once
    assert used(hub, "owner:ann") == 2
    leases = blocking(hub.leases(LeaseQuery(owner="ann"))).items
    assert again.instance_id in {lease.id for lease in leases}
    with pytest.raises(EnvironmentInUse):
        blocking(_push_and_delete(hub, leases[0].reference))


async def _push_and_delete(hub: HubClient, reference: str) -> None:
    from tests.contract.hub.hub_contract import entry

    name, version = reference.split("@")
    await hub.push(entry(name, version))
    await hub.delete_environment(name, version)


def test_a_failed_create_does_not_count_towards_the_quota(hub: HubClient, tmp_path: Any) -> None:
    limit(hub, "label:experiment=a", 1)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "broken.py").write_text("raise ValueError")
    (tmp_path / "config.json").write_text('{"name": "broken", "deployConfig": {"network": "none"}}')
    with pytest.raises(SandboxStartFailed):
        aenv_ray.create(tmp_path, labels={"experiment": "a"}, actor="shared")
    assert used(hub, "label:experiment=a") == 0


def test_pooled_instances_count_under_their_own_ids(
    hub: HubClient, make: Callable[..., Any]
) -> None:
    limit(hub, "owner:ann", 3)
    aenv_ray.warm(PROBE, 1, wait=True)
    try:
        handles = [make(owner="ann") for _ in range(2)]
    finally:
        aenv_ray.warm(PROBE, 0)
    leases = blocking(hub.leases(LeaseQuery(owner="ann"))).items
    assert {lease.id for lease in leases} == {handle.instance_id for handle in handles}
    deadline = ray.get(handles[0].renew.remote("2h"))
    blocking(hub.compare())

    def is_moved() -> bool:
        lease = blocking(hub.lease(handles[0].instance_id))
        return abs(lease.deadline - ray.get(handles[0].info.remote()).deadline) < 1

    eventually(is_moved, what=lambda: f"the deadline is not {deadline}")
    ray.get([handle.release.remote() for handle in handles])
    blocking(hub.compare())
    assert used(hub, "owner:ann") == 0


def test_without_a_quota_the_hub_is_not_asked(hub: HubClient, make: Callable[..., Any]) -> None:
    make(owner="ann", labels={"experiment": "a"})
    assert blocking(hub.leases(LeaseQuery(owner="ann"))).total == 0


async def test_a_create_that_is_cancelled_while_it_waits_for_room_no_longer_counts(
    hub: HubClient, make: Callable[..., Any]
) -> None:
    """Otherwise the owner's next create would be refused for minutes."""
    host = host_of(make())
    taken, capacity = await host.load.remote()
    others = [InstanceId(f"other-{number:08}") for number in range(capacity - taken)]
    assert await host.reserve.remote(others, 60.0)
    limit(hub, "owner:ann", 1)
    try:
        creating = asyncio.create_task(Environment(PROBE, actor="shared", owner="ann").initialize())
        await asyncio.to_thread(
            eventually, lambda: used(hub, "owner:ann") == 1, what=lambda: "nothing is claimed"
        )
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await asyncio.to_thread(
            eventually, lambda: used(hub, "owner:ann") == 0, what=lambda: "it still counts"
        )
    finally:
        await host.reserve.remote(others, 0.0)


async def test_a_create_that_is_cancelled_while_it_claims_its_quota_does_not_count(
    hub: HubClient, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(hub, "owner:ann", 1)
    asked, is_cancelled, answered = threading.Event(), threading.Event(), threading.Event()
    admit = HubClient.admit

    async def late(self: HubClient, leases: Sequence[Lease]) -> None:
        asked.set()
        await asyncio.to_thread(is_cancelled.wait)
        await admit(self, leases)
        answered.set()

    options = CreateOptions(actor="shared", owner="ann")
    batches = InstanceBatches(init(), project.load(PROBE), options, {})
    with monkeypatch.context() as patch:
        patch.setattr(HubClient, "admit", late)
        creating = asyncio.create_task(batches.create_group(1))
        await asyncio.to_thread(asked.wait)
        creating.cancel()
        asyncio.get_running_loop().call_later(0.5, is_cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await creating
        await asyncio.to_thread(answered.wait)
    assert used(hub, "owner:ann") == 0
    await asyncio.to_thread(make, owner="ann")
