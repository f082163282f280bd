"""Replaying recorded episodes: the same setup, calls and reward on new instances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from aenv_ray import ids
from aenv_ray.errors import ConfigError, ToolError
from aenv_ray.sampling.episode_env import EpisodeEnv
from aenv_ray.sampling.sampler import Sampling, sample
from aenv_ray.sampling.tasks.archives import check_files
from aenv_ray.trajectories.comparison import Comparison, compare
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task, ToolCall

_CALLS: Final = "recorded_calls"
REPLAYABLE: Final = (
    EpisodeStatus.COMPLETED,
    EpisodeStatus.DIED_INSIDE,
    EpisodeStatus.REWARD_FAILED,
)
"""Statuses that repeating the calls can reproduce; other episodes ended for other reasons."""


async def recorded(env: EpisodeEnv, task: Task) -> Any:
    """Make the calls of a recorded episode, and return its output."""
    extra = task.model_extra or {}
    for call in extra[_CALLS]:
        recorded_call = ToolCall.model_validate(call)
        try:
            await env.call_tool(recorded_call.tool, recorded_call.arguments)
        except ToolError:
            continue  # recorded as an error of the step, as in the original episode
    return extra["recorded_output"]


class Replay(NamedTuple):
    """A replay that has not begun; run `sampling`, then call `comparison`."""

    originals: tuple[Episode, ...]
    sampling: Sampling

    def comparison(self) -> Comparison:
        """Return where the replayed episodes differ from their recordings."""
        return compare(self.originals, self.episodes(), by_index=True)

    def episodes(self) -> list[Episode]:
        """Return the replayed episodes, each with the index of its original."""
        return [
            one.model_copy(update={"index": self.originals[one.index].index})
            for one in self.sampling.episodes
        ]

    def rescored(self, replayed: Episode) -> Episode:
        """Return a recorded episode with the outcome and the reward of its replay.

        All else is as recorded: its steps, conversation, tokens, task and group belong together.

        Args:
            replayed: An episode that `sampling` yielded.
        """
        fields = ("status", "reward", "reward_detail", "error", "environment", "environment_digest")
        update = {name: getattr(replayed, name) for name in fields}
        return self.originals[replayed.index].model_copy(update=update)


def replay(
    episodes: Iterable[Episode],
    environment: str | Path | None = None,
    *,
    files: Sequence[str | Path] = (),
    **options: Any,
) -> Replay:
    """Prepare to run recorded calls again, each episode on a new instance.

    A changed reward or environment scores the same behaviour again. Rewards in the replayed
    episodes are the new ones.

    Args:
        episodes: Void episodes are left out, except those whose reward failed.
        environment: As in `sample`. None: the one that the episodes name, which must be the same.
        files: Directories whose files the recorded tasks may bring, such as that of a benchmark.
            A record may come from others, and its tasks name the files that are read.
        options: Further arguments of `sample`.

    Raises:
        ConfigError: There is nothing to replay, an episode does not hold its task, the episodes
            come from several environments and none is given, or a task brings other files.
    """
    originals = tuple(one for one in episodes if one.status in REPLAYABLE)
    if not originals:
        raise ConfigError(
            "there are no episodes to replay",
            hint="record episodes that are not void: void ones are not replayed",
        )
    tasks = [_task(one) for one in originals]
    hint = "look at the tasks; if you trust them, allow the directory: --files DIR, or files=[DIR]"
    check_files(tasks, "the recorded tasks", [Path(one) for one in files], hint=hint)
    where = environment or _environment(originals)
    return Replay(originals, sample(where, recorded, tasks, **options))


def _task(episode: Episode) -> Task:
    if episode.task is None:
        raise ConfigError(
            f"episode {episode.index} does not hold its task, so its setup and reward are unknown",
            hint="record the episodes with this version of aenv-ray",
        )
    calls = [{"tool": step.tool, "arguments": step.arguments} for step in episode.steps]
    more = {_CALLS: calls, "recorded_output": episode.output}
    return Task.model_validate(episode.task.model_dump() | more)


def _environment(episodes: Iterable[Episode]) -> str:
    names = sorted({one.environment for one in episodes if one.environment is not None})
    if len(names) != 1:
        raise ConfigError(
            f"the episodes come from {len(names)} environments: {', '.join(names) or 'unknown'}",
            hint="name the environment to replay them on",
        )
    ids.split_reference(names[0])  # and no path: a record may come from others
    return names[0]
