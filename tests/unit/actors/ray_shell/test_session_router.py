"""The order in which a session prefers the replicas of a service."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.ray_shell.session_router import ranked


@given(st.sets(st.text(min_size=1), min_size=2, max_size=8), st.lists(st.text(), max_size=30))
def test_removing_a_replica_moves_only_its_own_sessions(
    replicas: set[str], sessions: list[str]
) -> None:
    gone = min(replicas)
    for session in sessions:
        before = ranked(session, replicas)
        after = ranked(session, replicas - {gone})
        assert after == [one for one in before if one != gone]
