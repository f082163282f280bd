"""Files that commands write: none is overwritten by mistake, and none is left half written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically

OverwriteOption = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]


def check_new(out: Path, *, force: bool, source: Path | None = None) -> None:
    """Check that a command may write a file, before it does anything else.

    Args:
        out: The file.
        force: Whether it may be overwritten.
        source: The file or directory that the command reads, which is never overwritten.

    Raises:
        ConfigError: It is the source or a file in it, or it has content and `force` is false.
    """
    if not out.is_file():
        return  # new, or not a regular file, such as a pipe
    inputs: Iterator[Path] = iter(())
    if source is not None:
        inputs = source.rglob("*") if source.is_dir() else iter([source])
    if any(one.is_file() and one.samefile(out) for one in inputs):
        raise ConfigError(f"{out} is the input, or a part of it", hint="choose another file")
    if out.stat().st_size and not force:
        raise ConfigError(
            f"{out} already exists", hint="choose another file, or overwrite it with --force"
        )


def write_text(out: Path, text: str) -> None:
    """Write a file atomically, or into what is not a regular file, such as a pipe.

    Raises:
        ConfigError: It cannot be written.
    """
    data = text.encode("utf-8", "replace")
    with writing(out):
        if out.exists() and not out.is_file():
            out.write_bytes(data)
        else:
            write_atomically(out, data, mode=None)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an error of writing a file into one that says what to do.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{out} cannot be written: {exc.strerror or exc}", hint="choose another file"
        ) from exc
