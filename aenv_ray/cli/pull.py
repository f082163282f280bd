"""``aenv pull``: download the project of a published environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output, GatewayOptions, with_gateway, reference
from aenv_ray.cli.terminal.output import progress, show
from aenv_ray.errors import ConfigError


@with_gateway
def pull(
    gateway: GatewayOptions,
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The environment.")],
    version: Annotated[
        str | None, typer.Option("--version", "-v", help="Default: that of NAME, else the highest.")
    ] = None,
    work_dir: Annotated[
        Path, typer.Option("--work-dir", "-w", help="Directory to create the project directory in.")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the project's files; keep others.")
    ] = False,
    output: Output = None,
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
