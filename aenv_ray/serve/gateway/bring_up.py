"""Brings up hub and gateway in the Ray that starts on this node, again at every start of a head.

``python -m aenv_ray.serve.gateway.bring_up`` is begun beside ``ray start`` in the head's container.
It waits for that Ray, does what is missing, and ends: what lives on from an earlier head stays.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway.settings import CONTROL_PORT, MCP_PORT, GatewaySettings

if TYPE_CHECKING:
    from aenv_ray.hub.client import HubClient

logger = logging.getLogger("aenv_ray.bring_up")

_PAUSE_S: Final = 5.0
_CONNECT_S: Final = 5.0
_LONGEST_S: Final = 3600.0
_LEAST_SECRET: Final = 32
_OWNER: Final = "admin"
_KIND: Final = "deployed"
_NAME: Final = "gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring up hub and gateway, trying again until it works; return the exit code.

    Args:
        arguments: Those of the program. None: this process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m aenv_ray.serve.gateway.bring_up", description=__doc__
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=CONTROL_PORT, help="control")
    parser.add_argument("--mcp-port", type=int, default=MCP_PORT, help="data")
    parser.add_argument("--replicas", type=int, default=1, help="processes, all on the head")
    parser.add_argument("--admin-token-file", type=Path, help="holds the token of an admin")
    parser.add_argument("--ray-port", type=int, default=6379, help="of Ray on this node")
    parser.add_argument("--timeout", type=float, default=_LONGEST_S, help="seconds to try at most")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    settings = GatewaySettings(
        host=given.host, port=given.port, mcp_port=given.mcp_port, replicas=given.replicas,
        on_head=True,
    )  # fmt: skip

    def attempt() -> None:
        _await_port(given.ray_port)
        secret = read_secret(given.admin_token_file) if given.admin_token_file else None
        bring_up(settings, secret)

    return 0 if persist(attempt, given.timeout) else 1


def persist(attempt: Callable[[], None], timeout_s: float) -> bool:
    """Try something until it works; return whether it did in time."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            attempt()
        except AenvError as exc:
            logger.warning("hub and gateway are not up yet: %s", exc.message)
            if time.monotonic() + _PAUSE_S > end:
                logger.exception("hub and gateway did not come up in %g s", timeout_s)
                return False
            time.sleep(_PAUSE_S)
            continue
        logger.info("hub and gateway are up")
        return True


def read_secret(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: There is none, or one that could be guessed.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the admin's token cannot be read: {exc}") from exc
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"the admin's token in {path} has {len(secret)} characters",
            hint=f"make one of {_LEAST_SECRET} or more at random",
        )
    return secret


def bring_up(settings: GatewaySettings, secret: str | None) -> None:
    """Do what is missing of hub, admin's token and gateway in the Ray on this node; then leave it.

    Args:
        settings: The gateway's. Where one runs with others, it is replaced.
        secret: Of the admin's token. None: none is made.

    Raises:
        ConfigError: Redis refuses us, or a port is taken.
        FabricUnavailable: Ray, Redis, hub or gateway does not come up.
    """
    from aenv_ray.actors.fabric import entrance
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.hub.hub_actor import ensure_hub
    from aenv_ray.serve.gateway import deployment

    entrance.init()
    try:
        hub = ensure_hub()
        if secret is not None:
            asyncio.run(keep_token(hub, secret))
        wanted = settings.model_dump(mode="json")
        known = asyncio.run(hub.documents(_KIND)).get(_NAME)
        # Deployed again, even unchanged, all replicas would be replaced.
        if known == wanted and deployment.is_deployed():
            return
        deployment.deploy(settings)
        asyncio.run(hub.put_document(_KIND, _NAME, wanted))
    finally:
        entrance.shutdown()
        ray_api.leave()


async def keep_token(hub: HubClient, secret: str) -> None:
    """Have the hub know an admin's token by its secret; again changes nothing.

    Raises:
        ConfigError: The secret is that of a token that is none of an admin.
        FabricUnavailable: The hub does not answer.
    """
    known = await hub.check_token(secret)
    if known is not None and known.role is not Role.ADMIN:
        raise ConfigError(f"the admin's token is one of role {known.role.value}")
    if known is None:
        await hub.adopt_token(secret, Role.ADMIN, _OWNER, note="of the cluster")


def _await_port(port: int) -> None:
    """Return once Ray listens here, before the costly import of Ray.

    Raises:
        FabricUnavailable: It does not.
    """
    try:
        socket.create_connection(("127.0.0.1", port), _CONNECT_S).close()
    except OSError as exc:
        raise FabricUnavailable(f"no Ray on port {port} of this node: {exc}") from exc


if __name__ == "__main__":
    sys.exit(main())
