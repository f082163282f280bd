"""The interface of the hub: `HubCore` implements it over Redis, `HubClient` by the hub actor.

Both raise the same errors. A write that returned survives the death of the hub and of Redis
(invariant 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    Lease,
    LeaseQuery,
    Page,
    Quota,
    Role,
    TokenRecord,
)
from aenv_ray.models import InstanceStatus


class Hub(ABC):
    """Versions, leases, tokens and quotas.

    Every method may raise FabricUnavailable if the hub or its Redis does not answer. It may then be
    repeated: no method takes effect twice.
    """

    # --- environments -----------------------------------------------------------------------

    @abstractmethod
    async def push(self, entry: EnvironmentVersion) -> EnvironmentVersion:
        """Publish a version and return the stored entry; the same content again changes nothing.

        Raises:
            VersionConflict: The version exists with different content.
            ConfigError: Its config and schemas are too large for a listing.
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

    @abstractmethod
    async def versions(self, name: str) -> tuple[EnvironmentVersion, ...]:
        """Return all versions of a name, highest first; empty if it was never published."""

    @abstractmethod
    async def environments(self, query: EnvironmentQuery) -> Page[EnvironmentVersion]:
        """Return the matching versions, sorted by name and then highest version first."""

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
    async def end_leases(self, instance_ids: Sequence[str]) -> None:
        """Delete leases and return their quota; unknown ids are ignored."""

    async def remember(self, key: str, value: str, ttl_s: float) -> str:
        """Store `value` under `key` unless the key has a value; return the stored value.

        For idempotency keys: all callers get the value of the first one.
        """
        return (await self.remember_all({key: value}, ttl_s))[key]

    @abstractmethod
    async def remember_all(self, values: Mapping[str, str], ttl_s: float) -> dict[str, str]:
        """Do what `remember` does for several keys at once; return the stored value of each."""

    # --- quotas and tokens ------------------------------------------------------------------

    @abstractmethod
    async def set_quota(self, quota: Quota) -> None:
        """Set the quota of a subject."""

    @abstractmethod
    async def delete_quota(self, subject: str) -> None:
        """Remove the quota of a subject."""

    @abstractmethod
    async def quotas(self) -> dict[str, tuple[int, int]]:
        """Return the number of instances and the limit of each subject with a quota."""

    @abstractmethod
    async def create_token(
        self,
        role: Role,
        owner: str,
        *,
        instance_id: str | None = None,
        ttl_s: float | None = None,
        note: str = "",
    ) -> tuple[str, TokenRecord]:
        """Create a token; return its secret, which cannot be read again, and its record.

        Raises:
            ConfigError: A token of role agent without an instance, or another one with one.
        """

    @abstractmethod
    async def check_token(self, secret: str) -> TokenRecord | None:
        """Return the token of a secret; None if it is unknown, expired or revoked."""

    @abstractmethod
    async def tokens(self, owner: str | None = None) -> tuple[TokenRecord, ...]:
        """Return the tokens of an owner, or of all owners, newest first."""

    @abstractmethod
    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token; an unknown id is ignored."""

    # --- services ---------------------------------------------------------------------------

    @abstractmethod
    async def put_document(self, kind: str, name: str, document: dict[str, Any]) -> None:
        """Store a JSON document, such as the record of a service, under a kind and a name."""

    @abstractmethod
    async def replace_document(
        self, kind: str, name: str, old: dict[str, Any], new: dict[str, Any]
    ) -> bool:
        """Replace a document if it still is `old`, as `documents` returned it.

        Returns:
            Whether it was replaced; False if somebody has changed or deleted it.
        """

    @abstractmethod
    async def documents(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the documents of a kind, by name."""

    @abstractmethod
    async def delete_document(self, kind: str, name: str) -> None:
        """Delete a document; an unknown name is ignored."""

    # --- the hub itself ---------------------------------------------------------------------

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """Return facts for people: the version, persistence, sizes and uptime of Redis."""
