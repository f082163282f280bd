"""An environment project on disk: its config, its digest, its archive, and where references lead.

A project is the source of an environment. What an instance runs is an unpacked copy that is named
by its digest, so that a project edited meanwhile never changes what already runs (invariant 6).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from aenv_ray import ids
from aenv_ray.errors import ConfigError, EnvironmentNotFound
from aenv_ray.project_config import EnvironmentConfig

CONFIG_NAME: Final = "config.json"
BUILTIN_DIR: Final = Path(__file__).parent / "envs"
MAX_ARCHIVE_BYTES: Final = 256 * 1024 * 1024
"""A larger project carries data that belongs into an image or a volume."""
_READ_ATTEMPTS: Final = 5
"""An editor that saves, or a checkout, is over by then."""

_EXCLUDED: Final = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".venv",
        "venv",
        "node_modules",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".idea",
        ".vscode",
        ".DS_Store",
        ".aenv",
    }
)


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
            ConfigError: It is larger than `MAX_ARCHIVE_BYTES`, or was edited since it was loaded.
        """
        buffer = io.BytesIO()
        digest = hashlib.sha256()
        try:
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for relative, path in _files(self.path):
                    status = path.lstat()
                    if buffer.tell() + status.st_size > MAX_ARCHIVE_BYTES:
                        raise ConfigError(
                            f"project {self.path} is over {MAX_ARCHIVE_BYTES >> 20} MiB",
                            hint="keep data sets out of it: put them in an image or a volume",
                        )
                    content = _content(path, status.st_mode)
                    digest.update(_digested(relative, status.st_mode, content))
                    digest.update(content)
                    tar.addfile(*_member(relative, status.st_mode, content))
        except FileNotFoundError:
            digest.update(b"removed")  # what was listed is gone
        if digest.hexdigest() != self.digest:
            _read.cache_clear()  # an edit that left size and time as they were is read by now
            raise ConfigError(
                f"project {self.path} was edited after it was loaded",
                hint="nothing was sent; do it again with the project as it is now",
            )
        return buffer.getvalue()


def _content(path: Path, mode: int) -> bytes:
    return os.fsencode(os.readlink(path)) if stat.S_ISLNK(mode) else path.read_bytes()


def _digested(relative: str, mode: int, content: bytes) -> bytes:
    """Return what a file adds to the digest before its content."""
    kind = "l" if stat.S_ISLNK(mode) else "x" if mode & stat.S_IXUSR else "f"
    return f"{kind} {len(content)} {relative}\0".encode()


def _member(relative: str, mode: int, content: bytes) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    """Return a file's member of an archive: nobody's, of no time."""
    info = tarfile.TarInfo(relative)
    info.mode = 0o755 if mode & stat.S_IXUSR else 0o644
    if stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
        return info, None
    info.size = len(content)
    return info, io.BytesIO(content)


def _files(root: Path) -> list[tuple[str, Path]]:
    """Return the project's files and symlinks, sorted by relative name."""
    found: list[tuple[str, Path]] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(d for d in subdirectories if d not in _EXCLUDED)
        for name in names:
            path = Path(directory, name)
            if name in _EXCLUDED or name.endswith(".pyc"):
                continue
            if path.is_symlink() or path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
        found += [
            (Path(directory, d).relative_to(root).as_posix(), Path(directory, d))
            for d in subdirectories
            if Path(directory, d).is_symlink()
        ]
    return sorted(found)


def _fingerprint(root: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return what changes when a file does: cheap enough for every create."""
    rows = []
    for relative, path in _files(root):
        status = path.lstat()
        rows.append((relative, status.st_size, status.st_mtime_ns, status.st_mode))
    return tuple(rows)


class _EditedMeanwhile(Exception):
    """The files changed while they were read."""


@lru_cache(maxsize=256)
def _read(root: Path, fingerprint: tuple[tuple[str, int, int, int], ...]) -> Project:
    """Read config and digest of one and the same content.

    Raises:
        _EditedMeanwhile: The files are no longer those of the fingerprint.
        ConfigError: The config is malformed.
    """
    digest = hashlib.sha256()
    try:
        config = read_config(root / CONFIG_NAME)
        for relative, _, _, mode in fingerprint:
            content = _content(root / relative, mode)
            digest.update(_digested(relative, mode, content))
            digest.update(content)
        if _fingerprint(root) != fingerprint:
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
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise EnvironmentNotFound(
            f"there is no project directory {root}", hint="make one with: aenv init NAME"
        )
    if not (root / CONFIG_NAME).is_file():
        raise _no_config(root)
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(_EditedMeanwhile, FileNotFoundError):
            return _read(root, _fingerprint(root))
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
    found = {}
    for path in sorted(BUILTIN_DIR.glob(f"*/{CONFIG_NAME}")):
        found[path.parent.name.replace("_", "-")] = path.parent
    return found


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
    if isinstance(reference, Path) or _looks_like_path(reference):
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


def _looks_like_path(reference: str) -> bool:
    return reference.startswith((".", "/", "~")) or "/" in reference or os.sep in reference


def unpack(archive: bytes, digest: str, directory: Path) -> Path:
    """Unpack an archive into ``directory/digest`` once; a later call returns it at once.

    The files are written beside it and renamed, so a crash leaves no half project, and two
    processes may do it at the same time.

    Raises:
        ConfigError: The archive would escape its directory.
    """
    target = directory / digest
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".unpack-") as partial:
        content = Path(partial, "content")
        content.mkdir(mode=0o755)
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar.getmembers():
                    _check_member(member)
                # `filter` came with Python 3.11.4; the check above does not depend on it.
                safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                tar.extractall(content, **safe)
        except (tarfile.TarError, OSError) as exc:
            raise ConfigError(f"project archive {digest[:12]}: {exc}") from exc
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same content
                raise
    return target


def _check_member(member: tarfile.TarInfo) -> None:
    """Refuse what an archive of ours never holds: names and links that lead out, and devices.

    Raises:
        ConfigError: The member is one of those.
    """
    target = member.name
    if member.issym():
        target = os.path.join(os.path.dirname(member.name), member.linkname)
    leads_out = os.path.normpath(target).split(os.sep)[0] == ".."
    if leads_out or os.path.isabs(member.name) or os.path.isabs(member.linkname):
        raise ConfigError(f"project archive: {member.name!r} would escape its directory")
    if not (member.isreg() or member.isdir() or member.issym()):
        raise ConfigError(f"project archive: {member.name!r} is no file, directory or symlink")
