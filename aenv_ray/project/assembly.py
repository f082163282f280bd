"""Completes a built-in environment with files of another project, of which the user has a copy.

The file ``assembly.json`` of the built-in names the files to copy. The result is an ordinary
project in the data directory. Its digest thus covers all files, and it runs on every node and
engine. Only built-in environments are assembled: otherwise a publisher could copy files of the
users who run a project.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from aenv_ray.config import settings
from aenv_ray.errors import ConfigError

ASSEMBLY_NAME: Final = "assembly.json"
_SKIPPED: Final = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
_PACKAGE: Final = re.compile(r"[A-Za-z0-9._-]+")


class Assembly(BaseModel):
    """An ``assembly.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: str
    """Name of the setting with the other project's path: ``tau2`` for ``AENV_TAU2``."""
    what: str
    """The other project's name, for messages."""
    hint: str
    """How to get the other project, for messages."""
    version: str
    """Versions of the other project that the built-in works with, as in a requirement."""
    target: str
    """Directory of the built-in that the files are copied to."""
    copies: tuple[str, ...]
    """Files and directories that must exist."""
    optional: tuple[str, ...] = ()
    """Files and directories that are copied if they exist."""
    python: str = ""
    """Versions of Python in which the copied part runs, among those that its project allows."""
    without: tuple[str, ...] = ()
    """Dependencies of the other project that the copied part does not need."""


def assembled(builtin: Path) -> Path:
    """Return the directory of a built-in, completed if it has an ``assembly.json``.

    Args:
        builtin: Its directory in this package.

    Raises:
        ConfigError: The setting is missing, or its project lacks files, is malformed, or has
            another version than the built-in needs.
        OSError: The files cannot be copied.
    """
    spec = builtin / ASSEMBLY_NAME
    if not spec.is_file():
        return builtin
    assembly = Assembly.model_validate_json(spec.read_text(encoding="utf-8"))
    source = _source(assembly)
    names = [*assembly.copies, *(name for name in assembly.optional if (source / name).exists())]
    target = settings().data_dir / "assembled" / f"{builtin.name}-{_key(builtin, source, names)}"
    if not target.is_dir():
        _make(assembly, builtin, source, names, target)
    return target


def _source(assembly: Assembly) -> Path:
    variable = f"AENV_{assembly.setting.upper()}"
    path: Path | None = getattr(settings(), assembly.setting)
    if path is None:
        raise ConfigError(
            f"this environment needs a copy of {assembly.what}, and {variable} is not set",
            hint=assembly.hint,
        )
    missing = [name for name in assembly.copies if not (path / name).exists()]
    if missing:
        raise ConfigError(
            f"{variable}: {path} is not a copy of {assembly.what}: it has no {', '.join(missing)}",
            hint=assembly.hint,
        )
    version = str(_about(assembly, path).get("version", "unknown"))
    if not _is_within(version, assembly.version):
        raise ConfigError(
            f"{variable}: {path} has version {version} of {assembly.what}, and "
            f"{assembly.version} is needed",
            hint=assembly.hint,
        )
    return path.resolve()


def _about(assembly: Assembly, source: Path) -> dict[str, Any]:
    """Return the table `project` of the other project's pyproject.toml.

    Raises:
        ConfigError: It cannot be read.
    """
    path = source / "pyproject.toml"
    try:
        about: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}", hint=f"give a checkout of {assembly.what}"
        ) from exc
    return about


def _is_within(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet  # only assemblies need it
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _make(assembly: Assembly, builtin: Path, source: Path, names: list[str], target: Path) -> None:
    """Create the directory. If several processes do this at once, the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
        made = Path(scratch) / "project"
        shutil.copytree(builtin, made, ignore=_SKIPPED)
        for name in names:
            path = made / assembly.target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if (source / name).is_dir():
                shutil.copytree(source / name, path, ignore=_SKIPPED)
            else:
                shutil.copyfile(source / name, path)
        _take_over_requirements(assembly, source, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _take_over_requirements(assembly: Assembly, source: Path, made: Path) -> None:
    """Write the other project's Python and packages where the engines look for them."""
    about = _about(assembly, source)
    lines = [line for line in about.get("dependencies", []) if _name(line) not in assembly.without]
    (made / "requirements.txt").write_text("".join(f"{line}\n" for line in lines))
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    versions = (about.get("requires-python", ""), assembly.python)
    config["requiresPython"] = ",".join(filter(None, versions))
    (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _name(requirement: str) -> str:
    found = _PACKAGE.match(requirement)
    return found.group().lower().replace("_", "-") if found else ""


def _key(builtin: Path, source: Path, names: list[str]) -> str:
    """Return a name that changes whenever one of the files changes."""
    digest = hashlib.sha256(str(source).encode())
    for top in (builtin, source / "pyproject.toml", *(source / name for name in names)):
        for path in sorted(_files(top)):
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _files(top: Path) -> Iterator[Path]:
    if top.is_file():
        yield top
    for directory, subdirectories, names in os.walk(top):
        subdirectories[:] = [name for name in subdirectories if name not in ("__pycache__", ".git")]
        yield from (Path(directory, name) for name in names if not name.endswith(".pyc"))
