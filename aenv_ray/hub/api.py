"""What the hub does, whoever asks: the actor, the gateway, a test.

`HubCore` does it over Redis; `RemoteHub` asks the hub actor. Both raise the same errors, and every
write that returned survives the death of the hub and of Redis (invariant 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    Every method may raise FabricUnavailable: the hub or its Redis does not answer; try again. Each
    may be repeated after that: none does its work twice.
    """

    # --- environments -----------------------------------------------------------------------

    @abstractmethod
    async def push(self, entry: EnvironmentVersion) -> EnvironmentVersion:
        """Publish a version and return it as it is kept; the same content again changes nothing.

        Raises:
            VersionConflict: The version exists with other content.
            ConfigError: Its config and schemas are too long to be listed.
        """

    @abstractmethod
    async def environment(self, name: str, version: str | None = None) -> EnvironmentVersion:
        """Return a version; None: the highest one that is not Failed.

        Raises:
            EnvironmentNotFound: There is none; the hint names what is there.
        """

    @abstractmethod
    async def versions(self, name: str) -> tuple[EnvironmentVersion, ...]:
        """Return all versions of a name, the highest first; none when nobody pushed it."""

    @abstractmethod
    async def environments(self, query: EnvironmentQuery) -> Page[EnvironmentVersion]:
        """Return versions by name, each name's highest version first."""

    @abstractmethod
    async def set_status(
        self, name: str, version: str, status: EnvironmentStatus
    ) -> EnvironmentVersion:
        """Move a version to another status.

        Raises:
            EnvironmentNotFound: There is none.
            CatalogConflict: The way from its status to that one is not allowed.
        """

    @abstractmethod
    async def delete_environment(self, name: str, version: str) -> None:
        """Delete a version; the name cannot be given to other content afterwards.

        Raises:
            EnvironmentNotFound: There is none.
            EnvironmentInUse: Instances or services use it; the message names some.
        """

    # --- leases -----------------------------------------------------------------------------

    @abstractmethod
    async def admit(self, leases: Sequence[Lease]) -> None:
        """Account for instances about to be made: all of them or none. An id again changes nothing.

        Raises:
            QuotaExceeded: A quota of their owner or labels is used up; it says when to try again.
        """

    @abstractmethod
    async def lease(self, instance_id: str) -> Lease:
        """Return a lease by the instance's id.

        Raises:
            InstanceNotFound: There is none.
        """

    @abstractmethod
    async def lease_of_capability(self, capability: str) -> Lease:
        """Return a lease by the name that stands for it.

        Raises:
            InstanceNotFound: There is none.
        """

    @abstractmethod
    async def leases(self, query: LeaseQuery) -> Page[Lease]:
        """Return leases, the newest first."""

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
        """Change what is given.

        Raises:
            InstanceNotFound: There is no such lease.
        """

    @abstractmethod
    async def end_leases(self, instance_ids: Sequence[str]) -> None:
        """Forget leases and give their places back; unknown ids do nothing."""

    @abstractmethod
    async def remember(self, key: str, value: str, ttl_s: float) -> str:
        """Keep `value` under `key` unless there is one, and return what is kept there.

        For idempotency keys: the first caller's instance id is everybody's.
        """

    # --- quotas and tokens ------------------------------------------------------------------

    @abstractmethod
    async def set_quota(self, quota: Quota) -> None:
        """Set a subject's quota."""

    @abstractmethod
    async def delete_quota(self, subject: str) -> None:
        """Let a subject have any number of instances."""

    @abstractmethod
    async def quotas(self) -> dict[str, tuple[int, int]]:
        """Return by subject how many instances it has and how many it may have."""

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
        """Make a token; its secret is returned this once.

        Raises:
            ConfigError: An agent's token names no instance, or another one names one.
        """

    @abstractmethod
    async def check_token(self, secret: str) -> TokenRecord | None:
        """Return the token that a secret is of; None: there is none, it ended or was revoked."""

    @abstractmethod
    async def tokens(self, owner: str | None = None) -> tuple[TokenRecord, ...]:
        """Return the tokens of an owner or of all, the newest first."""

    @abstractmethod
    async def revoke_token(self, token_id: str) -> None:
        """End a token; an unknown id does nothing."""

    # --- services ---------------------------------------------------------------------------

    @abstractmethod
    async def put_document(self, kind: str, name: str, document: dict[str, Any]) -> None:
        """Keep a JSON document under a kind and a name, such as a service's specification."""

    @abstractmethod
    async def replace_document(
        self, kind: str, name: str, old: dict[str, Any], new: dict[str, Any]
    ) -> bool:
        """Keep a document instead of another, as `documents` gave it.

        Returns:
            False when that is not what is kept: somebody changed or forgot it.
        """

    @abstractmethod
    async def documents(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the documents of a kind by name."""

    @abstractmethod
    async def delete_document(self, kind: str, name: str) -> None:
        """Forget a document; an unknown name does nothing."""

    # --- the hub itself ---------------------------------------------------------------------

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """Return facts for people: Redis's version, persistence, sizes, since when it runs."""
