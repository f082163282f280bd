"""The interface of the hub: `HubCore` implements it over Redis, `HubClient` by the hub actor.

Both raise the same errors. A write that returned survives the death of the hub and of Redis
(invariant 5).
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from aenv_ray.clock import Clock
from aenv_ray.errors import ConfigError
from aenv_ray.hub.records import (
    ArtifactsHeld,
    AuditRecord,
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    KeyGroup,
    Lease,
    LeaseQuery,
    NameRecord,
    Page,
    Quota,
    Right,
    Role,
    TokenRecord,
)
from aenv_ray.models import InstanceStatus

SECRET_PREFIX: Final = "aenv_"
"""Makes a token recognizable to people and to secret scanners."""
_SECRET_BYTES: Final = 32
_PAGE: Final = 1000


class Hub(ABC):
    """Versions, leases, tokens and quotas.

    Every method may raise FabricUnavailable if the hub or its Redis does not answer. It may then be
    repeated: no method takes effect twice.
    """

    _clock: Clock

    # --- environments -----------------------------------------------------------------------

    @abstractmethod
    async def push(
        self, entry: EnvironmentVersion, *, is_admin: bool = False
    ) -> EnvironmentVersion:
        """Publish a version and return the stored entry; the same content again changes nothing.

        The first publisher of a name becomes its owner.

        Args:
            entry: The version; its owner publishes it.
            is_admin: Publish it even if another owner has the name.

        Raises:
            Forbidden: The name belongs to another owner, who has not granted to publish, or is
                that of a built-in environment, which only administrators publish first.
            ArtifactQuotaExceeded: The owner's versions would exceed `MAX_OWNER_BYTES`.
            VersionConflict: The version exists with different content.
            ConfigError: Its config and schemas are too large for a listing.
        """

    @abstractmethod
    async def name(self, name: str) -> NameRecord:
        """Return who may publish and use the environments of a name.

        Names that were published before names had owners belong to their first publisher, and
        everybody may use them.
        """

    @abstractmethod
    async def grant(self, name: str, owner: str, right: Right | None) -> None:
        """Grant a right to an owner, or `EVERYBODY`; None revokes it.

        Raises:
            EnvironmentNotFound: The name has no owner.
            ConfigError: The owner to whom it is granted has a name that is too long.
            CatalogConflict: The owner of the name has given as many grants as it may.
        """

    @abstractmethod
    async def environment(self, name: str, version: str | None = None) -> EnvironmentVersion:
        """Return a version.

        Args:
            name: The environment.
            version: None: the highest version that is not Failed.

        Raises:
            EnvironmentNotFound: It does not exist; the hint names existing versions.
        """

    async def versions(self, name: str) -> tuple[EnvironmentVersion, ...]:
        """Return all versions of a name, highest first; empty if it was never published."""
        found = self.all_environments(EnvironmentQuery(name=name))
        return tuple([entry async for entry in found])

    @abstractmethod
    async def environments(self, query: EnvironmentQuery) -> Page[EnvironmentVersion]:
        """Return the matching versions, sorted by name and then highest version first."""

    async def all_environments(self, query: EnvironmentQuery) -> AsyncIterator[EnvironmentVersion]:
        """Yield all matching versions, page by page."""
        cursor: str | None = None
        while True:
            wanted = query.model_copy(update={"limit": _PAGE, "cursor": cursor})
            page = await self.environments(wanted)
            for entry in page.items:
                yield entry
            cursor = page.cursor
            if cursor is None:
                return

    @abstractmethod
    async def set_status(
        self, name: str, version: str, status: EnvironmentStatus
    ) -> EnvironmentVersion:
        """Change the status of a version.

        Raises:
            EnvironmentNotFound: The version does not exist.
            CatalogConflict: The transition is not allowed.
        """

    @abstractmethod
    async def delete_environment(self, name: str, version: str) -> None:
        """Delete a version. Other content can never be published under the same version.

        Raises:
            EnvironmentNotFound: The version does not exist.
            EnvironmentInUse: Instances or services use it; the message names some of them.
        """

    # --- artifacts --------------------------------------------------------------------------

    @abstractmethod
    async def keep_artifact(
        self, owner: str, digest: str, size_bytes: int, quota_bytes: int | None = None
    ) -> None:
        """Account for an artifact of an owner; again: note that it is used now.

        Raises:
            ArtifactQuotaExceeded: The owner's artifacts are larger than `quota_bytes` with it, or
                more than `catalog.MAX_ARTIFACTS`.
            CatalogConflict: It is being deleted, see `forget_artifact`.
        """

    @abstractmethod
    async def has_artifact(self, owner: str, digest: str) -> bool:
        """Return whether an owner has an artifact."""

    @abstractmethod
    async def artifacts_held(self, owner: str) -> ArtifactsHeld:
        """Return the total size and the number of an owner's artifacts."""

    @abstractmethod
    async def versions_of_archive(self, digest: str) -> tuple[str, ...]:
        """Return the versions that have an archive as ``name@version``, or some of many."""

    @abstractmethod
    async def artifacts_before(self, moment: float) -> frozenset[str]:
        """Return the digests that were kept before a moment and that no version refers to.

        The moment is in seconds since the epoch.
        """

    @abstractmethod
    async def forget_artifact(
        self, digest: str, *, before: float, owner: str | None = None
    ) -> bool:
        """Forget an artifact for one owner, or for all if all kept it before a moment.

        One that a version of the owner refers to stays accounted for, or nothing would collect it.

        Returns:
            Whether nobody else has it and no version refers to it. It stays accounted for then, and
            nobody can keep it for a while: delete it, and call `artifact_deleted`, or if that is
            impossible `artifact_stays`.
        """

    @abstractmethod
    async def artifact_deleted(self, digest: str) -> None:
        """Account no more for an artifact that `forget_artifact` allowed to delete."""

    @abstractmethod
    async def artifact_stays(self, digest: str) -> None:
        """Note that an artifact that `forget_artifact` allowed to delete was not deleted."""

    # --- leases -----------------------------------------------------------------------------

    @abstractmethod
    async def admit(self, leases: Sequence[Lease]) -> None:
        """Create the leases of instances that are about to start, all or none; idempotent by id.

        Raises:
            QuotaExceeded: A quota of their owner or labels is used up; it says when to try again.
        """

    @abstractmethod
    async def lease(self, instance_id: str) -> Lease:
        """Return the lease of an instance.

        Raises:
            InstanceNotFound: It has no lease.
        """

    @abstractmethod
    async def lease_of_capability(self, capability: str) -> Lease:
        """Return the lease with this capability.

        Raises:
            InstanceNotFound: No lease has it.
        """

    @abstractmethod
    async def leases(self, query: LeaseQuery) -> Page[Lease]:
        """Return the matching leases, newest first."""

    async def all_leases(self, query: LeaseQuery) -> AsyncIterator[Lease]:
        """Yield all matching leases, page by page."""
        cursor: str | None = None
        while True:
            page = await self.leases(query.model_copy(update={"limit": _PAGE, "cursor": cursor}))
            for lease in page.items:
                yield lease
            cursor = page.cursor
            if cursor is None:
                return

    @abstractmethod
    async def update_lease(
        self,
        instance_id: str,
        *,
        status: InstanceStatus | None = None,
        deadline: float | None = None,
        reason: str | None = None,
        engine: str | None = None,
    ) -> Lease:
        """Change the given fields of a lease and return it.

        Raises:
            InstanceNotFound: It does not exist.
        """

    @abstractmethod
    async def exchange(self, instance_ids: Sequence[str], leases: Sequence[Lease]) -> None:
        """Replace leases by others without checking quotas again.

        For instances that got other ids than those that were admitted.
        """

    @abstractmethod
    async def end_leases(self, instance_ids: Sequence[str]) -> None:
        """Delete leases and return their quota; unknown ids are ignored."""

    async def remember(
        self, key: str, value: str, ttl_s: float, group: KeyGroup | None = None
    ) -> str:
        """Store `value` under `key` unless the key has a value; return the stored value.

        For idempotency keys: all callers get the value of the first one.

        Args:
            key: The key.
            value: Its value, if it has none.
            ttl_s: How long it is stored.
            group: Limits how many keys are stored. "" is returned for a new key of a full group.
        """
        return (await self.remember_all({key: value}, ttl_s, group))[key]

    @abstractmethod
    async def remember_all(
        self, values: Mapping[str, str], ttl_s: float, group: KeyGroup | None = None
    ) -> dict[str, str]:
        """Do what `remember` does for several keys at once; return the stored value of each."""

    @abstractmethod
    async def replace_remembered(self, key: str, old: str, new: str, ttl_s: float) -> str:
        """Store `new` under `key` if its value is `old` or it has none; return the stored value.

        The value `old` may be `new` itself, which then is forgotten after `ttl_s` from now.
        """

    @abstractmethod
    async def shorten(
        self, keys: Sequence[str], ttl_s: float, group: KeyGroup | None = None
    ) -> None:
        """Forget the values that `remember` stored under these keys after `ttl_s` at the latest.

        `group` is the one that they were stored with.
        """

    # --- quotas and tokens ------------------------------------------------------------------

    @abstractmethod
    async def set_quota(self, quota: Quota) -> None:
        """Set the quota of a subject.

        Raises:
            ConfigError: The subject is invalid; so for `delete_quota`.
        """

    @abstractmethod
    async def delete_quota(self, subject: str) -> None:
        """Remove the quota of a subject."""

    @abstractmethod
    async def quotas(self) -> dict[str, tuple[int, int]]:
        """Return the number of instances and the limit of each subject with a quota.

        The number includes the inner instances that these instances may have.
        """

    async def create_token(
        self,
        role: Role,
        owner: str,
        *,
        instance_id: str | None = None,
        ttl_s: float | None = None,
        note: str = "",
        secret: str | None = None,
    ) -> tuple[str, TokenRecord]:
        """Create a token; return its secret, which cannot be read again, and its record.

        Args:
            role: What it may do.
            owner: The owner of the token.
            instance_id: The instance of an agent; only for the role agent.
            ttl_s: None: it does not expire.
            note: A note, shown in listings.
            secret: None: a new one. The secret does not leave this process; the hub stores a hash.

        Raises:
            CatalogConflict: The instance has as many tokens as it may.
            ConfigError: A token of role agent without an instance, another one with one, or a TTL
                that is not positive.
        """
        if (role is Role.AGENT) != (instance_id is not None):
            raise ConfigError(
                "a token is for one instance if and only if its role is agent",
                hint="pass an instance id for role agent, and none for other roles",
            )
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(
                f"the TTL of a token must be positive, not {ttl_s:g} s",
                hint="leave it out for a token that does not expire",
            )
        now = self._clock.now()
        record = TokenRecord(
            id=secrets.token_hex(8), role=role, owner=owner, instance_id=instance_id, note=note,
            created_at=now, expires_at=None if ttl_s is None else now + ttl_s,
        )  # fmt: skip
        secret = secret or SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        # Generated here: a retry after a lost answer stores the same token.
        await self.keep_token(_secret_hash(secret), record)
        return secret, record

    async def check_token(self, secret: str) -> TokenRecord | None:
        """Return the token of a secret; None if it is unknown, expired or revoked."""
        return await self.check_hash(_secret_hash(secret))

    @abstractmethod
    async def keep_token(self, hashed: str, record: TokenRecord) -> None:
        """Store a token under the hash of its secret.

        Raises:
            CatalogConflict: Its instance has as many tokens as it may.
        """

    @abstractmethod
    async def check_hash(self, hashed: str) -> TokenRecord | None:
        """Return the token whose secret has this hash; None if there is no valid one."""

    @abstractmethod
    async def token(self, token_id: str) -> TokenRecord | None:
        """Return the token with this id; None if it is unknown, expired or revoked."""

    @abstractmethod
    async def tokens(self, owner: str | None = None) -> tuple[TokenRecord, ...]:
        """Return the tokens of an owner, or of all owners, newest first."""

    @abstractmethod
    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token; an unknown id is ignored."""

    # --- audit log --------------------------------------------------------------------------

    async def record(self, entry: AuditRecord) -> None:
        """Append to the audit log.

        It keeps, or somewhat more, the latest 50,000 records of what administrators did, 50,000 of
        what publishers did, 10,000 of what every owner may do, and 10,000 of attempts that were
        refused or failed: none of these displaces another.
        """
        # Generated here: a retry after a lost answer appends nothing.
        await self.keep_record(entry, secrets.token_hex(8))

    @abstractmethod
    async def keep_record(self, entry: AuditRecord, nonce: str) -> None:
        """Append to the audit log, but only once with the same nonce within minutes."""

    @abstractmethod
    async def audit_log(self, limit: int, before: str | None = None) -> tuple[AuditRecord, ...]:
        """Return the latest records, newest first; `before`: older than the one with this id."""

    # --- services ---------------------------------------------------------------------------

    @abstractmethod
    async def put_document(self, kind: str, name: str, document: dict[str, Any]) -> None:
        """Store a JSON document, such as the record of a service, under a kind and a name."""

    @abstractmethod
    async def replace_document(
        self, kind: str, name: str, old: dict[str, Any] | None, new: dict[str, Any]
    ) -> bool:
        """Replace a document if it still is `old`, as `documents` returned it.

        None as `old` stores a new document if there is none.

        Returns:
            Whether it was replaced; False if somebody has changed, deleted or stored it.
        """

    @abstractmethod
    async def documents(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the documents of a kind, by name."""

    @abstractmethod
    async def delete_document(
        self, kind: str, name: str, old: dict[str, Any] | None = None
    ) -> bool:
        """Delete a document, if given only if it still is `old`, as `documents` returned it.

        Returns:
            False if the document is not `old`; after a lost answer perhaps because this deleted it.
            Without `old` always True: an unknown name is ignored.
        """

    # --- the hub itself ---------------------------------------------------------------------

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """Return facts for people: the version, persistence, sizes and uptime of Redis."""


def _secret_hash(secret: str) -> str:
    """Return the stored hash of a secret, which is random and long, so that no salt is needed."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
