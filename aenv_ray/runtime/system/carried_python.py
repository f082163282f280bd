"""A Python that a container has besides its image's (`aenv_ray.engines.images.node_python`).

By some variables of an image, the linker, the C library and OpenSSL load libraries into every
process. An agent may be able to change these libraries, so that a carried Python runs without such
variables. Commands have them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

COMMAND: Final = (
    *("/.aenv/python/ld.so", "--inhibit-cache", "--library-path", "/.aenv/python/libraries"),
    *("/.aenv/python/bin/python3", "-I", "-X", "utf8"),
)
"""Command of a carried Python in a container of the docker engine."""
_LOADS_CODE: Final = re.compile(
    # The command has a library path, which is used instead of that variable.
    "LD_(?!LIBRARY_PATH$).*|GLIBC_TUNABLES|GCONV_PATH|LOCPATH|OPENSSL_.*"
)
_KEPT: Final = "AENV_IMAGE_VARIABLES"
"""The variables, as JSON, that a Python left out when it started itself again."""
_kept: Final[dict[str, str]] = {}


def leave_variables_of_image() -> None:
    """Start this process again without variables that load code; nothing if it has none.

    To be called first, since the arguments are all that remains. The image's own Python keeps them.
    """
    found = {name: value for name, value in os.environ.items() if _LOADS_CODE.fullmatch(name)}
    words = Path("/proc/self/cmdline").read_bytes().removesuffix(b"\0").split(b"\0")
    if found and words[0] == os.fsencode(COMMAND[0]):
        kept = {_KEPT: json.dumps(found)}
        os.execve(words[0], words, {**_without_code(), **kept})
    _kept.update(json.loads(os.environ.pop(_KEPT, "{}")))


def variables_for(program: str) -> dict[str, str]:
    """Return the variables of a command: those of this process and of the image."""
    return _without_code() if program == COMMAND[0] else {**os.environ, **_kept}


def _without_code() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _LOADS_CODE.fullmatch(name)}
