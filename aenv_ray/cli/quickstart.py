"""``aenv quickstart``: real rollouts of the built-in environment, from nothing to a summary."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli import console
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.sampling import Sampling, Summary, Task

ENVIRONMENT: Final = "mini-terminal"
_EXPLORING: Final = ("ls -la", "pwd", "cat *.txt | head -5", "wc -c * 2>/dev/null", "env | sort")
_SETTLE_S: Final = 10.0


class PolicyName(StrEnum):
    """The scripted policies."""

    REFERENCE = "reference"
    """Each task's own solution."""
    WRONG = "wrong"
    """Each task's plausible wrong solution."""
    RANDOM = "random"
    """One of the two by a fair, seeded coin, after some looking around."""


def quickstart(
    policy: Annotated[
        PolicyName, typer.Option("--policy", help="Who acts in the episodes.")
    ] = PolicyName.REFERENCE,
    rollouts: Annotated[
        int, typer.Option("--rollouts", "-n", min=1, help="Episodes in total.")
    ] = 64,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Instances at a time.")
    ] = 16,
    out: Annotated[Path, typer.Option("--out", help="File for one JSON line an episode.")] = Path(
        "quickstart.jsonl"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Only a JSON summary on stdout, no progress bar.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random policy.")] = 0,
) -> None:
    """Run rollouts of mini-terminal on a local or running Ray.

    Example:
      aenv quickstart --policy wrong --rollouts 128 --concurrency 32
    """
    _check_writable(out)
    sampling = _prepare(policy, rollouts, concurrency, out, seed)
    from aenv_ray.actors import entrance

    # Ray prints its warnings on standard output, which is for the summary.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if not as_json:
                console.say(_connected())
            else:
                entrance.init()
            finished = _run_all(sampling, quiet=as_json)
            left = _instances_left()
        finally:
            entrance.shutdown()
    summary = finished.model_dump() | {"instances_left": left}
    if as_json:
        print(json.dumps(summary))
    else:
        _print_table(finished, left)
    if sampling.output_failure is not None:
        raise sampling.output_failure
    if not as_json:
        console.say(f"one JSON line for each episode: {out}")
    if finished.infra_failed or left:
        raise typer.Exit(1)


def _check_writable(out: Path) -> None:
    try:
        with out.open("a", encoding="utf-8"):
            pass
    except OSError as exc:
        raise ConfigError(
            f"{out} cannot be written: {exc.strerror}", hint="name another file with --out"
        ) from exc


def _prepare(policy: PolicyName, rollouts: int, concurrency: int, out: Path, seed: int) -> Sampling:
    from aenv_ray import project
    from aenv_ray.sampling import load_tasks, sample

    source = project.resolve(ENVIRONMENT)
    tasks = load_tasks(source.path / "tasks.jsonl")
    chosen = [tasks[index % len(tasks)] for index in range(rollouts)]
    return sample(
        source.reference, _scripted(policy, seed), chosen, concurrency=concurrency, out=out
    )


def _scripted(policy: PolicyName, seed: int) -> Any:
    """Return the policy: it replays a script through the environment's real tools."""

    async def act(env: Any, task: Task) -> str:
        name = policy
        if policy is PolicyName.RANDOM:
            # A generator for each task: the order in which episodes run changes nothing.
            dice = random.Random(f"{seed}/{task.id}")
            await env.call_tool("execute_command", {"command": dice.choice(_EXPLORING)})
            name = dice.choice([PolicyName.REFERENCE, PolicyName.WRONG])
        for step in task.reference if name is PolicyName.REFERENCE else task.wrong:
            await env.call_tool(step.tool, step.arguments)
        return name.value

    return act


def _connected() -> str:
    from aenv_ray import project
    from aenv_ray.actors import entrance
    from aenv_ray.actors.create_options import chosen_engine

    engine = chosen_engine(project.resolve(ENVIRONMENT))
    console.say("starting the fabric on Ray …")
    started = time.monotonic()
    connection = entrance.init()
    kind = "a local Ray, started for this run" if connection.owns_ray else "the Ray that runs"
    return f"on {kind}, up after {time.monotonic() - started:.1f} s; engine: {engine}"


def _run_all(sampling: Sampling, *, quiet: bool) -> Summary:
    """Return the summary of all episodes, also when their file could not be written."""
    try:
        return _run(sampling, quiet=quiet)
    except ConfigError as exc:
        if exc is not sampling.output_failure:
            raise
        return sampling.summary()


def _run(sampling: Sampling, *, quiet: bool) -> Summary:
    if quiet:
        return sampling.run()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("success {task.fields[success]}"), TextColumn("void {task.fields[void]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    succeeded = void = 0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        rollouts = bar.add_task("rollouts", total=sampling.total, success=0, void=0)
        for episode in sampling:
            succeeded += episode.reward is not None and episode.reward >= 1.0
            void += episode.reward is None
            if episode.error is not None:
                bar.console.print(f"{episode.task_id}: {episode.error}", markup=False)
            bar.update(rollouts, advance=1, success=succeeded, void=void)
    return sampling.summary()


def _instances_left() -> int:
    """Count what still runs, by what runs it; what is ending gets a moment."""
    from aenv_ray.actors import entrance

    connection = entrance.init()
    deadline = time.monotonic() + _SETTLE_S
    while (left := connection.count_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _print_table(summary: Summary, left: int) -> None:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} ms"

    mean = "-" if summary.reward_mean is None else f"{summary.reward_mean:.3f}"
    void = summary.infra_failed + summary.policy_failed + summary.reward_failed
    rows = [
        ("rollouts", f"{summary.rollouts}"),
        ("success", f"{summary.succeeded} of {summary.rollouts}"),
        ("reward mean", mean),
        ("infrastructure failures", f"{summary.infra_failed}"),
        ("void in total", f"{void}"),
        ("tool calls", f"{summary.tool_calls}"),
        ("calls/s", f"{summary.calls_per_s:.0f}"),
        ("create p50 / p99", f"{ms(summary.create_p50_ms)} / {ms(summary.create_p99_ms)}"),
        ("call p50 / p99", f"{ms(summary.call_p50_ms)} / {ms(summary.call_p99_ms)}"),
        ("wall time", f"{summary.wall_s:.1f} s"),
        ("instances left", f"{left}"),
    ]
    width = max(len(name) for name, _ in rows)
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in rows))
    sys.stdout.flush()
