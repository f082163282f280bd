"""The capabilities of a container."""

from __future__ import annotations

from collections.abc import Sequence


def added(wanted: Sequence[str]) -> list[str]:
    """Return the capabilities to add for those that a project wants, without ``CAP_``.

    With SETUID an agent has processes of other users. Process 1 ends them before a reward, which
    takes KILL.
    """
    names = [name.upper().removeprefix("CAP_") for name in wanted]
    is_enough = "SETUID" not in names or {"KILL", "ALL"} & {*names}
    return names if is_enough else [*names, "KILL"]
