"""`RemotePolicy`: a model in a Ray actor or a Serve deployment plays the episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aenv_ray.actors.ray_shell.remote_call import remote_call
from aenv_ray.errors import ConfigError, EndpointUnavailable
from aenv_ray.sampling.episode_env import EpisodeEnv
from aenv_ray.sampling.policies.chat import ChatMessage, ChatOptions, chat_options, play
from aenv_ray.sampling.policies.completion import (
    Completion,
    InvalidAnswer,
    read_completion,
    read_message,
)
from aenv_ray.trajectories.schema import Task

TIMEOUT_S: Final = 300.0


class RemotePolicy:
    """A model on Ray, in the same loop of tool calls as `OpenAIPolicy`.

    It is called as ``target.remote(messages, tools)`` with lists in OpenAI's format, and returns an
    assistant message, a whole chat completion, or a text.

    Args:
        target: A method of an actor, an actor with a method ``__call__``, or a Serve handle.
        timeout_s: Limit for one answer, in seconds.
        options: The attributes of `ChatOptions`: prompts, limits, stop tools, images.

    Raises:
        ConfigError: `target` cannot be called, or an option is unknown or out of range.
    """

    def __init__(self, target: Any, *, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
        if not timeout_s > 0:
            raise ConfigError(
                f"timeout_s must be positive, not {timeout_s!r}",
                hint="leave it out for the default",
            )
        remote_call(target)  # raises if it cannot be called
        self._target = target
        self._timeout_s = timeout_s
        self._options: ChatOptions = chat_options("RemotePolicy", options)

    def __repr__(self) -> str:
        return f"RemotePolicy({self._target!r})"

    async def __call__(self, env: EpisodeEnv, task: Task) -> ChatMessage:
        """Play an episode."""
        return await play(_RemoteModel(self._target, self._timeout_s), self._options, env, task)


class _RemoteModel:
    def __init__(self, target: Any, timeout_s: float) -> None:
        self._ask = remote_call(target)
        self._timeout_s = timeout_s

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        is_check: bool = False,
    ) -> Completion:
        del is_check  # it is never asked more than once
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask(list(messages), list(tools))
            return _completion(answer)
        except TimeoutError:
            failure = f"gave no answer within {self._timeout_s:g} s"
        except InvalidAnswer as exc:
            failure = f"answered nonsense: {exc}"
        raise EndpointUnavailable(
            f"the policy's model on Ray {failure}",
            hint="check the model's actor; a slow one needs a larger timeout_s",
        )


def _completion(answer: Any) -> Completion:
    if isinstance(answer, str):
        return Completion(text=answer)
    if isinstance(answer, Mapping) and "choices" not in answer:
        return read_message(answer)
    return read_completion(answer)
