"""A host on an engine that a test can hold up, send away and ask what it made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.host.host import Host
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import new_instance_id
from aenv_ray.models import ActorDensity, InstanceSpec
from aenv_ray.policy import Policy
from aenv_ray.project import project
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.unit.actors.host.spy_engine import HOST, SpyEngine

TOOLS = """
from aenv_ray.runtime import register_tool
_calls = []
@register_tool
def count() -> int:
    _calls.append(1)
    return len(_calls)
"""


@pytest.fixture
def source(tmp_path: Path) -> project.Project:
    root = tmp_path / "probe"
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text('{"name": "probe", "deployConfig": {"network": "host"}}')
    (root / "src" / "tools.py").write_text(TOOLS)
    return project.resolve(root)


@pytest.fixture
async def engine() -> AsyncIterator[SpyEngine]:
    made = SpyEngine()
    yield made
    made.away_for = 0
    await made.stop(made.made)
    await made.close()


@pytest.fixture
async def open_host(
    tmp_path: Path, source: project.Project, engine: SpyEngine
) -> AsyncIterator[Callable[[InstanceStore], Host]]:
    opened: list[Host] = []

    def make(store: InstanceStore, policy: Callable[[], Policy] = Policy, **options: Any) -> Host:
        opened.append(
            Host(
                HOST, node_id="n", density=ActorDensity.SHARED, make_engine=lambda _: engine,
                policy=policy,
                store=store, projects_dir=tmp_path / "projects",
                requests_path=tmp_path / "pools" / "host.json", **options,
            )
        )  # fmt: skip
        return opened[-1]

    await make(MemoryInstanceStore()).put_project(source.digest, source.archive())
    yield make
    for host in opened:
        await host.close()


@pytest.fixture
def store() -> MemoryInstanceStore:
    return MemoryInstanceStore()


@pytest.fixture
async def host(open_host: Callable[[InstanceStore], Host], store: MemoryInstanceStore) -> Host:
    made = open_host(store)
    await made.open()
    return made


@pytest.fixture
def spec(source: project.Project) -> Callable[..., InstanceSpec]:
    def make(**fields: Any) -> InstanceSpec:
        values: dict[str, Any] = {
            "instance_id": new_instance_id("probe"), "reference": source.reference,
            "digest": source.digest, "ttl_s": 60.0, "engine": "fake", "job_id": "j1",
        }  # fmt: skip
        return InstanceSpec(**{**values, **fields})

    return make
