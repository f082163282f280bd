"""``aenv eval``: play several benchmarks with a policy, and compare them in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aenv_ray.cli.sampling import options
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import EngineOption, OutputOption, with_options
from aenv_ray.cli.terminal.output import Columns, Format, chosen, show, show_rows
from aenv_ray.cli.terminal.output_files import OverwriteOption
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.sampling import Sampling, Task
    from aenv_ray.sampling.suites import Benchmark, BenchmarkResult


@with_options(options.ModelOptions)
def evaluate(  # each is an option
    model: options.ModelOptions,
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", help="Environments, separated by commas, or a TOML or JSON file."
        ),
    ],
    policy: options.PolicyOption,
    limit: options.TaskLimitOption = None,
    samples_per_task: options.SamplesPerTaskOption = 1,
    concurrency: options.ConcurrencyOption = "16",
    runners: options.RunnersOption = "auto",
    infra_retries: options.InfraRetriesOption = 2,
    episode_timeout: options.EpisodeTimeoutOption = None,
    engine: EngineOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory for the episodes and results.json.")
    ] = None,
    force: OverwriteOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    output: OutputOption = None,
) -> None:
    """Play several benchmarks with a policy; print one table.

    The benchmarks are played one after another. The table has the mean reward
    with a 95 % confidence interval, and the episodes that are void because the
    infrastructure or the policy failed. All tasks are read before anything
    starts. The first Ctrl-C lets the running episodes finish, the second one
    stops them; both print what is finished. Exits with 1 if a
    benchmark failed or has void episodes.

    Example:
      aenv eval mini-terminal,code --policy reference --limit 20
      aenv eval code -p openai:qwen3 --samples-per-task 8 --out results
      aenv eval suite.toml --policy my_agent:act --json
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.cli.sampling import rollouts as shown
    from aenv_ray.sampling.policies.named import named_policy
    from aenv_ray.sampling.suites import read_suite

    form = Format.JSON if as_json else output
    benchmarks = read_suite(suite)
    act = named_policy(policy, model.given)
    if out is not None:
        _prepare(out, benchmarks, force=force)
    evaluation = _Evaluation(out, force=force, quiet=chosen(form) is not Format.TABLE)
    has_ended = False
    try:
        with shown.on_ray():
            driver_api.init()  # on the main thread: only it can install Ray's signal handlers
            for benchmark in benchmarks:
                named = benchmark.engine or engine
                shown.say_engine(benchmark.environment, named, f"engine of {benchmark.label}")
            tasks = [benchmark.chosen_tasks(limit) for benchmark in benchmarks]
            try:
                for benchmark, chosen_tasks in zip(benchmarks, tasks, strict=True):
                    has_ended = not evaluation.play(
                        benchmark,
                        act,
                        chosen_tasks,
                        samples_per_task=benchmark.samples_per_task or samples_per_task,
                        concurrency=benchmark.concurrency or concurrency,
                        runners=runners,
                        infra_retries=infra_retries,
                        episode_timeout=benchmark.episode_timeout or episode_timeout,
                        engine=benchmark.engine or engine,
                    )
                    if has_ended:
                        break
            except KeyboardInterrupt:
                has_ended = True
    finally:  # whatever ends it, what was played is not lost
        if evaluation.results:
            evaluation.write()
            show_results(evaluation.results, form)
    for result in evaluation.results:
        if result.error is not None:
            console.say(f"{result.benchmark}: {result.error}")
    if has_ended:
        console.say("the evaluation was stopped early")
        raise typer.Exit(130)
    if any(result.error is not None or result.void for result in evaluation.results):
        raise typer.Exit(1)


class _Evaluation:
    """Plays benchmarks and keeps their results."""

    def __init__(self, out: Path | None, *, force: bool, quiet: bool) -> None:
        self.results: list[BenchmarkResult] = []
        self._out = out
        self._force = force
        self._quiet = quiet

    def play(
        self, benchmark: Benchmark, policy: Any, tasks: Sequence[Task], **options: Any
    ) -> bool:
        """Play a benchmark and add its result; return False if it was stopped with Ctrl-C.

        Raises:
            KeyboardInterrupt: It was stopped with a second Ctrl-C; its result is added.
        """
        from aenv_ray import sampling
        from aenv_ray.cli.sampling import rollouts as shown

        console.say(f"{benchmark.label}: {counted(len(tasks), 'task')}")
        file = None if self._out is None else self._out / _file_name(benchmark)
        run, error = None, None
        try:
            run = sampling.sample(
                benchmark.environment,
                policy,
                tasks,
                ttl=benchmark.ttl,
                environment_variables=benchmark.environment_variables,
                out=file,
                overwrite=self._force,
                **options,
            )
            with shown.draining(run):
                shown.run_all(run, quiet=self._quiet)
            if run.output_failure is not None:
                error = run.output_failure.message
        except AenvError as exc:
            error = f"{exc.code}: {exc.message}" + (f" ({exc.hint})" if exc.hint else "")
        finally:
            self._add(benchmark, run, error)
        return run is None or not run.is_draining or run.finished == run.total

    def _add(self, benchmark: Benchmark, run: Sampling | None, error: str | None) -> None:
        from aenv_ray.sampling.suites import result_of

        found = ((), 0.0) if run is None else (run.episodes, run.summary().wall_s)
        is_complete = run is not None and run.finished == run.total
        self.results.append(result_of(benchmark, *found, is_complete=is_complete, error=error))

    def write(self) -> None:
        """Write the results to the output directory, if there is one."""
        import json

        if self._out is not None:
            rows = [one.model_dump(mode="json") for one in self.results]
            (self._out / "results.json").write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


def _prepare(out: Path, benchmarks: Sequence[Benchmark], *, force: bool) -> None:
    from aenv_ray.trajectories.shards import check_output

    try:
        out.mkdir(parents=True, exist_ok=True)
        used = sorted(one.name for one in out.iterdir())
    except OSError as exc:
        raise ConfigError(
            f"{out} cannot be used as a directory: {exc.strerror}", hint="choose another --out"
        ) from None
    if used and not force:
        raise ConfigError(
            f"{out} is not empty: it has {used[0]}",
            hint="choose another --out, or overwrite with --force",
        )
    labels: dict[str, str] = {}
    for benchmark in benchmarks:
        name = _file_name(benchmark)
        if name in labels:
            raise ConfigError(
                f"the benchmarks {labels[name]!r} and {benchmark.label!r} would both write {name}",
                hint="set the field `name` of one of them",
            )
        labels[name] = benchmark.label
        check_output(out / name, overwrite=force)


def _file_name(benchmark: Benchmark) -> str:
    label = benchmark.label
    return "".join(c if c.isalnum() or c in "-_.@" else "-" for c in label) + ".jsonl"


def _successes(row: Any) -> str:
    found = f"{row['succeeded']}/{row['episodes']}"
    return found if row["is_complete"] else f"{found} (stopped)"


def _interval(row: Any) -> str | None:
    found = row["confidence_interval"]
    return None if found is None else f"{found[0]:.3f}..{found[1]:.3f}"


def _passes(row: Any) -> str:
    found = (f"pass@{one['k']} {one['estimate']:.3f}" for one in row["pass_at_k"])
    return f"{row['benchmark']}: {', '.join(found)}"


def show_results(results: Sequence[BenchmarkResult], form: Format | None) -> None:
    """Print results: in a table, and pass@k below it, for which a table has no room."""
    rows = [one.model_dump(mode="json") for one in results]
    show_rows(rows, form, _columns(rows), cut_first="SUCCESS")
    passes = [_passes(row) for row in rows if row["pass_at_k"]]
    if passes and chosen(form) is Format.TABLE:
        show(rows, form, "\n".join(passes))


def _columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns of the table; one of refused episodes only if there are some."""
    shown = dict(_COLUMNS)
    if not any(row["refused"] for row in rows):
        del shown["REFUSED"]
    return shown


_COLUMNS: Columns = {
    "BENCHMARK": lambda r: r["benchmark"],
    "TASKS": lambda r: r["tasks"],
    "SUCCESS": _successes,
    "REWARD": lambda r: None if r["reward_mean"] is None else f"{r['reward_mean']:.3f}",
    "95% INTERVAL": _interval,
    "VOID": lambda r: r["void"],
    "REFUSED": lambda r: r["refused"],
    "TIME": lambda r: f"{r['wall_s']:.1f} s",
}
