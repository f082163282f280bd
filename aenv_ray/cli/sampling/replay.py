"""``aenv replay`` and ``aenv rescore``: run recorded calls again on new instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aenv_ray.cli.sampling.trajectories import RecordArgument, show_comparison
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import EngineOption, OutputOption, RecordedEnvironmentOption
from aenv_ray.cli.terminal.output import Format, chosen, show
from aenv_ray.errors import ConfigError
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.sampling.replay import Replay
    from aenv_ray.trajectories import Episode, Trajectories

ReplayConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", "-c", min=1, help="Concurrent instances.")
]
FilesOption = Annotated[
    list[Path] | None,
    typer.Option("--files", help="Directory whose files the recorded tasks may bring; repeatable."),
]


def replay(
    path: RecordArgument,
    environment: RecordedEnvironmentOption = None,
    files: FilesOption = None,
    concurrency: ReplayConcurrencyOption = 16,
    engine: EngineOption = None,
    output: OutputOption = None,
) -> None:
    """Run recorded calls again on new instances and compare.

    Each episode's setup, calls and reward run again, in order. Exits with 1 if
    a result or a reward differs. Void episodes are not replayed.

    Tasks that bring files of this machine, as those of Terminal-Bench do, are
    replayed only with the directories of these files: a record may come from others.

    Example:
      aenv replay run1.jsonl
      aenv replay run1.jsonl --environment ./my-env
      aenv replay run1.jsonl --files terminal-bench/tasks
    """
    played = _play(path, environment, files, concurrency, engine, output)
    show_comparison(played.comparison(), output)


def rescore(
    path: RecordArgument,
    out: Annotated[Path, typer.Option("--out", help="Output file, JSON Lines.")],
    environment: RecordedEnvironmentOption = None,
    files: FilesOption = None,
    concurrency: ReplayConcurrencyOption = 16,
    engine: EngineOption = None,
    output: OutputOption = None,
) -> None:
    """Score recorded episodes again with a changed reward.

    Each episode's setup and calls run again on new instances, then the reward
    of the environment that you name. The output has the recorded episodes with the
    new rewards and outcomes; all else in them is as recorded.

    Example:
      aenv rescore run1.jsonl --environment ./my-env --out rescored.jsonl
    """
    if out.exists():
        raise ConfigError(f"{out} already exists", hint="choose another --out")
    played = _play(path, environment, files, concurrency, engine, output, out)
    found = played.comparison()
    before = {one.index: one.reward for one in played.originals}
    rows = [
        {
            "index": one.index,
            "task_id": one.task_id,
            "before": before[one.index],
            "after": one.reward,
        }
        for one in sorted(played.episodes(), key=lambda one: one.index)
    ]
    changed = [row for row in rows if row["before"] != row["after"]]
    diverged = sum(one.step is not None for one in found.differences)
    lines = [f"{len(changed)} of {len(rows)} rewards changed"]
    lines += [f"  {r['index']}  {r['task_id']}  {r['before']} -> {r['after']}" for r in changed]
    if diverged:
        lines.append(
            f"{counted(diverged, 'episode')} had other results of calls; "
            f"compare: aenv replay {path}"
        )
    show({"episodes": rows, "diverged": diverged}, output, "\n".join(lines))
    console.say(f"episodes written to {out}")


def _play(
    path: Path,
    environment: str | None,
    files: list[Path] | None,
    concurrency: int,
    engine: str | None,
    output: Format | None,
    out: Path | None = None,
) -> Replay:
    """Replay the episodes with a progress bar; write them with their new rewards to `out`.

    Raises:
        ConfigError: The output could not be written.
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.cli.sampling import rollouts as shown
    from aenv_ray.sampling.replay import replay as prepared
    from aenv_ray.trajectories import read

    recorded = read(path)
    options: dict[str, Any] = {"concurrency": concurrency, "engine": engine, "files": files or ()}
    with shown.on_ray():
        driver_api.init()
        played = prepared(recorded, environment, **options)
        with _rescoring(recorded, played, out) as each:
            shown.run_all(played.sampling, quiet=chosen(output) is not Format.TABLE, each=each)
    return played


@contextmanager
def _rescoring(
    recorded: Trajectories, played: Replay, out: Path | None
) -> Iterator[Callable[[Episode], None] | None]:
    """Return what writes a replayed episode to the output; None without one.

    Recorded attachments are copied to the output; those that are missing are counted and said.

    Raises:
        ConfigError: The output could not be written.
    """
    from aenv_ray.trajectories.shards import open_output

    if out is None:
        yield None
        return
    output = open_output(out)
    missing: dict[str, str] = {}

    def write(replayed: Episode) -> None:
        episode = played.rescored(replayed)
        for digest in {one.digest for step in episode.steps for one in step.attachments}:
            try:
                episode.contents[digest] = recorded.attachment(digest)
            except ConfigError as exc:  # the record is valid without it
                missing[digest] = exc.message
        output.write(episode)
        episode.contents.clear()

    try:
        yield write
    finally:
        output.close()
    if missing:
        first = next(iter(missing.values()))
        console.say(f"recorded attachments that are not in the output: {len(missing)}; {first}")
    if output.failure is not None:
        raise output.failure
