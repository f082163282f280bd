"""A host refuses what the operator's policy forbids, whatever its callers checked before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aenv_ray.actors.host.host import Host
from aenv_ray.errors import PolicyRefused
from aenv_ray.models import InstanceInfo, InstanceSpec
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project import project
from aenv_ray.project.config import DeployChanges, NetworkMode
from aenv_ray.testing.contract_bench import eventually
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.unit.actors.host.pools import pooled

Spec = Callable[..., InstanceSpec]
OPEN = STRICT.model_copy(update={"networks": ("*",), "engines": ("*",)})


async def outcome_of(host: Host, spec: InstanceSpec) -> object:
    (outcome,) = await host.start([spec])  # type: ignore[misc]  # the project is there
    return outcome


@pytest.mark.parametrize(
    ("policy", "fields", "setting"),
    [
        (STRICT, {}, "AENV_ALLOW_ENGINES"),
        (OPEN.model_copy(update={"networks": ("none",)}), {}, "AENV_ALLOW_NETWORKS"),
        (OPEN, {"ttl_s": 8 * 86_400.0}, "AENV_MAX_TTL"),
        (OPEN, {"changes": DeployChanges(memory="1Ti")}, "AENV_MAX_MEMORY"),
        (OPEN, {"changes": DeployChanges(image="10.0.0.7/a")}, "AENV_ALLOW_IMAGES"),
    ],
)
async def test_a_start_that_the_policy_forbids_is_refused(
    open_host: Callable[..., Host], spec: Spec, policy: Policy, fields: dict[str, object],
    setting: str,
) -> None:  # fmt: skip
    """Defends invariant 7: no client of a host can skip the check."""
    host = open_host(MemoryInstanceStore(), lambda: policy)
    await host.open()
    outcome = await outcome_of(host, spec(**fields))
    assert isinstance(outcome, PolicyRefused)
    assert setting in str(outcome.hint)
    assert await host.instances() == []


async def test_a_renewal_is_no_longer_than_a_create(
    open_host: Callable[..., Host], spec: Spec
) -> None:
    host = open_host(MemoryInstanceStore(), lambda: OPEN)
    await host.open()
    made = await outcome_of(host, spec())
    assert isinstance(made, InstanceInfo)
    with pytest.raises(PolicyRefused, match="TTL"):
        await host.renew(made.id, 8 * 86_400.0)
    await host.release([made.id])


async def test_a_policy_that_becomes_strict_holds_for_the_next_start(
    open_host: Callable[..., Host], spec: Spec
) -> None:
    now = [Policy()]
    host = open_host(MemoryInstanceStore(), lambda: now[0])
    await host.open()
    made = await outcome_of(host, spec())
    assert isinstance(made, InstanceInfo)
    now[0] = OPEN.model_copy(update={"networks": (NetworkMode.NONE,)})
    assert isinstance(await outcome_of(host, spec()), PolicyRefused)
    await host.release([made.id])


async def test_warm_sandboxes_of_an_owners_projects_are_limited_together(
    open_host: Callable[..., Host], source: project.Project, spec: Spec
) -> None:
    """Invariant 7: a publisher with a quota of one instance would fill the host's slots."""
    policy = OPEN.model_copy(update={"max_warm": 3})
    store = MemoryInstanceStore()
    host = open_host(store, lambda: policy)
    await host.open()
    for version, warm in (("1", 2), ("2", 8)):
        deploy = f'{{"network": "none", "warm": {warm}}}'
        text = f'{{"name": "probe", "version": "{version}", "deployConfig": {deploy}}}'
        (source.path / "config.json").write_text(text)
        made = project.resolve(source.path)
        await host.put_project(made.digest, made.archive())
        outcome = await outcome_of(host, spec(digest=made.digest, owner="eve"))
        assert isinstance(outcome, InstanceInfo), "a project that requests more is not refused"
    await host.sweep()

    await eventually(lambda: len(pooled(store)) == 3, "as many as the policy allows are ready")
    await host.sweep()
    assert len(pooled(store)) == 3
