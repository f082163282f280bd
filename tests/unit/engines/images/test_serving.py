"""How images serve instances, and which image a sidecar has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.images.serving import (
    ImageContent,
    Serving,
    choose,
    has_code,
    network_mode,
    server_command,
    sidecar_image,
)
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.project.config import DeployConfig
from aenv_ray.project.project import builtins


def content(**fields: Any) -> ImageContent:
    usual: dict[str, Any] = {
        "reference": "img", "python": (3, 11), "has_fitting_python": True, "has_shell": True,
        "has_aenvironment": False, "carries_runtime": False, "command": (), "ports": frozenset(),
    }  # fmt: skip
    return ImageContent(**{**usual, **fields})


def deploy(**fields: Any) -> DeployConfig:
    return DeployConfig.model_validate(fields)


PUBLISHED = "docker.io/swebench/sweb.eval.x86_64"
SERVER = {"ports": frozenset({"8081/tcp"})}
OLD: dict[str, Any] = {"python": (3, 9), "has_fitting_python": False}
NONE: dict[str, Any] = {"python": None, "has_fitting_python": False}


@pytest.mark.parametrize(
    ("facts", "code", "door", "serving"),
    [
        ({}, True, None, Serving.RUNTIME),
        (NONE, False, None, Serving.COMMANDS),
        ({}, False, "commands", Serving.COMMANDS),
        (SERVER, True, None, Serving.RUNTIME),
        (SERVER, False, None, Serving.PUBLIC),
        ({"has_aenvironment": True}, False, None, Serving.PUBLIC),
        ({"command": ("python3", "-m", "aenv.main", "/x")}, False, None, Serving.PUBLIC),
        ({"carries_runtime": True, **SERVER}, False, None, Serving.RUNTIME),
        ({**OLD, **SERVER}, True, None, Serving.PUBLIC),
        (OLD, True, None, Serving.COMMANDS),
        (NONE, True, None, Serving.COMMANDS),
        ({}, True, "public", Serving.PUBLIC),
        (SERVER, True, "commands", Serving.COMMANDS),
        ({}, False, "runtime", Serving.RUNTIME),
    ],
)
def test_image_and_project_decide_what_answers_calls(
    facts: dict[str, Any], code: bool, door: str | None, serving: Serving
) -> None:
    wanted = deploy(container={"door": door})
    chosen, lack = choose(wanted, content(**facts), has_code=code)
    assert chosen is serving
    assert bool(lack) == (serving is Serving.COMMANDS)


def test_the_reason_for_having_no_tools_is_given() -> None:
    assert "Python 3.9, and tools need 3.11" in choose(deploy(), content(**OLD), has_code=True)[1]
    assert "no python3" in choose(deploy(), content(**NONE), has_code=True)[1]
    assert "has no code" in choose(deploy(), content(**NONE), has_code=False)[1]


def test_an_image_that_can_run_nothing_is_refused() -> None:
    with pytest.raises(SandboxStartFailed, match=r"no python3.*no /bin/sh"):
        choose(deploy(), content(**NONE, has_shell=False), has_code=True)
    with pytest.raises(SandboxStartFailed, match="no Python files"):
        choose(deploy(), content(), has_code=False)
    with pytest.raises(SandboxStartFailed, match=r"Python 3\.9"):
        choose(deploy(container={"door": "runtime"}), content(**OLD), has_code=True)


def test_the_command_of_an_images_server() -> None:
    named = content(command=("run", "me"), **SERVER)
    assert server_command(named, ("-x",)) == ("run", "me", "-x")
    unnamed = content(has_aenvironment=True, command=("python3",))
    assert server_command(unnamed, ())[:4] == ("python3", "-m", "aenv.main", "/app/src")


def test_a_project_has_code_when_it_has_python_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert not has_code(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "setup.py").touch()
    assert not has_code(tmp_path), "if there is a src, only that counts"
    (tmp_path / "src" / "package").mkdir()
    (tmp_path / "src" / "package" / "tools.py").touch()
    assert has_code(tmp_path)


@pytest.mark.parametrize(
    ("prefix", "datasource", "image"),
    [
        (None, "docker.io/a/b:c", "docker.io/a/b:c"),
        ("", "a/b", "a/b"),
        ("docker.io/a/b:", "c", "docker.io/a/b:c"),
        ("docker.io/a/b", "c", "docker.io/a/b:c"),
        ("localhost:5000/a", "c", "localhost:5000/a:c"),
        ("docker.io/a/", "b:c", "docker.io/a/b:c"),
        ("docker.io/a/b:v1-", "c", "docker.io/a/b:v1-c"),
    ],
)
def test_the_sidecar_image_is_the_prefix_and_the_datasource(
    prefix: str | None, datasource: str, image: str
) -> None:
    assert sidecar_image("x@1", deploy(imagePrefix=prefix), datasource) == image


@pytest.mark.parametrize(
    ("datasource", "image"),
    [
        ("astropy__astropy-12907", f"{PUBLISHED}.astropy_1776_astropy-12907:latest"),
        ("chartjs__Chart.js-10301", f"{PUBLISHED}.chartjs_1776_chart.js-10301:latest"),
        ("docker.io/own/a__b-1:2", "docker.io/own/a__b-1:2"),
        ("own__image:1", "own__image:1"),
        ("debian", "debian"),
    ],
)
def test_a_datasource_of_swebench_may_be_an_instance_id(datasource: str, image: str) -> None:
    config = json.loads((builtins()["swebench"] / "config.json").read_text())
    assert sidecar_image("x@1", deploy(**config["deployConfig"]), datasource) == image
    assert sidecar_image("x@1", deploy(imagePrefix=""), datasource) == datasource


def test_the_image_of_instance_ids_names_them() -> None:
    with pytest.raises(ConfigError, match=r"instanceIdImage 'a/b': it does not contain {id}"):
        deploy(instanceIdImage="a/b")


def test_a_sidecar_image_needs_a_datasource() -> None:
    with pytest.raises(ConfigError, match=r"x@1 has a sidecar.*no datasource"):
        sidecar_image("x@1", deploy(imagePrefix="a/b"), "")


@pytest.mark.parametrize("name", ["DualContainer", "dualContainer"])
def test_both_spellings_request_a_sidecar(name: str) -> None:
    assert deploy(podTemplate=name).is_dual
    assert not deploy(podTemplate="singleContainer").is_dual


def test_the_default_network_is_the_nodes_unless_that_would_expose_something() -> None:
    dual = deploy(podTemplate="DualContainer")
    assert network_mode("x@1", deploy(), Serving.RUNTIME) == "host"
    assert network_mode("x@1", deploy(), Serving.PUBLIC) == "internet"
    assert network_mode("x@1", dual, Serving.RUNTIME) == "internet"
    assert network_mode("x@1", deploy(network="none"), Serving.PUBLIC) == "none"
    for wanted, serving in (
        (deploy(network="host"), Serving.PUBLIC),
        (deploy(network="host", podTemplate="DualContainer"), Serving.RUNTIME),
    ):
        with pytest.raises(ConfigError, match='x@1 cannot have network "host"'):
            network_mode("x@1", wanted, serving)
