"""Virtual environments of projects with requirements: built by uv, once for each content.

An environment is named by a hash of the requirements, with the files that they include, the
interpreter and what the runtime itself needs. It is built under a lock in its final place, because
scripts in it hold its absolute path.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aenv_ray.engines.node.installer import failure_of, uv_options, uv_variables
from aenv_ray.errors import AenvError, ConfigError, DeadlineExceeded, SandboxStartFailed
from aenv_ray.files import FileLock

logger = logging.getLogger(__name__)

RUNTIME_REQUIREMENTS: Final = ("pydantic>=2.12,<3",)
"""What `aenv_ray.runtime` needs; the public door also needs fastmcp and is not started there."""
PROVIDED: Final = frozenset({"aenvironment", "aenv-ray", "aenv_ray"})
"""Packages that the runtime replaces; an installed one would shadow it."""
BUILD_DEADLINE_S: Final = 1800.0
LOCK_DEADLINE_S: Final = 2 * BUILD_DEADLINE_S
"""Longer than another process takes to build the same environment: one `uv venv`, one install."""
_INCLUDE: Final = re.compile(r"(?:-(r|c)|--(requirement|constraint)(?=[\s=]))\s*=?\s*(\S.*)")
_COMMENT: Final = re.compile(r"(^|\s)#.*$")


@dataclass(frozen=True)
class Requirements:
    """The lines of ``requirements.txt`` and of the files that it includes."""

    packages: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Return what an environment with these requirements is named by."""
        constraints = [f"-c {line}" for line in self.constraints]
        parts = [*self.packages, *constraints, *RUNTIME_REQUIREMENTS]
        text = "\n".join([*parts, sys.base_prefix, platform.python_version()])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_requirements(project_dir: Path) -> Requirements:
    """Return what ``requirements.txt`` asks for; nothing without the file.

    ``-r FILE`` and ``-c FILE`` are resolved relative to the including file, as pip does. Addresses
    (``-r https://…``) are left to the installer.

    Raises:
        ConfigError: A file is not text, is missing, or is outside the project.
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
        if include is None or ("://" in include[3] and not include[3].startswith("file:")):
            if is_constraints or _package_name(line) not in PROVIDED:
                into.append(line)
            continue
        target = _included(path, include[3], root)
        is_constraint = is_constraints or (include[1] or include[2]).startswith("c")
        if (target, is_constraint) not in visited:
            _read(target, root, found.constraints if is_constraint else into, found, visited)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = (_COMMENT.sub("", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _included(path: Path, name: str, root: Path) -> Path:
    target = (path.parent / name.strip("'\"")).resolve()
    if not target.is_relative_to(root):
        raise ConfigError(
            f"{path} includes {name}, which is outside the project",
            hint="copy the file into the project; only the project's directory is published",
        )
    if not target.is_file():
        raise ConfigError(
            f"{path} includes {name}, which does not exist",
            hint=f"the path is relative to {path.parent}",
        )
    return target


def _package_name(line: str) -> str:
    return re.split(r"[<>=!~\[; @]", line, maxsplit=1)[0].lower()


def may_be_installing(project_dir: Path) -> bool:
    """Return whether a project has requirements that a node may have to install first."""
    try:
        return bool(read_requirements(project_dir).packages)
    except AenvError:
        return False  # the start reports it


async def ensure(project_dir: Path, cache_dir: Path) -> Path | None:
    """Return the interpreter of the project's virtual environment, built if it is missing.

    Args:
        project_dir: Unpacked project.
        cache_dir: The directory of all environments.

    Returns:
        None for a project without requirements: the node's interpreter serves it.

    Raises:
        SandboxStartFailed: The installer failed; the message ends with its output.
        ConfigError: ``requirements.txt``, or a file that it includes, cannot be used.
        DeadlineExceeded: Another process held the environment's lock for too long, or the
            installer took too long.

    Cancelling ends the installer and releases the lock.
    """
    requirements = read_requirements(project_dir)
    if not requirements.packages:
        return None
    target = cache_dir / requirements.key
    python = target / "bin" / "python"
    if not _exists(python):
        with await _lock(target.with_suffix(".lock")):
            if not _exists(python):
                await _build(project_dir, requirements, target)
    return python


def _exists(path: Path) -> bool:
    return path.exists()


async def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return await FileLock.acquire_async(path, LOCK_DEADLINE_S)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"waited {LOCK_DEADLINE_S:g} s for the lock {path}: another process builds this "
            "virtual environment",
            hint="end the process that holds the lock; `fuser` names it",
        ) from exc


async def _build(project_dir: Path, requirements: Requirements, target: Path) -> None:
    uv = find_uv()
    count = len(requirements.packages)
    logger.info("installing %d requirements of project %s", count, project_dir.name)
    shutil.rmtree(target, ignore_errors=True)
    marker = target / "bin" / "python"
    partial = target / "bin" / "python.partial"
    try:
        await _run([uv, "venv", "--quiet", "--python", sys.executable, str(target)])
        marker.rename(partial)
        with tempfile.TemporaryDirectory() as directory:
            lists = _write_lists(Path(directory), requirements)
            install = [uv, "pip", "install", "--python", str(partial), *lists, *uv_options()]
            await _run(install, project_dir, **uv_variables())
        partial.rename(marker)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _write_lists(directory: Path, requirements: Requirements) -> list[str]:
    """Write what to install, and return the installer's options for it."""
    lists = {"-r": [*requirements.packages, *RUNTIME_REQUIREMENTS], "-c": requirements.constraints}
    options = []
    for option, lines in lists.items():
        if lines:
            file = directory / f"requirements{option}.txt"
            file.write_text("\n".join(lines), encoding="utf-8")
            options += [option, str(file)]
    return options


async def _run(command: list[str], cwd: Path | None = None, **variables: str) -> None:
    # A sandbox must be able to read it. Ray's actors run on uvloop, which has no `umask` argument.
    readable = ["/bin/sh", "-c", 'umask 022 && exec "$@"', "sh"]
    try:
        output = await failure_of(
            [*readable, *command], deadline_s=BUILD_DEADLINE_S, cwd=cwd, variables=variables
        )
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"installing the project's requirements took more than {BUILD_DEADLINE_S:g} s",
            hint="pin versions, use wheels, or build an image and use the docker engine",
        ) from exc
    if output is not None:
        raise SandboxStartFailed(
            f"the project's requirements cannot be installed:\n{output}",
            hint="correct requirements.txt; the lines above are the installer's output",
        )


def find_uv() -> str:
    """Return the path of uv: the one installed with this package, or the first on ``PATH``.

    Raises:
        SandboxStartFailed: There is none.
    """
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        return find_uv_bin()
    found = shutil.which("uv")
    if found is None:
        raise SandboxStartFailed(
            "uv is not installed, and installing the project's requirements needs it",
            hint="pip install uv",
        )
    return found
