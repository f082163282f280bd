"""``aenv trajectories``: look at recorded episodes, compare, filter and export them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.sampling.options import OverwriteOption
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import OutputOption
from aenv_ray.cli.terminal.output import Columns, Format, pairs, show, show_done, show_rows
from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.trajectories import Episode, Step, Trajectories
    from aenv_ray.trajectories.comparison import Comparison

trajectories = typer.Typer(
    help="""Look at recorded episodes, compare, filter and export them.

    Example:
      aenv trajectories show run1.jsonl 0
    """,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

RecordArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="JSON Lines, Parquet, or a directory of shards.")
]
OutOption = Annotated[Path, typer.Option("--out", help="File to write.")]
_TEXT_SHOWN: Final = 2000
_DIFFERENCES_SHOWN: Final = 20


class Export(StrEnum):
    """What an export writes."""

    CHAT = "chat"
    """Chat messages with tool calls in the format of OpenAI, for SFT."""
    PREFERENCES = "preferences"
    """Preference pairs, chosen and rejected, for DPO."""
    STEPS = "steps"
    """A flat table of steps."""


class By(StrEnum):
    """What statistics are grouped by."""

    TASK = "task"
    ENVIRONMENT = "environment"
    POLICY = "policy"
    STATUS = "status"
    GROUP = "group"
    TOOL = "tool"


def _read(path: Path) -> Trajectories:
    from aenv_ray.trajectories import read

    return read(path)


@trajectories.command("list")
def list_(path: RecordArgument, output: OutputOption = None) -> None:
    """List episodes.

    Example:
      aenv trajectories list run1.jsonl
    """
    columns: Columns = {
        "INDEX": lambda e: str(e["index"]), "TASK": lambda e: e["task_id"],
        "STATUS": lambda e: e["status"], "REWARD": lambda e: e["reward"],
        "STEPS": lambda e: str(e["steps"]), "SECONDS": lambda e: f"{e['duration_s']:.2f}",
        "ERROR": lambda e: e["error"],
    }  # fmt: skip
    names = ("index", "task_id", "status", "reward", "duration_s", "error")
    rows = [
        {name: getattr(one, name) for name in names} | {"steps": len(one.steps)}
        for one in _read(path)
    ]
    show_rows(rows, output, columns, empty="no episodes")


@trajectories.command("show")
def show_(
    path: RecordArgument,
    index: Annotated[int, typer.Argument(help="Number of the episode.")],
    full: Annotated[bool, typer.Option("--full", help="Do not shorten texts.")] = False,
    output: OutputOption = None,
) -> None:
    """Show one episode with its steps and messages.

    Example:
      aenv trajectories show run1.jsonl 3
    """
    episode = next((one for one in _read(path) if one.index == index), None)
    if episode is None:
        raise ConfigError(
            f"{path} has no episode {index}", hint=f"list them: aenv trajectories list {path}"
        )
    limit = None if full else _TEXT_SHOWN
    show(episode.model_dump(mode="json"), output, _described(episode, limit))


def _described(episode: Episode, limit: int | None) -> str:
    """Return an episode as text; `show` removes control characters."""
    from aenv_ray.trajectories.conversation import NumberedStep, in_order, used

    facts = pairs(
        {
            "episode": episode.index, "task": episode.task_id, "status": episode.status.value,
            "reward": episode.reward, "error": episode.error, "environment": episode.environment,
            "digest": episode.environment_digest, "instance": episode.instance_id,
            "group": episode.group, "sample": episode.sample, "seed": episode.seed,
            "attempts": episode.attempts, "duration": f"{episode.duration_s:.3f} s",
            "phases": {name: f"{seconds:.3f}s" for name, seconds in episode.phases.items()},
            "policy": episode.policy, "usage": used(episode.usage), "node": episode.node_id,
            "start mode": episode.start_mode,
        }
    )  # fmt: skip
    parts = [facts]
    for one in in_order(episode):
        if isinstance(one, NumberedStep):
            parts += _step(one.number, one.step, limit)
        else:
            parts.append(f"{one.who}\n{_indented(one.text, limit)}" if one.text else one.who)
    for name, value in (("output", episode.output), ("reward", episode.reward_detail)):
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts.append(f"{name}\n{_indented(text, limit)}")
    return "\n\n".join(parts)


def _step(number: int, step: Step, limit: int | None) -> list[str]:
    outcome = step.error or ("error" if step.is_error else "ok")
    arguments = json.dumps(step.arguments, ensure_ascii=False)
    heading = f"step {number}  {step.tool}  {outcome}  {1000 * step.duration_s:.1f} ms"
    attachments = [
        f"  attachment {one.digest}, {one.media_type}, {one.size_bytes} bytes"
        for one in step.attachments
    ]
    return [
        f"{heading}\n{_indented(arguments, limit)}\n{_indented(step.text, limit)}",
        *attachments,
    ]


def _indented(text: str, limit: int | None) -> str:
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}\n[{len(text) - limit} more characters; show them with --full]"
    return "\n".join(f"  {line}" for line in text.split("\n"))


@trajectories.command("stats")
def stats(
    path: RecordArgument,
    by: Annotated[By, typer.Option("--by", help="What to group by.")] = By.TASK,
    output: OutputOption = None,
) -> None:
    """Show figures of episodes by task, or of calls by tool.

    Example:
      aenv trajectories stats run1.jsonl --by tool
    """
    from aenv_ray.trajectories import statistics

    episodes = _read(path)

    def ms(name: str) -> Callable[[Any], str | None]:
        return lambda row: None if row[name] is None else f"{row[name]:.1f}"

    if by is By.TOOL:
        rows = [one.model_dump() for one in statistics.by_tool(episodes)]
        columns: Columns = {
            "TOOL": lambda r: r["tool"], "CALLS": lambda r: str(r["calls"]),
            "ERRORS": lambda r: str(r["errors"]), "P50 MS": ms("p50_ms"), "P99 MS": ms("p99_ms"),
        }  # fmt: skip
        show_rows(rows, output, columns, empty="no calls")
        return
    keys: Mapping[By, Callable[[Episode], object]] = {
        By.TASK: lambda e: e.task_id,
        By.ENVIRONMENT: lambda e: e.environment,
        By.POLICY: lambda e: e.policy,
        By.STATUS: lambda e: e.status.value,
        # Each run numbers its groups from 0, and runs may have been joined.
        By.GROUP: lambda e: None if e.group is None else f"{e.group} of {e.task_id}",
    }
    rows = [one.model_dump() for one in statistics.grouped(episodes, lambda e: str(keys[by](e)))]
    columns = {
        by.upper(): lambda r: r["key"], "EPISODES": lambda r: str(r["episodes"]),
        "SUCCEEDED": lambda r: str(r["succeeded"]), "VOID": lambda r: str(r["void"]),
        "REWARD": lambda r: None if r["reward_mean"] is None else f"{r['reward_mean']:.3f}",
        "STEPS": lambda r: f"{r['steps_mean']:.1f}", "P50 MS": ms("duration_p50_ms"),
    }  # fmt: skip
    show_rows(rows, output, columns, empty="no episodes")


@trajectories.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Episodes to compare with.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Episodes to compare.")],
    output: OutputOption = None,
) -> None:
    """Compare two runs task by task. Exits with 1 if they differ.

    Times and ids are not compared.

    Example:
      aenv trajectories diff run1.jsonl run2.jsonl
    """
    from aenv_ray.trajectories.comparison import compare

    show_comparison(compare(_read(before), _read(after)), output)


def show_comparison(found: Comparison, output: Format | None) -> None:
    """Print a `Comparison`.

    Raises:
        typer.Exit: With code 1, if there are differences.
    """
    lines = [f"{found.equal} of {found.compared} episodes are equal"]
    if found.only_before or found.only_after:
        lines.append(f"without counterpart: {found.only_before} before, {found.only_after} after")
    for one in found.differences[:_DIFFERENCES_SHOWN]:
        lines.append(f"\nepisode {one.before_index}, task {one.task_id}")
        if one.before_status != one.after_status:
            lines.append(f"  status: {one.before_status} -> {one.after_status}")
        if one.before_reward != one.after_reward:
            lines.append(f"  reward: {one.before_reward} -> {one.after_reward}")
        if one.step is not None:
            lines += [f"  step {one.step}, {one.field}:", f"    - {one.before!r:.300}"]
            lines.append(f"    + {one.after!r:.300}")
    more = len(found.differences) - _DIFFERENCES_SHOWN
    if more > 0:
        lines.append(f"\nand {more} more; all are in -o json")
    show(found.model_dump(mode="json"), output, "\n".join(lines))
    if found.differences or found.only_before or found.only_after:
        raise typer.Exit(1)


@trajectories.command("filter")
def filter_(  # each is an option
    path: RecordArgument,
    out: OutOption,
    force: OverwriteOption = False,
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only these outcomes; repeatable.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Only these tasks; repeatable.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Only rewards of at least this.")
    ] = None,
    max_reward: Annotated[
        float | None, typer.Option("--max-reward", help="Only rewards of at most this.")
    ] = None,
    tool: Annotated[
        str | None, typer.Option("--tool", help="Only episodes that called this tool.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Write the episodes that match all conditions.

    They are JSON Lines, or one Parquet file if it is named *.parquet. An existing file is
    only overwritten with --force, and the file that is read never.

    Of several finished episodes with the same index, as in files that were joined, the
    later ones get new indices.

    Example:
      aenv trajectories filter run1.jsonl --min-reward 1 --out solved.jsonl
    """
    from aenv_ray.trajectories import EpisodeStatus, arrow, read

    known = [one.value for one in EpisodeStatus]
    for name in status or []:
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(known)}", param_hint="--status"
            )
    _check_out(out, path, force=force)

    def matches(episode: Episode) -> bool:
        reward = episode.reward
        return (
            (not status or episode.status in status)
            and (not task or episode.task_id in task)
            and (min_reward is None or (reward is not None and reward >= min_reward))
            and (max_reward is None or (reward is not None and reward <= max_reward))
            and (tool is None or any(step.tool == tool for step in episode.steps))
        )

    everything = read(path, renumber=True)
    kept = [episode for episode in everything if matches(episode)]
    _copy_attachments(everything, kept, out)
    if out.suffix == ".parquet":
        with _writing(out):
            arrow.write_parquet(kept, out)
    else:
        _write(out, "".join(f"{episode.model_dump_json()}\n" for episode in kept))
    console.say(f"{len(kept)} of {counted(len(everything), 'episode')} written to {out}")
    show_done({"path": str(out), "episodes": len(kept)}, output)


def _copy_attachments(source: Trajectories, episodes: Iterable[Episode], out: Path) -> None:
    """Copy the attachments of recorded episodes to a file of them.

    Lists of tools that are missing are counted and said: the episodes are whole without them.

    Raises:
        ConfigError: An attachment of a step is missing, or one cannot be written.
    """
    from aenv_ray.trajectories.attachments import AttachmentFiles

    files = AttachmentFiles(out, is_directory=False)
    episodes = tuple(episodes)
    of_steps = {one.digest for e in episodes for step in e.steps for one in step.attachments}
    missing: list[str] = []
    for digest in {one.digest for episode in episodes for one in episode.attachments}:
        try:
            content = source.attachment(digest)
        except ConfigError as exc:
            if digest in of_steps:
                raise
            missing.append(exc.message)
            continue
        with _writing(out):
            files.write({digest: content})
    if missing:
        console.say(f"lists of tools that are not in the output: {len(missing)}; {missing[0]}")


@trajectories.command("export")
def export(
    path: RecordArgument,
    out: OutOption,
    form: Annotated[
        Export, typer.Option("--as", help="chat: for SFT; preferences: for DPO; steps: a table.")
    ] = Export.CHAT,
    force: OverwriteOption = False,
    min_gap: Annotated[
        float, typer.Option("--min-gap", min=0, help="For pairs: rewards must differ by more.")
    ] = 0.0,
    output: OutputOption = None,
) -> None:
    """Export episodes for training or analysis.

    Chat messages and preference pairs are written as JSON Lines; steps as CSV, or as Parquet if
    the file is named *.parquet. Void episodes are left out, except from the steps. The number of
    groups that yield no preference pair is printed with the reasons. An existing file is only
    overwritten with --force.

    Example:
      aenv trajectories export run1.jsonl --as chat --out sft.jsonl
      aenv trajectories export run1.jsonl --as preferences --out dpo.jsonl
      aenv trajectories export run1.jsonl --as steps --out steps.parquet
    """
    from aenv_ray.trajectories import export as exports

    _check_out(out, path, force=force)
    episodes, found = _read(path), dict[str, Any]()
    if form is Export.STEPS:
        count = _export_steps(episodes, out)
    else:
        tools = exports.RecordedTools(episodes.attachment)
        chosen: list[Any] = list(
            exports.chat(episodes, tools)
            if form is Export.CHAT
            else exports.pairs(episodes, min_gap, tools)
        )
        if tools.missing:
            why = next(iter(tools.missing.values()))
            console.say(f"lists of tools that are not in the rows: {len(tools.missing)}; {why}")
        rows = [one for one in chosen if not isinstance(one, exports.NoPair)]
        _write(out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        count = len(rows)
        if form is Export.PREFERENCES:
            found["without_pair"] = Counter(
                one.value for one in chosen if isinstance(one, exports.NoPair)
            )
    console.say(f"{counted(count, 'row')} of {counted(len(episodes), 'episode')} written to {out}")
    for why, number in found.get("without_pair", {}).items():
        console.say(f"no pair of {counted(number, 'group')} {why}")
    show_done({"path": str(out), "rows": count} | found, output)


def _export_steps(episodes: Iterable[Episode], out: Path) -> int:
    from aenv_ray.trajectories import arrow
    from aenv_ray.trajectories.export import STEP_COLUMNS, step_rows

    rows = list(step_rows(episodes))
    if out.suffix == ".parquet":
        with _writing(out):
            arrow.write_steps(rows, out)
        return len(rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, STEP_COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    _write(out, text.getvalue())
    return len(rows)


@trajectories.command("report")
def report(
    path: RecordArgument,
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    force: OverwriteOption = False,
    output: OutputOption = None,
) -> None:
    """Write a report with plots as one self-contained HTML file.

    An existing file is only overwritten with --force.

    Example:
      aenv trajectories report run1.jsonl --out report.html
    """
    from aenv_ray.trajectories.report import report as rendered

    _check_out(out, path, force=force)
    episodes = _read(path)
    _write(out, rendered(list(episodes), path.name))
    console.say(f"report of {counted(len(episodes), 'episode')} written to {out}")
    show_done({"path": str(out), "episodes": len(episodes)}, output)


@trajectories.command("schema")
def schema(output: OutputOption = None) -> None:
    """Print the JSON Schema of a recorded episode.

    Example:
      aenv trajectories schema > episode.schema.json
    """
    from aenv_ray.trajectories.schema import json_schema

    found = json_schema()
    show(found, output, json.dumps(found, indent=2))


def _check_out(out: Path, source: Path, *, force: bool) -> None:
    """Check that a file may be written, before anything is read.

    Raises:
        ConfigError: It is the file that is read or a file in that directory, or it has content and
            `force` is false.
    """
    if not out.is_file():
        return  # new, or not a regular file, such as a pipe
    inputs = source.rglob("*") if source.is_dir() else [source]
    if any(one.is_file() and one.samefile(out) for one in inputs):
        raise ConfigError(
            f"{out} is the input, or a part of it", hint="choose another file with --out"
        )
    if out.stat().st_size and not force:
        raise ConfigError(
            f"{out} already exists",
            hint="choose another file with --out, or overwrite it with --force",
        )


def _write(out: Path, text: str) -> None:
    """Write a file atomically, or into what is not a regular file, such as a pipe.

    Raises:
        ConfigError: It cannot be written.
    """
    data = text.encode("utf-8", "replace")
    with _writing(out):
        if out.exists() and not out.is_file():
            out.write_bytes(data)
        else:
            write_atomically(out, data, mode=None)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{out} cannot be written: {exc.strerror or exc}", hint="choose another file with --out"
        ) from exc
