"""Runs an installer, whose own words are what its user needs when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_WORDS_LIMIT: Final = 4000
"""Characters of an installer's output that an error shows, from its end."""
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/'\"]+@")
"""In addresses; uv hides them itself, but not in an address that it refuses."""


async def failure_of(
    command: Sequence[str],
    *,
    deadline_s: float,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str | None:
    """Run a command; return its last words when it fails, None when it does not.

    Users and passwords in addresses are left out.

    It has this process's environment variables, and `variables` besides.

    Cancelling ends the command.

    Raises:
        TimeoutError: It takes more than `deadline_s`; it was ended.
        OSError: It cannot be run.
    """
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", **(variables or {})},
    )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            output, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if not process.returncode:
        return None
    return _CREDENTIALS.sub("****@", output.decode(errors="replace")).strip()[-_WORDS_LIMIT:]
