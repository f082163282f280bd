"""The messages of `HostShell.start`: what to start, and what became of it.

They are JSON: Ray would pickle the models object by object, which costs a create 0.2 ms each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, TypeAdapter

from aenv_ray.actors.calls.introduction import Introduction
from aenv_ray.errors import AenvError, from_wire, to_wire
from aenv_ray.models import InstanceInfo, InstanceSpec

_MISSING: Final = b"!"
"""First byte of an encoded `ProjectMissing`; no JSON array begins with it."""


class ProjectMissing(NamedTuple):
    """The answer of a host whose node does not have the project's files: nothing was started.

    Send the project to any host of that node and start again.
    """

    node_id: str


Outcomes = list[InstanceInfo | AenvError]
"""The outcome of each spec, in order."""


class _Failure(BaseModel):
    error: dict[str, Any]


Introductions = list[Introduction | None]
"""For each spec, how a caller on the node reaches its instance; None if it cannot."""

_SPECS: Final = TypeAdapter(list[InstanceSpec])
_OUTCOMES: Final = TypeAdapter(list[InstanceInfo | _Failure])
_INTRODUCTIONS: Final = TypeAdapter(list[Introduction | None])


def encode_specs(specs: Sequence[InstanceSpec]) -> bytes:
    """Encode the instances to start."""
    return _SPECS.dump_json(list(specs))


def decode_specs(data: bytes) -> list[InstanceSpec]:
    """Decode what `encode_specs` wrote."""
    return _SPECS.validate_json(data)


def encode_outcomes(outcomes: Outcomes | ProjectMissing) -> bytes:
    """Encode the answer of a host."""
    if isinstance(outcomes, ProjectMissing):
        return _MISSING + outcomes.node_id.encode()
    return _OUTCOMES.dump_json(
        [_Failure(error=to_wire(one)) if isinstance(one, AenvError) else one for one in outcomes]
    )


def decode_outcomes(data: bytes) -> Outcomes | ProjectMissing:
    """Decode what `encode_outcomes` wrote."""
    if data.startswith(_MISSING):
        return ProjectMissing(data.removeprefix(_MISSING).decode())
    return [
        from_wire(one.error) if isinstance(one, _Failure) else one
        for one in _OUTCOMES.validate_json(data)
    ]


def encode_introduced(outcomes: Outcomes | ProjectMissing, introductions: Introductions) -> bytes:
    """Encode the answer of a host to a caller that wants to be introduced."""
    return encode_outcomes(outcomes) + b"\n" + _INTRODUCTIONS.dump_json(introductions)


def decode_introduced(data: bytes) -> tuple[Outcomes | ProjectMissing, Introductions]:
    """Decode what `encode_introduced` wrote."""
    outcomes, _, introductions = data.partition(b"\n")
    return decode_outcomes(outcomes), _INTRODUCTIONS.validate_json(introductions)
