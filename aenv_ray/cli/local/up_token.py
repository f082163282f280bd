"""The admin's token of ``aenv up``: made with a fabric, and worth nothing once that is down."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.errors import AenvError

if TYPE_CHECKING:
    from aenv_ray.local_fabric import LocalFabric

_OWNER: Final = "admin"
_ANSWER_S: Final = 5.0


async def renewed(hub: Any) -> str:
    """Return a new token of a hub; those of earlier fabrics of this directory hold no more.

    Raises:
        FabricUnavailable: The hub does not answer.
    """
    from aenv_ray.hub.records import Role

    for record in await hub.tokens():
        if record.note == _note():
            await hub.revoke_token(record.id)
    secret, _ = await hub.create_token(Role.ADMIN, _OWNER, note=_note())
    return str(secret)


def end(fabric: LocalFabric) -> None:
    """Revoke a fabric's token, for what its hub keeps lives on.

    A gateway that does not answer is not waited for: the next `renewed` revokes it.
    """
    from aenv_ray.client.gateway_http import GatewayHttp

    if not fabric.token:
        return
    http = GatewayHttp(fabric.url, fabric.token, timeout_s=_ANSWER_S)
    with contextlib.closing(http), contextlib.suppress(AenvError):
        for found in http.data("GET", "/tokens", attempts=1):
            if found["note"] == _note():
                http.data("DELETE", f"/tokens/{found['id']}", attempts=1)


def _note() -> str:
    """Return what a token says of the one fabric that a directory has at a time."""
    from aenv_ray.config import settings

    return f"aenv up on {socket.gethostname()}, {settings().data_dir.absolute()}"
