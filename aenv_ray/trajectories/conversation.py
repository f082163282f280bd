"""An episode as a reader follows it: what the model was told and said, with the tool calls between.

The steps of an episode have the ids of aenv-ray, and its messages those of the model. So a call in
a message is matched with the first step of that tool and these arguments.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.client.openai_names import openai_name
from aenv_ray.trajectories.schema import Episode, Step, Usage
from aenv_ray.units import counted

_CUT: Final = "\n[truncated: "
"""How the note begins that a policy adds to a result that it cuts."""


@dataclass(frozen=True)
class MessagePart:
    """A message, or a part of one, that no step shows.

    Attributes:
        who: Its role, such as ``user`` or ``assistant``, and what part it is.
        text: Its text; empty if an answer of the model was.
    """

    who: str
    text: str


@dataclass(frozen=True)
class NumberedStep:
    """A tool call.

    Attributes:
        number: Its number among the steps of the episode.
        step: The step.
    """

    number: int
    step: Step


def in_order(episode: Episode) -> list[MessagePart | NumberedStep]:
    """Return the messages and steps of an episode in order; the instruction, if no message has it.

    A step that no message asks for is at the end, or, without messages, where it was made.
    """
    found: list[MessagePart | NumberedStep] = []
    steps: defaultdict[tuple[str, str], deque[NumberedStep]] = defaultdict(deque)
    left = [NumberedStep(number, step) for number, step in enumerate(episode.steps)]
    for one in left:
        steps[openai_name(one.step.tool, taken={}), _canonical(one.step.arguments)].append(one)
    results: dict[str, Step] = {}
    for message in episode.messages:
        if message.get("role") == "tool":
            found += _result(message, results)
            continue
        found += _texts(message)
        for call in _list(message.get("tool_calls")):
            name, arguments = _called(call)
            if waiting := steps[openai_name(name, taken={}), _canonical(arguments)]:
                done = waiting.popleft()
                left.remove(done)
                results[_id(call)] = done.step
                found.append(done)
            else:
                results.pop(_id(call), None)  # ids may repeat in later answers
                found.append(
                    MessagePart(f"assistant, call of {name or 'no tool'}", _text(arguments))
                )
    instruction = episode.task.instruction if episode.task is not None else ""
    if instruction and not any(
        isinstance(one, MessagePart) and instruction in one.text for one in found
    ):
        found.insert(0, MessagePart("instruction", instruction))
    return found + left


def used(usage: Usage | None) -> str:
    """Return the requests, tokens and cost of an episode as text; empty if none are known."""
    if usage is None:
        return ""
    cost = "" if usage.cost is None else f", cost {usage.cost:.6g}"
    return (
        f"{counted(usage.requests, 'request')}, {usage.prompt_tokens:,} prompt tokens, "
        f"{usage.completion_tokens:,} completion tokens{cost}"
    )


def _texts(message: Mapping[str, Any]) -> list[MessagePart]:
    """Return the texts of a message, reasoning first; an answer without any is an empty text."""
    role = str(message.get("role"))
    parts = {
        f"{role}, reasoning": message.get("reasoning") or message.get("reasoning_content"),
        role: message.get("content"),
        f"{role}, refusal": message.get("refusal"),
    }
    found = [MessagePart(who, text) for who, part in parts.items() if (text := _text(part))]
    return found if found or message.get("tool_calls") else [MessagePart(role, "")]


def _result(message: Mapping[str, Any], results: Mapping[str, Step]) -> list[MessagePart]:
    """Return what the model was told of a call, unless its step says the same."""
    told = _text(message.get("content"))
    step = results.get(str(message.get("tool_call_id")))
    if step is not None:
        begin = told.removeprefix("error: ").partition(_CUT)[0]
        if step.text in told or step.text.startswith(begin):
            return []
    return [MessagePart("tool", told)]


def _called(call: Any) -> tuple[str, Any]:
    """Return the name and the arguments of a call of a message."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # shown as it is
            arguments = json.loads(arguments or "{}")
    return str(function.get("name") or ""), arguments


def _id(call: Any) -> str:
    return str(call.get("id")) if isinstance(call, Mapping) else ""


def _canonical(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Return the content of a message as text; of an image, only that there is one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(_part, value))
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return _text(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"
