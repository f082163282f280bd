"""``aenv quickstart``: rollouts of a built-in environment, and their summary."""

from __future__ import annotations

import random
import secrets
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.sampling.options import ConcurrencyOption
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import EngineOption, OutputOption
from aenv_ray.cli.terminal.output import Format, chosen, show

if TYPE_CHECKING:
    from aenv_ray.sampling import Task

ENVIRONMENT: Final = "mini-terminal"
_EXPLORING: Final = ("ls -la", "pwd", "cat *.txt | head -5", "wc -c * 2>/dev/null", "env | sort")


class PolicyName(StrEnum):
    """The scripted policies."""

    REFERENCE = "reference"
    """The solution of each task."""
    WRONG = "wrong"
    """A plausible wrong solution of each task."""
    RANDOM = "random"
    """One of the two at random, with a seed, after another command."""


def quickstart(
    policy: Annotated[
        PolicyName, typer.Option("--policy", help="Scripted policy.")
    ] = PolicyName.REFERENCE,
    rollouts: Annotated[
        int, typer.Option("--rollouts", "-n", min=1, help="Number of episodes.")
    ] = 64,
    concurrency: ConcurrencyOption = "16",
    out: Annotated[Path, typer.Option("--out", help="Output file, JSON Lines.")] = Path(
        "quickstart.jsonl"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Same as -o json: a summary without progress bar.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random policy.")] = 0,
    engine: EngineOption = None,
    output: OutputOption = None,
) -> None:
    """Run rollouts of mini-terminal on a running or a new local Ray.

    Example:
      aenv quickstart --policy wrong --rollouts 128 --concurrency 32
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.cli.sampling import rollouts as shown
    from aenv_ray.project import project
    from aenv_ray.sampling import load_tasks, sample
    from aenv_ray.trajectories.shards import check_output

    check_output(out, overwrite=True)
    shown.check_writable(out)
    owner = f"quickstart-{secrets.token_hex(4)}"
    source = project.resolve(ENVIRONMENT)
    tasks = load_tasks(source.path / "tasks.jsonl")
    sampling = sample(
        source.reference, _scripted(policy, seed), [tasks[n % len(tasks)] for n in range(rollouts)],
        concurrency=concurrency, out=out, overwrite=True, engine=engine, owner=owner,
    )  # fmt: skip
    form = Format.JSON if as_json else chosen(output)
    quiet = form is not Format.TABLE
    with shown.on_ray():
        if quiet:
            driver_api.init()
        else:
            console.say(_connected(engine))
        finished = shown.run_all(sampling, quiet=quiet)
        left = shown.instances_left(ENVIRONMENT, engine, owner)
    summary = finished.model_dump(mode="json") | {"instances_left": left}
    show(summary, form, shown.table(finished, left))
    if sampling.output_failure is not None:
        raise sampling.output_failure
    if not quiet:
        console.say(f"episodes written to {out}")
    if finished.infra_failed or left:
        raise typer.Exit(1)


def _scripted(policy: PolicyName, seed: int) -> Any:
    """Return a policy that calls the environment's tools as a script says."""

    async def act(env: Any, task: Task) -> str:
        name = policy
        if policy is PolicyName.RANDOM:
            # One generator per task: the result does not depend on the order of episodes.
            dice = random.Random(f"{seed}/{task.id}")
            await env.call_tool("execute_command", {"command": dice.choice(_EXPLORING)})
            name = dice.choice([PolicyName.REFERENCE, PolicyName.WRONG])
        for step in task.reference if name is PolicyName.REFERENCE else task.wrong:
            await env.call_tool(step.tool, step.arguments)
        return name.value

    act.__qualname__ = policy.value  # the name in records
    return act


def _connected(wanted: str | None) -> str:
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.fabric.engine_choice import likely_engine
    from aenv_ray.actors.ray_shell import operator_policy
    from aenv_ray.project import project

    console.say("starting the fabric on Ray …")
    started = time.monotonic()
    connection = driver_api.init()
    engine = likely_engine(project.resolve(ENVIRONMENT), operator_policy.current(), wanted)
    kind = "a local Ray, started for this run" if connection.owns_ray else "the running Ray"
    return f"on {kind}, ready after {time.monotonic() - started:.1f} s; engine: {engine}"
