"""Patches as text: which files they change, and which of those a submission may not change."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final, NamedTuple

STEERING: Final = (
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
)
"""Names of files that steer Python or its test runner, in whatever directory."""
SHADOWS: Final = frozenset({"pytest", "_pytest", "pluggy", "unittest", "doctest", "nose"})
"""Test runners: a module of this name at the root of the repository would replace it."""
INSTALLED: Final = frozenset({".venv", "site-packages", "dist-packages"})
"""Directories of installed packages, which the image of the task has, and no solution changes."""
OF_GIT: Final = frozenset({"config", "hooks", "info", "attributes"})
"""Files of git in which a patch could name programs that git runs."""
_START: Final = re.compile(r"^diff --git ", re.MULTILINE)
_HEADER: Final = re.compile(r'^diff --git "?a/(.*?)"? "?b/(.*?)"?$', re.MULTILINE)
_PLAIN: Final = re.compile(r'^(?:---|\+\+\+) "?(?:[ab]/)?([^\t\n"]+)', re.MULTILINE)


class FilePatch(NamedTuple):
    """The part of a patch that changes one file."""

    paths: frozenset[str]
    """Its path before and after."""
    text: str


class Submission(NamedTuple):
    """What of a submitted patch is graded."""

    patch: str
    left_out: tuple[str, ...]
    """Paths whose changes are left out."""


def split(patch: str) -> list[FilePatch]:
    """Return the parts of a patch, each of which changes one file."""
    starts = [found.start() for found in _START.finditer(patch)]
    if not starts:
        return [FilePatch(_plain_paths(patch), patch)] if patch.strip() else []
    ends = [*starts[1:], len(patch)]
    return [
        FilePatch(_paths(patch[start:end]), patch[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


def paths(patch: str) -> frozenset[str]:
    """Return the paths of all files that a patch changes."""
    return frozenset().union(*(part.paths for part in split(patch)))


def permitted(patch: str, tests: Collection[str], gold: Collection[str]) -> Submission:
    """Leave out of a patch what would steer the tests instead of repairing the program.

    Args:
        patch: As submitted.
        tests: Paths of the tests' patch. The tests replace them; a file that is already there would
            keep their patch from being applied.
        gold: Paths of the reference patch, which a solution may have to change.
    """
    kept, left_out = [], set()
    for part in split(patch):
        refused = {path for path in part.paths if _is_refused(path, tests, gold)}
        left_out |= refused
        if not refused:
            kept.append(part.text)
    return Submission("".join(kept), tuple(sorted(left_out)))


def steering(paths: Collection[str], tests: Collection[str], gold: Collection[str]) -> list[str]:
    """Return those of some changed files that a submission may not change.

    The names in a patch may be written in many ways, so those of the files that it has changed are
    looked at as well. Arguments as for `permitted`.
    """
    return sorted(path for path in paths if _is_refused(path, tests, gold))


def _is_refused(path: str, tests: Collection[str], gold: Collection[str]) -> bool:
    if path in tests:
        return True
    if path in gold:
        return False
    place = PurePosixPath(path)
    if any(fnmatchcase(place.name.lower(), pattern) for pattern in STEERING):
        return True
    if not INSTALLED.isdisjoint(place.parts):
        return True
    if place.parts[0] == ".git":
        return not OF_GIT.isdisjoint(place.parts[1:2])
    return place.parts[0].removesuffix(".py") in SHADOWS


def _paths(part: str) -> frozenset[str]:
    header = _HEADER.search(part)
    named = {*header.groups()} if header else set()
    head = part.partition("\n@@")[0]
    return frozenset(named) | _plain_paths(head)


def _plain_paths(part: str) -> frozenset[str]:
    return frozenset(path for path in _PLAIN.findall(part) if path != "/dev/null")
