"""``aenv replay`` and ``aenv rescore``: run recorded calls again on new instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aenv_ray.cli.sampling import options
from aenv_ray.cli.sampling.trajectories import RecordArgument, show_comparison
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    EngineOption,
    OutputOption,
    RecordedEnvironmentOption,
    VariablesOption,
    variables,
    with_options,
)
from aenv_ray.cli.terminal.output import Format, chosen, show
from aenv_ray.cli.terminal.output_files import OverwriteOption, check_new
from aenv_ray.errors import ConfigError
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.sampling.replay import Replay
    from aenv_ray.trajectories import Episode, Trajectories

FilesOption = Annotated[
    list[Path] | None,
    typer.Option("--files", help="Directory whose files the recorded tasks may bring; repeatable."),
]


class ReplayOptions:
    """The options of commands that replay episodes: how they were played, and how to replay them.

    Raises:
        BadParameter: An option is malformed.
    """

    def __init__(
        self,
        *,
        files: FilesOption = None,
        concurrency: options.ConcurrencyOption = "16",
        episode_timeout: options.EpisodeTimeoutOption = None,
        reward_on_death: options.OptionalRewardOnDeathOption = None,
        reward_on_timeout: options.OptionalRewardOnTimeoutOption = None,
        reward_on_failure: options.OptionalRewardOnFailureOption = None,
        ttl: options.TtlOption = None,
        engine: EngineOption = None,
        env: VariablesOption = None,
    ) -> None:
        self.settings: dict[str, Any] = {
            "files": files or (),
            "concurrency": concurrency,
            "environment_variables": variables(env or [], "--env"),
        }
        """What the user gave of them, as `aenv_ray.sampling.replay` takes it."""
        given = {
            "episode_timeout": episode_timeout,
            "reward_on_death": reward_on_death,
            "ttl": ttl,
            "engine": engine,
        }
        self.settings |= {name: value for name, value in given.items() if value is not None}
        for name, text in (
            ("reward_on_timeout", reward_on_timeout),
            ("reward_on_failure", reward_on_failure),
        ):
            if text is not None:  # which "none" is not
                self.settings[name] = options.reward(text, f"--{name.replace('_', '-')}")


@with_options(ReplayOptions)
def replay(
    replaying: ReplayOptions,
    path: RecordArgument,
    environment: RecordedEnvironmentOption = None,
    output: OutputOption = None,
) -> None:
    """Run recorded calls again on new instances and compare.

    Each episode's setup, calls and reward run again, in order. Exits with 1 if
    a result or a reward differs. Only episodes that completed, whose sandbox died inside
    or whose reward failed are replayed, if their policy acted by tools alone; the
    number of the others is printed. Give the variables, the TTL and the episode timeout
    that the episodes were played with. An episode that again has no result keeps
    its reward, unless --reward-on-death or --reward-on-failure gives another.

    Tasks that bring files of this machine, as those of Terminal-Bench do, are
    replayed only with the directories of these files: a record may come from others.

    Example:
      aenv replay run1.jsonl
      aenv replay run1.jsonl --environment ./my-env
      aenv replay run1.jsonl --files terminal-bench/tasks
    """
    played = _play(path, environment, replaying.settings, output)
    show_comparison(played.comparison(), output)


@with_options(ReplayOptions)
def rescore(
    replaying: ReplayOptions,
    path: RecordArgument,
    out: Annotated[Path, typer.Option("--out", help="Output file, JSON Lines.")],
    force: OverwriteOption = False,
    environment: RecordedEnvironmentOption = None,
    output: OutputOption = None,
) -> None:
    """Score recorded episodes again with a changed reward.

    Each episode's setup and calls run again on new instances, then the reward
    of the environment that you name. The output has the recorded episodes with the
    new rewards and outcomes; all else in them is as recorded. Episodes that cannot be
    replayed, see aenv replay, are in it as recorded, and so are those whose replay
    failed for infrastructure: then the command exits with 1.

    Example:
      aenv rescore run1.jsonl --environment ./my-env --out rescored.jsonl
    """
    from aenv_ray.sampling.replay import reasons
    from aenv_ray.trajectories import EpisodeStatus
    from aenv_ray.trajectories.shards import check_output

    check_new(out, force=True, source=path)
    check_output(out, overwrite=force, hint="overwrite with --force, or choose another --out")
    played = _play(path, environment, replaying.settings, output, out)
    void = {one.index for one in played.episodes() if one.status is EpisodeStatus.INFRA_FAILED}
    before = {one.index: one.reward for one in played.originals}
    rows = [
        {
            "index": one.index,
            "task_id": one.task_id,
            "before": before[one.index],
            "after": one.reward,
        }
        for one in sorted(played.episodes(), key=lambda one: one.index)
        if one.index not in void
    ]
    changed = [row for row in rows if row["before"] != row["after"]]
    diverged = sum(
        one.step is not None and one.before_index not in void
        for one in played.comparison().differences
    )
    lines = [f"{len(changed)} of {len(rows)} rewards changed"]
    lines += [f"  {r['index']}  {r['task_id']}  {r['before']} -> {r['after']}" for r in changed]
    if diverged:
        lines.append(
            f"{counted(diverged, 'episode')} had other results of calls; "
            f"compare: aenv replay {path}"
        )
    if void:
        lines.append(
            f"{counted(len(void), 'episode')} could not be replayed, since the infrastructure "
            "failed: in the output as recorded"
        )
    rescored = {"episodes": rows, "diverged": diverged, "infra_failed": sorted(void)}
    show(rescored | {"not_replayed": dict(reasons(played.left_out))}, output, "\n".join(lines))
    console.say(f"episodes written to {out}")
    if void:
        raise typer.Exit(1)


def _play(
    path: Path,
    environment: str | None,
    settings: dict[str, Any],
    output: Format | None,
    out: Path | None = None,
) -> Replay:
    """Replay the episodes with a progress bar; write all with their new rewards to `out`.

    Raises:
        ConfigError: The output could not be written.
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.cli.sampling import rollouts as shown
    from aenv_ray.sampling.replay import reasons_told
    from aenv_ray.sampling.replay import replay as prepared
    from aenv_ray.trajectories import read

    recorded = read(path)
    with shown.on_ray():
        driver_api.init()
        played = prepared(recorded, environment, **settings)
        with _rescoring(recorded, played, out) as each:
            shown.run_all(played.sampling, quiet=chosen(output) is not Format.TABLE, each=each)
    if played.left_out:
        why = reasons_told(played.left_out)
        console.say(f"{counted(len(played.left_out), 'episode')} not replayed: {why}")
    return played


@contextmanager
def _rescoring(
    recorded: Trajectories, played: Replay, out: Path | None
) -> Iterator[Callable[[Episode], None] | None]:
    """Return what writes a replayed episode to the output; None without one.

    Episodes that are not replayed are written first. Recorded attachments are copied to the output;
    those that are missing are counted and said.

    Raises:
        ConfigError: The output could not be written, or lacks episodes.
    """
    from aenv_ray.cli.sampling.rollouts import StopWithoutOutput
    from aenv_ray.trajectories.shards import open_output

    if out is None:
        yield None
        return
    output = open_output(out)
    stop_without_output = StopWithoutOutput(
        played.sampling, lambda: output.failure, "make room, and rescore to another --out"
    )
    missing: dict[str, str] = {}

    def write(episode: Episode) -> None:
        for digest in {one.digest for one in episode.attachments}:
            try:
                episode.contents[digest] = recorded.attachment(digest)
            except ConfigError as exc:  # the record is valid without it
                missing[digest] = exc.message
        output.write(episode)
        if output.failure is None or output.is_final:  # otherwise it is tried again
            episode.contents.clear()
        stop_without_output.look()

    try:
        for one in played.left_out:
            write(one)
        yield lambda replayed: write(played.rescored(replayed))
    finally:
        output.close()
    if missing:
        first = next(iter(missing.values()))
        console.say(f"recorded attachments that are not in the output: {len(missing)}; {first}")
    if output.failure is not None:
        raise output.failure
    total = played.sampling.total or 0
    if played.sampling.is_draining and played.sampling.finished < total:
        raise ConfigError(
            f"{out} lacks the episodes that had not begun when it could not be written",
            hint="rescore to another --out",
        )
