"""The patterns of one ``.gitignore``, matched as git matches them.

Entry by entry: git decides about a directory before it looks into it, and never looks into one that
it ignores. Whoever matches whole paths instead, as most libraries do, differs from git where a
directory is ignored and something in it is brought back. The rules are those of ``gitignore(5)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

_CLASSES: Final = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": r" \t", "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9", "graph": r"\x21-\x7e", "lower": "a-z",
    "print": r"\x20-\x7e", "punct": r"!-/:-@\[-`{-~", "space": r"\s", "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}  # fmt: skip
_NEVER: Final = "(?!)"
_WILDCARD: Final = re.compile(r"[*?\[\\]")
_MOST_VERDICTS: Final = 50_000


@dataclass(frozen=True)
class _Pattern:
    """One line."""

    regex: re.Pattern[str]
    brings_back: bool
    """It began with ``!``."""
    only_directories: bool
    whole_path: bool
    """It is matched against the path from its file's directory on, not against the name alone."""


class IgnoreRules:
    """The lines of one file.

    Args:
        text: Its content; bytes that are no UTF-8 as surrogates, as in file names.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._verdicts: dict[tuple[str, bool], bool | None] = {}

    @cached_property
    def _patterns(self) -> tuple[_Pattern, ...]:
        """The patterns, the last one first."""
        lines = self._text.removeprefix("\ufeff").split("\n")
        parsed = [_parse(line.removesuffix("\r")) for line in reversed(lines)]
        return tuple(pattern for pattern in parsed if pattern is not None)

    def verdict(self, path: str, *, is_directory: bool) -> bool | None:
        """Return whether an entry is ignored; None when no line says anything about it.

        Args:
            path: From the directory of the file on, with ``/`` between its parts. No directory
                above the entry is ignored.
            is_directory: A link to one is none.
        """
        key = (path, is_directory)
        if key not in self._verdicts:
            if len(self._verdicts) >= _MOST_VERDICTS:
                self._verdicts.clear()  # files come and go
            self._verdicts[key] = self._decide(path, is_directory)
        return self._verdicts[key]

    def _decide(self, path: str, is_directory: bool) -> bool | None:
        name = path.rpartition("/")[2]
        for pattern in self._patterns:
            if pattern.only_directories and not is_directory:
                continue
            if pattern.regex.fullmatch(path if pattern.whole_path else name):
                return not pattern.brings_back
        return None


def _parse(line: str) -> _Pattern | None:
    """Return the pattern of a line; None for an empty one or a comment."""
    if line.startswith("#"):
        return None
    text = _without_trailing_spaces(line)
    brings_back = text.startswith("!")
    text = text.removeprefix("!")
    only_directories = text.endswith("/")
    text = text.removesuffix("/")
    whole_path = "/" in text
    text = text.removeprefix("/")
    if not text:
        return None
    source = _translate(text)
    return _Pattern(re.compile(source, re.DOTALL), brings_back, only_directories, whole_path)


def _without_trailing_spaces(line: str) -> str:
    """Return the line without spaces at its end, but for those after a backslash."""
    bare = line.rstrip(" ")
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if backslashes % 2 and bare != line else bare


def _translate(glob: str) -> str:
    """Return a pattern as a regular expression."""
    parts: list[str] = []
    at = 0
    while at < len(glob):
        letter = glob[at]
        if letter == "*":
            end = at
            while end < len(glob) and glob[end] == "*":
                end += 1
            at = _stars(glob, at, end, parts)
        elif letter == "?":
            parts.append("[^/]")
            at += 1
        elif letter == "[":
            source, at = _bracket(glob, at)
            parts.append(source)
        elif letter == "\\":
            if at + 1 == len(glob):
                return _NEVER
            parts.append(re.escape(glob[at + 1]))
            at += 2
        else:
            parts.append(re.escape(letter))
            at += 1
    return "".join(parts)


def _stars(glob: str, start: int, end: int, parts: list[str]) -> int:
    """Translate the stars from `start` to `end`; return where the pattern goes on."""
    # Git compares what stands before the first wildcard as text, and matches from there on: to it
    # the stars of ``a**/b`` are the first of a pattern.
    is_first = not _WILDCARD.search(glob, 0, start)
    between_slashes = (is_first or glob[start - 1] == "/") and (
        end == len(glob) or glob[end] == "/"
    )
    if end - start < 2 or not between_slashes:
        parts.append("[^/]*")
        return end
    if end == len(glob):
        parts.append(".*")
        return end
    parts.append("(?:.*/)?")
    return end + 1


def _bracket(glob: str, start: int) -> tuple[str, int]:
    """Return the expression of the ``[…]`` at `start`, and where the pattern goes on."""
    at = start + 1
    negated = glob[at : at + 1] in ("!", "^")
    at += negated
    pieces: list[str] = []
    is_first = True
    while at < len(glob) and (is_first or glob[at] != "]"):
        is_first = False
        named = re.compile(r"\[:(\w*):\]").match(glob, at)
        if named:
            if named[1] not in _CLASSES:
                return _NEVER, len(glob)
            pieces.append(_CLASSES[named[1]])
            at = named.end()
            continue
        low, at = _letter(glob, at)
        if glob[at : at + 1] == "-" and glob[at + 1 : at + 2] not in ("", "]"):
            high, at = _letter(glob, at + 1)
            if low <= high:
                pieces.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            pieces.append(re.escape(low))
    if at >= len(glob):
        return _NEVER, len(glob)  # it is not closed
    content = "".join(pieces)
    if negated:
        return f"(?!/)[^{content}]" if content else "[^/]", at + 1
    return f"(?!/)[{content}]" if content else _NEVER, at + 1


def _letter(glob: str, at: int) -> tuple[str, int]:
    """Return the letter at a place in brackets, and where they go on."""
    if glob[at] == "\\" and at + 1 < len(glob):
        return glob[at + 1], at + 2
    return glob[at], at + 1
