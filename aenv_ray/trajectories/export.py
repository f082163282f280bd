"""Exports of episodes: chat messages for SFT, preference pairs for DPO, and a table of steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from operator import itemgetter
from typing import Any

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories.schema import Attachment, Episode

ExportedMessage = dict[str, Any]
"""A message in the chat format of OpenAI."""


def messages(episode: Episode) -> list[ExportedMessage]:
    """Return the episode as chat messages with tool calls, in the format of OpenAI.

    The conversation that the policy recorded, if there is one. Otherwise the task's instruction,
    one assistant message for each tool call with its result, and the output if it is text.
    """
    if episode.messages:
        return [dict(message) for message in episode.messages]
    instruction = episode.task.instruction if episode.task is not None else ""
    found: list[ExportedMessage] = [{"role": "user", "content": instruction or episode.task_id}]
    for number, step in enumerate(episode.steps):
        call_id = step.call_id or f"call_{number}"
        function = {"name": step.tool, "arguments": json.dumps(step.arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": call_id, "content": step.text})
    if isinstance(episode.output, str) and episode.output:
        found.append({"role": "assistant", "content": episode.output})
    return found


class RecordedTools:
    """The tools that models had, by episode; each list is read once.

    Args:
        read: Returns the content of an attachment.
    """

    def __init__(self, read: Callable[[Attachment], bytes]) -> None:
        self._read = read
        self._lists: dict[str, list[Any]] = {}
        self.missing: dict[str, str] = {}
        """Why a list could not be read, by its digest."""

    def of(self, episode: Episode) -> dict[str, Any]:
        """Return ``{"tools": […]}`` in OpenAI's format; empty if none are known."""
        recorded = episode.tools
        if recorded is None or recorded.digest in self.missing:
            return {}
        if recorded.digest not in self._lists:
            try:
                self._lists[recorded.digest] = json.loads(self._read(recorded))
            except (ConfigError, ValueError, RecursionError) as exc:
                why = exc.message if isinstance(exc, ConfigError) else str(exc)
                self.missing[recorded.digest] = why
                return {}
        return {"tools": self._lists[recorded.digest]}


def chat(
    episodes: Iterable[Episode], tools: RecordedTools | None = None
) -> Iterator[dict[str, Any]]:
    """Yield ``{"messages": […]}`` for each episode that has a reward, with its tools if known."""
    for episode in episodes:
        if episode.reward is not None:
            yield {"messages": messages(episode)} | (tools.of(episode) if tools else {})


class NoPair(StrEnum):
    """Why a group gives no preference pair."""

    NO_ANSWER = "without two episodes that have an assistant message"
    """Other episodes hold nothing to prefer, such as one whose first call hung."""
    OTHER_PROMPTS = "without two conversations that begin alike"
    """The best episode's prompt is that of no other."""
    EQUAL = "with rewards that differ too little"
    """By no more than the least difference that was asked for."""


def pairs(
    episodes: Iterable[Episode], min_gap: float = 0.0, tools: RecordedTools | None = None
) -> Iterator[dict[str, Any] | NoPair]:
    """Yield for each group its best and its worst episode as a pair, or why it gives none.

    A group has one environment and one task: runs that were joined use the same ids for groups of
    different tasks. The episodes of a task that have no group id are one group. Episodes without an
    assistant message are not considered; the worst one begins as the best one does. A group gives
    no pair if their rewards differ by no more than `min_gap`.

    Yields:
        ``{"prompt": […], "chosen": […], "rejected": […], "chosen_reward", "rejected_reward",
        "task_id"}``, with lists of chat messages; and ``tools`` if those of the best are known.
    """
    groups: dict[tuple[str | None, ...], list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.reward is not None:
            key = episode.environment_digest, episode.group, episode.task_id
            groups[key].append(episode)
    for group in groups.values():
        yield _pair(group, min_gap, tools)


def _pair(
    group: list[Episode], min_gap: float, tools: RecordedTools | None
) -> dict[str, Any] | NoPair:
    split = [(one.reward or 0.0, *_split(messages(one)), one) for one in group]
    answered = [one for one in split if one[2]]
    if len(answered) < 2:
        return NoPair.NO_ANSWER
    best = max(answered, key=itemgetter(0))
    others = [one for one in answered if one is not best and one[1] == best[1]]
    if not others:
        return NoPair.OTHER_PROMPTS
    worst = min(others, key=itemgetter(0))
    if best[0] - worst[0] <= min_gap:
        return NoPair.EQUAL
    return {
        "prompt": best[1],
        "chosen": best[2],
        "rejected": worst[2],
        "chosen_reward": best[0],
        "rejected_reward": worst[0],
        "task_id": group[0].task_id,
    } | (tools.of(best[3]) if tools else {})


def _split(
    conversation: list[ExportedMessage],
) -> tuple[list[ExportedMessage], list[ExportedMessage]]:
    """Return the messages before the assistant's first one, and the rest."""
    roles = [message.get("role") for message in conversation]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return conversation[:first], conversation[first:]


STEP_COLUMNS = (
    "index", "task_id", "group", "sample", "status", "reward", "environment", "step", "tool",
    "arguments", "text", "is_error", "error", "call_id", "started_s", "duration_s",
)  # fmt: skip
"""Columns of the table of steps."""


def step_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, Any]]:
    """Yield one flat row for each step, with the columns `STEP_COLUMNS`."""
    for episode in episodes:
        shared = {name: getattr(episode, name) for name in STEP_COLUMNS[:7]}
        for number, step in enumerate(episode.steps):
            row = {name: getattr(step, name) for name in STEP_COLUMNS[8:]}
            row["arguments"] = json.dumps(step.arguments)
            yield shared | {"status": episode.status.value, "step": number} | row
