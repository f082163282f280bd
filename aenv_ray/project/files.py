"""Which files of a directory are the project, and what changes when one of them does.

Not of it is what no project means to carry (`EXCLUDED`), and what a ``.gitignore`` or an
``.aenvignore`` in the project says, in any of its directories; a line of an ``.aenvignore`` goes
before those of every ``.gitignore``. Files above the project's directory say nothing: a project is
the same wherever it lies.

This runs at every create, so it looks at each file once and reads none that it has read before.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import Final, NamedTuple

from aenv_ray.errors import ConfigError
from aenv_ray.project.ignore_rules import IgnoreRules

CONFIG_NAME: Final = "config.json"
"""At the top of a project; never ignored."""
EXCLUDED: Final = frozenset(
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
_IGNORE_FILES: Final = (".gitignore", ".aenvignore")
"""The stronger one last."""


class FileRow(NamedTuple):
    """One file or symlink, without its content."""

    name: str
    """From the project's directory on, with ``/``."""
    size: int
    mtime_ns: int
    ctime_ns: int
    """Also an edit that puts the time of the content back changes it."""
    mode: int


class _Rules(NamedTuple):
    """The lines of one file, and where they hold."""

    prefix: str
    rules: IgnoreRules


_Stack = tuple[tuple[_Rules, ...], ...]
"""Of each name in `_IGNORE_FILES`, the files from the project's directory downwards."""


def scan(root: str) -> tuple[FileRow, ...]:
    """Return the project's files and symlinks, sorted by name.

    Raises:
        ConfigError: A directory or an ignore file cannot be read.
        FileNotFoundError: One was removed meanwhile.
    """
    rows: list[FileRow] = []
    try:
        _scan(root, "", ((),) * len(_IGNORE_FILES), rows)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise FileNotFoundError(str(exc)) from exc
    except OSError as exc:
        raise ConfigError(
            f"project {root} cannot be read: {exc.filename}: {exc.strerror}",
            hint="make it readable, or name it in .aenvignore",
        ) from exc
    rows.sort()
    return tuple(rows)


def _scan(directory: str, prefix: str, stack: _Stack, rows: list[FileRow]) -> None:
    with os.scandir(directory) as listing:
        entries = [entry for entry in listing if entry.name not in EXCLUDED]
    ignoring = {entry.name: entry for entry in entries if entry.name in _IGNORE_FILES}
    if ignoring:
        stack = _with_files(stack, prefix, ignoring)
    has_rules = any(stack)
    for entry in entries:
        name = prefix + entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if has_rules and name != CONFIG_NAME and _is_ignored(stack, name, is_directory):
            continue
        if is_directory:
            _scan(entry.path, f"{name}/", stack, rows)
        elif not name.endswith(".pyc") and (
            entry.is_file(follow_symlinks=False) or entry.is_symlink()
        ):
            rows.append(_row(name, entry.stat(follow_symlinks=False)))


def _row(name: str, status: os.stat_result) -> FileRow:
    return FileRow(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


def _with_files(stack: _Stack, prefix: str, ignoring: dict[str, os.DirEntry[str]]) -> _Stack:
    """Return the stack with a directory's own files; one that is a link counts for nothing."""
    deeper = []
    for name, above in zip(_IGNORE_FILES, stack, strict=True):
        entry = ignoring.get(name)
        if entry is not None and entry.is_file(follow_symlinks=False):
            row = _row(prefix + name, entry.stat(follow_symlinks=False))
            deeper.append((*above, _Rules(prefix, _read_rules(entry.path, row))))
        else:
            deeper.append(above)
    return tuple(deeper)


@lru_cache(maxsize=256)
def _read_rules(path: str, row: FileRow) -> IgnoreRules:
    del row  # it is when to read again
    with open(path, "rb") as file:
        return IgnoreRules(file.read().decode("utf-8", "surrogateescape"))


def _is_ignored(stack: _Stack, name: str, is_directory: bool) -> bool:
    for group in reversed(stack):
        for prefix, rules in reversed(group):
            verdict = rules.verdict(name[len(prefix) :], is_directory=is_directory)
            if verdict is not None:
                return verdict
    return False


def forget() -> None:
    """Read every ignore file again: one was edited without a trace."""
    _read_rules.cache_clear()


# --- what a file adds to the digest ---------------------------------------------------------------


def content_of(path: str, mode: int) -> bytes:
    """Return a file's content, or where a symlink leads.

    Raises:
        ConfigError: It cannot be read.
        FileNotFoundError: It was removed.
    """
    try:
        if stat.S_ISLNK(mode):
            return os.fsencode(os.readlink(path))
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}",
            hint="make it readable, or name it in .aenvignore",
        ) from exc


def digested(name: str, mode: int, content: bytes) -> bytes:
    """Return what a file adds to the project's digest before its content."""
    kind = "l" if stat.S_ISLNK(mode) else "x" if mode & stat.S_IXUSR else "f"
    return f"{kind} {len(content)} ".encode() + os.fsencode(name) + b"\0"
