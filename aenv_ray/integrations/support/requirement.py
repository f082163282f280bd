"""The check that a framework is installed in a version that its adapter supports."""

from __future__ import annotations

import importlib.metadata
import re

from aenv_ray.errors import ConfigError


def require(
    distribution: str, extra: str, minimum: str, below: str, *, way_out: str | None = None
) -> None:
    """Check a framework's version.

    Args:
        distribution: Its name on PyPI.
        extra: Our extra that installs it.
        minimum: Lowest version that works.
        below: First version that is not known to work.
        way_out: The hint of the error. None: how to install the extra.

    Raises:
        ConfigError: It is missing, or of another version.
    """
    hint = way_out or f"pip install 'aenv-ray[{extra}]'"
    wanted = f"{distribution}>={minimum},<{below}"
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{wanted} is not installed", hint=hint) from None
    if not _numbers(minimum) <= _numbers(found) < _numbers(below):
        raise ConfigError(f"{distribution} {found} is not supported; needs {wanted}", hint=hint)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (1, 26, 0) of 1.26.0rc1."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
