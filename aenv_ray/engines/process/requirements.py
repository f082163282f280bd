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
_INCLUDE: Final = re.compile(r"(?:-(r|c)|--(requirement|constraint)(?=[\s=]))\s*=?\s*(\S.*)")
_COMMENT: Final = re.compile(r"(^|\s)#.*$")
_PACKAGE: Final = re.compile(
    r"""
    (?P<name>[A-Za-z0-9][A-Za-z0-9._-]*) \s*
    (\[ [A-Za-z0-9._,\s-]* \])? \s*             # extras
    (\(? [<>=!~] [\w.*+!<>=~,\s-]* \)?)? \s*    # versions
    (; [\w\s.'"<>=!~()+*,-]*?)? \s*            # marker
    (\s --hash [=\s] [a-z0-9]+ : [0-9a-f]+ \s*)*
    """,
    re.VERBOSE,
)
_FILES: Final = (".whl", ".zip", ".tar.gz")
_OPTION: Final = re.compile(r"(^|\s)-(?!-hash[=\s])")
_FILE: Final = re.compile(r"(?P<path>[^\s;\[@:]+)\s*(?P<rest>(\[[^\]]*\])?\s*(;.*)?)")


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
            something that only the operator decides.
    """
    found = Requirements()
    path = project_dir / "requirements.txt"
    if path.is_file():
        _read(path, project_dir.resolve(), found.packages, found, visited=set())
    return found


def _read(
    path: Path, root: Path, into: list[str], found: Requirements, visited: set[tuple[Path, bool]]
) -> None:
    """Add the lines of a file to a list; all that a constraints file includes are constraints."""
    is_constraints = into is found.constraints
    visited.add((path.resolve(), is_constraints))
    for line in _lines(path):
        include = _INCLUDE.fullmatch(line)
        if include is None:
            _add(line, path, root, into, found)
            continue
        target = _inside(path, include[3].strip("'\""), root)
        is_constraint = is_constraints or (include[1] or include[2]).startswith("c")
        if (target, is_constraint) not in visited:
            _read(target, root, found.constraints if is_constraint else into, found, visited)


def _add(line: str, path: Path, root: Path, into: list[str], found: Requirements) -> None:
    package, file = _PACKAGE.fullmatch(line), _FILE.fullmatch(line)
    if not line.isprintable():
        raise _refused(line, path, "not text")
    if "${" in line:  # the installer would put the variable's value in its place
        raise _refused(line, path, "a variable")
    if _OPTION.search(line):
        raise _refused(line, path, "an option of the installer")
    if package is not None and not package["name"].endswith(_FILES):
        if into is found.constraints or package["name"].lower() not in PROVIDED:
            into.append(line)
    elif file is not None and into is not found.constraints:
        target = _inside(path, file["path"], root, of=root, is_directory=True)
        found.files[target] = file["rest"]
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


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}", hint="make it a readable file in UTF-8"
        ) from exc
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = (_COMMENT.sub("", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _inside(
    path: Path, name: str, root: Path, *, of: Path | None = None, is_directory: bool = False
) -> Path:
    """Return a file of the project that a line of `path` names, relative to `of` or to `path`."""
    target = ((of or path.parent) / name).resolve()
    if not target.is_relative_to(root):
        raise ConfigError(
            f"{path} includes {name}, which is outside the project",
            hint="copy the file into the project; only the project's directory is published",
        )
    if not (target.is_file() or (is_directory and target.is_dir())):
        raise ConfigError(
            f"{path} includes {name}, which does not exist",
            hint=f"the path is relative to {of or path.parent}",
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
