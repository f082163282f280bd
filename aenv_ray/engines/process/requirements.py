"""What a project's ``requirements.txt`` may ask for: packages by name, and files of the project.

The installer runs on the node, for everybody. Where packages come from is the operator's decision,
so a project names no address, no option and no file outside of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aenv_ray.errors import ConfigError

PROVIDED: Final = frozenset({"aenvironment", "aenv-ray", "aenv_ray"})
"""Packages that the runtime replaces; an installed one would shadow it."""
MAX_BYTES: Final = 1024 * 1024
"""Maximum size of ``requirements.txt`` and the files that it includes, together: they are read by
the processes that serve everybody."""
MAX_FILES: Final = 100
MAX_LINES: Final = 10_000
_INCLUDE: Final = re.compile(r"(?:-(r|c)|--(requirement|constraint)(?=[\s=]))\s*+=?\s*+(\S.*)")
_COMMENT: Final = re.compile(r"(^|\s)#.*$")
# Possessive, so that they take linear time: what follows a part never begins with what is in it.
_PACKAGE: Final = re.compile(
    r"""
    (?P<name>[A-Za-z0-9][A-Za-z0-9._-]*+) [ ]?+
    (\[ [A-Za-z0-9._, -]*+ \])? [ ]?+            # extras
    (\(? [<>=!~] [\w.*+!<>=~, -]*+ \)?+)? [ ]?+   # versions
    (; [\w .'"<>=!~()+*,-]*+)?                   # marker
    """,
    re.VERBOSE,
)
_HASH_OPTION: Final = re.compile(r" --hash[= ]")
_HASH: Final = re.compile(r"[a-z0-9]++:[0-9a-f]++")
_FILES: Final = (".whl", ".zip", ".tar.gz")
_OPTION: Final = re.compile(r"(^|\s)-(?!-hash[=\s])")
_FILE: Final = re.compile(r"(?P<path>[^\s;\[@:]++)\s*+(?P<rest>(\[[^\]]*+\])?\s*+(;.*)?)")


@dataclass(frozen=True)
class Requirements:
    """The lines of ``requirements.txt`` and of the files that it includes."""

    packages: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    files: dict[Path, str] = field(default_factory=dict)
    """Wheels and source directories of the project, with what follows them in their lines."""

    def __bool__(self) -> bool:
        return bool(self.packages or self.files)

    def key(self, *further: str) -> str:
        """Return a name for what these requirements resolve to: nothing else has the same.

        Args:
            further: What else the resolution depends on.
        """
        parts = [*self.packages, "", *self.constraints, "", *further]
        parts += [f"{_digest(path)} {rest}" for path, rest in self.files.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def read_requirements(project_dir: Path) -> Requirements:
    """Return what ``requirements.txt`` asks for; nothing without the file.

    ``-r FILE`` and ``-c FILE`` are resolved relative to the including file, as pip does.

    Raises:
        ConfigError: A file is not text, is missing, or is outside the project; or a line asks for
            something that only the operator decides; or there are more than `MAX_BYTES`,
            `MAX_FILES` or `MAX_LINES`.
    """
    path = project_dir / "requirements.txt"
    reader = _Reader(project_dir.resolve())
    if path.is_file():
        reader.read(path, reader.found.packages)
    return reader.found


class _Reader:
    """Reads ``requirements.txt`` and the files that it includes.

    Args:
        root: The project's directory, without symlinks.
    """

    def __init__(self, root: Path) -> None:
        self.found = Requirements()
        self._root = root
        self._visited: set[tuple[Path, bool]] = set()
        self._read_bytes = 0
        self._lines_left = MAX_LINES

    def read(self, path: Path, into: list[str]) -> None:
        """Add the lines of a file to a list; all that a constraints file includes are constraints.

        Raises:
            ConfigError: See `read_requirements`.
        """
        is_constraints = into is self.found.constraints
        self._visited.add((path.resolve(), is_constraints))
        if len(self._visited) > MAX_FILES:
            raise ConfigError(
                f"requirements.txt includes more than {MAX_FILES} files",
                hint="put their lines into one file",
            )
        for line in self._lines(path):
            # What is not text could not be part of a path either.
            if not (words := " ".join(line.split())).isprintable():
                raise _refused(words, path, "not text")
            include = _INCLUDE.fullmatch(line)
            if include is None:
                self._add(words, path, into)
                continue
            target = _inside(path, include[3].strip("'\""), self._root)
            is_constraint = is_constraints or (include[1] or include[2]).startswith("c")
            if (target, is_constraint) not in self._visited:
                self.read(target, self.found.constraints if is_constraint else into)

    def _lines(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1 - self._read_bytes)
            text = data.decode()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(
                f"{path} cannot be read: {exc}", hint="make it a readable file in UTF-8"
            ) from exc
        joined = re.sub(r"\\\r?\n", " ", text)
        lines = [_COMMENT.sub("", line).strip() for line in joined.splitlines()]
        self._read_bytes += len(data)
        self._lines_left -= sum(1 for line in lines if line)
        if self._read_bytes > MAX_BYTES or self._lines_left < 0:
            raise ConfigError(
                f"{path.name}: requirements.txt and the files that it includes have more than "
                f"{MAX_BYTES >> 20} MiB or {MAX_LINES:,} lines",
                hint="name fewer packages, or build an image and use the docker engine",
            )
        return [line for line in lines if line]

    def _add(self, line: str, path: Path, into: list[str]) -> None:
        """Add a line, in which each run of spaces is one."""
        if "${" in line:  # the installer would put the variable's value in its place
            raise _refused(line, path, "a variable")
        if _OPTION.search(line):
            raise _refused(line, path, "an option of the installer")
        wanted, *hashes = _HASH_OPTION.split(line)
        package = _PACKAGE.fullmatch(wanted) if all(map(_HASH.fullmatch, hashes)) else None
        file = _FILE.fullmatch(line)
        if package is not None and not package["name"].endswith(_FILES):
            if into is self.found.constraints or package["name"].lower() not in PROVIDED:
                into.append(line)
        elif file is not None and into is not self.found.constraints:
            target = _inside(path, file["path"], self._root, of=self._root, is_directory=True)
            self.found.files[target] = file["rest"]
        else:
            raise _refused(line, path, "an address, or something that is not a requirement")


def _refused(line: str, path: Path, what: str) -> ConfigError:
    # The line may hold a password.
    return ConfigError(
        f"{path.name}: {re.split('[=/@ ]', line)[0][:40]!r} … is {what}, which a project cannot "
        "give",
        hint="name packages, with versions, and wheels or source directories of the project; the "
        "operator chooses the package indexes (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL)",
    )


def _inside(
    path: Path, name: str, root: Path, *, of: Path | None = None, is_directory: bool = False
) -> Path:
    """Return a file of the project that a line of `path` names, relative to `of` or to `path`."""
    try:
        target = ((of or path.parent) / name).resolve()
        is_inside = target.is_relative_to(root)
        is_there = is_inside and (target.is_file() or (is_directory and target.is_dir()))
    except (OSError, RuntimeError) as exc:  # its name is too long, or it is a loop of symlinks
        raise ConfigError(
            f"{path} includes {name[:80]}, which cannot be read: {exc}",
            hint="name a file of the project",
        ) from exc
    if not is_inside:
        raise ConfigError(
            f"{path} includes {name}, which is outside the project",
            hint="copy the file into the project; only the project's directory is published",
        )
    if not is_there:
        raise ConfigError(
            f"{path} includes {name}, which does not exist",
            hint=f"give its path relative to {of or path.parent}",
        )
    return target


def _digest(path: Path) -> str:
    """Return a digest of the names and contents of a file, or of all files below a directory."""
    digest = hashlib.sha256()
    for file in _below(path):
        name = str(file.relative_to(path.parent)).encode()
        is_link = file.is_symlink()
        content = str(file.readlink()).encode() if is_link else file.read_bytes()
        kind = b"link" if is_link else b"%o" % (file.stat().st_mode & 0o777)
        for part in (name, kind, content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _below(path: Path) -> Iterable[Path]:
    if path.is_symlink() or not path.is_dir():
        return [path]

    def walk(directory: Path) -> Iterator[Path]:
        for entry in sorted(directory.iterdir()):
            yield from _below(entry)

    return walk(path)
