"""Options of commands that sample episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

_POLICY: Final = typer.Option(
    "--policy",
    "-p",
    help="openai:MODEL, reference, null, random, random:SEED, module:function, "
    "file.py:function or module:Class.",
)
PolicyOption = Annotated[str, _POLICY]
OptionalPolicyOption = Annotated[str | None, _POLICY]
ShuffleOption = Annotated[
    int | None, typer.Option("--shuffle", metavar="SEED", help="Shuffle the tasks.")
]
TaskLimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Maximum number of tasks, after shuffling.")
]


def _bounds(text: str) -> str:
    from aenv_ray.errors import ConfigError
    from aenv_ray.sampling.runners.concurrency import concurrency_bounds

    try:
        concurrency_bounds(text)
    except ConfigError as exc:
        raise typer.BadParameter(exc.message) from None
    return text


ConcurrencyOption = Annotated[
    str,
    typer.Option(
        "--concurrency",
        "-c",
        metavar="N|MIN-MAX",
        callback=_bounds,
        help="Concurrent instances, or bounds between which their number adapts.",
    ),
]
SamplesPerTaskOption = Annotated[
    int, typer.Option("--samples-per-task", min=1, help="Episodes of each task, as a group.")
]
RunnersOption = Annotated[
    str, typer.Option("--runners", help="Where the policy runs: nodes, driver or auto.")
]
InfraRetriesOption = Annotated[
    int, typer.Option("--infra-retries", min=0, help="Retries after infrastructure failures.")
]
EpisodeTimeoutOption = Annotated[
    str | None,
    typer.Option("--episode-timeout", help="Limit for the policy: 90s, 30m. Default: the TTL."),
]
TtlOption = Annotated[str | None, typer.Option("--ttl", help="TTL of instances: 30m, 2h.")]
_ON_DEATH: Final = typer.Option(
    "--reward-on-death", help="Reward of episodes whose sandbox was ended from inside."
)
RewardOnDeathOption = Annotated[float, _ON_DEATH]
OptionalRewardOnDeathOption = Annotated[float | None, _ON_DEATH]
_ON_TIMEOUT: Final = typer.Option(
    "--reward-on-timeout",
    help="Reward of episodes that time out because of tool calls, or none.",
)
RewardOnTimeoutOption = Annotated[str, _ON_TIMEOUT]
OptionalRewardOnTimeoutOption = Annotated[str | None, _ON_TIMEOUT]
_ON_FAILURE: Final = typer.Option(
    "--reward-on-failure",
    help="Reward of episodes whose reward function fails after the agent acted, or none.",
)
RewardOnFailureOption = Annotated[str, _ON_FAILURE]
OptionalRewardOnFailureOption = Annotated[str | None, _ON_FAILURE]


def reward(value: str, option: str) -> float | None:
    """Return the reward that an option gives; None leaves the episodes out of means.

    Raises:
        BadParameter: It is neither a number nor ``none``.
    """
    if value.strip().lower() == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter("give a number or none", param_hint=option) from None


# --- of --policy openai:MODEL ---------------------------------------------------------------------

BaseUrlOption = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        metavar="URL",
        help="Model: endpoint, up to /v1. Default: OPENAI_BASE_URL, else OpenAI's.",
    ),
]
ApiKeyEnvOption = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="NAME",
        help="Model: variable that holds the API key. Default: OPENAI_API_KEY.",
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT|@FILE",
        help="Model: template of the system message over the task's fields; '' for none.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT|@FILE",
        help="Model: template of the first user message. Default: {instruction}.",
    ),
]
MaxTurnsOption = Annotated[
    int | None,
    typer.Option("--max-turns", min=1, help="Model: maximum answers in an episode. Default: 50."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Model: maximum tokens in an episode."),
]
MaxCostOption = Annotated[
    float | None,
    typer.Option("--max-cost", help="Model: maximum cost of an episode; needs --price."),
]
PriceOption = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="IN,OUT",
        help="Model: prices of a million prompt tokens and a million answer tokens; or "
        "'reported', if the endpoint states the cost of each answer.",
    ),
]
StopToolOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop-tool",
        metavar="TOOL",
        help="Model: tool whose success ends the episode, repeatable.",
    ),
]
RequestOption = Annotated[
    str | None,
    typer.Option(
        "--request",
        metavar="JSON",
        help="Model: further fields of each request: '{\"temperature\": 0.7}'.",
    ),
]
StreamOption = Annotated[bool, typer.Option("--stream", help="Model: ask for streamed answers.")]
ImagesOption = Annotated[
    bool,
    typer.Option("--images", help="Model: pass it the images of results."),
]


class ModelOptions:
    """The options of ``--policy openai:MODEL``.

    Raises:
        BadParameter: A file cannot be read, or an option is malformed.
    """

    def __init__(
        self,
        *,
        base_url: BaseUrlOption = None,
        api_key_env: ApiKeyEnvOption = None,
        system: SystemOption = None,
        prompt: PromptOption = None,
        max_turns: MaxTurnsOption = None,
        max_tokens: MaxTokensOption = None,
        max_cost: MaxCostOption = None,
        price: PriceOption = None,
        stop_tool: StopToolOption = None,
        request: RequestOption = None,
        stream: StreamOption = False,
        images: ImagesOption = False,
    ) -> None:
        values = {
            "base_url": base_url,
            "api_key_env": api_key_env,
            "system": _template(system, "--system"),
            "prompt": _template(prompt, "--prompt"),
            "max_turns": max_turns,
            "max_tokens": max_tokens,
            "max_cost": max_cost,
            "prices": _prices(price),
            "stop_tools": tuple(stop_tool or ()),
            "request": _request_fields(request),
            "stream": stream,
            "images": images,
        }
        self.given: dict[str, Any] = {
            name: value
            for name, value in values.items()
            if value is not None and value is not False and value != ()
        }
        """What the user gave of them, as `named_policy` takes it."""


def _template(text: str | None, option: str) -> str | None:
    """Return a template, read from a file if it is written as ``@FILE``.

    Raises:
        BadParameter: The file cannot be read.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"{text[1:]} cannot be read: {exc}", param_hint=option) from None


def _prices(text: str | None) -> tuple[float, float] | Literal["reported"] | None:
    """Return the value of ``--price``.

    Raises:
        BadParameter: It is neither two numbers nor ``reported``.
    """
    if text is None:
        return None
    if text == "reported":
        return "reported"
    try:
        asked, answered = map(float, text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither two numbers, such as 0.5,1.5, nor 'reported'",
            param_hint="--price",
        ) from None
    return asked, answered


def _request_fields(text: str | None) -> dict[str, Any] | None:
    """Return the fields of ``--request``.

    Raises:
        BadParameter: They are not a JSON object.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(f"not JSON: {exc}", param_hint="--request") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--request")
    return found
