"""``aenv hub``: what the hub stores, its audit log, backups."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    GatewayOptions,
    OutputOption,
    YesOption,
    confirm,
    with_gateway,
)
from aenv_ray.cli.terminal.output import Columns, moment, show, show_rows, size
from aenv_ray.cli.terminal.output_files import OverwriteOption, check_new
from aenv_ray.errors import BackupInvalid, ConfigError
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.hub.backup import BackupSummary

hub = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Show, back up and restore the hub with all it stores.\n\n"
    "Example:\n  aenv hub status",
)  # fmt: skip

_AUDIT: Final[Columns] = {
    "ID": lambda r: r["id"],
    "TIME": lambda r: moment(r["at"]),
    "WHO": lambda r: r["actor"],
    "ROLE": lambda r: r["role"],
    "ACTION": lambda r: r["action"],
    "SUBJECT": lambda r: r["subject"],
    "OUTCOME": lambda r: r["outcome"],
    "DETAIL": lambda r: ", ".join(f"{key}={value}" for key, value in r["detail"].items()),
}


@hub.command("status")
@with_gateway
def hub_status(gateway: GatewayOptions, output: OutputOption = None) -> None:
    """Show the hub's contents, storage and start time.

    Example:
      aenv hub status -o json
    """
    show(gateway.connect().hub().shown(), output)


@hub.command()
@with_gateway
def audit(
    gateway: GatewayOptions,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of records.")
    ] = 50,
    before: Annotated[
        str | None, typer.Option("--before", help="Only records older than this id.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Show who changed what, the latest first; needs an admin token.

    Example:
      aenv hub audit -n 20
    """
    rows = [one.shown() for one in gateway.connect().audit_log(limit, before)]
    show_rows(rows, output, _AUDIT, empty="the audit log is empty")


@hub.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file; - for stdout.")],
    force: OverwriteOption = False,
    output: OutputOption = None,
) -> None:
    """Write what the hub stores to a file, even while it is in use.

    The file shows one moment: versions with their archives, grants, quotas,
    services, tokens and the audit log. It holds hashes of tokens and the variables
    of services, so keep it secret. Run this on the machine or pod of the hub; it
    needs neither a gateway nor Ray.

    Example:
      aenv hub backup hub.tar
    """
    import asyncio

    from aenv_ray.config import settings
    from aenv_ray.hub import backup as backups

    check_new(file, force=force)
    with _written(file) as target:
        summary = asyncio.run(backups.write_backup(settings(), target))
    console.say(f"backed up {_content(summary)}")
    for reference in summary.missing:
        console.say(f"its archive in the artifact store is missing or damaged: {reference}")
    if str(file) != "-":
        show(summary.model_dump(), output, str(file))


@hub.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A backup; - for stdin.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete what the hub has now.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Restore a backup into an empty hub.

    The file is checked before anything is changed. Tokens of the hub stay valid,
    and audit records that are later than the backup are kept. Leases of running
    instances are not touched.

    Example:
      aenv hub restore hub.tar
      aenv hub restore hub.tar --replace --yes
    """
    import asyncio

    from aenv_ray.config import settings
    from aenv_ray.hub import backup as backups

    with _read(file) as source:
        if replace:
            confirm("Delete everything in the hub and restore the backup?", yes)
        try:
            summary = asyncio.run(backups.read_backup(settings(), source, replace=replace))
        except BackupInvalid as exc:
            raise BackupInvalid(f"{file}: {exc.message}", hint=exc.hint) from exc
    console.say(f"restored {_content(summary)}")
    show(summary.model_dump(), output, str(summary.versions))


def _content(summary: BackupSummary) -> str:
    return (
        f"{counted(summary.versions, 'version')}, {counted(summary.artifacts, 'archive')} "
        f"({size(summary.artifact_bytes)}), {counted(summary.tokens, 'token')} and "
        f"{counted(summary.audit_records, 'audit record')}"
    )


@contextlib.contextmanager
def _written(file: Path) -> Iterator[IO[bytes]]:
    """Open a file that only this user can read, and that appears once it is complete."""
    if str(file) == "-":
        yield sys.stdout.buffer
        return
    part: Path | None = None
    try:
        fd, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
        part = Path(name)
        with open(fd, "wb") as target:
            yield target
            target.flush()
            os.fsync(fd)
        part.replace(file)
    except BaseException as exc:
        if part is not None:
            part.unlink()
        if isinstance(exc, OSError) and exc.errno is not None:
            raise ConfigError(
                f"{file} cannot be written: {exc.strerror}", hint="choose another path"
            ) from exc
        raise


@contextlib.contextmanager
def _read(file: Path) -> Iterator[IO[bytes]]:
    """Open a file; a pipe is copied first, because a backup is read twice."""
    is_stdin = str(file) == "-"
    try:
        source = sys.stdin.buffer if is_stdin else file.open("rb")
    except OSError as exc:
        raise ConfigError(
            f"{file} cannot be read: {exc.strerror}", hint="pass the path of a backup"
        ) from exc
    with contextlib.nullcontext(source) if is_stdin else source:
        if source.seekable():
            yield source
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(source, copy)
            copy.seek(0)
            yield copy
