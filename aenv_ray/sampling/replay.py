"""Replaying recorded episodes: the same setup, calls and reward on new instances."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from aenv_ray import ids
from aenv_ray.errors import AenvError, CallCancelled, ConfigError, ToolError, ToolTimeout
from aenv_ray.sampling.episode_env import CALL_TIMEOUT_S, EpisodeEnv
from aenv_ray.sampling.sampler import Sampling, sample
from aenv_ray.sampling.tasks.archives import check_files
from aenv_ray.trajectories.comparison import Comparison, compare
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step, Task, ToolCall

_CALLS: Final = "recorded_calls"
REPLAYABLE: Final = (
    EpisodeStatus.COMPLETED,
    EpisodeStatus.DIED_INSIDE,
    EpisodeStatus.REWARD_FAILED,
)
"""Statuses that repeating the calls can reproduce; other episodes ended for other reasons."""
_REWARD_OPTIONS: Final = {
    EpisodeStatus.DIED_INSIDE: "reward_on_death",
    EpisodeStatus.REWARD_FAILED: "reward_on_failure",
}
"""The option of `sample` that gives the reward of episodes without a result."""
_SLOWER: Final = 3.0
"""By this factor a call of an older record, whose limit is not known, may take longer."""


class _RecordedCall(ToolCall):
    """A recorded step, to be called again."""

    cancelled_after_s: float | None = None
    """When it is cancelled; None: not at all."""


async def recorded(env: EpisodeEnv, task: Task) -> Any:
    """Make the calls of a recorded episode, and return its output."""
    extra = task.model_extra or {}
    for call in extra[_CALLS]:
        await _repeat(env, _RecordedCall.model_validate(call))
    return extra["recorded_output"]


async def _repeat(env: EpisodeEnv, call: _RecordedCall) -> None:
    """Make a call; that it has no result is recorded in its step, as in the original episode.

    Raises:
        AenvError: The sandbox has ended, or the infrastructure failed.
    """
    try:
        async with asyncio.timeout(call.cancelled_after_s):
            await env.call_tool(call.tool, call.arguments, call.timeout_s or CALL_TIMEOUT_S)
    except ToolError:
        pass
    except TimeoutError as exc:
        if isinstance(exc, AenvError):
            raise


class Replay(NamedTuple):
    """A replay that has not begun; run `sampling`, then call `comparison`."""

    originals: tuple[Episode, ...]
    sampling: Sampling
    left_out: tuple[Episode, ...]
    """Episodes that are not replayed; see `why_not`."""
    replaced_rewards: frozenset[EpisodeStatus]
    """Statuses without a result for which the caller gives a reward."""

    def comparison(self) -> Comparison:
        """Return where the replayed episodes differ from their recordings."""
        return compare(self.originals, self.episodes(), by_index=True)

    def episodes(self) -> list[Episode]:
        """Return the replayed episodes, each with the index of its original.

        One that ends without a result, as its original did, has the reward of its original unless
        an option gives another: no reward function gave it.
        """
        return [self._as_original(one) for one in self.sampling.episodes]

    def _as_original(self, replayed: Episode) -> Episode:
        original = self.originals[replayed.index]
        update: dict[str, Any] = {"index": original.index}
        status = original.status
        has_no_result = status in _REWARD_OPTIONS and status is replayed.status
        if has_no_result and status not in self.replaced_rewards:
            update["reward"] = original.reward
        return replayed.model_copy(update=update)

    def rescored(self, replayed: Episode) -> Episode:
        """Return a recorded episode with the outcome and the reward of its replay.

        All else is as recorded: its steps, conversation, tokens, task and group belong together. If
        the infrastructure failed, so is its reward.

        Args:
            replayed: An episode that `sampling` yielded.
        """
        original = self.originals[replayed.index]
        if replayed.status is EpisodeStatus.INFRA_FAILED:
            return original
        new = self._as_original(replayed)
        fields = ("status", "reward", "reward_detail", "error", "environment", "environment_digest")
        return original.model_copy(update={name: getattr(new, name) for name in fields})


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
        episodes: Those for which `why_not` gives a reason are left out.
        environment: As in `sample`. None: the one that the episodes name, which must be the same.
        files: Directories whose files the recorded tasks may bring, such as that of a benchmark.
            A record may come from others, and its tasks name the files that are read.
        options: Further arguments of `sample`, such as the `environment_variables`, `ttl` and
            `episode_timeout` that the episodes were played with.

    Raises:
        ConfigError: There is nothing to replay, an episode does not hold its task, the episodes
            come from several environments and none is given, or a task brings other files.
    """
    given = tuple(episodes)
    originals = tuple(one for one in given if why_not(one) is None)
    left_out = tuple(one for one in given if why_not(one) is not None)
    if not originals:
        why = reasons_told(left_out)
        raise ConfigError(
            f"there are no episodes to replay{f': {why}' if why else ''}",
            hint="record episodes that complete, and whose policy acts by tools",
        )
    tasks = [_task(one) for one in originals]
    hint = "look at the tasks; if you trust them, allow the directory: --files DIR, or files=[DIR]"
    check_files(tasks, "the recorded tasks", [Path(one) for one in files], hint=hint)
    where = environment or _environment(originals)
    sampling = sample(where, recorded, tasks, **options)
    replaced = frozenset(one for one, option in _REWARD_OPTIONS.items() if option in options)
    return Replay(originals, sampling, left_out, replaced)


def why_not(episode: Episode) -> str | None:
    """Return why repeating the recorded calls cannot reproduce an episode; None if it can."""
    if episode.status not in REPLAYABLE:
        return episode.status.value
    if episode.unrecorded_calls:
        return "with commands or written files that are not steps"
    return None


def reasons(left_out: Iterable[Episode]) -> Mapping[str, int]:
    """Return how many episodes are not replayed, by reason."""
    return Counter(why for one in left_out if (why := why_not(one)) is not None)


def reasons_told(left_out: Iterable[Episode]) -> str:
    """Return `reasons` as text."""
    return ", ".join(f"{count} {reason}" for reason, count in reasons(left_out).items())


def _call(step: Step) -> dict[str, Any]:
    """Return a step as a call with the limit that it had."""
    is_cancelled = step.error == CallCancelled.code
    call = _RecordedCall(
        tool=step.tool,
        arguments=step.arguments,
        timeout_s=step.timeout_s or _likely_limit_s(step),
        cancelled_after_s=step.duration_s if is_cancelled else None,
    )
    return call.model_dump()


def _likely_limit_s(step: Step) -> float:
    """Return a limit for a call of an older record, which does not have it."""
    if step.error == ToolTimeout.code and step.duration_s > 0:
        return step.duration_s
    return max(CALL_TIMEOUT_S, _SLOWER * step.duration_s)


def _task(episode: Episode) -> Task:
    if episode.task is None:
        raise ConfigError(
            f"episode {episode.index} does not hold its task, so its setup and reward are unknown",
            hint="record the episodes with this version of aenv-ray",
        )
    more = {_CALLS: list(map(_call, episode.steps)), "recorded_output": episode.output}
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
