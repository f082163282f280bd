"""Options of ``--policy openai:MODEL``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

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


def given(**options: Any) -> dict[str, Any]:
    """Return the options that the user gave."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }


def template(text: str | None, option: str) -> str | None:
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


def prices(text: str | None) -> tuple[float, float] | Literal["reported"] | None:
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


def request_fields(text: str | None) -> dict[str, Any] | None:
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
