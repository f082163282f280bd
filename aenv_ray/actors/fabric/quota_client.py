"""Quotas for instances that Ray code creates; they are the same as the gateway's.

A create asks the hub only if it names an owner or labels, a hub is running, and one of these has a
quota; otherwise it costs nothing. Ray code releases its instances without the hub, so the hub
compares its leases with the running instances, regularly and when a quota is used up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.background_tasks import shielded
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import AenvError, QuotaExceeded
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.leases import label_subject
from aenv_ray.hub.ray_leases import lease_of
from aenv_ray.hub.records import Lease
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec, InstanceStatus

logger = logging.getLogger(__name__)

FRESH_S: Final = 5.0
"""A new quota takes effect for Ray code within this time."""
STARTING_S: Final = 310.0
"""How long a starting instance counts towards a quota, in addition to its wait for room."""


def quota_subjects(options: CreateOptions) -> frozenset[str]:
    """Return the owner and the labels whose quotas instances with these options count in."""
    subjects = {label_subject(key, value) for key, value in options.labels.items()}
    if options.owner is not None:
        subjects.add(f"owner:{options.owner}")
    return frozenset(subjects)


class QuotaClient:
    """Claims shares of quotas at the hub, for one connection to the fabric."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._hub: HubClient | None = None
        self._subjects: frozenset[str] = frozenset()
        self._known_until = 0.0

    def claim(
        self, specs: Sequence[InstanceSpec], subjects: frozenset[str], queue_s: float
    ) -> QuotaClaim | None:
        """Return the claim of instances that are about to start; None if no quota applies. Blocks.

        Args:
            specs: The instances; they count once `QuotaClaim.take` is called.
            subjects: Whose quotas they count in, see `quota_subjects`.
            queue_s: Longest wait for room.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        if not subjects & self._limited():
            return None
        assert self._hub is not None
        return QuotaClaim(self._hub, self._clock, specs, STARTING_S + queue_s)

    def _limited(self) -> frozenset[str]:
        """Return the subjects that have quotas; the answer is cached for `FRESH_S`."""
        now = self._clock.now()
        if now >= self._known_until:
            from aenv_ray.hub.hub_actor import find_hub

            self._hub = find_hub()
            quotas = blocking(self._hub.quotas()) if self._hub is not None else {}
            self._subjects = frozenset(quotas)
            self._known_until = now + FRESH_S
        return self._subjects


class QuotaClaim:
    """The claim of one create on its quotas; its methods block.

    If one of them fails or is interrupted, `give_up` undoes what it has done.
    """

    def __init__(
        self, hub: HubClient, clock: Clock, specs: Sequence[InstanceSpec], starting_s: float
    ) -> None:
        self._hub = hub
        self._starting_s = starting_s
        self._now = clock.now()
        self._specs = specs
        self._counted: list[InstanceId] = []
        """Ids under which instances may count."""

    def take(self) -> None:
        """Count the instances, all or none.

        Raises:
            QuotaExceeded: A quota is used up.
            FabricUnavailable: The hub does not answer.
        """
        pending = [
            lease_of(spec, spec.instance_id, self._now, self._starting_s, InstanceStatus.PENDING)
            for spec in self._specs
        ]
        try:
            self._admit(pending)
        except QuotaExceeded:
            # The hub may still count released instances, until it checks which ones run.
            blocking(self._hub.compare())
            self._admit(pending)

    def _admit(self, leases: Sequence[Lease]) -> None:
        self._counted = [InstanceId(lease.id) for lease in leases]
        try:
            blocking(shielded(self._hub.admit(leases)))
        except QuotaExceeded:
            self._counted = []
            raise

    def settle(self, made: Iterable[tuple[InstanceSpec, InstanceId]]) -> None:
        """Replace the claim by leases of the instances that run, under their actual ids.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        running = [
            lease_of(spec, i, self._now, self._starting_s, InstanceStatus.RUNNING)
            for spec, i in made
        ]
        claimed = list(self._counted)
        self._counted += [InstanceId(lease.id) for lease in running]
        blocking(shielded(self._hub.exchange(claimed, running)))

    def give_up(self) -> None:
        """Give the claim up: no instance was created, or those that were are released."""
        if not self._counted:
            return
        try:
            blocking(self._hub.end_leases(self._counted))
        except AenvError as exc:  # the error of the create matters more
            logger.warning(
                "a failed create counts towards its quotas for %g s: %s", self._starting_s, exc
            )
