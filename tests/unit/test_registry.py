"""What an environment registers: names, rules, and what is refused at import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aenv_ray.runtime import (
    register_function,
    register_health,
    register_reward,
    register_tool,
)
from aenv_ray.runtime.faults import Fault
from aenv_ray.runtime.registry import Registry, get_registry, registering_in


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registering_in(Registry()):
        yield get_registry()


def echo(text: str = "") -> str:
    """Say it again.

    Args:
        text: What.
    """
    return text


def test_both_forms_of_a_decorator_leave_the_function_as_it_was(registry: Registry) -> None:
    def one() -> int:
        return 1

    def two() -> int:
        return 2

    assert register_tool(one) is one
    assert register_tool()(two) is two
    assert register_reward(one) is one
    assert register_reward()(two) is two
    assert register_function(one) is one
    assert register_function()(two) is two
    assert register_health()(one) is one
    assert list(registry.tools) == list(registry.rewards) == list(registry.functions)
    assert list(registry.tools) == ["one", "two"]
    assert registry.health is not None


def test_the_options_of_a_tool_reach_its_listing(registry: Registry) -> None:
    register_tool(name="say", description="Say.", timeout=3.0, idempotent=True)(echo)
    register_tool(echo)
    say, plain = registry.tool("say").mcp_tool(), registry.tool("echo").mcp_tool()
    assert (say["description"], say["annotations"]) == ("Say.", {"idempotentHint": True})
    assert (plain["description"], "annotations" in plain) == ("Say it again.", False)
    assert registry.tool("say").timeout_s == 3.0


def test_async_functions_are_known_whatever_their_form() -> None:
    async def later() -> None: ...

    class Object:
        __name__ = "object"

        async def __call__(self) -> None: ...

    registry = Registry()
    assert registry.add_tool(later).is_async
    assert registry.add_tool(Object(), name="object").is_async
    assert not registry.add_tool(echo).is_async


def make(number: int) -> Callable[[], int]:
    def made() -> int:
        return number

    return made


@pytest.mark.parametrize("add", [Registry.add_tool, Registry.add_reward, Registry.add_function])
def test_a_name_that_is_taken_is_refused_with_both_places(add: Callable[..., Any]) -> None:
    def made() -> None: ...

    registry = Registry()
    add(registry, make(1))
    with pytest.raises(ValueError, match=r"already (registered|served) by") as caught:
        add(registry, made)
    assert "made" in str(caught.value)


def test_two_tools_of_one_name_are_told_apart_by_file_and_line() -> None:
    def made() -> None: ...

    registry = Registry()
    registry.add_tool(make(1))
    with pytest.raises(ValueError, match=rf"{__file__}:\d+; .*{__file__}:\d+ needs another name"):
        registry.add_tool(made)


def test_the_same_function_may_register_again() -> None:
    """A notebook cell or a module that runs twice."""
    registry = Registry()
    for _ in range(2):
        registry.add_tool(make(1))
        registry.add_reward(make(1), default=True)
        registry.add_function(make(1))
        registry.set_health(make(1))
    assert (len(registry.tools), len(registry.rewards), len(registry.functions)) == (1, 1, 1)
    registry.add_tool(make(2))
    assert registry.tool("made").function() == 2, "the newest counts"


def test_a_tool_a_reward_and_a_function_may_share_a_name() -> None:
    registry = Registry()
    for add in (registry.add_tool, registry.add_reward, registry.add_function):
        add(echo)
    assert registry.tool("echo").kind == "tool"
    assert registry.reward("echo").kind == "reward"
    assert registry.function("echo").kind == "function"


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: float) -> None:
    """Invariant 9."""
    registry = Registry()
    for add in (registry.add_tool, registry.add_reward, registry.add_function):
        with pytest.raises(ValueError, match="not above zero"):
            add(echo, timeout_s=timeout_s)
    assert registry == Registry()


def test_the_first_reward_answers_unless_one_is_marked() -> None:
    registry = Registry()
    registry.add_reward(echo, name="first")
    registry.add_reward(echo, name="second")
    assert registry.reward().name == "first"
    registry.add_reward(echo, name="third", default=True)
    registry.add_reward(echo, name="fourth")
    assert registry.reward().name == "third"
    assert registry.reward("second").name == "second"


def test_two_default_rewards_are_refused_and_the_first_stays() -> None:
    registry = Registry()
    registry.add_reward(echo, name="first", default=True)
    with pytest.raises(ValueError, match="'second' and 'first' are both marked default"):
        registry.add_reward(echo, name="second", default=True)
    assert list(registry.rewards) == ["first"]


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    registry = Registry()
    with pytest.raises(Fault, match="registers no reward"):
        registry.reward()
    for find, kind in ((registry.tool, "tool"), (registry.function, "function")):
        with pytest.raises(Fault, match=f"no {kind} 'x'") as caught:
            find("x")
        assert caught.value.hint == f"the environment's {kind}s are: none"
    registry.add_reward(echo, name="b")
    registry.add_reward(echo, name="a")
    with pytest.raises(Fault) as caught:
        registry.reward("x")
    assert caught.value.hint == "the environment's rewards are: a, b"


@pytest.mark.parametrize(
    ("endpoint", "path"), [(None, "/functions/echo"), ("/x", "/x"), ("x/y", "/x/y")]
)
def test_a_function_has_a_path(endpoint: str | None, path: str) -> None:
    entry = Registry().add_function(echo, endpoint=endpoint, method="get")
    assert (entry.endpoint, entry.method) == (path, "GET")


def test_a_route_serves_one_function() -> None:
    def other() -> None: ...

    registry = Registry()
    registry.add_function(echo, endpoint="/x")
    with pytest.raises(ValueError, match="POST /x is already served by 'echo'"):
        registry.add_function(other, endpoint="x")
    registry.add_function(other, endpoint="/x", method="GET")
    assert list(registry.functions) == ["echo", "other"]


def test_a_method_that_http_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'FETCH' is none of GET"):
        Registry().add_function(echo, method="FETCH")


def test_there_is_one_health_check() -> None:
    registry = Registry()
    registry.set_health(echo)
    with pytest.raises(ValueError, match="'echo' is already registered"):
        registry.set_health(make(1))
    assert registry.health is not None
    assert registry.health.name == "echo"


def test_the_listing_has_aenvironments_form() -> None:
    registry = Registry()
    registry.add_function(echo)
    registry.add_reward(echo)
    registry.set_health(echo)
    registry.add_tool(echo)
    listing = registry.listing()
    assert listing["total"] == 3
    assert listing["functions"] == [
        {
            "name": "echo",
            "endpoint": "/functions/echo",
            "method": "POST",
            "description": "Say it again.",
            "parameters": {"text": {"type": "str", "default": ""}},
            "is_async": False,
        }
    ]
    assert listing["reward"][0]["endpoint"] == "/task/reward"
    assert (listing["health"][0]["endpoint"], listing["health"][0]["method"]) == ("/health", "GET")


def test_a_parameter_that_json_cannot_carry_fails_before_the_first_call() -> None:
    def positional(a: int, /) -> None: ...

    registry = Registry()
    registry.add_tool(positional)
    with pytest.raises(TypeError, match="positional-only"):
        registry.compile()


def test_clear_forgets_everything() -> None:
    registry = Registry()
    registry.add_tool(echo)
    registry.add_reward(echo, default=True)
    registry.add_function(echo)
    registry.set_health(echo)
    registry.clear()
    assert registry == Registry()
    registry.add_reward(make(1))
    assert registry.reward().name == "made"


def test_decorators_fill_the_registry_of_the_moment() -> None:
    one, two = Registry(), Registry()
    usual = get_registry()
    with registering_in(one):
        register_tool(echo)
        with registering_in(two):
            register_tool(name="inner")(echo)
        assert get_registry() is one
    assert get_registry() is usual
    assert (list(one.tools), list(two.tools)) == (["echo"], ["inner"])
