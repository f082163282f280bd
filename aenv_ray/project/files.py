"""The files of a project, and what each contributes to the project's digest.

Left out are `EXCLUDED` names, and files that a ``.gitignore`` or ``.aenvignore`` in the project
matches; an ``.aenvignore`` has precedence over every ``.gitignore``. Ignore files above the
project's directory have no effect, so that a project does not depend on its location.

This runs at every create: each file is looked at once, and unchanged files are not read again.
"""

from __future__ import annotations

import os
import re
import stat
import time
import warnings
from functools import lru_cache
from typing import Final, NamedTuple

from pathspec import GitIgnoreSpec, RegexPattern

from aenv_ray.errors import ConfigError

CONFIG_NAME: Final = "config.json"
"""In the project's directory; never ignored."""
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
_CLASSES: Final = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \t", "cntrl": "\x00-\x1f\x7f",
    "digit": "0-9", "graph": "\x21-\x7e", "lower": "a-z", "print": " -~",
    "punct": "!-/:-@[-`{-~", "space": " \t\n\r\f\v", "upper": "A-Z", "xdigit": "0-9a-fA-F",
}  # fmt: skip
_DIRECTORY: Final = "ps_d"
"""pathspec's group for the slash after a directory."""
_CLASS: Final = re.compile(r"\[:(\w+):\]")
_EVERYTHING_BELOW: Final = re.compile(r"/\*\*(/?) *$")
_MAX_VERDICTS: Final = 50_000
MAX_IGNORE_BYTES: Final = 256 * 1024
"""Maximum size of an ignore file."""
MAX_RULES_CPU_S: Final = 30.0
"""CPU time for one scan of a project with ignore files, which somebody else may have written."""
_ENTRIES_PER_LOOK: Final = 64
"""After how many entries of a directory that time is checked."""
_STAR: Final = "[^/]*"
_LEADING_STARS: Final = "^(?:.+/)?"
_INNER_STARS: Final = "(?:/.+)?"
"""pathspec's expressions for ``*``, for ``**/`` at the start, and for ``/**`` inside."""
_END: Final = re.compile(r"(?:\(\?:)?\(\?P<ps_d>/\)(?:\|\$\))?$")
_IGNORE_FILES: Final = (".gitignore", ".aenvignore")
"""In ascending order of precedence."""


class FileRow(NamedTuple):
    """A file or symlink, without its content."""

    name: str
    """Path relative to the project's directory."""
    size: int
    mtime_ns: int
    ctime_ns: int
    """Changes even if an edit restores the modification time."""
    mode: int


class IgnoreRules:
    """The patterns of one ignore file, parsed by pathspec and applied as git applies them.

    git decides about each entry by its own name, from the top down, and does not descend into
    ignored directories. pathspec's own matching also applies a pattern for a directory to
    everything below it, so that ``a`` and then ``!b`` would bring back ``b/a``.

    Args:
        text: The file's content; bytes that are not UTF-8 as surrogates, as in file names.
    """

    def __init__(self, text: str) -> None:
        lines = text.removeprefix("\ufeff").split("\n")
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # "[[a]" is fine
            parsed = [_parse(line) for line in lines]
        self._patterns = [pattern for pattern in reversed(parsed) if pattern is not None]
        self._cached = lru_cache(maxsize=_MAX_VERDICTS)(self._decide)

    def verdict(self, path: str, *, is_directory: bool) -> bool | None:
        """Return whether an entry is ignored; None if no pattern matches it.

        Args:
            path: Relative to the directory of the ignore file. No directory above is ignored.
            is_directory: False for a symlink to a directory.
        """
        return self._cached(f"{path}/" if is_directory else path)

    def _decide(self, path: str) -> bool | None:
        name = path[path.rfind("/", 0, -1) + 1 :]
        for pattern in self._patterns:
            match = pattern.regex.search(path if pattern.is_anchored else name)
            if match is None:
                continue
            # Where the matched directory ends: within the path it is a parent of the entry.
            end = match.end(_DIRECTORY) if _DIRECTORY in pattern.regex.groupindex else -1
            if end in (-1, len(match.string)):
                return pattern.is_ignoring
        return None


class _Pattern(NamedTuple):
    regex: re.Pattern[str]
    is_ignoring: bool
    """False: it brings back what an earlier line ignores."""
    is_anchored: bool
    """It is matched against the path, not against the name alone."""


def _parse(line: str) -> _Pattern | None:
    """Return the pattern of a line; None if it matches nothing."""
    # pathspec does not know POSIX classes, and its "a/**" matches the directory "a/" too.
    line = _CLASS.sub(lambda match: _CLASSES.get(match[1], match[0]), line)
    line = _EVERYTHING_BELOW.sub(r"/**/*\1", line)
    try:
        (pattern,) = GitIgnoreSpec.from_lines([line]).patterns
    except (ValueError, re.error):
        return None  # git skips malformed lines
    if pattern.include is None:
        return None
    assert isinstance(pattern, RegexPattern)
    assert pattern.regex is not None
    is_anchored = "/" in line.rstrip("\r").rstrip(" ").removesuffix("/")
    regex = re.compile(linear(pattern.regex.pattern))
    return _Pattern(regex, pattern.include, is_anchored)


def linear(expression: str) -> str:
    """Return pathspec's expression for a pattern as one that needs no exponential time.

    Somebody else may have written the pattern. Each ``*`` but the last of a part takes the first
    match of what follows it, for good: a later one leaves less for the rest, so that it would not
    match more. A part is what is between ``**``, and takes the first match in the same way. The
    whole matches the entry itself, not a directory above it.
    """
    end = _END.search(expression)
    body, tail = (expression[: end.start()], end[0]) if end else (expression, "")
    is_deep = body.startswith(_LEADING_STARS)
    parts = body.removeprefix(_LEADING_STARS if is_deep else "^").split(_INNER_STARS)
    found = "^" if body.startswith("^") else ""
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        stars = "(?:/.+?)??" if number else "(?:.+?/)??" if is_deep else ""
        matched = _linear_part(part)
        found += stars + matched if is_last else f"(?>{stars}{matched}(?=/))"
    return found + tail + (r"\Z" if end else "")


def _linear_part(part: str) -> str:
    first, *others = part.split(_STAR)
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>[^/]*?{text})" for text in middle) + _STAR + last


class _Rules(NamedTuple):
    """The rules of one ignore file, and the directory they apply to."""

    prefix: str
    rules: IgnoreRules


_Stack = tuple[tuple[_Rules, ...], ...]
"""For each name in `_IGNORE_FILES`, the ignore files from the project's directory downwards."""


def scan(root: str) -> tuple[FileRow, ...]:
    """Return the project's files and symlinks, sorted by name.

    Raises:
        ConfigError: A directory or an ignore file cannot be read.
        FileNotFoundError: A file was removed during the scan.
    """
    rows: list[FileRow] = []
    try:
        _scan(root, "", ((),) * len(_IGNORE_FILES), rows, time.thread_time() + MAX_RULES_CPU_S)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise FileNotFoundError(str(exc)) from exc
    except OSError as exc:
        raise ConfigError(
            f"project {root} cannot be read: {exc.filename}: {exc.strerror}",
            hint="make it readable, or list it in .aenvignore",
        ) from exc
    rows.sort()
    return tuple(rows)


def _scan(directory: str, prefix: str, stack: _Stack, rows: list[FileRow], ends_at: float) -> None:
    with os.scandir(directory) as listing:
        entries = [entry for entry in listing if entry.name not in EXCLUDED]
    ignoring = {entry.name: entry for entry in entries if entry.name in _IGNORE_FILES}
    if ignoring:
        stack = _with_files(stack, prefix, ignoring)
    has_rules = any(stack)
    for number, entry in enumerate(entries):
        if has_rules and number % _ENTRIES_PER_LOOK == 0 and time.thread_time() > ends_at:
            raise ConfigError(
                f"the ignore files of the project take more than {MAX_RULES_CPU_S:g} s to apply",
                hint="use fewer and simpler patterns in .gitignore and .aenvignore",
            )
        name = prefix + entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if has_rules and name != CONFIG_NAME and _is_ignored(stack, name, is_directory):
            continue
        if is_directory:
            _scan(entry.path, f"{name}/", stack, rows, ends_at)
        elif not name.endswith(".pyc") and (
            entry.is_file(follow_symlinks=False) or entry.is_symlink()
        ):
            rows.append(_row(name, entry.stat(follow_symlinks=False)))


def _row(name: str, status: os.stat_result) -> FileRow:
    return FileRow(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


def _with_files(stack: _Stack, prefix: str, ignoring: dict[str, os.DirEntry[str]]) -> _Stack:
    """Return the stack with the ignore files of one more directory; symlinks have no effect."""
    deeper = []
    for name, above in zip(_IGNORE_FILES, stack, strict=True):
        entry = ignoring.get(name)
        if entry is not None and entry.is_file(follow_symlinks=False):
            row = _row(prefix + name, entry.stat(follow_symlinks=False))
            if row.size > MAX_IGNORE_BYTES:
                raise ConfigError(
                    f"{row.name} has {row.size} bytes; an ignore file has up to {MAX_IGNORE_BYTES}",
                    hint="use patterns that match many files, such as data/**",
                )
            deeper.append((*above, _Rules(prefix, _read_rules(entry.path, row))))
        else:
            deeper.append(above)
    return tuple(deeper)


@lru_cache(maxsize=256)
def _read_rules(path: str, row: FileRow) -> IgnoreRules:
    del row  # part of the cache key: a changed file is read again
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
    """Drop cached ignore files, after an edit that changed neither size nor times."""
    _read_rules.cache_clear()


# --- the digest -----------------------------------------------------------------------------------


def content_of(path: str, mode: int) -> bytes:
    """Return the content of a file, or the target of a symlink.

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
            hint="make it readable, or list it in .aenvignore",
        ) from exc


def digested(name: str, mode: int, content: bytes) -> bytes:
    """Return the header of a file in the project's digest, before its content."""
    kind = "l" if stat.S_ISLNK(mode) else "x" if mode & stat.S_IXUSR else "f"
    return f"{kind} {len(content)} ".encode() + os.fsencode(name) + b"\0"
