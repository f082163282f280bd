"""``aenv push`` and ``aenv pull``: publish a project, and download a published one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    GatewayOptions,
    OutputOption,
    ProjectArgument,
    ReferenceArgument,
    VersionOption,
    WorkDirOption,
    project_of,
    reference,
    with_gateway,
)
from aenv_ray.cli.terminal.output import Format, progress, show, size
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.hub.packing import Package
    from aenv_ray.project.project import Project


@with_gateway
def push(
    gateway: GatewayOptions,
    path: ProjectArgument = Path(),
    work_dir: WorkDirOption = Path(),
    version: Annotated[
        str | None, typer.Option("--version", "-v", help="Default: that of config.json.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Pack and load the project; publish nothing.")
    ] = False,
    allow_secret: Annotated[
        list[str] | None,
        typer.Option("--allow-secret", help="File or pattern that may look like a secret."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="No effect: a published version never changes.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Publish a project.

    The gateway loads it in a sandbox to list its tools. Publishing the same
    content again has no effect; other content needs a new version. Files that
    .gitignore or .aenvignore match are left out.

    Example:
      aenv push ./todo
      aenv push ./todo --dry-run
    """
    from aenv_ray.hub import packing

    if force:
        console.say("--force has no effect: a published version never changes")
    with _versioned(project_of(work_dir, path), version) as source:
        package = packing.pack(source, allow=allow_secret or [])
        if dry_run:
            _show_dry(package, output)
            return
    client = gateway.connect()
    if not client.has_artifact(package.sha256):
        with progress(source.reference, len(package.data)) as on_bytes:
            client.upload(package.data, package.sha256, on_bytes)
    console.say(f"loading {source.reference} in a sandbox …")
    found = client.publish(package.sha256, allow_secret or [])
    console.say(f"published {found.reference}, {size(found.archive_bytes)}")
    show(found.shown(), output, found.reference)


@contextlib.contextmanager
def _versioned(source: Project, version: str | None) -> Iterator[Project]:
    """Yield a project with another version: a copy, since the version is part of its content."""
    from aenv_ray import ids
    from aenv_ray.project import project

    if version in (None, source.config.version):
        yield source
        return
    ids.split_reference(f"{source.config.name}@{version}")
    with tempfile.TemporaryDirectory(prefix="aenv-push-") as directory:
        copy = project.unpack(source.archive(), source.digest, Path(directory))
        config = copy / project.CONFIG_NAME
        data = json.loads(config.read_text(encoding="utf-8"))
        text = json.dumps(data | {"version": version}, indent=2, ensure_ascii=False)
        config.unlink()  # it may be a hard link
        config.write_text(text + "\n", encoding="utf-8")
        yield project.load(copy)


def _show_dry(package: Package, output: Format | None) -> None:
    """Show what would be published, after loading it in a sandbox."""
    import asyncio

    from aenv_ray.actors.fabric.publishing import inspect

    console.say(f"loading {package.source.reference} in a sandbox …")
    found = asyncio.run(inspect(package.source))
    functions = [one.model_dump(mode="json") for one in found.functions]
    facts = _facts(package) | {"functions": functions}
    lines = facts | {
        "files": len(facts["files"]),
        "functions": [f"{one.kind} {one.name}" for one in found.functions],
        "note": found.note,
    }
    show(facts, output, lines)
    console.say("dry run: nothing was published")


def _facts(package: Package) -> dict[str, Any]:
    with tarfile.open(fileobj=io.BytesIO(package.data), mode="r:") as tar:
        files = [member.name for member in tar.getmembers()]
    return {
        "environment": package.source.reference,
        "digest": package.source.digest,
        "archive": package.sha256,
        "archive_bytes": len(package.data),
        "files": files,
    }


@with_gateway
def pull(
    gateway: GatewayOptions,
    name: ReferenceArgument,
    version: VersionOption = None,
    work_dir: Annotated[
        Path, typer.Option("--work-dir", "-w", help="Directory to create the project directory in.")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the project's files; keep others.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Download an environment's project and print its path.

    The project is checked against its digest and written to WORK_DIR/NAME,
    completely or not at all.

    Example:
      aenv pull todo@1.0.0
    """
    bare, version = reference(name, version)
    target = work_dir / bare
    if target.exists() and not (target.is_dir() and (force or not any(target.iterdir()))):
        raise ConfigError(
            f"{target} exists already",
            hint="overwrite its files with --force, or choose another --work-dir",
        )
    client = gateway.connect()
    found = client.environment(bare, version)
    if not found.archive:
        raise ConfigError(
            f"the hub has no source archive of {found.reference}",
            hint="it was registered by another client; ask its publisher to run: aenv push",
        )
    with progress(found.reference, found.archive_bytes) as on_bytes:
        archive = client.download(found.archive, on_bytes)
    _unpack(archive, found.digest, target)
    console.say(f"pulled {found.reference}")
    shown = {"name": bare, "version": found.version, "digest": found.digest}
    show(shown | {"path": str(target.resolve())}, output, str(target.resolve()))


def _unpack(archive: bytes, digest: str, target: Path) -> None:
    """Unpack an archive; a new directory is created completely or not at all.

    Raises:
        ConfigError: The archive has another digest, or the directory cannot be written.
    """
    from aenv_ray.project import project

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".aenv-pull-") as partial:
            unpacked = project.unpack(archive, digest, Path(partial))
            if target.is_dir() and any(target.iterdir()):
                shutil.copytree(unpacked, target, symlinks=True, dirs_exist_ok=True)
            else:
                os.replace(unpacked, target)
    except (OSError, shutil.Error) as exc:
        raise ConfigError(
            f"{target} cannot be written: {exc}", hint="choose another --work-dir"
        ) from exc
