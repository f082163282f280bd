"""The hub actor on a real Ray with its own Redis: what dies, and what is not lost (invariant 5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.errors import ConfigError, VersionConflict
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.records import EnvironmentQuery, LeaseQuery, Quota, Role
from aenv_ray.hub.redis import keeper as redis_keeper
from tests.contract.hub.hub_contract import entry, lease
from tests.ray.cluster import Cluster
from tests.ray.faults import actor_pid, eventually, eventually_empty, kill

pytestmark = pytest.mark.redis

STRIKES = (10, 25, 40)
"""After how many acknowledged writes something dies."""


@pytest.fixture
def hub(cluster: Cluster) -> Iterator[HubClient]:
    del cluster
    yield hub_actor.ensure_hub()
    hub_actor.end_hub()
    eventually_empty(redis_pids)


def keeper_pid() -> int:
    lock = settings().data_dir / "hub" / redis_keeper.KEEPER_LOCK
    return int(eventually(lock.read_text))  # emptied before it is written


def redis_pids() -> list[int]:
    """Return the pids of the keeper and its Redis; a zombie counts as ended."""
    pid = keeper_pid()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [pid, *map(int, children)]
    return []


def kill_hub() -> None:
    kill(actor_pid(ray_api.find_actor(ray_api.HUB_NAME)))


def kill_redis() -> None:
    kill(eventually(lambda: redis_pids()[1:])[0])  # after another strike it may not be up yet


def kill_keeper() -> None:
    kill(eventually(redis_pids)[0])


def kill_hub_and_redis() -> None:
    kill_redis()
    kill_hub()


@pytest.mark.parametrize("strike", [kill_hub, kill_redis, kill_keeper, kill_hub_and_redis])
def test_no_acknowledged_write_is_lost_whatever_dies(
    hub: HubClient, strike: Callable[[], None]
) -> None:
    """Invariant 5; and clients see nothing of it but that it takes longer."""
    name = strike.__name__.replace("_", "-")
    acknowledged: list[str] = []
    numbers = itertools.count()

    async def write() -> None:
        while len(acknowledged) < 60:
            number = next(numbers)
            pushed = await hub.push(entry(name, f"1.{number}.0"))
            await hub.admit([lease(f"{name}-{number}", reference=pushed.reference)])
            acknowledged.append(pushed.version)
            if len(acknowledged) in STRIKES:  # the other writers go on meanwhile
                await asyncio.to_thread(strike)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(write())
        versions = {version.version for version in await hub.versions(name)}
        assert versions == set(acknowledged)
        page = await hub.leases(LeaseQuery(name=name, limit=1000))
        assert {item.reference for item in page.items} == {f"{name}@{v}" for v in acknowledged}
        assert len(page.items) == page.total == len(acknowledged)
        await hub.end_leases([item.id for item in page.items])

    asyncio.run(run())


def test_a_restarted_hub_finds_all_its_data(hub: HubClient) -> None:
    secret, _ = blocking(hub.create_token(Role.PUBLISHER, "somebody"))
    blocking(hub.push(entry("kept")))
    blocking(hub.set_quota(Quota(subject="owner:kept", max_instances=1)))
    hub_actor.end_hub()
    eventually_empty(redis_pids)
    hub_actor.end_hub()
    assert hub_actor.find_hub() is None
    again = hub_actor.ensure_hub()
    assert blocking(again.environment("kept")).reference == "kept@1.0.0"
    assert blocking(again.check_token(secret)) is not None
    assert blocking(again.quotas()) == {"owner:kept": (0, 1)}
    # A handle from before finds the new actor.
    assert blocking(hub.environments(EnvironmentQuery(name="kept"))).total == 1
    with pytest.raises(VersionConflict):
        blocking(hub.push(entry("kept", description="other")))


def test_a_redis_ends_with_the_last_hub_however_it_died(hub: HubClient) -> None:
    blocking(hub.status())
    assert redis_pids()
    ray_api.kill(ray_api.find_actor(ray_api.HUB_NAME))
    eventually_empty(redis_pids)
    eventually(lambda: hub_actor.find_hub() is None, what=lambda: "the hub is there")


def test_a_hub_whose_node_is_gone_is_not_made_again_without_its_data(
    hub: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking(hub.status())
    hub_actor.end_hub()
    monkeypatch.setattr(ray_api, "alive_nodes", lambda: {"another": 2})
    with pytest.raises(ConfigError, match="gone from the cluster") as caught:
        hub_actor.ensure_hub()
    assert "AENV_REDIS_URL" in str(caught.value.hint)


def test_settings_that_cannot_work_leave_no_hub_behind(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cluster
    monkeypatch.setenv("AENV_REDIS_URL", "redis://:geheim@host:port")
    settings.cache_clear()
    try:
        with pytest.raises(ConfigError) as caught:
            hub_actor.ensure_hub()
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert "geheim" not in str(caught.value)
    assert "AENV_REDIS_URL" in str(caught.value.hint)
    eventually(lambda: hub_actor.find_hub() is None, what=lambda: "the hub is there")
