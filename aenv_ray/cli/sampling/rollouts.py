"""Display of rollouts: where they stand while they run, then a summary."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aenv_ray.cli.sampling import live_view
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.output import pairs, printable
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.sampling import Episode, Sampling, Summary
    from aenv_ray.trajectories.statistics import PassAtK

_SETTLE_S: Final = 10.0
_PHASES_SHOWN: Final = 3
_CAUSES_SHOWN: Final = 5
_ERRORS_SHOWN: Final = 3
_OUTPUT_PATIENCE_S: Final = 60.0
"""How long new episodes begin although the output takes none."""


def check_writable(out: Path) -> None:
    """Check that the output file or directory can be written, before anything runs.

    Raises:
        ConfigError: It cannot.
    """
    from aenv_ray.trajectories import shards

    if shards.is_directory(out):
        shards.make_directory(out)
        return
    try:
        with out.open("a", encoding="utf-8"):
            pass
    except OSError as exc:
        raise ConfigError(
            f"{out} cannot be written: {exc.strerror}", hint="choose another file with --out"
        ) from exc


@contextlib.contextmanager
def on_ray() -> Iterator[None]:
    """Disconnect from Ray after the block, and reserve standard output for data during it."""
    from aenv_ray.actors.fabric import driver_api

    # Ray prints warnings on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            driver_api.shutdown()


def say_engine(environment: str, engine: str | None, what: str = "engine") -> None:
    """Print the engine of a sampling, unless the caller, the project or a setting names it.

    Raises:
        ConfigError: The engine is unknown, or lacks what the environment needs.
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.fabric.engine_choice import likely_engine, possible_engines
    from aenv_ray.actors.fabric.references import resolve_environment
    from aenv_ray.actors.ray_shell import operator_policy

    source, policy = resolve_environment(environment, driver_api.init), operator_policy.current()
    if not possible_engines(source, policy, engine).is_fixed:
        console.say(f"{what}: {likely_engine(source, policy, engine)}")


@contextlib.contextmanager
def draining(sampling: Sampling) -> Iterator[None]:
    """During the block, the first Ctrl-C lets running episodes finish, and the second one stops."""

    def on_interrupt(number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGINT, before)
        sampling.drain()
        console.say("no more episodes begin, and the running ones finish; Ctrl-C again stops them")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_all(
    sampling: Sampling, *, quiet: bool, each: Callable[[Episode], None] | None = None
) -> Summary:
    """Run all episodes and return their summary, even if the output file cannot be written.

    Args:
        sampling: The sampling.
        quiet: Show no progress bar.
        each: Called with each episode as it finishes.
    """
    try:
        return _run(sampling, each, quiet=quiet)
    except ConfigError as exc:
        if exc is not sampling.output_failure:
            raise
        return sampling.summary()


def _run(sampling: Sampling, each: Callable[[Episode], None] | None, *, quiet: bool) -> Summary:
    from aenv_ray.sampling.progress import Progress

    progress = Progress(
        sampling.total,
        sampling.episodes,
        playing=lambda: sampling.playing,
        waiting=lambda: sampling.waiting,
    )
    errors = 0
    stop_without_output = StopWithoutOutput(
        sampling, lambda: sampling.output_failure, "make room meanwhile, or continue with --resume"
    )
    with live_view.shown(progress.view, redraw=not quiet):
        for episode in sampling:
            progress.add(episode)
            stop_without_output.look()
            if each is not None:
                each(episode)
            if episode.error is not None:
                errors += 1
                if errors <= _ERRORS_SHOWN:
                    said = " ".join(episode.error.split())
                    console.say(printable(f"{episode.task_id}: {said}"))
    if errors > _ERRORS_SHOWN:
        console.say(f"and {errors - _ERRORS_SHOWN} more episodes with an error")
    return sampling.summary()


class StopWithoutOutput:
    """Drains a sampling whose output takes no episodes.

    This process is about to end, and what is in no output ends with it.

    Args:
        sampling: The sampling.
        failure: Returns why episodes are missing in the output at present; None if none are.
        hint: What to do.
    """

    def __init__(
        self, sampling: Sampling, failure: Callable[[], ConfigError | None], hint: str
    ) -> None:
        self._sampling = sampling
        self._failure = failure
        self._hint = hint
        self._since: float | None = None

    def look(self) -> None:
        """Note whether the output takes episodes."""
        failure, now = self._failure(), time.monotonic()
        if failure is None:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= _OUTPUT_PATIENCE_S and not self._sampling.is_draining:
            self._sampling.drain()
            console.say(
                f"{failure.message}; no more episodes begin, and the running ones finish: "
                f"{self._hint}"
            )


def instances_left(environment: str, engine: str | None, owner: str) -> int:
    """Return how many instances of the rollouts still run; waits for those that are ending.

    On a Ray started for the rollouts these are all processes, containers and pods of sandboxes; on
    a shared one, the instances of `owner`, since others may run more.

    Args:
        environment: Its warm pool is emptied first, as no more rollouts follow.
        engine: The rollouts' engine.
        owner: The rollouts' owner.
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.fabric.warm_api import warm
    from aenv_ray.errors import DeadlineExceeded, FabricUnavailable

    # Sandboxes that are starting, or on an unreachable host, are counted, and end with this job.
    with contextlib.suppress(DeadlineExceeded, FabricUnavailable):
        warm(environment, 0, engine=engine)
    connection = driver_api.init()

    def count() -> int:
        if connection.owns_ray:
            return connection.count_processes()
        return sum(instance.owner == owner for instance in connection.list_instances())

    deadline = time.monotonic() + _SETTLE_S
    while (left := count()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _pass(one: PassAtK) -> str:
    return f"{one.estimate:.3f} of {one.tasks} tasks"


def table(summary: Summary, left: int | None = None) -> str:
    """Return the summary of rollouts as text."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} ms"

    mean = "-" if summary.reward_mean is None else f"{summary.reward_mean:.3f}"
    rows = [
        ("rollouts", f"{summary.rollouts}"),
        ("success", f"{summary.succeeded} of {summary.rollouts}"),
        ("reward mean", mean),
        *((f"pass@{one.k}", _pass(one)) for one in summary.pass_at_k),
        ("died inside", f"{summary.died_inside}"),
        ("infrastructure failures", f"{summary.infra_failed}"),
        ("policy failed", f"{summary.policy_failed}"),
        ("timed out", f"{summary.timed_out}"),
        ("reward failed", f"{summary.reward_failed}"),
        ("refused", f"{summary.refused}"),
        ("tool calls", f"{summary.tool_calls}"),
        ("calls/s", f"{summary.calls_per_s:.0f}"),
        ("create p50 / p99", f"{ms(summary.create_p50_ms)} / {ms(summary.create_p99_ms)}"),
        ("call p50 / p99", f"{ms(summary.call_p50_ms)} / {ms(summary.call_p99_ms)}"),
        ("wall time", f"{summary.wall_s:.1f} s"),
    ]
    slowest = list(summary.phases_mean_ms.items())[:_PHASES_SHOWN]
    if slowest:
        rows.append(("slowest phases", ", ".join(f"{one} {ms(value)}" for one, value in slowest)))
    if summary.causes:
        causes = list(summary.causes.items())[:_CAUSES_SHOWN]
        rows.append(("causes", ", ".join(f"{cause}: {count}" for cause, count in causes)))
    if summary.worst_tasks:
        worst = (f"{printable(one.task_id)} {one.reward_mean:.3f}" for one in summary.worst_tasks)
        rows.append(("worst tasks", ", ".join(worst)))
    if left is not None:
        rows.append(("instances left", f"{left}"))
    return pairs(dict(rows))
