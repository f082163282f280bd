"""The capabilities that containers get."""

from __future__ import annotations

import pytest

from aenv_ray.engines.node import capabilities


@pytest.mark.parametrize(
    ("wanted", "added"),
    [
        ((), []),
        (("CAP_CHOWN", "SETGID"), ["CHOWN", "SETGID"]),
        (("cap_setuid",), ["SETUID", "KILL"]),
        (("SETUID", "CAP_KILL"), ["SETUID", "KILL"]),
        (("ALL", "SETUID"), ["ALL", "SETUID"]),
    ],
)
def test_who_may_have_other_users_may_be_ended(wanted: tuple[str, ...], added: list[str]) -> None:
    """Invariant 14: process 1 ends the agent's processes, also those of another user."""
    assert capabilities.added(wanted) == added
