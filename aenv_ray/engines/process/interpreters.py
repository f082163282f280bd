"""Chooses the Python that serves a project, by ``requiresPython`` in its ``config.json``.

The running Python serves every project that it suits. Others are found where this machine already
has them: on ``PATH``, and among the versions that uv and pyenv have installed. None is downloaded.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from aenv_ray.errors import ConfigError
from aenv_ray.project.config import EnvironmentConfig

LOWEST: Final = (3, 11)
"""The lowest Python that `aenv_ray.runtime` runs in."""
_PROBE_S: Final = 10.0
_NAME: Final = re.compile(r"python3\.\d+")
_PROBE: Final = (
    "import json, os, sys\n"
    "path = os.path.realpath(getattr(sys, '_base_executable', '') or sys.executable)\n"
    "print(json.dumps([path, '.'.join(map(str, sys.version_info[:3])), sys.base_prefix,"
    " sys.implementation.name == 'cpython' and sys.version_info.releaselevel == 'final'"
    f" and sys.version_info >= {LOWEST}]))\n"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine."""

    path: str
    """The path of its executable."""
    version: str
    """``"3.12.1"``."""
    prefix: str
    """The directory of its installation."""


def running() -> Interpreter:
    """Return the Python that runs this."""
    return Interpreter(sys.executable, platform.python_version(), sys.base_prefix)


def choose(config: EnvironmentConfig) -> Interpreter:
    """Return the Python that serves a project; blocks while it asks others for their versions.

    The running one if it suits, otherwise the newest that does.

    Raises:
        ConfigError: This machine has none that suits; the message names those it has.
    """
    wanted, own = SpecifierSet(config.requires_python), running()
    if wanted.contains(own.version, prereleases=True):
        return own
    others = sorted(found(), key=lambda one: Version(one.version), reverse=True)
    for one in others:
        if one.version in wanted:
            return one
    versions = ", ".join(dict.fromkeys([own.version, *(one.version for one in others)]))
    raise ConfigError(
        f"{config.reference} requires Python {config.requires_python} (requiresPython), and this "
        f"node has {versions}",
        hint="install one that suits, for example `uv python install 3.12`, on each node that runs "
        "the environment; they are looked for on PATH and among the versions of uv and pyenv",
    )


def found() -> list[Interpreter]:
    """Return the Pythons of this machine that the runtime runs in, each once; blocks."""
    known: dict[str, Interpreter] = {}
    for path in _candidates():
        try:
            one = _asked(path, os.stat(path).st_mtime_ns)
        except OSError:  # it was removed meanwhile
            continue
        if one is not None:
            known.setdefault(one.path, one)
    return list(known.values())


def _candidates() -> Iterator[str]:
    seen: set[str] = set()
    for directory in _directories():
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names:
            path = os.path.join(directory, name)
            is_new = _NAME.fullmatch(name) and os.path.realpath(path) not in seen
            if is_new and os.path.isfile(path) and os.access(path, os.X_OK):
                seen.add(os.path.realpath(path))
                yield path


def _directories() -> Iterable[Path]:
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    managed = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python")
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    shims = str(pyenv.parent / "shims")  # scripts, which choose by the directory they run in
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    listed = [Path(p) for p in path if os.path.isabs(p) and p != shims]
    return [*listed, *sorted(managed.glob("*/bin")), *sorted(pyenv.glob("*/bin"))]


@lru_cache(maxsize=256)
def _asked(path: str, mtime_ns: int) -> Interpreter | None:
    """Return what an executable says of itself; None if the runtime does not run in it."""
    del mtime_ns  # part of the key: another file may take its place
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", _PROBE], env={"PATH": os.defpath}, cwd="/", check=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S,
        )  # fmt: skip
        real, version, prefix, suits = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # not a Python that works
    return Interpreter(real, version, prefix) if suits else None
