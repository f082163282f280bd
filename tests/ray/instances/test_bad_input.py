"""What a caller or a project can get wrong: a typed error that helps, and nothing left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    EnvironmentNotFound,
    InstanceNotFound,
    SandboxStartFailed,
    ToolInputInvalid,
    ToolNotFound,
)
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE

pytestmark = pytest.mark.usefixtures("cluster")

TOOL = (
    "from aenv_ray.runtime import register_tool\n@register_tool\ndef fine() -> int:\n    return 1\n"
)


@pytest.mark.parametrize(
    ("reference", "error", "says", "hints"),
    [
        ("no-such-thing", EnvironmentNotFound, "no-such-thing", "mini-terminal"),
        ("mini-terminal@9.9.9", EnvironmentNotFound, "9.9.9", "mini-terminal@1.0.0"),
        ("/no/such/dir", EnvironmentNotFound, "/no/such/dir", "aenv init"),
        ("./no-such-dir", EnvironmentNotFound, "no-such-dir", "aenv init"),
        ("Mini_Terminal", ConfigError, "Mini_Terminal", "lower-case"),
        ("mini-terminal@", ConfigError, "mini-terminal@", "name@version"),
        ("mini-terminal@1 0", ConfigError, "1 0", "name@version"),
        ("", ConfigError, "invalid environment name", "lower-case"),
        ("/tmp", EnvironmentNotFound, "config.json", "aenv init"),
    ],
)
def test_an_unknown_reference(
    reference: str, error: type[AenvError], says: str, hints: str
) -> None:
    """Unknown names, versions and paths are distinguished from malformed ones."""
    with pytest.raises(error, match=says.replace(".", r"\.")) as caught:
        aenv_ray.create(reference)
    assert hints in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ttl": "soon"}, "ttl 'soon'"),
        ({"ttl": "-5m"}, "ttl '-5m'"),
        ({"ttl": 0}, "ttl 0"),
        ({"ttl": -1}, "ttl -1"),
        ({"ttl": "400d"}, "30 days"),
        ({"ttl": float("nan")}, "ttl nan"),
        ({"ttl": float("inf")}, "ttl inf"),
        ({"ttl": True}, "ttl True"),
        ({"ttl": [1]}, "ttl"),
        ({"idle_timeout": "often"}, "idle timeout 'often'"),
        ({"idle_timeout": 0}, "idle timeout 0"),
        ({"actor": "lonely"}, "actor 'lonely'"),
        ({"lifetime": "eternal"}, "lifetime 'eternal'"),
        ({"engine": "steam"}, "engine 'steam'"),
        (
            {"environment_variables": {"N": 7}},
            r"environment_variables\['N'\] must be a string",
        ),
        ({"environment_variables": {7: "N"}}, "environment_variables"),
        ({"environment_variables": {"A=B": "x"}}, "environment_variables"),
        ({"environment_variables": {"A": "x\0y"}}, "environment_variables"),
        ({"environment_variables": {"": "x"}}, "environment_variables"),
        ({"labels": {"n": 7}}, r"labels\['n'\] must be a string, not int"),
        ({"arguments": [7]}, "arguments"),
        ({"arguments": "text"}, "arguments"),
        ({"owner": 7}, "owner"),
        ({"datasource": 7}, "datasource"),
    ],
    ids=str,
)
@pytest.mark.parametrize("actor", ["shared"])
def test_an_invalid_option(options: dict[str, Any], says: str, actor: str) -> None:
    """Each wrong option is a `ConfigError` that names it, before anything is made."""
    with pytest.raises(ConfigError, match=says):
        aenv_ray.create(PROBE, **{"actor": actor, **options})


@pytest.mark.parametrize("count", [0, -1, "3", 1.5, True, None])
def test_the_size_of_a_group_is_a_number_of_at_least_one(count: Any) -> None:
    """Said by `create_many` itself, not by what it calls."""
    with pytest.raises(ConfigError, match="count"):
        aenv_ray.create_many(PROBE, count)


@pytest.mark.parametrize("actor", ["shared", "dedicated"])
def test_a_group_beyond_the_clusters_capacity(actor: str) -> None:
    """Refused before its ten million specs are made, which would take minutes and gigabytes."""
    with pytest.raises(CapacityExceeded, match="no room for 10000000 instances"):
        aenv_ray.create_many(PROBE, 10**7, actor=actor)


def test_an_invalid_environment_name() -> None:
    """None and numbers are mistakes of the caller, in `create` and in `create_many`."""
    for wrong in (None, 5):
        with pytest.raises(ConfigError, match="environment"):
            aenv_ray.create(wrong)  # type: ignore[arg-type]  # the point of the test
        with pytest.raises(ConfigError, match="environment"):
            aenv_ray.create_many(wrong, 2)  # type: ignore[arg-type]  # the point of the test


def test_a_call_too_large_for_a_message_leaves_the_instance(env: Any) -> None:
    """The caller gets an error; the connection, and with it the instance, remains."""
    with pytest.raises(ToolInputInvalid, match="more than"):
        env.call_tool.remote("echo", {"text": "x" * 135_000_000})
    assert ray.get(env.call_tool.remote("add", {"a": 1, "b": 2})).data == 3


def test_an_unknown_option_is_a_mistake_of_the_program() -> None:
    """Python's own error names it, in `create` and in `create_many`."""
    with pytest.raises(TypeError, match="colour"):
        aenv_ray.create(PROBE, colour="blue")  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(TypeError, match="colour"):
        aenv_ray.create_many(PROBE, 2, colour="blue")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"name": "x",\n "version": }', r"config\.json, line 2"),
        ("", r"config\.json"),
        ("[]", r"config\.json: it is a list"),
        ("{}", r"config\.json: name"),
        ('{"name": "Not Valid"}', "Not Valid"),
        ('{"name": "x", "deployConfig": {"ttl": "soon"}}', "soon"),
        ('{"name": "x", "deployConfig": {"cpu": "many"}}', "many"),
        ('{"name": "x", "deployConfig": {"memory": "2 elephants"}}', "elephants"),
        ('{"name": "x", "deployConfig": {"network": "carrier"}}', r"deployConfig\.network"),
        (
            '{"name": "x", "deployConfig": {"environmentVariables": {"A": 1}}}',
            "environmentVariables",
        ),
        ('{"name": "x", "deployConfig": {"engine": "steam"}}', "steam"),
        ('{"name": "x", "deployConfig": {"engine": "process", "network": "internet"}}', "internet"),
        ('{"name": "x", "deployConfig": []}', "deployConfig"),
    ],
    ids=range(13),
)
def test_a_malformed_config(project: Callable[..., Path], config: str, says: str) -> None:
    """`ConfigError` names the file and the line or the field."""
    with pytest.raises(ConfigError, match=says):
        aenv_ray.create(project(TOOL, config=config), actor="shared")


def test_a_project_that_does_not_load(project: Callable[..., Path]) -> None:
    """`SandboxStartFailed` shows the reason; mended, the same path works."""
    with pytest.raises(SandboxStartFailed, match="no_such_module") as caught:
        aenv_ray.create(project("import no_such_module\n"), actor="shared")
    assert "aenv_ray/runtime" not in caught.value.message.splitlines()[0]
    handle = aenv_ray.create(project(TOOL), actor="shared")
    assert ray.get(handle.call_tool.remote("fine")).data == 1
    ray.get(handle.release.remote())


def test_a_dedicated_project_that_does_not_load_leaves_no_actor(
    project: Callable[..., Path],
) -> None:
    """The actor made for an instance that never came to be goes with it."""
    names = {row["name"] for row in ray.util.list_named_actors(all_namespaces=True)}
    with pytest.raises(SandboxStartFailed, match="not today"):
        aenv_ray.create(project("raise RuntimeError('not today')\n"), actor="dedicated")
    after = {row["name"] for row in ray.util.list_named_actors(all_namespaces=True)}
    assert not [name for name in after - names if name.startswith("written-")]


def test_a_project_without_tools_is_an_environment_without_tools(
    project: Callable[..., Path],
) -> None:
    """Functions and rewards alone are a valid environment; nothing at all is a mistake."""
    with pytest.raises(SandboxStartFailed, match="registers no tool"):
        aenv_ray.create(project("x = 1\n"), actor="shared")
    handle = aenv_ray.create(project(TOOL.replace("_tool", "_function")), actor="shared")
    assert ray.get(handle.list_tools.remote()) == []
    assert ray.get(handle.check_health.remote())["status"] in ("success", "healthy")
    assert ray.get(handle.call_function.remote("fine")) == 1
    ray.get(handle.release.remote())


def test_unknown_tools_functions_and_rewards(env: Any) -> None:
    """Unknown tools, functions and rewards are `ToolNotFound` with the name."""
    for reference in (
        env.call_tool.remote("nonsense"),
        env.call_function.remote("nonsense"),
        env.call_reward.remote(name="nonsense"),
        env.call_tool.remote("double", {"value": 1}),
        env.call_tool.remote("score"),
        env.call_tool.remote("health"),
        env.call_function.remote("score"),
    ):
        with pytest.raises(ToolNotFound) as caught:
            ray.get(reference)
        assert caught.value.tool_name or "is no" in caught.value.message
        assert caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "a"),
        ({"a": "one"}, "a"),
        ({"a": 1, "c": 2}, "c"),
        ({"a": None}, "a"),
        ({"a": 1.5}, "a"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(env: Any, arguments: dict[str, Any], says: str) -> None:
    """`ToolInputInvalid` names the tool and the argument, and the tool does not run."""
    with pytest.raises(ToolInputInvalid, match=rf"\b{says}\b") as caught:
        ray.get(env.call_tool.remote("add", arguments))
    assert caught.value.tool_name == "add"


@pytest.mark.parametrize("arguments", [[1], "text", 7])
def test_arguments_that_are_no_object(env: Any, arguments: Any) -> None:
    """`ToolInputInvalid`, however the caller got there."""
    with pytest.raises(ToolInputInvalid, match="object"):
        ray.get(env.call_tool.remote("add", arguments))


@pytest.mark.parametrize("name", ["", 7, None])
def test_an_invalid_tool_name(env: Any, name: Any) -> None:
    """A name that is no name is an error of the caller."""
    with pytest.raises((ConfigError, ToolInputInvalid, ToolNotFound)):
        ray.get(env.call_tool.remote(name))


@pytest.mark.parametrize("ttl", ["soon", 0, -1, "400d"])
def test_an_invalid_renewal(env: Any, ttl: Any) -> None:
    """`renew` checks as `create` does."""
    with pytest.raises(ConfigError, match="ttl"):
        env.renew.remote(ttl)


@pytest.mark.parametrize("instance_id", ["", "x", "../../etc/passwd", "probe-" + "a" * 500, "ü"])
def test_an_invalid_id(instance_id: str) -> None:
    """Any text may be asked for; it is not found."""
    with pytest.raises(InstanceNotFound):
        aenv_ray.get(instance_id)


def test_an_invalid_option_leaves_nothing(cluster: Cluster) -> None:
    """After everything above, no instance of these tests lives (each test checks it)."""
    del cluster
    assert [i for i in aenv_ray.list_instances() if i.reference == "written@1.0.0"] == []
