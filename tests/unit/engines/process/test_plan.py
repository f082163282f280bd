"""A plan is made once for all instances that it suits, and holds nothing of any of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.process import engine
from aenv_ray.engines.process.engine import ProcessEngine
from aenv_ray.engines.process.plan import Plan
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.project.config import EnvironmentConfig


def made(tmp_path: Path, isolation: Any = "auto") -> ProcessEngine:
    return ProcessEngine(
        HostId("h"), runtime_dir=tmp_path / "run", data_dir=tmp_path / "data", scope="s",
        owner_pid=1, isolation=isolation,
    )  # fmt: skip


def config(**deploy: Any) -> EnvironmentConfig:
    data = {"name": "x", "version": "1.0.0", "deployConfig": {"network": "none", **deploy}}
    return EnvironmentConfig.model_validate(data)


def spec(tmp_path: Path, **fields: Any) -> SandboxSpec:
    first = SandboxSpec(
        instance_id=InstanceId("x-00000001"), project_dir=tmp_path, config=config(), deadline=1e12
    )
    return replace(first, **fields)


async def plan_of(by: ProcessEngine, wanted: SandboxSpec) -> Plan:
    plan = await by._plan(wanted)
    assert isinstance(plan, Plan)
    return plan


async def test_instances_share_a_plan_that_holds_nothing_of_them(tmp_path: Path) -> None:
    """Invariant 10: the variables of one instance may be secrets."""
    by = made(tmp_path)
    secret = spec(
        tmp_path, environment_variables={"TOKEN": "secret"}, arguments=("secret",),
        labels={"a": "secret"}, datasource="secret",
    )  # fmt: skip
    plan = await plan_of(by, secret)
    # An equal configuration: a policy makes a new object for each instance.
    other = spec(tmp_path, instance_id=InstanceId("x-00000002"), config=config())
    assert await plan_of(by, other) is plan
    for preload in (True, False):
        assert "secret" not in json.dumps(plan.setup(preload=preload))


async def test_what_a_plan_depends_on_makes_another(tmp_path: Path) -> None:
    isolation = ["auto"]
    by = made(tmp_path, lambda: isolation[0])
    (tmp_path / "other").mkdir()

    async def key(**fields: Any) -> str:
        return (await plan_of(by, spec(tmp_path, **fields))).setup(preload=True)[0]

    keys = [
        await key(),
        await key(config=config(memory="64M")),
        await key(config=config(environmentVariables={"A": "1"})),
        await key(project_dir=tmp_path / "other"),
    ]
    isolation[0] = "required"
    keys.append(await key())
    assert len(set(keys)) == len(keys)
    isolation[0] = "auto"
    assert await key() == keys[0]


async def test_few_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_MAX_PLANS", 2)
    by = made(tmp_path)
    for name in "abc":
        (tmp_path / name).mkdir()
        await plan_of(by, spec(tmp_path, project_dir=tmp_path / name))
    assert len(by._plans) == 2


async def test_a_deleted_link_to_the_package_is_made_again(tmp_path: Path) -> None:
    by = made(tmp_path)
    await plan_of(by, spec(tmp_path))
    (link,) = (tmp_path / "data" / "runtime").glob("*/aenv_ray")
    link.unlink()
    await plan_of(by, spec(tmp_path))
    assert (link / "engines").is_dir()
