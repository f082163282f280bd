"""A tool is called by its own name, optionally prefixed with its environment and a slash."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.actors.calls.handle import EnvHandle, bare_tool_name
from aenv_ray.errors import ConfigError, ToolNotFound
from aenv_ray.ids import InstanceId


@pytest.mark.parametrize(
    ("name", "reference", "bare"),
    [
        ("echo", "env@1.0.0", "echo"),
        ("env@1.0.0/echo", "env@1.0.0", "echo"),
        ("env/echo", "env@1.0.0", "echo"),
        ("env/echo", "env", "echo"),
        ("env@1.0.0/echo", "env", "echo"),
        ("files/read", "env@1.0.0", "files/read"),
        ("env/files/read", "env@1.0.0", "files/read"),
        ("env@1.0.0/files/read", "env@1.0.0", "files/read"),
        ("mail@home", "env@1.0.0", "mail@home"),
        ("", "env@1.0.0", ""),
        ("echo", "./projects/env", "echo"),
    ],
)
def test_the_prefix_of_the_environment_is_removed(name: str, reference: str, bare: str) -> None:
    assert bare_tool_name(name, reference) == bare


@pytest.mark.parametrize("name", ["other@1.0.0/echo", "env@2.0.0/echo"])
def test_the_prefix_of_another_environment_is_rejected_with_a_hint(name: str) -> None:
    with pytest.raises(ToolNotFound, match=name) as caught:
        bare_tool_name(name, "env@1.0.0")
    assert caught.value.hint == "write env@1.0.0/echo or just echo"
    assert caught.value.tool_name == name


@pytest.mark.parametrize("name", [None, 3, b"echo", ["echo"]])
def test_a_name_that_is_not_a_string_is_a_config_error(name: Any) -> None:
    with pytest.raises(ConfigError, match="expected a string"):
        bare_tool_name(name, "env@1.0.0")


def test_a_forgotten_remote_raises_type_error() -> None:
    handle: Any = EnvHandle(InstanceId("env-abcdefgh"), "env@1.0.0", None, None)
    with pytest.raises(TypeError, match=r"\.remote\("):
        handle.call_tool("echo")


def test_a_handle_shows_its_instance() -> None:
    handle = EnvHandle(InstanceId("env-abcdefgh"), "env@1.0.0", None, None)
    assert repr(handle) == "EnvHandle('env-abcdefgh')"
