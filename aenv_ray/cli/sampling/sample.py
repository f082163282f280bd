"""``aenv sample``: run episodes of an environment with your own policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aenv_ray.cli.sampling import options
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    EngineOption,
    OutputOption,
    SampledArgument,
    VariablesOption,
    variables,
    with_options,
)
from aenv_ray.cli.terminal.output import Format, chosen, show
from aenv_ray.cli.terminal.output_files import OverwriteOption

if TYPE_CHECKING:
    from aenv_ray.sampling import Episode


@with_options(options.ModelOptions)
def sample(  # noqa: PLR0913, PLR0917  # each is an option
    model: options.ModelOptions,
    environment: SampledArgument,
    policy: options.OptionalPolicyOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            "-t",
            metavar="FILE|DIR|hf:NAME:SPLIT",
            help="JSON Lines, JSON, CSV, Parquet, task directories, or a data set of Hugging Face. "
            "Default: the environment's own tasks.",
        ),
    ] = None,
    task_id: Annotated[
        list[str] | None,
        typer.Option("--task-id", help="Id or pattern of tasks to keep, repeatable: 'count-*'."),
    ] = None,
    shuffle: options.ShuffleOption = None,
    limit: options.TaskLimitOption = None,
    task_field: Annotated[
        list[str] | None,
        typer.Option(
            "--task-field",
            metavar="FIELD=COLUMN",
            help="Read a task field from a column, repeatable: instruction=question, id=# (row "
            "number).",
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--predictions",
            metavar="FILE",
            help="Grade these patches instead of playing a policy: SWE-bench's predictions, as "
            "JSON Lines or JSON.",
        ),
    ] = None,
    rollouts: Annotated[
        int | None,
        typer.Option("--rollouts", "-n", min=1, help="Number of episodes. Default: one per task."),
    ] = None,
    concurrency: options.ConcurrencyOption = "16",
    samples_per_task: options.SamplesPerTaskOption = 1,
    hedge: Annotated[
        int,
        typer.Option(
            "--hedge",
            min=0,
            help="Start this many extra episodes of each task; keep the first that finish.",
        ),
    ] = 0,
    runners: options.RunnersOption = "auto",
    out: Annotated[Path, typer.Option("--out", help="JSON Lines file, or a directory.")] = Path(
        "episodes.jsonl"
    ),
    force: OverwriteOption = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue: run the episodes that the file lacks.")
    ] = False,
    infra_retries: options.InfraRetriesOption = 2,
    episode_timeout: options.EpisodeTimeoutOption = None,
    reward_on_death: options.RewardOnDeathOption = 0.0,
    reward_on_timeout: options.RewardOnTimeoutOption = "0.0",
    reward_on_failure: options.RewardOnFailureOption = "0.0",
    ttl: options.TtlOption = None,
    engine: EngineOption = None,
    env: VariablesOption = None,
    output: OutputOption = None,
) -> None:
    """Run episodes of an environment with a policy.

    The policy is a model behind an OpenAI-compatible endpoint, your own function
    or class policy(env, task), sync or async, or one that checks the tasks:
    reference plays their solutions, null does nothing, random calls any tools.
    Infrastructure failures are excluded from means; the command exits with 1 if
    there was one. Failures that an agent can cause have a reward and count in
    means: --reward-on-death if it ended the sandbox, --reward-on-timeout if it used
    up the time, --reward-on-failure if the reward function failed.

    Example:
      aenv sample mini-terminal --policy reference
      aenv sample mini-terminal -p null --task-id 'count-*' --shuffle 1 --limit 5
      aenv sample mini-terminal -p openai:qwen3 --base-url http://host:8000/v1
      aenv sample mini-terminal -p my_agent:act -n 5000 --concurrency 8-256
      aenv sample mini-terminal --policy my_agent:act -n 64 --out run1.jsonl
      aenv sample swebench --tasks verified.jsonl --predictions preds.jsonl
      aenv sample mini-terminal -p my_agent:act -n 64 --out run1.jsonl --resume
    """
    from aenv_ray import sampling
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.cli.sampling import rollouts as shown
    from aenv_ray.sampling.policies.named import named_policy
    from aenv_ray.trajectories.shards import check_output

    if (policy is None) == (predictions is None):
        raise typer.BadParameter("give either --policy or --predictions", param_hint="--policy")
    act = named_policy(policy or "null", model.given)
    if resume and force:
        raise typer.BadParameter("cannot be combined with --force", param_hint="--resume")
    if not resume:
        hint = "continue with --resume, overwrite with --force, or choose another --out"
        check_output(out, overwrite=force, hint=hint)
    shown.check_writable(out)
    quiet = chosen(output) is not Format.TABLE
    with shown.on_ray():
        driver_api.init()  # on the main thread, the only one that can install Ray's signal handlers
        found = sampling.tasks_of(
            environment,
            tasks,
            variables(task_field or [], "--task-field"),
            variables(env or [], "--env"),
        )
        if predictions is not None:
            found = sampling.with_predictions(found, sampling.load_predictions(predictions))
        chosen_tasks = sampling.select_tasks(
            found,
            ids=task_id or (),
            shuffle=shuffle,
            limit=limit,
        )
        if rollouts is not None:
            chosen_tasks = [chosen_tasks[n % len(chosen_tasks)] for n in range(rollouts)]
        shown.say_engine(environment, engine)
        run = sampling.sample(
            environment,
            act,
            chosen_tasks,
            concurrency=concurrency,
            samples_per_task=samples_per_task,
            hedge=hedge,
            runners=runners,
            infra_retries=infra_retries,
            episode_timeout=episode_timeout,
            reward_on_death=reward_on_death,
            reward_on_timeout=options.reward(reward_on_timeout, "--reward-on-timeout"),
            reward_on_failure=options.reward(reward_on_failure, "--reward-on-failure"),
            out=out,
            resume=resume,
            overwrite=force,
            ttl=ttl,
            engine=engine,
            environment_variables=variables(env or [], "--env"),
        )
        try:
            with shown.draining(run):
                finished = shown.run_all(run, quiet=quiet)
        except KeyboardInterrupt:
            console.say(f"finished episodes are in {out}; continue with --resume")
            raise
    show(finished.model_dump(mode="json"), output, shown.table(finished))
    if predictions is not None:
        _say_verdicts(run.episodes)
    if run.output_failure is not None:
        raise run.output_failure
    console.say(f"episodes written to {out}")
    if run.is_draining and run.finished != run.total:
        console.say("the run was stopped early; continue with --resume")
        raise typer.Exit(130)
    if finished.infra_failed:
        raise typer.Exit(1)


def _say_verdicts(episodes: Sequence[Episode]) -> None:
    """Print which predictions resolve their instances."""
    kinds = {"resolved": True, "unresolved": False, "without verdict": None}
    for what, is_resolved in kinds.items():
        ids = [
            episode.task_id
            for episode in episodes
            if (None if episode.reward is None else episode.reward == 1.0) is is_resolved
        ]
        if ids:
            console.say(f"{what}: {len(ids)}: {', '.join(sorted(ids))}")
