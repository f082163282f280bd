"""Plays an episode with a model, as tokens: for trainers that provide a model, but no loop.

    outcome, tokens = await played(pool, task, lambda episode: turns(episode, …))

The model's own tokens are never decoded and encoded again: later tokens are appended to them. So
the trainer learns from exactly the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool, LiveEpisode
from aenv_ray.integrations.support.tools import EnvironmentTools, model_text
from aenv_ray.models import ToolResult
from aenv_ray.trajectories.schema import Generation, Task

MAX_TURNS: Final = 32
TOOL_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""A tool call in the format of Hermes and Qwen; the group is JSON."""


@dataclass(frozen=True)
class Turn:
    """What a model wrote at once."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """The logprobs of each token, under the policy that wrote it."""
    versions: Sequence[int] = ()
    """The versions of the weights that wrote each token; empty if the trainer does not say."""
    is_truncated: bool = False
    """Whether it reached its limit of tokens."""


@dataclass
class Tokens:
    """The tokens of an episode; all lists but `prompt_ids` have one item for each later token."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the model wrote the token, 0 where the environment did."""
    logprobs: list[float] = field(default_factory=list)
    """0 where the environment wrote the token."""
    versions: list[int] = field(default_factory=list)
    """-1 where the environment wrote the token, or the version is unknown."""
    is_truncated: bool = False
    turn_count: int = 0

    def add_turn(self, turn: Turn) -> None:
        """Append what the model wrote."""
        count = len(turn.token_ids)
        self.response_ids += turn.token_ids
        self.mask += [1] * count
        self.logprobs += turn.logprobs
        self.versions += turn.versions or [-1] * count
        self.is_truncated = turn.is_truncated
        self.turn_count += 1

    def add_context(self, ids: Sequence[int]) -> None:
        """Append what the environment replied."""
        self.response_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def generation(self) -> Generation:
        """Return the tokens for the record of the episode.

        It has no log-probabilities if one is not finite: records cannot hold that.
        """
        is_finite = all(map(math.isfinite, self.logprobs))
        return Generation(
            prompt_ids=tuple(self.prompt_ids), response_ids=tuple(self.response_ids),
            response_mask=tuple(self.mask), logprobs=tuple(self.logprobs) if is_finite else None,
        )  # fmt: skip


class Tokenizer(Protocol):
    """The part of a tokenizer of transformers that is used."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Return the tokens of messages."""
        ...

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """Return the text of tokens."""
        ...


Generate = Callable[[list[int], int], Awaitable[Turn]]
"""Continues token ids by at most the given number of tokens."""
Parse = Callable[[str], list[tuple[str, str]]]
"""Finds the tool calls in a model's text: name, and arguments as JSON text."""


def hermes_calls(text: str) -> list[tuple[str, str]]:
    """Return the tool calls in the format of Hermes and Qwen: JSON within ``<tool_call>``.

    A call that is not JSON, or has no name, gets the name "". No tool has it, so the model sees an
    error.
    """
    calls = []
    for body in TOOL_CALL.findall(text):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):  # also a number or a nesting that is too large
            call = None
        if not isinstance(call, Mapping):
            calls.append(("", "{}"))
            continue
        given = call.get("arguments", {})
        calls.append(
            (str(call.get("name", "")), given if isinstance(given, str) else json.dumps(given))
        )
    return calls


def task_of_column(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the task in a column of a dataset, without fields that are None.

    Datasets give each mapping of a column the keys of all rows.
    """
    return {name: value for name, value in (given or {}).items() if value is not None}


async def turns(
    episode: LiveEpisode,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    generate: Generate,
    *,
    max_tokens: int,
    max_turns: int = MAX_TURNS,
    max_length: int | None = None,
    parse: Parse = hermes_calls,
) -> Tokens:
    """Let the model act until it calls no tool, or a limit or the end of the episode is reached.

    Args:
        episode: The episode whose tools the model calls.
        tokenizer: The tokenizer of the model, with a chat template.
        messages: The prompt.
        generate: Asks the model.
        max_tokens: Maximum number of tokens after the prompt.
        max_turns: Maximum number of turns of the model.
        max_length: Maximum number of tokens, including those of the prompt. None: only
            `max_tokens` applies.
        parse: Finds tool calls in its text.

    Raises:
        ConfigError: The chat template cannot append results of tools.
        AenvError: The tools could not be listed; the episode is over.
    """
    ours = EnvironmentTools(episode)
    offered = [
        {
            "type": "function",
            "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.parameters,
            },
        }
        for tool in await ours.load()
    ]  # fmt: skip
    prompt = [dict(message) for message in messages]
    tokens = Tokens(_ids(tokenizer, prompt, tools=offered, add_generation_prompt=True))
    if max_length is not None:
        max_tokens = min(max_tokens, max_length - len(tokens.prompt_ids))
    while tokens.turn_count < max_turns and (left := max_tokens - len(tokens.response_ids)) > 0:
        turn = await generate([*tokens.prompt_ids, *tokens.response_ids], left)
        tokens.add_turn(turn)
        calls = parse(tokenizer.decode(list(turn.token_ids), skip_special_tokens=False))
        if turn.is_truncated or not calls:
            break
        replies = await _replies(ours, calls)
        if replies is None:
            break
        context = _context_ids(tokenizer, replies, turn)
        if len(tokens.response_ids) + len(context) >= max_tokens:
            tokens.is_truncated = True
            break
        tokens.add_context(context)
    return tokens


async def _replies(
    ours: EnvironmentTools, calls: list[tuple[str, str]]
) -> list[dict[str, Any]] | None:
    """Return the results of tools as messages; None if the episode has ended.

    The episode knows whether it is void.
    """
    running: list[asyncio.Task[ToolResult]] = []
    has_ended = False
    try:
        async with asyncio.TaskGroup() as group:
            for name, given in calls:
                running.append(group.create_task(ours.call(name, given)))
    except* AenvError:
        has_ended = True
    if has_ended:
        return None
    return [
        {"role": "tool", "name": name, "content": model_text(task.result())}
        for (name, _), task in zip(calls, running, strict=True)
    ]


def _context_ids(tokenizer: Tokenizer, replies: list[dict[str, Any]], turn: Turn) -> list[int]:
    """Return the tokens between what the model wrote and what it writes next.

    They are what the template adds after the end of an assistant's message.
    """
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
    shorter = _ids(tokenizer, before)
    longer = _ids(tokenizer, [*before, *replies], add_generation_prompt=True)
    if longer[: len(shorter)] != shorter:
        raise ConfigError(
            "the chat template changes earlier messages when results of tools are appended",
            hint="use a chat template that only appends",
        )
    end = tokenizer.eos_token_id
    if end is None or end not in shorter:
        return longer[len(shorter) :]
    after_end = len(shorter) - shorter[::-1].index(end)
    missing = [] if turn.token_ids and turn.token_ids[-1] == end else [end]
    return [*missing, *longer[after_end:]]


def _ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    )


async def played(
    pool: EpisodePool,
    task: Task | Mapping[str, Any],
    act: Callable[[LiveEpisode], Awaitable[Tokens]],
    *,
    void_retries: int = 0,
) -> tuple[EpisodeOutcome, Tokens | None]:
    """Play an episode; its instance is given back in any case.

    Args:
        pool: Begins it.
        task: What is to be done.
        act: Acts in it, as `turns` does.
        void_retries: How often it is played again while it is void.

    Returns:
        Its outcome, and its tokens, None if it ended before the model could act.

    Raises:
        ConfigError: The task or an option is wrong.
        ValueError: The log-probabilities do not match the tokens.
    """
    outcome, tokens = await _played_once(pool, task, act)
    for _ in range(void_retries):
        if not outcome.is_void:
            break
        outcome, tokens = await _played_once(pool, task, act)
    return outcome, tokens


async def _played_once(
    pool: EpisodePool,
    task: Task | Mapping[str, Any],
    act: Callable[[LiveEpisode], Awaitable[Tokens]],
) -> tuple[EpisodeOutcome, Tokens | None]:
    episode = await pool.begin(task)
    try:
        tokens = await act(episode)
        generation = tokens.generation()
    except ConfigError:
        await episode.abandon()
        raise
    except AenvError:
        return await episode.finish(), None
    except BaseException:
        await asyncio.shield(episode.abandon())
        raise
    for version, _ in itertools.groupby(v for v in tokens.versions if v >= 0):
        await episode.record_policy_version(version)
    return await episode.finish(generation), tokens
