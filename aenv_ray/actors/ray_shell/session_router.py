"""Routing of Serve calls: by session id where a call has one, otherwise by load."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_CHOICES = 2


def ranked(session: str, replicas: Iterable[str]) -> list[str]:
    """Return replicas in the order of a session's preference (rendezvous hashing).

    Adding or removing a replica affects only the sessions whose first choice is that replica.
    """
    return sorted(replicas, key=lambda one: hashlib.sha256(f"{session}\0{one}".encode()).digest())


class SessionRouter(RequestRouter):
    """Sends calls of one session to the same replica, and others to the less busy of two.

    Serve's ``ConsistentHashRouter`` ignores load for calls without a session. A session's calls may
    still reach another replica, for example after scaling; see `aenv_ray.serve.services.sessions`.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of candidates; within a rank, Serve takes the one with the fewest calls."""
        session = "" if pending_request is None else pending_request.metadata.session_id
        if session:
            by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
            return [[by_id[name]] for name in ranked(session, by_id)]
        count = min(_CHOICES, len(candidate_replicas))
        return [random.sample(candidate_replicas, count)] if count else []
