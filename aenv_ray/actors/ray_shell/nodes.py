"""The nodes of a Ray cluster, as Ray reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SLOT: Final = "env_slot"
"""Ray resource that a node declares to limit its instances: one unit is one instance."""


@dataclass(frozen=True)
class NodeFacts:
    """A live node.

    Attributes:
        cores: CPUs that Ray schedules on it.
        slots: Instances that the node accepts, if it declares `SLOT`; None: it declares no limit.
        is_head: Whether Ray's head runs there.
        machine: Host name of the machine; in tests several nodes share one.
    """

    cores: int
    slots: int | None = None
    is_head: bool = False
    machine: str = ""

    @property
    def takes_instances(self) -> bool:
        """Whether instances may run here. A head without CPUs takes none."""
        return bool(self.slots) if self.slots is not None else not (self.is_head and not self.cores)

    @property
    def is_elastic(self) -> bool:
        """Whether an autoscaler may add and remove it; then it has hosts only while it is used."""
        return bool(self.slots)
