"""Why a process ended, and whether something inside its sandbox ended it."""

from __future__ import annotations

import contextlib
import signal

from aenv_ray.engines.node.oom_kills import node_oom_kills
from aenv_ray.errors import InsideCause


def inside_of(status: int | None, *, isolated: bool, oom_kills_before: int) -> InsideCause | None:
    """Return what inside a sandbox ended its process; None if it was ended from outside.

    Args:
        status: Its exit code or negated signal; None if that is not known.
        isolated: It was process 1 of a pid namespace, which no signal from inside kills: SIGKILL
            came from outside, for example because the node had no memory left.
        oom_kills_before: `node_oom_kills` when it started; used without isolation, where its own
            processes can send SIGKILL too.
    """
    if status is None:
        return None
    if status >= 0:
        return InsideCause.EXIT
    if status == -signal.SIGKILL and (isolated or node_oom_kills() != oom_kills_before):
        return None
    return InsideCause.SIGNAL


def cause_of(status: int | None) -> str:
    """Describe how a process ended, from its exit code or its negated signal."""
    if status is None:
        return "its process ended"
    if status >= 0:
        return f"its process exited with code {status}"
    with contextlib.suppress(ValueError):
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process was killed by signal {-status}"
