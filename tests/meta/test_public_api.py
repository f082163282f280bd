"""The public names of `aenv_ray`, each documented."""

from __future__ import annotations

import inspect

import pytest

import aenv_ray
from aenv_ray import runtime

PUBLIC = [
    "AenvError", "EnvHandle", "Environment", "SyncEnvironment", "ToolResult", "agent_env", "create",
    "create_many", "get", "init", "list_instances", "release_many", "sample", "shutdown",
    "vector", "warm",
]  # fmt: skip
RUNTIME = [
    "Audio", "ChatEndpoint", "EmbeddedResource", "Image", "PromptMessage", "Registry",
    "current_call", "get_registry", "register_function", "register_health", "register_prompt",
    "register_reset", "register_resource", "register_reward", "register_tasks", "register_tool",
    "resource_updated",
    "serve_agent",
]  # fmt: skip


def test_the_public_names_are_these() -> None:
    """A change here affects every user and belongs in the changelog."""
    assert aenv_ray.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC
    assert len(PUBLIC) <= 16
    assert runtime.__all__ == RUNTIME


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(aenv_ray, name)
    assert inspect.getdoc(value)
    assert value.__module__.startswith("aenv_ray.")
    if inspect.isclass(value):
        for member, function in inspect.getmembers(value, inspect.isfunction):
            if not member.startswith("_"):
                assert inspect.getdoc(function), f"{name}.{member}"


@pytest.mark.parametrize("name", RUNTIME)
def test_every_name_for_environments_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(runtime, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = aenv_ray.no_such_name
