"""What a host and an introduced caller on its node tell each other.

The caller connects to the host's Unix socket and sends a `DoorClaim`. The host answers with
`ACCEPTED` and the descriptor of a connection to the sandbox's door, or closes the connection.
Afterwards each side sends lines of JSON: the caller an `ActivityReport` when its calls begin, when
they pause and in between; the host an answer to each, and the names of calls to cancel.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from aenv_ray.ids import InstanceId

ACCEPTED: Final = b"+"
UNREACHABLE: Final = b"-"
"""Answer to a claim, if the engine's sandboxes can only be reached through their host."""
LINE_BYTES: Final = 65_536
"""A longer line ends the connection."""


class Introduction(NamedTuple):
    """How a caller reaches the door of one instance."""

    path: str
    """The host's Unix socket."""
    key: str
    """For this instance and role; valid once, and for a minute."""
    idle_timeout_s: float | None
    """The instance's."""


class DoorClaim(NamedTuple):
    """First message of a caller."""

    instance_id: InstanceId
    key: str


class ActivityReport(NamedTuple):
    """What a caller did since its last report."""

    number: int
    """The host's answer repeats it."""
    calls: int
    """Calls that have ended since the last report."""
    is_busy: bool
    """Whether calls are running, or ran a moment ago."""
    quiet_s: float
    """Seconds since the last call ended; 0 while one is running."""


def line_of(values: tuple[Any, ...] | dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(values).encode() + b"\n"


def claim_of(line: bytes) -> DoorClaim:
    """Parse a claim.

    Raises:
        ValueError: It is not one.
    """
    match json.loads(line):
        case [str(instance_id), str(key)]:
            return DoorClaim(InstanceId(instance_id), key)
    raise ValueError("not a claim")


def activity_of(line: bytes) -> ActivityReport:
    """Parse a report.

    Raises:
        ValueError: It is not one.
    """
    match json.loads(line):
        case [int(number), int(calls), bool(is_busy), int() | float() as quiet_s]:
            return ActivityReport(number, max(0, calls), is_busy, max(0.0, quiet_s))
    raise ValueError("not a report")
