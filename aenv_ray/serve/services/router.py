"""Which replica of a service gets a call: a session's own, else the less busy of two."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

_CHOICES = 2


def ranked(session: str, replicas: Iterable[str]) -> list[str]:
    """Return replicas in the order in which a session prefers them (rendezvous hashing).

    A replica that comes or goes changes the first place of those sessions alone that it is, or
    was, the first of.
    """
    return sorted(replicas, key=lambda one: hashlib.sha256(f"{session}\0{one}".encode()).digest())


class SessionRouter(RequestRouter):
    """Routes calls with a session by its name, others by load.

    It saves a hop and no more: a replica that gets a session which is not its own passes the call
    on, see `aenv_ray.serve.services.sessions`.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return candidates in ranks; of one rank Serve takes the one with the fewest calls."""
        session = "" if pending_request is None else pending_request.metadata.session_id
        if session:
            by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
            return [[by_id[name]] for name in ranked(session, by_id)]
        count = min(_CHOICES, len(candidate_replicas))
        return [random.sample(candidate_replicas, count)] if count else []
