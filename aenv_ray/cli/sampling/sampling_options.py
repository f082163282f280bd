"""Options of commands that sample episodes."""

from __future__ import annotations

from typing import Annotated, Final

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
OverwriteOption = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]
InfraRetriesOption = Annotated[
    int, typer.Option("--infra-retries", min=0, help="Retries after infrastructure failures.")
]
EpisodeTimeoutOption = Annotated[
    str | None,
    typer.Option("--episode-timeout", help="Limit for the policy: 90s, 30m. Default: the TTL."),
]
