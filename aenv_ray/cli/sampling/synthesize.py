"""``aenv synthesize``: check proposed tasks, and keep those that prove to be right."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.sampling.options import ConcurrencyOption
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import EngineOption, OutputOption, SampledArgument
from aenv_ray.cli.terminal.output import Format, chosen, show, table
from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.sampling import Sampling
    from aenv_ray.sampling.synthesis import Synthesis

_FORMS: Final = "FILE.jsonl, module:function or file.py:function"


def synthesize(
    environment: SampledArgument,
    generator: Annotated[
        str,
        typer.Option(
            "--generator",
            "-g",
            help="module:function or file.py:function, which is called with the seed and returns "
            "or yields tasks; or a file of proposed tasks.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="File for the tasks, JSON Lines.")],
    count: Annotated[
        int, typer.Option("--count", min=1, help="Maximum number of proposals.")
    ] = 100,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed that the generator is called with.")
    ] = 0,
    known: Annotated[
        str | None,
        typer.Option("--known", metavar="FILE", help="Tasks that proposals must not repeat."),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(
            "--repetitions", min=2, help="Episodes per task, for each of the two policies."
        ),
    ] = 3,
    pass_reward: Annotated[
        float, typer.Option("--pass-reward", help="Least reward of a reference solution.")
    ] = 1.0,
    null_reward: Annotated[
        float, typer.Option("--null-reward", help="Highest reward for doing nothing.")
    ] = 0.0,
    report: Annotated[
        Path | None, typer.Option("--report", help="File for the report, JSON.")
    ] = None,
    concurrency: ConcurrencyOption = "16",
    engine: EngineOption = None,
    output: OutputOption = None,
) -> None:
    """Check proposed tasks and keep those that prove to be right.

    A task is kept if the reward confirms its reference solution, refuses an agent
    that does nothing, and is the same in every repetition. Duplicates are removed.
    The report says which tasks were dropped and why. Exits with 1 if none is kept.

    Example:
      aenv synthesize ./todo --generator my_tasks.py:propose --out tasks.jsonl
      aenv synthesize ./todo -g proposed.jsonl --known tasks.jsonl --out new.jsonl
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.cli.sampling import rollouts as shown
    from aenv_ray.sampling import load_tasks
    from aenv_ray.sampling.synthesis import Synthesizer

    if out.exists():
        raise ConfigError(f"{out} already exists", hint="choose another --out")
    quiet = chosen(output) is not Format.TABLE

    def play(sampling: Sampling) -> None:
        shown.run_all(sampling, quiet=quiet)

    proposals = _proposals(generator, count, seed)
    synthesizer = Synthesizer(
        environment,
        known=load_tasks(known) if known is not None else (),
        repetitions=repetitions,
        pass_reward=pass_reward,
        null_reward=null_reward,
        play=play,
        concurrency=concurrency,
        engine=engine,
    )
    with shown.on_ray():
        driver_api.init()
        found = synthesizer.check(proposals).recordable()
    lines = "".join(f"{one.model_dump_json(exclude_defaults=True)}\n" for one in found.kept)
    _write(out, lines)
    if report is not None:
        _write(report, found.model_dump_json(indent=2) + "\n")
    show(found.model_dump(mode="json"), output, _table(found))
    console.say(f"{counted(len(found.kept), 'task')} written to {out}")
    if not found.kept:
        raise typer.Exit(1)


def _proposals(generator: str, count: int, seed: int) -> Iterable[Any]:
    from aenv_ray.sampling.policies.named import imported
    from aenv_ray.sampling.synthesis import proposals_of
    from aenv_ray.sampling.tasks.feed import task_rows

    if ":" not in generator:
        return (data for _, data in islice(task_rows(generator), count))
    return proposals_of(imported(generator, "generator", _FORMS), count, seed)


def _table(found: Synthesis) -> str:
    lines = [f"{found.proposed} proposed, {len(found.kept)} kept"]
    lines += [f"  {count} {reason.value}" for reason, count in found.counts().items()]
    if found.dropped:
        rows = [
            (str(one.number), one.task_id or "", one.reason.value, one.detail)
            for one in found.dropped
        ]
        lines += ["", table(rows, ("PROPOSAL", "TASK", "DROPPED FOR", "FOUND"))]
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text, mode=None)
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}", hint="choose another file"
        ) from exc
