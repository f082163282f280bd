"""tau2-bench's requests to a model go to the host, and carry nothing but the conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import chat_module


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    requests: list[Any] = []

    def complete(messages: list[Any], **options: Any) -> dict[str, Any]:
        requests.append((messages, options))
        call = {"id": "c1", "function": {"name": "look", "arguments": '{"at": 1}'}}
        message = {"content": None, "tool_calls": [call]}
        return {"choices": [{"message": message}], "usage": {"prompt_tokens": 3}}

    monkeypatch.setattr(chat_module.chat_model, "complete", complete)
    yield requests
    for name in [name for name in sys.modules if name.partition(".")[0] == "litellm"]:
        del sys.modules[name]


def test_only_the_conversation_and_its_options_are_sent(asked: list[Any]) -> None:
    calls = [{"id": "c0", "type": "function"}]
    messages = [
        {"role": "assistant", "content": "Hello", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    answer = chat_module.completion(
        model=chat_module.USER_MODEL, api_key="secret", num_retries=3, messages=messages,
        tools=None, tool_choice=None, temperature=0.0, seed=7,
    )  # fmt: skip
    sent = [{"role": "assistant", "content": "Hello"}, messages[1]]
    assert asked == [(sent, {"temperature": 0.0, "seed": 7})]
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("c1", "look", '{"at": 1}')
    assert answer.get("usage").prompt_tokens == 3
    assert answer.get("usage").completion_tokens == 0


def test_it_is_found_as_litellm(asked: list[Any]) -> None:
    chat_module.install()
    from litellm import completion
    from litellm.caching.caching import Cache
    from litellm.main import ModelResponse

    assert completion is chat_module.completion
    assert Cache is object
    assert ModelResponse is chat_module.Answer


def call(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": arguments}}]}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    """Return what asks a model that gives these messages, one after another."""

    def completion(model: str, *messages: dict[str, Any]) -> tuple[Any, list[Any]]:
        answers, options = list(messages), []

        def complete(_: list[Any], **given: Any) -> dict[str, Any]:
            options.append(given)
            return {"choices": [{"message": answers.pop(0), "finish_reason": "length"}]}

        monkeypatch.setattr(chat_module.chat_model, "complete", complete)
        found = chat_module.completion(
            model=model, messages=[{"role": "user", "content": "Hello"}], temperature=0.0, seed=7
        )
        return found.choices[0].message, options

    return completion


@pytest.mark.parametrize(
    "useless", [{"content": None}, {}, {"content": " \n"}, call("{"), call("[1]")]
)
def test_an_answer_without_a_turn_of_the_user_is_asked_for_again(
    ask: Callable[..., tuple[Any, list[Any]]], useless: dict[str, Any]
) -> None:
    """The agent would be scored for a model that its limit of tokens cut."""
    message, options = ask(chat_module.USER_MODEL, useless, {"content": "Hi"})
    assert (message.content, message.tool_calls) == ("Hi", [])
    assert options == [{"temperature": 0.0, "seed": 7}, {}], "the same would be answered again"
    with pytest.raises(RuntimeError, match=r"3 answers .* \(finish_reason 'length'\)"):
        ask(chat_module.USER_MODEL, *(dict(useless) for _ in range(chat_module.ATTEMPTS)))


@pytest.mark.parametrize(
    "text", ['{"results": []}', '```json\n{"results": []}\n```', '\n```\n{"results": []}\n\n```\n']
)
def test_the_judge_may_put_its_answer_into_a_fence(
    ask: Callable[..., tuple[Any, list[Any]]], text: str
) -> None:
    message, options = ask("gpt-judge", {"content": text})
    assert json.loads(message.content) == {"results": []}
    assert len(options) == 1


def test_a_judge_that_gives_no_json_is_asked_again(
    ask: Callable[..., tuple[Any, list[Any]]],
) -> None:
    message, options = ask("gpt-judge", {"content": "All met."}, {}, {"content": "{}"})
    assert (message.content, len(options)) == ("{}", 3)
    with pytest.raises(RuntimeError, match="the last one has no JSON object"):
        ask("gpt-judge", *({"content": text} for text in ("Yes", "[]", "```json\n{\n```")))
