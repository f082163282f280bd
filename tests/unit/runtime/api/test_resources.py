"""MCP resources and prompts: URIs, what reading gives, messages."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.api.results import (
    Audio,
    EmbeddedResource,
    Image,
    PromptMessage,
    completion_result,
    prompt_result,
    resource_result,
    tool_result,
)
from aenv_ray.runtime.faults import Fault


def page(year: str, day: str = "today") -> str:
    return f"{day} of {year}"


@pytest.mark.parametrize(
    ("pattern", "uri", "arguments"),
    [
        ("notes://{year}", "notes://a%20b", {"year": "a b"}),
        ("notes://{year}", "notes://a/b", None),
        ("notes://{year}", "notes://", None),
        ("notes://{year}/{day}.md", "notes://2026/3.md", {"year": "2026", "day": "3"}),
        ("notes://{year}/{day}.md", "notes://2026/3xmd", None),
        ("notes://a+b/{year}", "notes://aab/1", None),
    ],
)
def test_a_template_gives_the_arguments_in_a_uri(
    pattern: str, uri: str, arguments: dict[str, str] | None
) -> None:
    found = Registry().add_resource(page, pattern).read_at(uri)
    assert (found and found.uri_arguments) == arguments


@pytest.mark.parametrize("uri", ["notes", "notes://today", "notes://{week}", "notes://{year}/{x}"])
def test_a_uri_that_does_not_fit_the_function_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"has no scheme|must have the same parameters"):
        Registry().add_resource(page, uri)


@pytest.mark.parametrize(
    "uri", ["notes://{year}/{year}", "notes://{year}{?day}", "notes://{year}}"]
)
def test_a_template_has_each_parameter_once_and_nothing_else_in_braces(uri: str) -> None:
    with pytest.raises(ValueError, match="is not a template"):
        Registry().add_resource(page, uri)


def test_a_long_uri_is_refused_before_it_is_matched() -> None:
    """Invariant 14: an agent could keep the runtime from running the reward."""
    registry = Registry()
    registry.add_resource(page, "notes://{year}-{day}")
    with pytest.raises(Fault, match="over 2000") as caught:
        registry.resource("notes://" + "-" * 1_000_000)
    assert caught.value.code == "tool_input_invalid"


def test_a_fixed_uri_comes_before_a_template() -> None:
    registry = Registry()
    registry.add_resource(page, "notes://{year}", name="any")
    registry.add_resource(lambda: "now", "notes://now", name="now")
    assert registry.resource("notes://now").function() == "now"
    assert registry.resource("notes://2026").uri_arguments == {"year": "2026"}
    with pytest.raises(ValueError, match="already registered"):
        registry.add_resource(lambda: "then", "notes://now", name="then")
    with pytest.raises(Fault, match="there is no resource 'other://x'") as caught:
        registry.resource("other://x")
    assert caught.value.hint == "the environment's resources are: notes://now, notes://{year}"


@pytest.mark.parametrize(
    ("value", "kind", "content"),
    [
        ("text", "text/plain", {"text": "text"}),
        (b"\x00\x01", "application/octet-stream", {"blob": "AAE="}),
        ({"a": 1}, "application/json", {"text": '{"a":1}'}),
        (None, "application/json", {"text": "null"}),
    ],
)
def test_contents_have_the_type_of_the_value(value: Any, kind: str, content: Any) -> None:
    expected = {"contents": [{"uri": "a://c", "mimeType": kind, **content}]}
    assert resource_result("a://c", "", value) == expected
    assert resource_result("a://c", "x/y", value)["contents"][0]["mimeType"] == "x/y"


def test_a_prompt_is_one_message_or_several() -> None:
    assert prompt_result(None, "hello") == {
        "description": "",
        "messages": [{"role": "user", "content": {"type": "text", "text": "hello"}}],
    }
    image, told = prompt_result("x", [Image(b"x"), PromptMessage("done", "assistant")])["messages"]
    assert image["content"] == {"type": "image", "data": "eA==", "mimeType": "image/png"}
    assert told == {"role": "assistant", "content": {"type": "text", "text": "done"}}


def test_a_tool_returns_audio_and_contents_of_resources() -> None:
    audio, text = tool_result([Audio(b"x"), EmbeddedResource("a://b", "hi")])["content"]
    assert audio == {"type": "audio", "data": "eA==", "mimeType": "audio/wav"}
    assert text == {
        "type": "resource",
        "resource": {"uri": "a://b", "mimeType": "text/plain", "text": "hi"},
    }


# --- completions ---------------------------------------------------------------------------------


def weeks(value: str, arguments: dict[str, str]) -> list[str]:
    return [f"{value} in {arguments.get('year', '?')}"]


def completed(registry: Registry, about: dict[str, str], name: str, value: str, **more: Any) -> Any:
    params = {"ref": about, "argument": {"name": name, "value": value}, **more}
    entry = registry.completion(params)
    return entry.function(**(entry.uri_arguments or {}))


def test_arguments_of_templates_and_prompts_are_completed() -> None:
    registry = Registry()
    registry.add_resource(page, "notes://{year}/{day}", completions={"year": ["2025", "2026"]})
    registry.add_prompt(page, completions={"day": weeks})
    template = {"type": "ref/resource", "uri": "notes://{year}/{day}"}
    assert completed(registry, template, "year", "2026") == ["2026"]
    assert completed(registry, template, "year", "20") == ["2025", "2026"]
    assert completed(registry, template, "day", "mon") == []
    prompt = {"type": "ref/prompt", "name": "page"}
    context = {"context": {"arguments": {"year": "2026"}}}
    assert completed(registry, prompt, "day", "mon", **context) == ["mon in 2026"]
    assert completed(registry, prompt, "day", "mon") == ["mon in ?"]
    assert registry.completes
    assert not Registry().completes


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({}, "tool_input_invalid"),
        ({"ref": {"type": "ref/prompt", "name": "no"}, "argument": {"name": "x"}}, "tool_not"),
        ({"ref": {"type": "ref/prompt", "name": "page"}, "argument": {"name": "x"}}, "tool_input"),
        ({"ref": {"type": "ref/resource", "uri": "no://x"}, "argument": {"name": "x"}}, "tool_not"),
    ],
)
def test_a_completion_of_nothing_is_refused(params: dict[str, Any], code: str) -> None:
    registry = Registry()
    registry.add_prompt(page)
    with pytest.raises(Fault) as caught:
        registry.completion(params)
    assert caught.value.code.startswith(code)


def test_completions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not one of its parameters"):
        Registry().add_prompt(page, completions={"week": []})
    with pytest.raises(TypeError, match="takes who"):
        Registry().add_prompt(page, completions={"day": lambda who: who})
    with pytest.raises(TypeError, match="not a list of strings"):
        Registry().add_resource(page, "notes://{year}/{day}", completions={"day": "monday"})


def test_no_more_completions_than_mcp_allows_are_sent() -> None:
    found = completion_result(str(number) for number in range(150))["completion"]
    assert (len(found["values"]), found["total"], found["hasMore"]) == (100, 150, True)
    assert completion_result(None)["completion"]["values"] == []
    for wrong in ("text", [1]):
        with pytest.raises(TypeError, match="not a list of texts"):
            completion_result(wrong)
