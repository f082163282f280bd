"""Stands in for the package ``litellm``, with which tau2-bench asks chat models.

The real one would need the endpoint's key in the sandbox, and takes twenty seconds to import. This
one asks through the instance's host, which has the key. It offers what tau2-bench imports.
"""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from aenv_ray.runtime import chat_model

_PASSED_ON = ("temperature", "top_p", "max_tokens", "seed", "stop", "response_format")
USER_MODEL: Final = "host"
"""The model's name in requests of the simulated user; all others are the judge's."""
ATTEMPTS: Final = 3
_FENCED: Final = re.compile(r"\s*```\w*\s*\n(.*)\n\s*```\s*", re.DOTALL)


class Answer(SimpleNamespace):
    """A chat completion, as attributes."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        """Return nothing: the trajectory does not keep raw answers."""
        return {}


def completion(*, model: str, messages: list[dict[str, Any]], **options: Any) -> Answer:
    """Return the model's answer; the operator chooses the model.

    An answer that tau2-bench cannot use is asked for again: it says nothing about the agent.

    Raises:
        Fault: As `aenv_ray.runtime.chat_model.complete`.
        RuntimeError: None of the answers can be used.
    """
    wanted = {name: options[name] for name in _PASSED_ON if options.get(name) is not None}
    for name in ("tools", "tool_choice"):
        if options.get(name):
            wanted[name] = options[name]
    # As litellm does: tau2-bench writes `"tool_calls": None`, and the API knows only arrays there.
    sent = [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]
    for _ in range(ATTEMPTS):
        answer = chat_model.complete(sent, **wanted)
        message = answer["choices"][0]["message"]
        if model != USER_MODEL:
            message["content"] = _without_fence(message.get("content") or "")
        lack = _lack(message, is_judge=model != USER_MODEL)
        if not lack:
            return _attributes(answer)
        for name in ("temperature", "seed"):  # with them, the answer would be the same again
            wanted.pop(name, None)
    reason = answer["choices"][0].get("finish_reason")
    raise RuntimeError(
        f"{ATTEMPTS} answers of the chat model could not be used; the last one has {lack} "
        f"(finish_reason {reason!r})"
    )


def _without_fence(text: str) -> str:
    """Return a text without Markdown's fence, in which many models put JSON."""
    fenced = _FENCED.fullmatch(text)
    return fenced[1] if fenced else text


def _lack(message: dict[str, Any], *, is_judge: bool) -> str:
    """Return why tau2-bench cannot use an answer, in words; "" if it can."""
    if is_judge:
        return "" if _is_object(message["content"]) else "no JSON object"
    calls = message.get("tool_calls") or []
    if not all(_is_object(call["function"]["arguments"]) for call in calls):
        return "arguments that are no JSON object"
    return "" if calls or (message.get("content") or "").strip() else "neither text nor tool calls"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def _attributes(answer: dict[str, Any]) -> Answer:
    message = answer["choices"][0]["message"]
    calls = [
        SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
        for call in message.get("tool_calls") or []
    ]
    usage = answer.get("usage") or {}
    return Answer(
        model=answer.get("model", ""),
        choices=[
            SimpleNamespace(
                finish_reason=answer["choices"][0].get("finish_reason"),
                message=SimpleNamespace(
                    role="assistant", content=message.get("content"), tool_calls=calls
                ),
            )
        ],
        usage=SimpleNamespace(
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
        ),
    )


def install() -> None:
    """Put the stand-in where ``import litellm`` finds it."""
    package = ModuleType("litellm")
    package.__path__ = []
    caching, cache, main = (
        ModuleType(f"litellm.{name}") for name in ("caching", "caching.caching", "main")
    )
    caching.__path__ = []
    parts: dict[str, Any] = {
        "completion": completion,
        "completion_cost": lambda **_: 0.0,
        "enable_cache": lambda: None,
        "disable_cache": lambda: None,
    }
    package.__dict__.update(parts)
    cache.Cache = object  # type: ignore[attr-defined]
    main.ModelResponse = main.Usage = Answer  # type: ignore[attr-defined]
    for module in (package, caching, cache, main):
        sys.modules[module.__name__] = module
