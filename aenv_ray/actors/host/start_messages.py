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


StartAnswer = list[tuple[InstanceInfo | AenvError, Introduction | None]]
"""The outcome of each spec, in order, and how the caller reaches its sandbox directly."""


class _Failure(BaseModel):
    error: dict[str, Any]


_SPECS: Final = TypeAdapter(list[InstanceSpec])
_ANSWER: Final = TypeAdapter(list[tuple[InstanceInfo | _Failure, Introduction | None]])


def encode_specs(specs: Sequence[InstanceSpec]) -> bytes:
    """Encode the instances to start."""
    return _SPECS.dump_json(list(specs))


def decode_specs(data: bytes) -> list[InstanceSpec]:
    """Decode what `encode_specs` wrote."""
    return _SPECS.validate_json(data)


def encode_answer(answer: StartAnswer | ProjectMissing) -> bytes:
    """Encode the answer of a host."""
    if isinstance(answer, ProjectMissing):
        return _MISSING + answer.node_id.encode()
    return _ANSWER.dump_json(
        [
            (_Failure(error=to_wire(one)) if isinstance(one, AenvError) else one, introduction)
            for one, introduction in answer
        ]
    )


def decode_answer(data: bytes) -> StartAnswer | ProjectMissing:
    """Decode what `encode_answer` wrote."""
    if data.startswith(_MISSING):
        return ProjectMissing(data.removeprefix(_MISSING).decode())
    return [
        (from_wire(one.error) if isinstance(one, _Failure) else one, introduction)
        for one, introduction in _ANSWER.validate_json(data)
    ]
