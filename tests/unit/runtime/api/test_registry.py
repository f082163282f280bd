"""Decorators and the registry that they fill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aenv_ray.runtime import (
    Registry,
    get_registry,
    register_function,
    register_health,
    register_reward,
    register_tool,
)
from aenv_ray.runtime.api.registry import registering_in
from aenv_ray.runtime.faults import Fault


@pytest.fixture
def registry() -> Iterator[Registry]:
    """Yield a registry of this test's own, which the decorators fill."""
    own = Registry()
    with registering_in(own):
        yield own


def test_tools_keep_working_as_functions(registry: Registry) -> None:
    @register_tool
    def bare(x: int) -> int:
        return x + 1

    @register_tool(name="called-name", description="Said.", timeout=2.0, idempotent=True)
    async def called(x: int) -> int:
        return x

    assert bare(1) == 2
    assert list(registry.tools) == ["bare", "called-name"]
    assert not registry.tools["bare"].is_async
    entry = registry.tools["called-name"]
    assert entry.is_async
    assert entry.timeout_s == 2.0
    assert entry.mcp_tool()["annotations"] == {"idempotentHint": True}
    assert entry.mcp_tool()["description"] == "Said."
    assert "description" not in registry.tools["bare"].mcp_tool()  # in MCP it is never null
    assert get_registry() is registry


def test_the_registry_of_the_process_is_untouched_by_another() -> None:
    before = dict(get_registry().tools)
    with registering_in(Registry()) as _:
        register_tool(lambda: None)
    assert get_registry().tools == before


def test_every_decorator_works_with_and_without_parentheses(registry: Registry) -> None:
    @register_reward
    def one() -> float:
        return 1.0

    @register_reward(name="two", timeout=1.0)
    def second() -> float:
        return 2.0

    @register_function
    def three() -> None: ...

    @register_function(endpoint="admin/four", method="put")
    async def four() -> None: ...

    @register_health()
    def health() -> dict[str, str]:
        return {"status": "healthy"}

    assert list(registry.rewards) == ["one", "two"]
    assert registry.functions["three"].endpoint == "/functions/three"
    assert (registry.functions["four"].endpoint, registry.functions["four"].method) == (
        "/admin/four", "PUT",
    )  # fmt: skip
    assert registry.health is not None
    assert registry.health.name == "health"
    listing = registry.listing()
    assert listing["total"] == 5
    assert listing["functions"][1]["is_async"] is True


def test_calls_without_a_name_run_the_default_or_the_first_reward(registry: Registry) -> None:
    @register_reward
    def first() -> float:
        return 1.0

    assert registry.reward().name == "first"

    @register_reward(default=True)
    def marked() -> float:
        return 2.0

    @register_reward
    def last() -> float:
        return 3.0

    assert registry.reward().name == "marked"
    assert registry.reward("last").name == "last"

    def another() -> float:
        return 4.0

    with pytest.raises(ValueError, match="both marked default"):
        registry.add_reward(another, default=True)


def test_without_a_reward_the_call_is_refused_with_a_hint(registry: Registry) -> None:
    with pytest.raises(Fault, match="registers no reward") as raised:
        registry.reward()
    assert "register_reward" in str(raised.value.hint)


DUPLICATES: list[Callable[[Registry, Callable[..., Any]], Any]] = [
    lambda r, f: r.add_tool(f, name="same"),
    lambda r, f: r.add_reward(f, name="same"),
    lambda r, f: r.add_function(f, endpoint="/same"),
    lambda r, f: r.set_health(f),
]


@pytest.mark.parametrize("add", DUPLICATES, ids=["tool", "reward", "endpoint", "health"])
def test_two_functions_under_one_name_are_refused(
    add: Callable[[Registry, Callable[..., Any]], Any],
) -> None:
    def one() -> None: ...

    def two() -> None: ...

    registry = Registry()
    add(registry, one)
    add(registry, one)  # a notebook's cell that ran again
    with pytest.raises(ValueError, match="already"):
        add(registry, two)


def test_endpoints_differ_by_method() -> None:
    def read() -> None: ...

    def write() -> None: ...

    registry = Registry()
    registry.add_function(read, endpoint="/state", method="GET")
    registry.add_function(write, endpoint="/state", method="POST")
    with pytest.raises(ValueError, match="'FETCH'"):
        registry.add_function(lambda: None, method="FETCH")


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_must_be_positive(registry: Registry, timeout: float) -> None:
    with pytest.raises(ValueError, match="not a positive number"):
        register_tool(timeout=timeout)(lambda: None)
    assert registry.tools == {}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    registry = Registry()
    registry.add_tool(lambda: None, name="b")
    registry.add_tool(lambda: None, name="a")
    with pytest.raises(Fault, match="no tool 'c'") as raised:
        registry.tool("c")
    assert "a, b" in str(raised.value.hint)
    with pytest.raises(Fault, match="no function 'x'"):
        registry.function("x")


def test_clear_removes_everything(registry: Registry) -> None:
    @register_reward(default=True)
    def one() -> float:
        return 1.0

    registry.clear()
    assert registry.rewards == {}
    with pytest.raises(Fault):
        registry.reward()


def test_compile_finds_a_parameter_without_a_json_schema() -> None:
    import threading

    def locked(lock: threading.Thread) -> None: ...

    registry = Registry()
    registry.add_tool(locked)
    with pytest.raises(TypeError, match="locked"):
        registry.compile()


def test_compile_leaves_nothing_to_find_out_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fork of a template would find it out again, and copy pages for it."""
    registry = Registry()
    entry = registry.add_tool(lambda x: x, name="tool")
    registry.compile()
    monkeypatch.setattr("aenv_ray.runtime.api.registry.inspect", None)
    assert not entry.is_async


def test_callable_objects_and_bound_methods_are_tools() -> None:
    class Tool:
        """A tool with state."""

        async def __call__(self, x: int) -> int:
            return x

        def method(self, y: int) -> int:
            return y

    registry = Registry()
    assert registry.add_tool(Tool(), name="object").is_async
    assert not registry.add_tool(Tool().method).is_async
    registry.add_tool(functools.partial(Tool().method, y=1), name="partial")
    registry.compile()
    assert registry.tools["object"].mcp_tool()["inputSchema"]["required"] == ["x"]
    assert registry.tools["method"].signature.names == ["y"]
    assert registry.tools["partial"].signature.bind("partial", {}) == {"y": 1}


@pytest.mark.parametrize("add", ["add_tool", "add_reward", "add_function", "set_health"])
def test_an_object_that_is_not_a_named_function_is_refused(add: str) -> None:
    register: Any = getattr(Registry(), add)
    with pytest.raises(TypeError, match="not 'search'; pass settings by keyword, as in name=…"):
        register("search")
    with pytest.raises(TypeError, match="has no name: "):
        register(functools.partial(print))
