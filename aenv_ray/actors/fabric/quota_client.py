"""Accounts of instances that Ray code makes: quotas hold for them as for the gateway's.

A create asks the hub only where it names an owner or labels, a hub runs, and a quota is set for one
of these; otherwise it costs nothing. Ray code releases its instances without the hub, so the hub
compares its leases with what runs, now and then and when a quota is used up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import AenvError, QuotaExceeded
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.leases import label_subject
from aenv_ray.hub.ray_leases import lease_of
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec, InstanceStatus

logger = logging.getLogger(__name__)

FRESH_S: Final = 5.0
"""A quota that is set holds for Ray code after this much."""
STARTING_S: Final = 310.0
"""A place is kept for a create so long, beyond what it waits for room: longer than any lasts."""


class QuotaClient:
    """The quotas of one connection to the fabric.

    Args:
        clock: For the age of what is known.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._hub: HubClient | None = None
        self._subjects: frozenset[str] = frozenset()
        self._known_until = 0.0

    def take_places(
        self, specs: Sequence[InstanceSpec], options: CreateOptions
    ) -> QuotaPlaces | None:
        """Take places for instances about to be made; None: no quota is set for them.

        Raises:
            QuotaExceeded: There are not so many.
            FabricUnavailable: The hub does not answer.
        """
        subjects = {label_subject(key, value) for key, value in options.labels.items()}
        if options.owner is not None:
            subjects.add(f"owner:{options.owner}")
        if not subjects or not subjects & self._limited():
            return None
        assert self._hub is not None
        places = QuotaPlaces(self._hub, self._clock, specs, STARTING_S + options.queue_s)
        places.take()
        return places

    def _limited(self) -> frozenset[str]:
        """Return the subjects that have quotas, as of a moment ago."""
        now = self._clock.now()
        if now >= self._known_until:
            from aenv_ray.hub.hub_actor import find_hub

            self._hub = find_hub()
            quotas = blocking(self._hub.quotas()) if self._hub is not None else {}
            self._subjects = frozenset(quotas)
            self._known_until = now + FRESH_S
        return self._subjects


class QuotaPlaces:
    """The places of one create."""

    def __init__(
        self, hub: HubClient, clock: Clock, specs: Sequence[InstanceSpec], starting_s: float
    ) -> None:
        self._hub = hub
        self._starting_s = starting_s
        self._now = clock.now()
        self._specs = specs

    def take(self) -> None:
        """Take the places, all or none."""
        pending = [
            lease_of(spec, spec.instance_id, self._now, self._starting_s, InstanceStatus.PENDING)
            for spec in self._specs
        ]
        try:
            blocking(self._hub.admit(pending))
        except QuotaExceeded:
            # Some that count may be released already: the hub has not looked yet.
            blocking(self._hub.compare())
            blocking(self._hub.admit(pending))

    def settle(self, made: Iterable[tuple[InstanceSpec, InstanceId]]) -> None:
        """Account for what was made, by the ids that it has."""
        running = [
            lease_of(spec, i, self._now, self._starting_s, InstanceStatus.RUNNING)
            for spec, i in made
        ]
        blocking(self._hub.exchange([spec.instance_id for spec in self._specs], running))

    def give_back(self) -> None:
        """Give the places back: nothing was made."""
        try:
            blocking(self._hub.end_leases([spec.instance_id for spec in self._specs]))
        except AenvError as exc:  # why nothing was made says more
            logger.warning("places of a quota are free again in %g s: %s", self._starting_s, exc)
