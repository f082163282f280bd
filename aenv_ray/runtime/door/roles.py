"""Roles: who is at the other end of a connection to the fast door, and what that peer may call."""

from __future__ import annotations

from collections.abc import MutableMapping
from enum import StrEnum
from typing import Any, Final

from aenv_ray.runtime.door.host.link import OF_HOSTS
from aenv_ray.runtime.faults import Fault

HELLO: Final = "aenv/hello"
"""First message of a connection; its ``role`` is final. A connection without it is the host's."""
_CALL_ID: Final = "aenv/call_id"
_OF_AGENT: Final = "agent "
_AGENT_METHODS: Final = frozenset(
    {
        "aenv/answer",
        "aenv/call_tools",
        "completion/complete",
        "ping",
        "prompts/get",
        "prompts/list",
        "resources/list",
        "resources/read",
        "resources/subscribe",
        "resources/templates/list",
        "resources/unsubscribe",
        "tools/call",
        "tools/list",
    }
)


class DoorRole(StrEnum):
    """The role of a connection's peer."""

    HOST = "host"
    """The host of the instance; it also answers requests of the runtime."""
    OWNER = "owner"
    """A caller on the node that acts for the owner of the instance: it may call everything."""
    AGENT = "agent"
    """A caller on the node that acts for the agent: it may use tools, resources and prompts."""


def check_method(role: DoorRole, method: str) -> None:
    """Check that a role may call a method (invariant 8).

    Raises:
        Fault: ``forbidden``: it may not.
    """
    if role is DoorRole.AGENT and method not in _AGENT_METHODS:
        raise Fault(
            "forbidden",
            f"a connection of an agent cannot call {method}",
            f"methods of an agent: {', '.join(sorted(_AGENT_METHODS))}",
        )


def scope_meta(params: Any) -> None:
    """Keep the call ids of agents separate from those of owners, and drop what only hosts say.

    The gateway does the same. If an agent sends the id of an owner's call, it neither receives the
    result of that call nor prevents the owner from using the id.
    """
    meta = params.get("_meta") if isinstance(params, MutableMapping) else None
    if not isinstance(meta, MutableMapping):
        return
    for key in OF_HOSTS:
        meta.pop(key, None)
    call_id = meta.get(_CALL_ID)
    if call_id is not None:
        meta[_CALL_ID] = f"{_OF_AGENT}{str(call_id).removeprefix(_OF_AGENT)}"


def role_of(params: Any) -> DoorRole:
    """Return the role that a `HELLO` names.

    Raises:
        Fault: ``config_error``: the role is missing or unknown.
    """
    try:
        return DoorRole(params["role"])
    except (TypeError, KeyError, ValueError):
        raise Fault(
            "config_error",
            f"{HELLO} names no known role: {str(params)[:100]}",
            f"roles: {', '.join(DoorRole)}",
        ) from None
