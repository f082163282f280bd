"""The nodes of a Ray cluster, as Ray reports them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

SLOT: Final = "env_slot"
"""Ray resource that a node declares to limit its instances: one unit is one instance."""
ENGINE_LABEL: Final = "aenv-ray.io/engine"
"""Ray label of a node whose instances all run on one engine. Without it, the node's hosts find out
which engines they can run."""


class SlotDemand(NamedTuple):
    """Slots that are missing on one node."""

    slots: int
    engines: tuple[str, ...] = ()
    """The node must have one of these as its `ENGINE_LABEL`; empty: any node will do."""


@dataclass(frozen=True)
class NodeFacts:
    """A live node.

    Attributes:
        cores: CPUs that Ray schedules on it.
        slots: Instances that the node accepts, if it declares `SLOT`; None: it declares no limit.
        is_head: Whether Ray's head runs there.
        engine: The node's `ENGINE_LABEL`; None: it declares no engine.
        machine: Host name of the machine; in tests several nodes share one.
        is_draining: Whether it takes no new instances, because it is to be stopped.
        is_leaving: Whether it is draining, and its replicas of services move to other nodes.
    """

    cores: int
    slots: int | None = None
    is_head: bool = False
    machine: str = ""
    engine: str | None = None
    is_draining: bool = False
    is_leaving: bool = False

    @property
    def takes_instances(self) -> bool:
        """Whether instances may be created here. A head without CPUs takes none."""
        if self.is_draining:
            return False
        return bool(self.slots) if self.slots is not None else not (self.is_head and not self.cores)

    def may_run(self, engines: Collection[str]) -> bool:
        """Whether one of these engines may run here; an undeclared engine may, and so may none."""
        return self.engine is None or not engines or self.engine in engines

    @property
    def is_elastic(self) -> bool:
        """Whether an autoscaler may add and remove it; then it has hosts only while it is used."""
        return bool(self.slots)
