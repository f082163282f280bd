"""An environment project on disk: its config, its digest, its archive, and where references lead.

A project is the source of an environment. What an instance runs is an unpacked copy that is named
by its digest, so that a project edited meanwhile never changes what already runs (invariant 6).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from aenv_ray import ids
from aenv_ray.errors import ConfigError, EnvironmentNotFound
from aenv_ray.project import archive as project_archive
from aenv_ray.project import files as project_files
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.files import FileRow

CONFIG_NAME: Final = project_files.CONFIG_NAME
BUILTIN_DIR: Final = Path(__file__).parents[1] / "envs"
_READ_ATTEMPTS: Final = 5
"""An editor that saves, or a checkout, is over by then."""

unpack = project_archive.unpack


@dataclass(frozen=True)
class Project:
    """A project directory with a valid config.

    Attributes:
        path: The directory.
        config: Its parsed ``config.json``.
        digest: SHA-256 over the names, kinds, modes and contents of its files.
    """

    path: Path
    config: EnvironmentConfig
    digest: str

    @property
    def reference(self) -> str:
        """``name@version``."""
        return self.config.reference

    def archive(self) -> bytes:
        """Return the project's files as an uncompressed tar, the same bytes for the same digest.

        The files are read again, one at a time: a project may be large, and most are archived once
        and loaded at every create. What is read is checked against the digest.

        Raises:
            ConfigError: It is too large, or was edited since it was loaded.
        """
        with contextlib.suppress(FileNotFoundError):  # a directory vanished as we looked
            archived = project_archive.pack(self.path, project_files.scan(str(self.path)))
            if archived.digest == self.digest:
                return archived.data
        _read.cache_clear()  # an edit that left size and times as they were is read by now
        project_files.forget()
        raise ConfigError(
            f"project {self.path} was edited after it was loaded",
            hint="nothing was sent; do it again with the project as it is now",
        )


class _EditedMeanwhile(Exception):
    """The files changed while they were read."""


@lru_cache(maxsize=256)
def _read(root: Path, rows: tuple[FileRow, ...]) -> Project:
    """Read config and digest of one and the same content.

    Raises:
        _EditedMeanwhile: The files are no longer those of `rows`.
        ConfigError: The config is malformed, or a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        config = read_config(root / CONFIG_NAME)
        for row in rows:
            content = project_files.content_of(os.path.join(root, row.name), row.mode)
            digest.update(project_files.digested(row.name, row.mode, content))
            digest.update(content)
        if project_files.scan(str(root)) != rows:
            raise _EditedMeanwhile
    except FileNotFoundError as exc:
        raise _EditedMeanwhile from exc
    return Project(root, config, digest.hexdigest())


def load(path: str | Path) -> Project:
    """Read a project directory.

    Raises:
        EnvironmentNotFound: No such directory, or it has no ``config.json``.
        ConfigError: The config is malformed; the message names line or field. Or the files were
            edited again and again while they were read.
    """
    root = Path(os.path.realpath(os.path.expanduser(path)))
    if not root.is_dir():
        raise EnvironmentNotFound(
            f"there is no project directory {root}", hint="make one with: aenv init NAME"
        )
    if not (root / CONFIG_NAME).is_file():
        raise _no_config(root)
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(_EditedMeanwhile, FileNotFoundError):
            return _read(root, project_files.scan(str(root)))
    raise ConfigError(f"project {root} is edited all the time while it is read")


def _no_config(root: Path) -> EnvironmentNotFound:
    return EnvironmentNotFound(
        f"{root} has no {CONFIG_NAME}",
        hint="name a project directory, or make one with: aenv init NAME",
    )


def read_config(path: Path) -> EnvironmentConfig:
    """Parse a ``config.json``.

    Raises:
        EnvironmentNotFound: There is no such file.
        ConfigError: It is not JSON (with the line), or a field is wrong (with its path).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _no_config(path.parent) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    data = _parse_json(path, text)
    try:
        return EnvironmentConfig.model_validate(data)
    except ValidationError as exc:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in exc.errors(include_url=False)
        )
        raise ConfigError(f"{path}: {problems}") from None
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.message}", hint=exc.hint) from None


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as exc:
        line = text.split("\n")[exc.lineno - 1].strip()
        raise ConfigError(
            f"{path}, line {exc.lineno}, column {exc.colno}: {exc.msg}",
            hint=f"the line is: {line[:80]}" if line else "the file is empty or ends too early",
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: it holds a {type(data).__name__}, not an object")
    return data


def builtins() -> dict[str, Path]:
    """Return the environments that ship with aenv-ray, by name."""
    return dict(_builtins())


@cache
def _builtins() -> tuple[tuple[str, Path], ...]:
    found = sorted(BUILTIN_DIR.glob(f"*/{CONFIG_NAME}"))
    return tuple((path.parent.name.replace("_", "-"), path.parent) for path in found)


def resolve(reference: str | Path) -> Project:
    """Return the project that a reference names.

    Args:
        reference: ``name@version`` or ``name`` of a built-in environment, or a path to a project
            (a `Path`, or text with a slash, or ``.``).

    Raises:
        EnvironmentNotFound: There is no such environment, version or directory.
        ConfigError: The reference or the project's config is malformed.
    """
    if not isinstance(reference, str | Path):
        raise ConfigError(
            f"environment {reference!r} is neither text nor a path",
            hint="write name@version, or the path of a project",
        )
    if isinstance(reference, Path) or looks_like_path(reference):
        return load(reference)
    name, version = ids.split_reference(reference)
    path = builtins().get(name)
    if path is None:
        known = ", ".join(builtins()) or "none"
        raise EnvironmentNotFound(
            f"there is no environment {name!r}",
            hint=f"built-in environments: {known}; or give the path of a project, as ./{name}",
        )
    project = load(path)
    if version is not None and version != project.config.version:
        raise EnvironmentNotFound(
            f"environment {name!r} has no version {version!r}",
            hint=f"use {project.reference}",
        )
    return project


def looks_like_path(reference: str) -> bool:
    """Whether a reference names a directory rather than an environment."""
    return reference.startswith((".", "/", "~")) or "/" in reference or os.sep in reference
