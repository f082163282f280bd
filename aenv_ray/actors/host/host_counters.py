"""What happened on a host, counted for the controller's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.errors import AenvError
from aenv_ray.models import InstanceInfo, InstanceSpec

OK: Final = "ok"
ANY_ENGINE: Final = "any"
"""Label of outcomes that concern no particular engine."""
OUTSIDE: Final = "outside"
"""Label of a loss that was not caused from inside the sandbox."""


class EngineOutcome(NamedTuple):
    """The labels of a count."""

    engine: str
    outcome: str
    """`OK`, the code of an error, or the cause of a loss."""


def outcome_of(spec: InstanceSpec, answer: InstanceInfo | AenvError) -> EngineOutcome:
    """Return how a create ended."""
    if isinstance(answer, InstanceInfo):
        return EngineOutcome(answer.engine, OK)
    engines = spec.possible_engines
    return EngineOutcome(engines[0] if len(engines) == 1 else ANY_ENGINE, answer.code)


@dataclass
class HostCounters:
    """Counts since the host's process started."""

    creates: Counter[EngineOutcome] = field(default_factory=Counter)
    lost: Counter[EngineOutcome] = field(default_factory=Counter)

    def created(self, ends: Iterable[tuple[InstanceSpec, InstanceInfo | AenvError]]) -> None:
        """Count creates that have ended."""
        self.creates.update(outcome_of(spec, answer) for spec, answer in ends)

    def ended(self, life: InstanceLife) -> None:
        """Count the end of an instance if its sandbox was lost."""
        if life.ended is EndReason.LOST:
            inside = life.end_cause.inside if life.end_cause is not None else None
            cause = OUTSIDE if inside is None else inside.value
            self.lost[EngineOutcome(life.record.spec.engine, cause)] += 1


class HostMeasures(NamedTuple):
    """What a host reports for metrics."""

    instances: int
    """Used or reserved slots."""
    capacity: int
    counters: HostCounters
    pods: Counter[str]
    """Its pods, by phase."""
