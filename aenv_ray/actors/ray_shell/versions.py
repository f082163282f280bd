"""Whether processes of a cluster run versions of aenv-ray that understand each other."""

from __future__ import annotations

import aenv_ray
from aenv_ray.errors import ConfigError


def check_version(theirs: str, where: str, way_out: str) -> None:
    """Check the version of aenv-ray in another process against the version in this one.

    Versions with the same major number understand each other; below 1.0, those with the same minor
    number.

    Args:
        theirs: What that process answered; anything but a version means one older than 0.1.
        where: Where it runs, for the message.
        way_out: What to do, for the message.

    Raises:
        ConfigError: The versions are incompatible.
    """
    ours = aenv_ray.__version__
    if _series(theirs) != _series(ours):
        known = theirs if theirs[:1].isdigit() else "an older version"
        raise ConfigError(
            f"{where} runs aenv-ray {known}, and this process runs {ours}, which is incompatible: "
            f"{way_out}",
            hint="aenv version shows what is installed; install the same version on both",
        )


def _series(version: str) -> tuple[str, ...]:
    major, _, rest = version.partition(".")
    return (major,) if major != "0" else (major, rest.partition(".")[0])
