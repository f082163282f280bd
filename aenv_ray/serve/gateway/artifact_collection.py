"""Deletes artifacts that no version refers to: never published, or of deleted versions."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.serve.gateway.membership import Membership

logger = logging.getLogger(__name__)

GRACE_S: Final = 3600.0
"""An artifact is kept this long after its upload, so that it can be published."""
EVERY_S: Final = 600.0
GIVE_UP_AFTER: Final = 3
"""A round ends when the hub or the store did not answer for this many artifacts in a row. Each
can be uploaded again only after `LEAVING_S`."""
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
    """

    def __init__(self, hub: Hub, store: ArtifactStore, clock: Clock) -> None:
        self._hub = hub
        self._store = store
        self._clock = clock

    async def run(self, membership: Membership) -> None:
        """Run until cancelled; a failed round is logged, and the next one repeats its work."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                if await membership.is_elected("collect", EVERY_S):
                    await self.once()
            except AenvError as exc:
                logger.warning("collecting artifacts failed: %s", exc)

    async def once(self) -> list[str]:
        """Delete unreferenced artifacts older than `GRACE_S`; return their digests.

        Raises:
            AenvError: At least one of them was not deleted; the last reason.
        """
        await self._forget_uploads()
        before = self._clock.now() - GRACE_S
        gone: list[str] = []
        failure: AenvError | None = None
        unanswered = 0
        for digest in sorted(await self._hub.artifacts_before(before)):
            try:
                # One that is being published was kept anew, so it stays.
                if await self._hub.forget_artifact(digest, before=before):
                    await self._delete(digest)
                    gone.append(digest)
                unanswered = 0
            except AenvError as exc:
                logger.warning("artifact %s was not deleted: %s", digest[:12], exc.message)
                failure = exc
                unanswered += isinstance(exc, FabricUnavailable)
                if unanswered == GIVE_UP_AFTER:
                    break
        if gone:
            logger.info("deleted %d unreferenced artifacts", len(gone))
        if failure is not None:
            raise failure
        return gone

    async def _delete(self, digest: str) -> None:
        """Delete an artifact that the hub allowed to delete."""
        try:
            await self._store.delete(digest)
        except FabricUnavailable:
            raise  # it may be deleted yet: until then nobody may keep it
        except AenvError:
            await self._hub.artifact_stays(digest)
            raise
        await self._hub.artifact_deleted(digest)

    async def _forget_uploads(self) -> None:
        now = self._clock.now()
        for name, document in (await self._hub.documents(UPLOADS)).items():
            if "at" not in document:  # of an earlier version
                await self._hub.replace_document(UPLOADS, name, document, document | {"at": now})
            elif document["at"] < now - UPLOAD_KEPT_S:
                await self._hub.delete_document(UPLOADS, name)

    async def drop(self, digest: str, owner: str) -> None:
        """Delete an owner's artifact, unless another owner has it or a version refers to it."""
        if await self._hub.forget_artifact(digest, before=0.0, owner=owner):
            await self._delete(digest)
