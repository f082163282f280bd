"""Episodes whose actions are texts of a model, for trainers that do not support tool calls.

A text calls tools as Qwen's and Hermes' models do, and gets their results in the same way:

    <tool_call>{"name": "execute_command", "arguments": {"command": "ls"}}</tool_call>
    <tool_response>…</tool_response>

A text without a call is the answer that ends the episode.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.errors import AenvError
from aenv_ray.integrations.episodes import EpisodeOutcome, SyncEpisode
from aenv_ray.integrations.support.token_loop import TOOL_CALL
from aenv_ray.integrations.support.tools import (
    EnvironmentTools,
    FrameworkTool,
    model_text,
)

MAX_TURNS: Final = 16


def tool_instructions(tools: Sequence[FrameworkTool]) -> str:
    """Return what a prompt has to say about tools."""
    listed = "\n".join(
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        )
        for tool in tools
    )
    return (
        f"You can call these tools:\n{listed}\n"
        'Call one with <tool_call>{"name": …, "arguments": {…}}</tool_call>. '
        "Answer without a call when you have finished."
    )


@dataclass(frozen=True)
class TextTurn:
    """What a text did."""

    observation: str
    """The results of its calls; empty after an answer."""
    outcome: EpisodeOutcome | None = None
    """Outcome of the episode, if the text was its last."""
    is_truncated: bool = False
    """The episode has ended because of its number of turns."""


class TextEpisode:
    """Plays an episode by texts.

    Args:
        episode: The episode to play.
        only: Names of the tools to offer. None: all.
        max_turns: Number of texts after which the episode ends.
        timeout_s: Timeout of a call. None: 60.
    """

    def __init__(
        self,
        episode: SyncEpisode,
        *,
        only: Collection[str] | None = None,
        max_turns: int = MAX_TURNS,
        timeout_s: float | None = None,
    ) -> None:
        self._episode = episode
        self._tools = EnvironmentTools(episode, only=only, timeout_s=timeout_s)
        self._max_turns = max_turns
        self._turns = 0

    @property
    def instance_id(self) -> str | None:
        """Id of its instance; None if none was started."""
        return self._episode.instance_id

    def instructions(self) -> str:
        """Return what the model has to know about the tools; empty if the episode has ended.

        Raises:
            ConfigError: `only` names a tool that the environment lacks.
        """
        try:
            tools = self._tools.load_blocking()
        except AenvError:
            if self._episode.instance_id is not None:
                raise
            return ""  # it was not started: its outcome is void
        return tool_instructions(tools)

    def act(self, text: str) -> TextTurn:
        """Run the calls of a text, one after the other; without one, end the episode."""
        self._turns += 1
        calls = TOOL_CALL.findall(text)
        if not calls:
            return TextTurn("", self._episode.finish())
        try:
            results = [self._result(call) for call in calls]
        except AenvError:
            return TextTurn("", self._episode.finish())
        observation = "\n".join(f"<tool_response>\n{one}\n</tool_response>" for one in results)
        if self._turns >= self._max_turns:
            return TextTurn(observation, self._episode.finish(), is_truncated=True)
        return TextTurn(observation)

    def _result(self, call: str) -> str:
        try:
            data: Any = json.loads(call)
            name, arguments = data["name"], data.get("arguments")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            return f"Error: the tool call is not a JSON object with name and arguments: {exc!r}"
        result = self._tools.call_blocking(str(name), arguments)
        return f"Error: {model_text(result)}" if result.is_error else model_text(result)

    def close(self) -> None:
        """End the episode, with its reward, if it has not ended."""
        self._episode.finish()
