"""What the hub says of environments, remembered for seconds: instances show theirs each time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import EnvironmentNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import EnvironmentVersion

KNOWN_S: Final = 10.0
"""How old the status of a version may be that is shown with an instance; the rest never changes."""
_MOST: Final = 1000


class KnownEnvironments:
    """Versions by reference.

    Args:
        hub: Which knows them.
        clock: For the end of what is remembered.
    """

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, EnvironmentVersion | None]] = OrderedDict()

    async def find(self, reference: str) -> EnvironmentVersion | None:
        """Return a version, at most `KNOWN_S` old; None: it was never published.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        known = self._known.get(reference)
        if known is not None and self._clock.now() < known[0]:
            return known[1]
        name, _, version = reference.partition("@")
        try:
            found = await self._hub.environment(name, version)
        except EnvironmentNotFound:
            found = None
        self._known[reference] = (self._clock.now() + KNOWN_S, found)
        self._known.move_to_end(reference)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return found
