"""Environment projects on disk: loading, digest, archive, and resolving references.

Instances run an unpacked copy of the project. The copy is named by the project's digest, so editing
the project never affects running instances (invariant 6).
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
from aenv_ray.project import files
from aenv_ray.project.archive import check_size, pack, unpack
from aenv_ray.project.assembly import assembled
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.files import CONFIG_NAME, FileRow
from aenv_ray.validation import problems_of

BUILTIN_DIR: Final = Path(__file__).parents[1] / "envs"
_READ_ATTEMPTS: Final = 5
"""Enough for an editor to finish saving, or git to finish a checkout."""

__all__ = ["CONFIG_NAME", "Project", "builtins", "load", "looks_like_path", "resolve", "unpack"]


@dataclass(frozen=True)
class Project:
    """A project directory with a valid config.

    Attributes:
        path: The directory.
        config: The parsed ``config.json``.
        digest: SHA-256 over the names, types, modes and contents of its files.
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

        The files are read again, because a loaded project does not keep their contents.

        Raises:
            ConfigError: The project is too large, or was edited after it was loaded.
        """
        with contextlib.suppress(FileNotFoundError):  # a directory was removed during the scan
            archived = pack(self.path, files.scan(str(self.path)))
            if archived.digest == self.digest:
                return archived.data
        _read.cache_clear()  # in case an edit changed neither size nor times
        files.forget()
        raise ConfigError(
            f"project {self.path} was edited after it was loaded",
            hint="nothing was sent; try again",
        )


class _EditedMeanwhile(Exception):
    """Files changed while they were read."""


@lru_cache(maxsize=256)
def _read(root: Path, rows: tuple[FileRow, ...]) -> Project:
    """Read config and digest from the same content.

    Raises:
        _EditedMeanwhile: The files differ from `rows`.
        ConfigError: The config is invalid, a file cannot be read, or the project is too large.
    """
    check_size(f"project {root}", sum(row.size for row in rows), len(rows))
    digest = hashlib.sha256()
    try:
        config = read_config(root / CONFIG_NAME)
        for row in rows:
            content = files.content_of(os.path.join(root, row.name), row.mode)
            digest.update(files.digested(row.name, row.mode, content))
            digest.update(content)
        if files.scan(str(root)) != rows:
            raise _EditedMeanwhile
    except FileNotFoundError as exc:
        raise _EditedMeanwhile from exc
    return Project(root, config, digest.hexdigest())


def load(path: str | Path) -> Project:
    """Read a project directory.

    Raises:
        EnvironmentNotFound: The directory or its ``config.json`` does not exist.
        ConfigError: The config is invalid (the message names line or field), the project is too
            large, or the files changed repeatedly while they were read.
    """
    root = Path(os.path.realpath(os.path.expanduser(path)))
    if not root.is_dir():
        raise EnvironmentNotFound(
            f"there is no project directory {root}", hint="create one with: aenv init NAME"
        )
    if not (root / CONFIG_NAME).is_file():
        raise _no_config(root)
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(_EditedMeanwhile, FileNotFoundError):
            return _read(root, files.scan(str(root)))
    raise ConfigError(f"project {root} keeps changing while it is read", hint="try again")


def _no_config(root: Path) -> EnvironmentNotFound:
    return EnvironmentNotFound(
        f"{root} has no {CONFIG_NAME}",
        hint="give the path of a project, or create one with: aenv init NAME",
    )


def read_config(path: Path) -> EnvironmentConfig:
    """Parse a ``config.json``.

    Raises:
        EnvironmentNotFound: The file does not exist.
        ConfigError: It is not JSON, or a field is invalid; the message names line or field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _no_config(path.parent) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}", hint="make it a readable file in UTF-8"
        ) from exc
    data = _parse_json(path, text)
    try:
        return EnvironmentConfig.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(
            f"{path}: {problems_of(exc)}",
            hint="correct these fields; docs/environments.md lists them",
        ) from None
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
        raise ConfigError(
            f"{path} is nested too deeply", hint="flatten it: a config.json needs only a few levels"
        ) from None
    except ValueError as exc:  # a number with thousands of digits
        raise ConfigError(f"{path}: {exc}", hint="write a smaller number") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: it is a {type(data).__name__}, not an object", hint='write {"name": …}'
        )
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
        reference: ``name@version`` or ``name`` of a built-in environment, or the path of a project
            (a `Path`, or text that starts with ``.`` or has a slash).

    Raises:
        EnvironmentNotFound: The environment, version or directory does not exist.
        ConfigError: The reference or the project's config is invalid.
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
            hint=f"built-in environments: {known}; write a path as ./{name}",
        )
    project = load(assembled(path))
    if version is not None and version != project.config.version:
        raise EnvironmentNotFound(
            f"environment {name!r} has no version {version!r}",
            hint=f"use {project.reference}",
        )
    return project


def named_on_command_line(text: str, directory: Path = Path()) -> str:
    """Return the reference that an argument of a command, or a field of a suite file, stands for.

    It is that of a project if there is one in a directory of that name, which then comes before
    environments of that name. In Python, text is a path only if it looks like one.

    Args:
        text: A path, relative to `directory`, or as for `resolve`.
        directory: The working directory, or that of the file.
    """
    try:
        path = directory / Path(text).expanduser()
    except RuntimeError:  # there is no such user; it is reported as a missing directory
        path = directory / text
    if looks_like_path(text) or (text and _is_project(path)):
        return str(path) if path.is_absolute() else os.path.join(os.curdir, path)
    return text


def _is_project(path: Path) -> bool:
    """Return whether a directory has the configuration of an environment, not of something else."""
    try:
        data = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"name", "version"} <= data.keys()


def looks_like_path(reference: str) -> bool:
    """Return whether a reference is a path rather than the name of an environment."""
    return reference.startswith((".", "/", "~")) or "/" in reference or os.sep in reference
