"""Which engines an instance may run on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.fabric import engine_choice
from aenv_ray.actors.fabric.create_options import CreateOptions, OwnOptions
from aenv_ray.actors.fabric.engine_choice import possible_engines
from aenv_ray.config import Settings
from aenv_ray.errors import ConfigError
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
    assert possible_engines(made()) == (("kubernetes",), True)
    assert possible_engines(made(engine="docker")) == (("docker",), True)
    assert possible_engines(made(engine="docker"), "process") == (("process",), True)
    with pytest.raises(ConfigError, match="unknown engine 'moon'"):
        possible_engines(made(), "moon")


def test_an_engine_that_lacks_a_second_container_is_refused_before_anything_is_built(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch)
    with pytest.raises(ConfigError, match=r"thing@1.0.0: .* no second container") as raised:
        possible_engines(made(podTemplate="DualContainer"), "process")
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
    assert possible_engines(made(**deploy)) == (engines, False)


def test_the_engines_of_the_clusters_workers_come_first(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, engine_slots="kubernetes=64,process=0,docker=8")
    assert possible_engines(made()).names == ("kubernetes", "docker", "process")


def test_an_image_of_one_instance_needs_an_engine_with_containers(
    made: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch)
    changes = DeployChanges(image="python:3.12")
    (spec,) = CreateOptions(changes=changes).specs(made(), 1, job_id=None)
    assert spec.possible_engines == ("docker", "kubernetes")
    (spec,) = CreateOptions().specs(made(), 1, job_id=None)
    assert spec.possible_engines == ("process", "docker", "kubernetes")
    own = OwnOptions(changes=changes).given_to(spec)
    assert (own.engine, own.possible_engines) == ("docker", ("docker", "kubernetes"))
    (spec,) = CreateOptions(engine="process").specs(made(), 1, job_id=None)
    assert OwnOptions(changes=changes).given_to(spec).possible_engines == ("process",)
