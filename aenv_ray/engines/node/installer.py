"""Runs an installer, whose own words are what its user needs when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aenv_ray.engines.node.pip_sources import without_passwords

_WORDS_LIMIT: Final = 4000
"""Characters of an installer's output that an error shows, from its end."""


async def failure_of(
    command: Sequence[str],
    *,
    deadline_s: float,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str | None:
    """Run a command; return its last words when it fails, without passwords, None when it does not.

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
    return without_passwords(output.decode(errors="replace")).strip()[-_WORDS_LIMIT:]
