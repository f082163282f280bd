"""The tool-calling loop: a model asks for tool calls, and gets their results, until it is done.

An agent chooses what results contain, and must not void its episode by a result at which the model
fails (invariant 14). So images are checked before they are passed on, and after a failure the model
is asked the opening of the conversation, which contains no result. Only if that fails too, the
model has failed. `ModelRelay` does the same for models of environments.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Protocol

from aenv_ray.client.openai_names import OpenAIToolNames, openai_arguments
from aenv_ray.errors import (
    AenvError,
    ConfigError,
    ConversationRefused,
    EndpointUnavailable,
    ToolError,
)
from aenv_ray.models import ToolResult
from aenv_ray.sampling.episode_env import CALL_TIMEOUT_S, EpisodeEnv
from aenv_ray.sampling.policies.completion import Completion, ToolRequest
from aenv_ray.trajectories.attachments import attached
from aenv_ray.trajectories.schema import Task, recordable_task

logger = logging.getLogger("aenv_ray")

SYSTEM: Final = "Solve the task with the tools. When you have finished, answer without a tool call."
PROMPT: Final = "{instruction}"
_FIELD: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")
MAX_TURNS: Final = 50
RESULT_CHARACTERS: Final = 20_000
IMAGE_BYTES: Final = 20 << 20
"""Largest image that is passed on."""
EPISODE_IMAGES_BYTES: Final = 64 << 20
"""Size of all images of an episode that are passed on. Each request contains all of them, and an
agent that used up the runner's memory would end the episodes of others."""
_IMAGES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"RIFF....WEBP": "image/webp",
}
"""Images that endpoints read, by their first bytes; a dot is any byte."""
ChatMessage = dict[str, Any]


class Stop(StrEnum):
    """Why a model's part of an episode ended. All of these are outcomes, which are scored."""

    ANSWERED = "answered"
    """The model answered without a tool call."""
    STOP_TOOL = "stop_tool"
    """The model called a tool that ends the episode."""
    REFUSED = "refused"
    """The model refused, or a filter of its endpoint stopped it."""
    CUT = "cut"
    """The answer reached the endpoint's limit for one answer, and had no tool call."""
    CONTEXT_FULL = "context_full"
    """The conversation no longer fits into the model's context."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_COST = "max_cost"


class ContextFull(Exception):
    """The endpoint refuses the conversation because it is too long."""


class Filtered(Exception):
    """The endpoint refuses the conversation because of its content."""


class EndpointLimited(EndpointUnavailable):
    """The endpoint limits requests, whatever is in them."""


class ChatModel(Protocol):
    """A model that answers conversations."""

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        is_check: bool = False,
    ) -> Completion:
        """Return the answer to a conversation.

        Args:
            messages: The conversation.
            tools: The tools that the model may call.
            is_check: Ask only once, after a failure.

        Raises:
            ContextFull: The conversation is too long.
            Filtered: A filter refuses it.
            EndpointUnavailable: The endpoint gave no answer.
            Exception: It refuses the conversation.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How an episode is played with a model.

    Attributes:
        system: Template of the system message over the task's fields; "" for none.
        prompt: Template of the first user message.
        max_turns: Answers of the model in an episode.
        max_tokens: Tokens of prompts and answers in an episode; None: no limit.
        max_cost: Cost of an episode; None: no limit. It requires `prices`.
        prices: Cost of a million tokens of prompts, and of answers; ``"reported"``: each answer of
            the endpoint states its cost. None: costs are recorded if answers state them.
        stop_tools: Tools that end the episode once a call of them succeeded.
        images: Pass images in results on to the model, which must accept them.
        parallel: Run the calls of one answer concurrently rather than in order.
        call_timeout_s: Deadline of a tool call, in seconds.
        result_characters: Longest result that the model gets. The rest is cut, with a note.
    """

    system: str = SYSTEM
    prompt: str = PROMPT
    max_turns: int = MAX_TURNS
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: tuple[float, float] | Literal["reported"] | None = None
    stop_tools: tuple[str, ...] = ()
    images: bool = False
    parallel: bool = True
    call_timeout_s: float = CALL_TIMEOUT_S
    result_characters: int = RESULT_CHARACTERS

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_cost", "call_timeout_s", "result_characters"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(
                    f"{name} must be positive, not {value!r}", hint="leave it out for the default"
                )
        if self.max_cost is not None and self.prices is None:
            raise ConfigError(
                "max_cost requires prices: without them the cost of an episode is not known",
                hint='give prices=(IN, OUT) for a million tokens, or prices="reported" if the '
                "endpoint states the cost of each answer (--price IN,OUT or --price reported)",
            )

    def cost(self, completion: Completion) -> float | None:
        """Return the cost of an answer; None if it is not known.

        Raises:
            ConfigError: A limit depends on a cost that the endpoint did not report.
        """
        if self.prices is None or self.prices == "reported":
            if completion.cost is None and self.max_cost is not None:
                raise ConfigError(
                    f"the endpoint did not report the cost of an answer, so that max_cost "
                    f"{self.max_cost:g} cannot be enforced",
                    hint="give prices=(IN, OUT) for a million tokens (--price IN,OUT)",
                )
            return completion.cost
        asked, answered = self.prices
        tokens = completion.prompt_tokens * asked + completion.completion_tokens * answered
        return tokens / 1e6

    def tokens(self, completion: Completion) -> int:
        """Return the tokens of an answer and its prompt; 0 if they are not known.

        Raises:
            ConfigError: A limit depends on them, and the endpoint did not report them.
        """
        tokens = completion.prompt_tokens + completion.completion_tokens
        limits: dict[str, float | None] = {"max_tokens": self.max_tokens}
        if self.prices != "reported":
            limits["max_cost"] = self.max_cost
        for name, limit in limits.items():
            if limit is not None and not tokens:
                raise ConfigError(
                    f"the endpoint did not report the tokens of an answer, so that {name} "
                    f"{limit:.15g} cannot be enforced",
                    hint="have it report them, in `usage` of a chat completion, or leave the limit "
                    "out: max_turns holds without them",
                )
        return tokens


def chat_options(policy: str, options: Mapping[str, Any]) -> ChatOptions:
    """Return the options of a policy with a model.

    Raises:
        ConfigError: One is unknown or out of range.
    """
    known = ChatOptions.__dataclass_fields__
    unknown = options.keys() - known.keys()
    if unknown:
        raise ConfigError(
            f"unknown option of {policy}: {', '.join(sorted(unknown))}",
            hint=f"options: {', '.join(known)}",
        )
    return ChatOptions(**options)


async def play(model: ChatModel, options: ChatOptions, env: EpisodeEnv, task: Task) -> ChatMessage:
    """Play an episode with a model.

    Returns:
        ``stop``, a `Stop`; ``text`` of the last answer; and ``turns``.

    Raises:
        EndpointUnavailable: The model could not be asked; the episode is void.
        ConversationRefused: The model fails at what calls have returned, and works otherwise.
        AenvError: As `EpisodeEnv.call_tool` does, except for `ToolError`, which the model is told.
    """
    return await _Conversation(model, options, env, task).play()


class _Conversation:
    """One episode with a model."""

    def __init__(self, model: ChatModel, options: ChatOptions, env: EpisodeEnv, task: Task) -> None:
        self._model = model
        self._options = options
        self._env = env
        self._messages: list[ChatMessage] = []
        self._tools = OpenAIToolNames()
        self._tokens = 0
        self._cost = 0.0
        self._images_bytes = 0
        self._text = ""
        self._opening = opening(options.system, options.prompt, task)

    async def play(self) -> ChatMessage:
        self._tools = OpenAIToolNames(await self._env.list_tools())
        # Programs also play on environments of their own, which need not have a record of tools.
        if (record_tools := getattr(self._env, "record_tools", None)) is not None:
            record_tools(self._tools.listed)
        for message in self._opening:
            self._say(message)
        turns = 0
        stop: Stop | None = None
        while stop is None:
            turns += 1
            stop = await self._turn(turns)
        return {"stop": stop.value, "turns": turns, "text": self._text}

    def _say(self, message: ChatMessage, **recorded: Any) -> None:
        """Add a message to the conversation, and to the record with other or further fields."""
        self._messages.append(message)
        self._env.record_message(message | recorded)

    async def _turn(self, turn: int) -> Stop | None:
        """Take one answer and run its calls; return why the episode ends, None if it continues."""
        try:
            completion = await self._answer()
        except ContextFull:
            return Stop.CONTEXT_FULL
        except Filtered:
            return Stop.REFUSED
        self._count(completion)
        extra = {} if completion.reasoning is None else {"reasoning": completion.reasoning}
        self._say(completion.as_message(), **extra)
        self._text = completion.text
        if completion.refusal is not None or completion.finish_reason == "content_filter":
            return Stop.REFUSED
        if not completion.requests:
            return Stop.CUT if completion.finish_reason == "length" else Stop.ANSWERED
        if (reached := self._limit()) is not None:
            return reached
        return await self._run(completion.requests) or (
            Stop.MAX_TURNS if turn >= self._options.max_turns else None
        )

    async def _answer(self) -> Completion:
        """Return the model's answer to the conversation.

        Raises:
            ContextFull, Filtered: As `ChatModel.complete`.
            ConversationRefused: The model answers the opening, and not what has been added to it.
            Exception: The model fails at the opening, too.
        """
        try:
            return await self._model.complete(self._messages, self._tools.listed)
        except (ContextFull, Filtered, EndpointLimited):
            raise
        except Exception:
            if len(self._messages) == len(self._opening) or not await self._answers_opening():
                raise
        try:  # once more: the model may have worked again only now
            return await self._model.complete(self._messages, self._tools.listed, is_check=True)
        except (ContextFull, Filtered, EndpointLimited):
            raise
        except Exception as exc:
            said = exc.message if isinstance(exc, AenvError) else f"{type(exc).__name__}: {exc}"
            raise ConversationRefused(
                f"the model fails at this conversation, and answers its opening: {said}",
                hint="look at the last results of calls, such as images: the model cannot read one",
            ) from exc

    async def _answers_opening(self) -> bool:
        """Ask the opening again, and return whether the model answers; the answer's cost counts."""
        *before, last = self._opening
        # Another text each time, so that no cache answers in place of the model.
        text = f"{last['content']}\n\n[{secrets.token_hex(4)}]"
        messages = [*before, {**last, "content": text}]
        try:
            answer = await self._model.complete(messages, self._tools.listed, is_check=True)
        except Exception as exc:  # noqa: BLE001  # whatever it is, the first failure is raised
            logger.info("the model answers no other request either: %s", exc)
            return False
        self._count(answer)
        return True

    def _count(self, completion: Completion) -> None:
        self._tokens += self._options.tokens(completion)
        cost = self._options.cost(completion)
        self._cost += cost or 0.0
        self._env.record_usage(
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            cost=cost,
        )

    def _limit(self) -> Stop | None:
        options = self._options
        if options.max_tokens is not None and self._tokens >= options.max_tokens:
            return Stop.MAX_TOKENS
        if options.max_cost is not None and self._cost >= options.max_cost:
            return Stop.MAX_COST
        return None

    # --- tool calls -------------------------------------------------------------------------------

    async def _run(self, requests: Sequence[ToolRequest]) -> Stop | None:
        results = await self._results(requests)
        images: list[ShownImage] = []
        stop = None
        for request, result in zip(requests, results, strict=True):
            shown = self._fitting(images_of(result)) if self._options.images else []
            self._say(
                {
                    "role": "tool",
                    "tool_call_id": request.call_id,
                    "content": shown_text(result, shown, self._options),
                }
            )
            images += shown
            if not result.is_error and self._name(request) in self._options.stop_tools:
                stop = Stop.STOP_TOOL
        if images:
            note = {"type": "text", "text": "The images of the results above:"}
            content = [note, *map(image_part, images)]
            recorded = [note, *map(image_note, images)]
            self._say({"role": "user", "content": content}, content=recorded)
        return stop

    def _fitting(self, images: Sequence[ShownImage]) -> list[ShownImage]:
        """Return the images for which the conversation has room, and note them."""
        kept = []
        for image in images:
            if self._images_bytes + image.size_bytes <= EPISODE_IMAGES_BYTES:
                self._images_bytes += image.size_bytes
                kept.append(image)
        return kept

    async def _results(self, requests: Sequence[ToolRequest]) -> list[ToolResult]:
        if not self._options.parallel:
            return [await self._call(request) for request in requests]
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._call(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [call.result() for call in calls]

    async def _call(self, request: ToolRequest) -> ToolResult:
        """Run a call; an error of the tool or of the request becomes a message to the model."""
        try:
            name = self._tools.own_name(request.name)
            arguments = openai_arguments(name, request.arguments)
            return await self._env.call_tool(name, arguments, self._options.call_timeout_s)
        except ToolError as exc:
            text = f"{exc.code}: {exc.message}" + (f" ({exc.hint})" if exc.hint else "")
            return ToolResult([{"type": "text", "text": text}], is_error=True)

    def _name(self, request: ToolRequest) -> str:
        return self._tools.own_name(request.name)


class ShownImage(NamedTuple):
    """An image in a result that a model can read, as far as its first bytes say."""

    block: Mapping[str, Any]
    media_type: str

    @property
    def size_bytes(self) -> int:
        """Its size, within two bytes."""
        return len(self.block["data"]) * 3 // 4


def shown_text(result: ToolResult, images: Sequence[ShownImage], options: ChatOptions) -> str:
    """Return the text of a result for a model, with notes about what was left out.

    Args:
        result: The result of a call.
        images: Those of it that the model gets.
        options: How long the text may be.
    """
    parts = []
    for block in result.content:
        if block.get("type") == "text":
            parts.append(str(block.get("text", "")))
        elif not any(block is image.block for image in images):
            parts.append(f"[{block.get('type')} {block.get('mimeType', '')} not shown]")
    text = "\n".join(parts)
    if len(text) > options.result_characters:
        text = f"{text[: options.result_characters]}\n[truncated: {len(text)} characters]"
    return f"error: {text}" if result.is_error else text


def images_of(result: ToolResult) -> list[ShownImage]:
    """Return the images of a result that a model can read."""
    found = ((block, _media_type(block)) for block in result.content)
    return [ShownImage(block, media_type) for block, media_type in found if media_type is not None]


def _media_type(block: Mapping[str, Any]) -> str | None:
    """Return what the data of an image block is; None if it is no image, or too large.

    What the block says of it does not count: endpoints refuse a request with a wrong type.
    """
    data = block.get("data")
    if block.get("type") != "image" or not isinstance(data, str) or len(data) > IMAGE_BYTES * 4 / 3:
        return None
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:
        return None
    for begin, media_type in _IMAGES.items():
        if re.match(begin, content, re.DOTALL):
            return media_type
    return None


def image_part(image: ShownImage) -> ChatMessage:
    """Return an image as a part of a user message."""
    url = f"data:{image.media_type};base64,{image.block['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def image_note(image: ShownImage) -> ChatMessage:
    """Return the note that replaces an image in a record; it names the attachment."""
    (named,) = attached([image.block], "")
    return {"type": "text", "text": f"[{named.media_type}, attachment {named.digest}]"}


# --- prompts --------------------------------------------------------------------------------------


def rendered(template: str, task: Task) -> str:
    """Return a template with the task's fields in place of ``{name}`` and ``{name.key}``.

    Strings are inserted as they are, other values as JSON. ``{{`` and ``}}`` are literal braces;
    braces around anything but a name, such as JSON, are left as they are.

    Raises:
        ConfigError: The task has no such field.
    """
    fields = recordable_task(task).model_dump(mode="json")

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        found: Any = fields
        for key in name.split("."):
            if not isinstance(found, dict) or key not in found:
                raise ConfigError(
                    f"task {task.id!r} has no field {name!r}, which the prompt template names",
                    hint=f"fields: {', '.join(fields)}; write literal braces as {{{{ and }}}}",
                )
            found = found[key]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return _FIELD.sub(value, template)


def opening(system: str, prompt: str, task: Task) -> list[dict[str, Any]]:
    """Return the first messages of an episode; an empty system template gives no system message."""
    messages = [{"role": "user", "content": rendered(prompt, task)}]
    if system:
        messages.insert(0, {"role": "system", "content": rendered(system, task)})
    return messages
