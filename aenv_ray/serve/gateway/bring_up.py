"""Starts the hub and the gateway in the Ray cluster whose head runs on this node.

``python -m aenv_ray.serve.gateway.bring_up`` runs beside ``ray start`` in the head's container, at
every start of the head. It waits for Ray, starts what is missing, and exits.
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

from aenv_ray import logs
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable
from aenv_ray.hub.keys import GATEWAY_DEPLOYED
from aenv_ray.hub.records import AuditRecord, Role
from aenv_ray.serve.gateway.settings import CONTROL_PORT, MCP_PORT, GatewaySettings

if TYPE_CHECKING:
    from aenv_ray.hub.client import HubClient

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 5.0
_CONNECT_S: Final = 5.0
_LONGEST_S: Final = 3600.0
_MIN_SECRET: Final = 32
_OWNER: Final = "admin"
_NAME: Final = "gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the hub and the gateway, with retries; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aenv_ray.serve.gateway.bring_up", description=__doc__
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=CONTROL_PORT, help="control port")
    parser.add_argument("--mcp-port", type=int, default=MCP_PORT, help="data port")
    parser.add_argument("--replicas", type=int, default=1, help="processes, all on the head")
    parser.add_argument("--admin-token-file", type=Path, help="file with the administrator token")
    parser.add_argument("--ray-port", type=int, default=6379, help="port of Ray on this node")
    parser.add_argument("--timeout", type=float, default=_LONGEST_S, help="seconds to keep trying")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logs.configure("bring_up")
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
    """Repeat `attempt` until it succeeds; return False if it did not in time."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            attempt()
        except AenvError as exc:
            logger.warning("the hub and the gateway are not up yet: %s", exc.message)
            if time.monotonic() + _PAUSE_S > end:
                logger.exception("the hub and the gateway did not start within %g s", timeout_s)
                return False
            time.sleep(_PAUSE_S)
            continue
        logger.info("the hub and the gateway are up")
        return True


def read_secret(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: The file cannot be read, or the token is too short.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"cannot read the administrator token: {exc}",
            hint="pass the path of a readable UTF-8 file as --admin-token-file",
        ) from exc
    if len(secret) < _MIN_SECRET:
        raise ConfigError(
            f"the administrator token in {path} has {len(secret)} characters, fewer than "
            f"{_MIN_SECRET}",
            hint="create one with `openssl rand -hex 32`",
        )
    return secret


def bring_up(settings: GatewaySettings, secret: str | None) -> None:
    """Start what is missing of the hub, the administrator token and the gateway.

    Disconnects from Ray afterwards.

    Args:
        settings: Settings of the gateway; one that runs with other settings is replaced.
        secret: The administrator token; None: none is created.

    Raises:
        ConfigError: Redis refuses the connection, or a port is in use.
        FabricUnavailable: Ray, Redis, the hub or the gateway does not start.
    """
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.hub.hub_actor import ensure_hub
    from aenv_ray.serve.gateway import deployment

    driver_api.init()
    try:
        hub = ensure_hub()
        if secret is not None:
            asyncio.run(keep_token(hub, secret))
        wanted = settings.model_dump(mode="json")
        known = asyncio.run(hub.documents(GATEWAY_DEPLOYED)).get(_NAME)
        # Deploying it again would replace all replicas, even without a change.
        if known == wanted and deployment.is_deployed():
            deployment.apply_policy(hub)
            return
        deployment.deploy(settings)
        asyncio.run(hub.put_document(GATEWAY_DEPLOYED, _NAME, wanted))
    finally:
        driver_api.shutdown()
        ray_api.leave()


async def keep_token(hub: HubClient, secret: str) -> None:
    """Register an administrator token in the hub; does nothing if it is registered.

    Raises:
        ConfigError: The token has another role.
        FabricUnavailable: The hub does not answer.
    """
    known = await hub.check_token(secret)
    if known is not None and known.role is not Role.ADMIN:
        raise ConfigError(
            f"the administrator token is registered with the role {known.role.value}",
            hint="use another token, or revoke this one",
        )
    if known is None:
        _, record = await hub.create_token(Role.ADMIN, _OWNER, note="of the cluster", secret=secret)
        await hub.record(AuditRecord(actor=_OWNER, action="token.create", subject=record.id))


def _await_port(port: int) -> None:
    """Check that Ray listens on this node, before importing Ray, which is slow.

    Raises:
        FabricUnavailable: It does not listen.
    """
    try:
        socket.create_connection(("127.0.0.1", port), _CONNECT_S).close()
    except OSError as exc:
        raise FabricUnavailable(
            f"Ray does not listen on port {port} of this node: {exc}",
            hint="start Ray there first: ray start --head",
        ) from exc


if __name__ == "__main__":
    sys.exit(main())
