"""``aenv pull``: a published environment's project, back on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import ApiKey, Output, SystemUrl, Timeout, gateway, reference
from aenv_ray.cli.terminal.output import show
from aenv_ray.errors import ConfigError


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The environment.")],
    version: Annotated[
        str | None, typer.Option("--version", "-v", help="Default: that of NAME, else the highest.")
    ] = None,
    work_dir: Annotated[
        Path, typer.Option("--work-dir", "-w", help="Where the project directory is made.")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the project's files, keep all others.")
    ] = False,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Download an environment's project and print its path.

    It is made in WORK_DIR/NAME, whole and checked against its digest.

    Example:
      aenv pull mini-terminal@1.0.0
    """
    bare, version = reference(name, version)
    target = work_dir / bare
    if target.exists() and not (target.is_dir() and (force or not any(target.iterdir()))):
        raise ConfigError(
            f"{target} is there already",
            hint="--force overwrites the project's files in it; --work-dir names another place",
        )
    with gateway(system_url, api_key, timeout) as door:
        found = door.environment(bare, version)
        if not found.archive:
            raise ConfigError(
                f"{found.reference} has no source in the hub",
                hint="it was registered by a client that keeps its archive elsewhere",
            )
        from aenv_ray.cli.terminal.transfer import progress

        with progress(found.reference, found.archive_bytes) as on_bytes:
            archive = door.download(found.archive, on_bytes)
    _put(archive, found.digest, target)
    console.say(f"pulled {found.reference}")
    shown = {"name": bare, "version": found.version, "digest": found.digest}
    show(shown | {"path": str(target.resolve())}, output, str(target.resolve()))


def _put(archive: bytes, digest: str, target: Path) -> None:
    """Unpack an archive; a new directory appears whole or not at all.

    Raises:
        ConfigError: It is not what its digest says, or the place cannot be written.
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
