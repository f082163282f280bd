"""Deletes artifacts that no version refers to: never published, or of deleted versions."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import AenvError
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.hub.records import EnvironmentQuery

logger = logging.getLogger(__name__)

GRACE_S: Final = 3600.0
"""An artifact is kept this long after its upload, so that it can be published."""
EVERY_S: Final = 600.0
UPLOADS: Final = "upload"
"""Kind of the hub's documents of archives that were uploaded by a signed URL, to be published."""
UPLOAD_KEPT_S: Final = 24 * 3600.0
"""An upload is known by its version for this long."""


class ArtifactCollector:
    """Collects the garbage of an artifact store.

    All replicas run it; the hub elects one of them for each round.

    Args:
        hub: Knows who uploaded what, and what is published.
        store: Holds the artifacts.
        clock: Clock for the age of artifacts.
        replica: Name of this replica.
    """

    def __init__(self, hub: Hub, store: ArtifactStore, clock: Clock, replica: str) -> None:
        self._hub = hub
        self._store = store
        self._clock = clock
        self._replica = replica

    async def run(self) -> None:
        """Run until cancelled; a failed round is logged, and the next one repeats its work."""
        while True:
            await asyncio.sleep(EVERY_S)
            round_name = f"collect:{int(self._clock.now() / EVERY_S)}"
            try:
                elected = await self._hub.remember(round_name, self._replica, 2 * EVERY_S)
                if elected == self._replica:
                    await self.once()
            except AenvError as exc:
                logger.warning("collecting artifacts failed: %s", exc)

    async def once(self) -> list[str]:
        """Delete unreferenced artifacts older than `GRACE_S`; return their digests.

        Raises:
            FabricUnavailable: The hub or the store does not answer.
        """
        await self._forget_uploads()
        before = self._clock.now() - GRACE_S
        candidates = await self._hub.artifacts_before(before)
        if not candidates:
            return []
        candidates -= {e.archive async for e in self._hub.all_environments(EnvironmentQuery())}
        gone = []
        for digest in sorted(candidates):
            # Publishing keeps an artifact anew first, so one that is being published stays.
            if await self._hub.forget_artifact(digest, before=before):
                await self._store.delete(digest)
                await self._hub.artifact_deleted(digest)
                gone.append(digest)
        if gone:
            logger.info("deleted %d unreferenced artifacts", len(gone))
        return gone

    async def _forget_uploads(self) -> None:
        now = self._clock.now()
        for name, document in (await self._hub.documents(UPLOADS)).items():
            if "at" not in document:  # of an earlier version
                await self._hub.replace_document(UPLOADS, name, document, document | {"at": now})
            elif document["at"] < now - UPLOAD_KEPT_S:
                await self._hub.delete_document(UPLOADS, name)

    async def drop(self, digest: str, owner: str) -> None:
        """Delete an owner's artifact, unless another owner has it or a version refers to it.

        One that a version of the owner refers to stays accounted for, or nothing would collect it.
        """
        published = self._hub.all_environments(EnvironmentQuery())
        publishers = {entry.owner async for entry in published if entry.archive == digest}
        if owner in publishers:
            return
        if await self._hub.forget_artifact(digest, before=0.0, owner=owner):
            if not publishers:
                await self._store.delete(digest)
            await self._hub.artifact_deleted(digest)
