"""``aenv up`` and ``aenv down``: Ray, hub and gateway on this machine, beyond the command."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.cli.local.signals import interrupts
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import OutputOption
from aenv_ray.cli.terminal.output import show
from aenv_ray.errors import AenvError, ConfigError, DeadlineExceeded, FabricUnavailable
from aenv_ray.files import FileLock, make_private

if TYPE_CHECKING:
    from aenv_ray.local_fabric import LocalFabric

_LOCK: Final = "up.lock"
_LOCK_S: Final = 600.0
_HEALTH_S: Final = 10.0
_TOKEN_OWNER: Final = "admin"
_REVOKE_S: Final = 5.0
_RAY_ATTEMPTS: Final = 3


def up(
    port: Annotated[
        int,
        typer.Option("--port", "-p", min=0, max=65535, help="Port of REST; 0 chooses a free one."),
    ] = 8080,
    mcp_port: Annotated[
        int, typer.Option("--mcp-port", min=0, max=65535, help="Port of MCP; 0 chooses a free one.")
    ] = 8081,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=100, help="Gateway processes.")
    ] = 1,
    num_cpus: Annotated[
        int | None, typer.Option("--num-cpus", min=1, help="CPUs for Ray. Default: all.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Start Ray, hub and gateway on this machine.

    They run until `aenv down`. If RAY_ADDRESS is set, that Ray is used and
    continues to run afterwards. Prints the addresses and an admin token;
    other commands find them without options.

    Example:
      aenv up
      aenv up -o json
    """
    from aenv_ray import local_fabric
    from aenv_ray.config import settings

    data_dir = settings().data_dir
    with _locked(data_dir), contextlib.redirect_stdout(sys.stderr):  # Ray prints there
        found = local_fabric.read(data_dir)
        if found is not None and found.is_broken():
            console.say("removing a broken earlier fabric")
            _take_down(found)
            found = None
        if found is not None and _is_healthy(found):
            console.say(f"already up, started by {found.user}")
            fabric = found
        else:
            fabric = _bring_up(found, host, port, mcp_port, replicas, num_cpus)
    shown = {"url": fabric.url, "mcp_url": fabric.mcp_url, "token": fabric.token}
    shown["ray_address"] = fabric.ray_address
    show(shown, output)


def _is_healthy(fabric: LocalFabric) -> bool:
    """Return whether a fabric's gateway answers and accepts its token."""
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_http import GatewayHttp

    http = GatewayHttp(fabric.url, fabric.token or None, timeout_s=_HEALTH_S)
    with Gateway(http) as client:
        try:
            client.health()
            client.hub()
        except AenvError:
            return False
    return True


def _bring_up(
    found: LocalFabric | None,
    host: str,
    port: int,
    mcp_port: int,
    replicas: int,
    num_cpus: int | None,
) -> LocalFabric:
    """Start what is missing and return the fabric; if a new one fails, nothing is left."""
    from aenv_ray import local_fabric
    from aenv_ray.config import settings
    from aenv_ray.local_fabric import Phase

    data_dir = settings().data_dir
    fabric = found or _planned(host, port, mcp_port)
    local_fabric.write(data_dir, fabric)  # first, so that `aenv down` finds the processes
    try:
        with interrupts():
            if fabric.owns_ray and not fabric.ray_address:
                fabric = _start_ray(data_dir, fabric, num_cpus)
            fabric = _start_gateway(fabric, host, replicas)
            fabric = fabric.model_copy(update={"phase": Phase.UP})
            local_fabric.write(data_dir, fabric)
    except BaseException:
        if found is None:
            console.say("removing what was started")
            _take_down(local_fabric.read(data_dir) or fabric)
        raise
    return fabric


def _planned(host: str, port: int, mcp_port: int) -> LocalFabric:
    """Return the record of a fabric that is to be started, with free ports for 0."""
    from aenv_ray.addresses import local_host
    from aenv_ray.cli.local import local_ray
    from aenv_ray.clock import SystemClock
    from aenv_ray.config import settings
    from aenv_ray.local_fabric import LocalFabric, Phase

    port, mcp_port = _free_ports(host, port, mcp_port)
    address = settings().ray_address
    name = local_host(host)
    return LocalFabric(
        id=secrets.token_hex(8),
        phase=Phase.STARTING,
        url=f"http://{name}:{port}",
        mcp_url=f"http://{name}:{mcp_port}",
        ray_address=address or "",
        owns_ray=address is None,
        ray_temp_dir=local_ray.new_temp_dir() if address is None else None,
        started_at=SystemClock().now(),
        user=local_ray.user(),
    )


def _start_ray(data_dir: Path, fabric: LocalFabric, num_cpus: int | None) -> LocalFabric:
    from aenv_ray import local_fabric
    from aenv_ray.actors.ray_shell.ray_token import use_token
    from aenv_ray.cli.local import local_ray

    console.say("starting Ray …")
    use_token(make=True)
    attempt, address = 1, ""
    while not address:
        try:
            address = local_ray.start(fabric, num_cpus)
        except FabricUnavailable as exc:
            if attempt == _RAY_ATTEMPTS:
                raise
            attempt += 1
            # Its processes wait seconds for each other, which is too short on a busy machine.
            console.say(f"{exc.message}; trying again …")
            local_ray.end(fabric, console.say)
            fabric = fabric.model_copy(update={"ray_temp_dir": local_ray.new_temp_dir()})
            local_fabric.write(data_dir, fabric)
    sessions = local_ray.sessions_of(local_ray.processes(fabric))
    fabric = fabric.model_copy(update={"ray_address": address, "sessions": sessions})
    local_fabric.write(data_dir, fabric)
    return fabric


def _start_gateway(fabric: LocalFabric, host: str, replicas: int) -> LocalFabric:
    """Return the fabric with a hub, a token and a gateway that answers."""
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.config import settings
    from aenv_ray.engines.node.directory import node_path
    from aenv_ray.hub import hub_actor
    from aenv_ray.serve.gateway import deployment
    from aenv_ray.serve.gateway.settings import GatewaySettings

    driver_api.init(fabric.ray_address)
    try:
        console.say("starting the hub …")
        hub = hub_actor.ensure_hub()
        token = fabric.token or asyncio.run(new_token(hub))
        console.say("starting the gateway …")
        if settings().isolation in ("auto", "none"):
            console.say(
                f"AENV_ISOLATION={settings().isolation}: code that others publish may run here "
                "without a sandbox; unset it to refuse that"
            )
        deployment.deploy(
            GatewaySettings(
                host=host,
                port=_port_of(fabric.url),
                mcp_port=_port_of(fabric.mcp_url),
                replicas=replicas,
            )
        )
        scope = ray_api.session_scope()
    finally:
        driver_api.shutdown()
        ray_api.leave()
    node_dir = node_path(settings().runtime_dir, scope) if fabric.owns_ray else None
    fabric = fabric.model_copy(update={"token": token, "node_dir": node_dir})
    if not _is_healthy(fabric):
        raise FabricUnavailable(
            f"the gateway at {fabric.url} does not answer", hint="try again: aenv up"
        )
    return fabric


def _take_down(fabric: LocalFabric) -> None:
    """End everything that a fabric started, and remove its record."""
    from aenv_ray import local_fabric
    from aenv_ray.cli.local import local_ray
    from aenv_ray.config import settings

    revoke_token(fabric)
    if fabric.owns_ray:
        local_ray.end(fabric, console.say)
    elif fabric.ray_answers():
        _leave_ray(fabric)
    local_fabric.forget(settings().data_dir)


def _leave_ray(fabric: LocalFabric) -> None:
    """End the gateway, its instances and the hub on a Ray that continues to run."""
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.hub import hub_actor
    from aenv_ray.serve.gateway import deployment

    connection = driver_api.init(fabric.ray_address)
    try:
        hub = hub_actor.find_hub()
        leased = _leased(hub) if hub is not None else []
        deployment.undeploy()
        if leased:
            connection.release(leased)
        hub_actor.end_hub()
    finally:
        driver_api.shutdown()
        ray_api.leave()


def _leased(hub: Any) -> list[Any]:
    """Return the ids of the instances created through the gateway."""
    from aenv_ray.hub.records import LeaseQuery

    async def all_of_them() -> list[Any]:
        return [lease.id async for lease in hub.all_leases(LeaseQuery())]

    return asyncio.run(all_of_them())


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _free_ports(host: str, *wanted: int) -> list[int]:
    """Return the ports, with a free one for each 0.

    Raises:
        ConfigError: A port is in use, or this machine does not have the address.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for port, option in zip(wanted, ("--port", "--mcp-port"), strict=True):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port or free_port(host)))
            except OSError as exc:
                raise ConfigError(
                    f"cannot listen on port {port} of {host}: {exc.strerror}",
                    hint=f"choose another port with {option}; 0 chooses a free one",
                ) from None
            ports.append(int(sock.getsockname()[1]))
    return ports


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Wait for other ``aenv up`` and ``aenv down`` of this user, and exclude them.

    Raises:
        ConfigError: The data directory cannot be used.
        DeadlineExceeded: Another one is still running after ten minutes.
    """
    path = data_dir / _LOCK
    try:
        make_private(data_dir)
        lock = FileLock.try_acquire(path)
        if lock is None:
            console.say("waiting for another aenv up or aenv down …")
            lock = FileLock.acquire(path, _LOCK_S)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"another aenv up or aenv down is running: {exc}", hint="end that process"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"{data_dir} cannot be used: {exc.strerror}", hint="set AENV_DATA_DIR"
        ) from exc
    with lock:
        yield


def down(output: OutputOption = None) -> None:
    """End what `aenv up` started, with its instances.

    The hub's data stays on disk. Also works if `aenv up` failed halfway.

    Example:
      aenv down
    """
    from aenv_ray import local_fabric
    from aenv_ray.config import settings

    data_dir = settings().data_dir
    with _locked(data_dir), contextlib.redirect_stdout(sys.stderr):
        fabric = local_fabric.read(data_dir)
        if fabric is None:
            console.say("nothing is up")
        else:
            console.say("ending gateway, hub and instances …")
            _take_down(fabric)
    ended = {"ended": fabric is not None, "url": fabric.url if fabric else None}
    show(ended, output, "down")


# --- the token ------------------------------------------------------------------------------------


async def new_token(hub: Any) -> str:
    """Return a new admin token, and revoke those of earlier fabrics of this data directory.

    Raises:
        FabricUnavailable: The hub does not answer.
    """
    from aenv_ray.hub.records import AuditRecord, Role

    for record in await hub.tokens():
        if record.note == _token_note():
            await hub.revoke_token(record.id)
    secret, made = await hub.create_token(Role.ADMIN, _TOKEN_OWNER, note=_token_note())
    await hub.record(AuditRecord(actor=_TOKEN_OWNER, action="token.create", subject=made.id))
    return str(secret)


def revoke_token(fabric: LocalFabric) -> None:
    """Revoke a fabric's token, since the hub's data outlives the fabric.

    If the gateway does not answer, the next `new_token` revokes it.
    """
    from aenv_ray.client.gateway_http import GatewayHttp

    if not fabric.token:
        return
    http = GatewayHttp(fabric.url, fabric.token, timeout_s=_REVOKE_S)
    with contextlib.closing(http), contextlib.suppress(AenvError):
        for found in http.data("GET", "/tokens", attempts=1):
            if found["note"] == _token_note():
                http.data("DELETE", f"/tokens/{found['id']}", attempts=1)


def _token_note() -> str:
    """Return the note of a token, which identifies this data directory."""
    from aenv_ray.config import settings

    return f"aenv up on {socket.gethostname()}, {settings().data_dir.absolute()}"
