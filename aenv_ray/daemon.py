"""Starts the small processes of a node, and detaches them from the process that started them.

This module imports only the standard library, because these processes import little else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

_MOST_DESCRIPTORS: Final = 65_536
_INHERITED_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH")


def environment() -> dict[str, str]:
    """Return the variables that a launcher or janitor inherits: none of Ray's and no token."""
    return {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}


async def start(
    module: str, *arguments: str, data: bytes = b"", env: Mapping[str, str] | None = None
) -> None:
    """Run a module that calls `detach`; returns once that, or an earlier end, has happened.

    Args:
        module: Its name.
        arguments: Its arguments.
        data: Its standard input.
        env: Its variables. None: those of this process.
    """
    import asyncio  # the small processes do without

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, *arguments,
        stdin=asyncio.subprocess.PIPE if data else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, env=env, start_new_session=True,
    )  # fmt: skip
    # If it is killed before it has read, uvloop raises RuntimeError, where asyncio ignores the
    # broken pipe. Callers find out by themselves whether the process serves.
    with contextlib.suppress(RuntimeError):
        await process.communicate(data or None)
    await process.wait()


def protect_from_oom_killer() -> None:
    """Have the kernel kill other processes first when the node has no memory left.

    Ray gives its workers the highest score, 1000, as sandboxes have. Only root may lower a score
    below the one that a process started with.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")


def raise_file_limit() -> None:
    """Allow this process as many open files as it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def detach(log: Path | None = None, *, keep: Collection[int] = ()) -> None:
    """Become a daemon: returns in a new process, the calling one exits.

    The new process is nobody's child, leads no terminal session, has normal priority (a Ray worker
    runs at nice 15), ``/`` as its directory, a umask of 077, and is protected from the OOM killer.

    Args:
        log: Where standard output and standard error go; None discards them.
        keep: Descriptors that stay open. All others are closed, so that no lock or socket of the
            starting process lives on.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output = null if log is None else os.open(log, flags, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _MOST_DESCRIPTORS)
    os.chdir("/")
    os.umask(0o077)
    protect_from_oom_killer()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # only root may go back from nice 15
