"""Virtual environments of projects with requirements: built by uv, once for each content.

An environment is named by a hash of the requirements, the interpreter and what the runtime itself
needs; it is built beside its place and renamed, under a lock, so that any number of hosts ask for
it and one builds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from aenv_ray.engines.node.installer import failure_of
from aenv_ray.engines.node.pip_sources import uv_options, uv_variables
from aenv_ray.errors import ConfigError, SandboxStartFailed

logger = logging.getLogger(__name__)

RUNTIME_REQUIREMENTS: Final = ("pydantic>=2.12,<3",)
"""What `aenv_ray.runtime` needs; the public door needs fastmcp too and is not started there."""
PROVIDED: Final = frozenset({"aenvironment", "aenv-ray", "aenv_ray"})
"""Packages that the runtime stands in for; installing them would shadow it."""
BUILD_DEADLINE_S: Final = 1800.0


def read_requirements(project_dir: Path) -> list[str]:
    """Return the lines of ``requirements.txt`` that ask for something; empty without the file."""
    path = project_dir / "requirements.txt"
    if not path.is_file():
        return []
    wanted = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name = text.split("#")[0].strip()
        bare = name.lower()
        for separator in "<>=!~[; ":
            bare = bare.split(separator)[0]
        if bare not in PROVIDED:
            wanted.append(text)
    return wanted


def may_be_installing(project_dir: Path) -> bool:
    """Whether a project has requirements of its own, which a node may have to install first."""
    try:
        return bool(read_requirements(project_dir))
    except (OSError, ValueError):
        return False  # whoever starts it says what is wrong


async def ensure(project_dir: Path, cache_dir: Path) -> Path | None:
    """Return the interpreter of the project's virtual environment, building it if need be.

    Args:
        project_dir: Unpacked project.
        cache_dir: Where environments are kept.

    Returns:
        None for a project without requirements: the node's own interpreter serves it.

    Raises:
        SandboxStartFailed: The installer failed; the message ends with its own words.
        ConfigError: ``requirements.txt`` is not text.
    """
    try:
        requirements = read_requirements(project_dir)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{project_dir / 'requirements.txt'}: {exc}") from exc
    if not requirements:
        return None
    key = "\n".join(
        [*requirements, *RUNTIME_REQUIREMENTS, sys.base_prefix, platform.python_version()]
    )
    target = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:24]
    python = target / "bin" / "python"
    if not _exists(python):
        lock = await asyncio.to_thread(_lock, target.with_suffix(".lock"))
        try:
            if not _exists(python):
                await _build(project_dir, requirements, target)
        finally:
            os.close(lock)
    return python


def _exists(path: Path) -> bool:
    return path.exists()


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


async def _build(project_dir: Path, requirements: list[str], target: Path) -> None:
    uv = _uv()
    logger.info("installing %d requirements of project %s", len(requirements), project_dir.name)
    # Not renamed afterwards: scripts in a virtual environment hold its absolute path.
    shutil.rmtree(target, ignore_errors=True)
    marker = target / "bin" / "python"
    partial = target / "bin" / "python.partial"
    try:
        await _run([uv, "venv", "--quiet", "--python", sys.executable, str(target)])
        marker.rename(partial)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join([*requirements, *RUNTIME_REQUIREMENTS]))
            file.flush()
            install = [uv, "pip", "install", "--python", str(partial), "-r", file.name]
            await _run([*install, *uv_options()], project_dir, **uv_variables())
        partial.rename(marker)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


async def _run(command: list[str], cwd: Path | None = None, **variables: str) -> None:
    # A sandbox must be able to read it. Ray's actors run on uvloop, which has no `umask` argument.
    readable = ["/bin/sh", "-c", 'umask 022 && exec "$@"', "sh"]
    words = await failure_of(
        [*readable, *command], deadline_s=BUILD_DEADLINE_S, cwd=cwd, variables=variables
    )
    if words is not None:
        raise SandboxStartFailed(
            f"the project's requirements cannot be installed:\n{words}",
            hint="mend requirements.txt; the lines above are the installer's own",
        )


def _uv() -> str:
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        return find_uv_bin()
    found = shutil.which("uv")
    if found is None:
        raise SandboxStartFailed(
            "the project has requirements, and uv, which installs them, is missing",
            hint="pip install uv",
        )
    return found
