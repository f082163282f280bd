"""A model's answer, read from chat-completion JSON or from the chunks of a stream."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.client.openai_names import openai_name
from aenv_ray.trajectories.storable import storable_text

_MOST_TOKENS: Final = 1 << 53
"""A larger number is none of tokens; floats are exact up to here."""


class InvalidAnswer(Exception):
    """An endpoint answered something that is not a chat completion."""


class ErrorAnswer(InvalidAnswer):
    """An endpoint answered an error with status 200, for example in a stream that had begun.

    Attributes:
        error: The error as it was sent: mostly an object with ``message`` and ``code``.
    """

    def __init__(self, error: Any) -> None:
        super().__init__(f"the answer is an error: {_shown(error)}")
        self.error = error


@dataclass(frozen=True)
class ToolRequest:
    """A tool call that a model asks for.

    Attributes:
        call_id: Unique in its answer.
        name: The name that the model used, with only characters that endpoints accept.
        arguments: JSON text as the model wrote it; it may be malformed.
    """

    call_id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """Return the call for the conversation; malformed arguments would be refused there."""
        arguments = self.arguments if _is_json_object(self.arguments) else "{}"
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


@dataclass(frozen=True)
class Completion:
    """One answer of a model.

    Attributes:
        text: Its text; empty if it only calls tools.
        requests: The tool calls that it asks for, to be run in parallel.
        refusal: Why the model refuses; None if it does not.
        reasoning: Reasoning text that some servers send beside the text; it is recorded only.
        finish_reason: ``stop``, ``tool_calls``, ``length``, ``content_filter``; None if unknown.
        prompt_tokens: Tokens of the prompt; 0 if the endpoint does not count them.
        completion_tokens: Tokens of the answer, likewise.
        cost: The cost that the endpoint names, in its currency; None if it names none from 0 on.
    """

    text: str = ""
    requests: tuple[ToolRequest, ...] = ()
    refusal: str | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.requests:
            message["tool_calls"] = [request.as_message() for request in self.requests]
        if self.refusal is not None:
            message["refusal"] = self.refusal
        return message


def read_completion(data: Any) -> Completion:
    """Return the answer of a chat completion.

    Raises:
        InvalidAnswer: `data` is not one.
        ErrorAnswer: It is an error.
    """
    _check_error(data)
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        raise InvalidAnswer(f"the answer has no message: {_shown(data)}")
    return read_message(message, _text(choice.get("finish_reason")), data.get("usage"))


def _check_error(data: Any) -> None:
    """Check that an answer, or a chunk of a stream, is not an error.

    Raises:
        ErrorAnswer: It is one.
    """
    if isinstance(data, Mapping) and data.get("error"):
        raise ErrorAnswer(data["error"])


def read_message(
    message: Mapping[str, Any], finish_reason: str | None = None, usage: Any = None
) -> Completion:
    """Return the answer of an assistant message.

    Raises:
        InvalidAnswer: It is not an assistant message.
    """
    if not message.keys() & {"content", "tool_calls", "refusal"}:
        raise InvalidAnswer(f"the answer's message is empty: {_shown(message)}")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if _is_text(part))
    if not isinstance(content, str | None) or not isinstance(calls, list):
        raise InvalidAnswer(f"the answer's message is malformed: {_shown(message)}")
    counted = usage if isinstance(usage, Mapping) else {}
    return Completion(
        text=_text(content) or "",
        requests=_requests(calls),
        refusal=_text(message.get("refusal")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        finish_reason=finish_reason,
        prompt_tokens=_count(counted.get("prompt_tokens")),
        completion_tokens=_count(counted.get("completion_tokens")),
        cost=_number(counted.get("cost")),
    )


def _requests(calls: list[Any]) -> tuple[ToolRequest, ...]:
    given = [_text(call.get("id")) if isinstance(call, Mapping) else None for call in calls]
    found: dict[str, ToolRequest] = {}
    for call, given_id in zip(calls, given, strict=True):
        function = call.get("function") if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        call_id = given_id
        if call_id is None or call_id in found:
            call_id = _free_id({*found, *given}, len(found))
        found[call_id] = ToolRequest(
            call_id,
            openai_name(_text(function.get("name")) or "unnamed", taken={}),
            storable_text(_arguments(function.get("arguments"))),
        )
    return tuple(found.values())


def _free_id(taken: Container[str | None], number: int) -> str:
    """Return an id for a call that has none, or that of another call of the answer."""
    return next(one for n in itertools.count(number) if (one := f"call_{n}") not in taken)


def _arguments(value: Any) -> str:
    """Return arguments as text; some servers send an object, or null for a call without any."""
    if not value:  # also {}, which may precede the text in a stream
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _text(value: Any) -> str | None:
    return storable_text(value) if isinstance(value, str) and value else None


def _count(value: Any) -> int:
    """Return a number of tokens, which some servers send as a float; 0 if it is none."""
    number = _number(value)
    return 0 if number is None or number > _MOST_TOKENS else int(number)


def _number(value: Any) -> float | None:
    """Return a number from 0; None if it is something else, such as NaN, which JSON may have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0 <= number < math.inf else None


def _shown(data: Any) -> str:
    return json.dumps(data, default=repr)[:200]


# --- streams --------------------------------------------------------------------------------------


@dataclass
class StreamedCompletion:
    """Joins the chunks of a streamed answer."""

    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    _texts: dict[str, str] = field(default_factory=dict)
    _calls: list[dict[str, str]] = field(default_factory=list)
    _current: dict[int | None, dict[str, str]] = field(default_factory=dict)
    """The last call of each index. Some servers send none, or the same one for parallel calls."""

    def add(self, chunk: Any) -> None:
        """Add a chunk.

        Raises:
            InvalidAnswer: It is not a chunk of a completion.
            ErrorAnswer: It is an error.
        """
        _check_error(chunk)
        try:
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"] or ():
                if choice.get("index", 0) == 0:
                    self.finish_reason = _text(choice.get("finish_reason")) or self.finish_reason
                    self._add_delta(choice.get("delta") or {})
        except (AttributeError, KeyError, TypeError):
            raise InvalidAnswer(
                f"the stream has a chunk that is not a completion's: {_shown(chunk)}"
            ) from None

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        for name in ("content", "refusal", "reasoning_content", "reasoning"):
            if isinstance(delta.get(name), str):
                self._texts[name] = self._texts.get(name, "") + delta[name]
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            index, call_id, name = part.get("index"), part.get("id"), function.get("name") or ""
            call = self._current.get(index)
            # A part with another id and no name may be arguments: vLLM has sent each with a new id.
            if call is None or (
                name and call["name"] and (index is None or (call_id and call_id != call["id"]))
            ):
                call = self._current[index] = {"id": "", "name": "", "arguments": ""}
                self._calls.append(call)
            call["id"] = call["id"] or call_id or ""
            call["name"] += name
            call["arguments"] += _arguments(function.get("arguments"))

    def finished(self) -> Completion:
        """Return the whole answer.

        Raises:
            InvalidAnswer: The stream ended before the answer did.
        """
        if self.finish_reason is None:
            raise InvalidAnswer("the stream ended before the answer did")
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in self._calls
        ]
        return read_message({**self._texts, "tool_calls": calls}, self.finish_reason, self.usage)
