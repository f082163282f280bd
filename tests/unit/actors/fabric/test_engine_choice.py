"""Which engines an instance may run on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.fabric import engine_choice
from aenv_ray.actors.fabric.create_options import CreateOptions, OwnOptions
from aenv_ray.actors.fabric.engine_choice import likely_engine, possible_engines
from aenv_ray.config import Settings
from aenv_ray.errors import ConfigError
from aenv_ray.policy import Policy
from aenv_ray.project import project
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.project import Project

MakeProject = Callable[..., Project]


@pytest.fixture
def made(tmp_path: Path) -> MakeProject:
    def make(**deploy: Any) -> Project:
        config = {"name": "thing", "version": "1.0.0", "deployConfig": deploy}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "src").mkdir(exist_ok=True)
        return project.load(tmp_path)

    return make


def given(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    monkeypatch.setattr(engine_choice, "settings", lambda: Settings(**settings))


def test_who_names_an_engine_gets_that_one(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller before the project, the project before the setting."""
    given(monkeypatch, engine="kubernetes")
    assert possible_engines(made(), Policy()) == (("kubernetes",), True)
    assert possible_engines(made(engine="docker"), Policy()) == (("docker",), True)
    assert possible_engines(made(engine="docker"), Policy(), "process") == (("process",), True)
    with pytest.raises(ConfigError, match="unknown engine 'moon'"):
        possible_engines(made(), Policy(), "moon")


def test_an_engine_that_lacks_a_second_container_is_refused_before_anything_is_built(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch)
    with pytest.raises(ConfigError, match=r"thing@1.0.0: .* no second container") as raised:
        possible_engines(made(podTemplate="DualContainer"), Policy(), "process")
    assert "docker engine" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("deploy", "engines"),
    [
        ({}, ("process", "docker", "kubernetes")),
        ({"network": "none"}, ("process", "docker", "kubernetes")),
        ({"network": "host"}, ("process", "docker")),
        ({"network": "internet"}, ("docker", "kubernetes")),
        ({"allow": ["pypi.org:443"]}, ("docker",)),
        ({"container": {"image": "python:3.12"}}, ("docker", "kubernetes")),
        ({"podTemplate": "DualContainer"}, ("docker", "kubernetes")),
    ],
)
def test_otherwise_it_is_what_the_project_needs_that_decides(
    made: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    deploy: dict[str, Any],
    engines: tuple[str, ...],
) -> None:
    given(monkeypatch)
    assert possible_engines(made(**deploy), Policy()) == (engines, False)


def test_the_engines_of_the_clusters_workers_come_first(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, engine_slots="kubernetes=64,process=0,docker=8")
    assert possible_engines(made(), Policy()).names == ("kubernetes", "docker", "process")


@pytest.mark.parametrize(
    ("allowed", "engines"),
    [
        (("docker",), ("docker",)),
        (("docker", "process"), ("docker", "process")),
        (("runsc",), ("kubernetes", "docker", "process")),  # for the policy's refusal
    ],
)
def test_no_engine_is_chosen_that_the_policy_forbids(
    made: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    allowed: tuple[str, ...],
    engines: tuple[str, ...],
) -> None:
    """Otherwise instances would be placed where they are refused, while others have room."""
    given(monkeypatch, engine_slots="kubernetes=64,docker=8")
    policy = Policy(engines=allowed)
    assert possible_engines(made(), policy).names == engines
    assert possible_engines(made(), policy, "process") == (("process",), True)
    assert likely_engine(made(), policy) == engines[0]
    (spec,) = CreateOptions().specs(made(), 1, job_id=None, policy=policy)
    assert (spec.engine, spec.possible_engines) == (engines[0], engines)


def test_an_image_is_never_of_an_engine_without_containers(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the policy allows only such an engine, it refuses the instance."""
    given(monkeypatch)
    policy = Policy(engines=("process",))
    (spec,) = CreateOptions().specs(made(), 1, job_id=None, policy=policy)
    own = OwnOptions(changes=DeployChanges(image="python:3.12")).given_to(spec)
    assert own.possible_engines == ("docker", "kubernetes")


def test_an_image_of_one_instance_needs_an_engine_with_containers(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch)
    changes = DeployChanges(image="python:3.12")
    (spec,) = CreateOptions(changes=changes).specs(made(), 1, job_id=None, policy=Policy())
    assert spec.possible_engines == ("docker", "kubernetes")
    (spec,) = CreateOptions().specs(made(), 1, job_id=None, policy=Policy())
    assert spec.possible_engines == ("process", "docker", "kubernetes")
    own = OwnOptions(changes=changes).given_to(spec)
    assert (own.engine, own.possible_engines) == ("docker", ("docker", "kubernetes"))
    (spec,) = CreateOptions(engine="process").specs(made(), 1, job_id=None, policy=Policy())
    assert OwnOptions(changes=changes).given_to(spec).possible_engines == ("process",)
