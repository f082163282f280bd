"""``aenv up``: Ray, hub and gateway on this machine, which live on after the command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.local import up_token
from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output
from aenv_ray.cli.terminal.output import show
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable

if TYPE_CHECKING:
    from aenv_ray.local_fabric import LocalFabric

_LOCK: Final = "up.lock"
_HEALTH_S: Final = 10.0
_RAY_ATTEMPTS: Final = 3


class Step(Enum):
    """What has to be done for a fabric to be up."""

    NOTHING = "it is up"
    REPAIR = "Ray runs, hub or gateway do not"
    START = "nothing runs"
    CLEAN = "remains of an earlier one are in the way"


def next_step(*, known: bool, ray_answers: bool, is_up: bool, is_healthy: bool) -> Step:
    """Return what has to be done.

    Args:
        known: A fabric is written down.
        ray_answers: Its Ray does.
        is_up: It was up once.
        is_healthy: Its gateway answers.
    """
    if not known:
        return Step.START
    if not ray_answers or not is_up:
        return Step.CLEAN
    return Step.NOTHING if is_healthy else Step.REPAIR


def up(
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Control; 0: any free one.")
    ] = 8080,
    mcp_port: Annotated[
        int, typer.Option("--mcp-port", min=0, max=65535, help="Data; 0: any free one.")
    ] = 8081,
    host: Annotated[
        str, typer.Option("--host", help="To listen on; 0.0.0.0: all networks.")
    ] = "127.0.0.1",
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=100, help="Processes of the gateway.")
    ] = 1,
    num_cpus: Annotated[
        int | None, typer.Option("--num-cpus", min=1, help="For Ray. Default: the machine's.")
    ] = None,
    output: Output = None,
) -> None:
    """Bring up Ray, hub and gateway on this machine.

    They live on until `aenv down`. A Ray that RAY_ADDRESS names is used and
    not ended. Prints the addresses and an admin's token, which further commands
    find by themselves.

    Example:
      aenv up
      aenv up -o json
    """
    from aenv_ray import local_fabric
    from aenv_ray.config import settings

    data_dir = settings().data_dir
    with locked(data_dir), _quiet_stdout():
        found = local_fabric.read(data_dir)
        step = _look(found)
        if step is Step.CLEAN and found is not None:
            console.say("taking down what is left of an earlier fabric")
            take_down(found)
            step, found = Step.START, None
        if found is None:
            port, mcp_port = _free_ports(host, port, mcp_port)
        if step is Step.NOTHING and found is not None:
            console.say(f"it is up already; started by {found.user}")
            fabric = found
        else:
            fabric = _bring_up(found, host, port, mcp_port, replicas, num_cpus)
    shown = {"url": fabric.url, "mcp_url": fabric.mcp_url, "token": fabric.token}
    shown["ray_address"] = fabric.ray_address
    show(shown, output)


def _look(found: LocalFabric | None) -> Step:
    from aenv_ray.local_fabric import Phase

    return next_step(
        known=found is not None,
        ray_answers=found is not None and found.ray_answers(),
        is_up=found is not None and found.phase is Phase.UP,
        is_healthy=found is not None and is_healthy(found),
    )


def is_healthy(fabric: LocalFabric) -> bool:
    """Return whether a fabric's gateway answers and knows its token."""
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_http import GatewayHttp

    http = GatewayHttp(fabric.url, fabric.token or None, timeout_s=_HEALTH_S)
    with Gateway(http) as door:
        try:
            door.health()
            door.hub()
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
    """Return the fabric once all of it runs; where it was started now and fails, none is left."""
    from aenv_ray import local_fabric
    from aenv_ray.config import settings
    from aenv_ray.local_fabric import Phase

    data_dir = settings().data_dir
    fabric = found or _planned(host, port, mcp_port)
    local_fabric.write(data_dir, fabric)  # first, so that `aenv down` finds the rest
    try:
        with interrupts():
            if fabric.owns_ray and not fabric.ray_address:
                fabric = _start_ray(data_dir, fabric, num_cpus)
            fabric = _start_gateway(fabric, host, replicas)
            fabric = fabric.model_copy(update={"phase": Phase.UP})
            local_fabric.write(data_dir, fabric)
    except BaseException:
        if found is None:
            console.say("taking down what was begun")
            take_down(local_fabric.read(data_dir) or fabric)
        raise
    return fabric


def _planned(host: str, port: int, mcp_port: int) -> LocalFabric:
    from aenv_ray.cli.local import local_ray
    from aenv_ray.clock import SystemClock
    from aenv_ray.config import settings
    from aenv_ray.local_fabric import LocalFabric, Phase

    address = settings().ray_address
    name = "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host
    name = f"[{name}]" if ":" in name else name
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
            # Its processes give each other seconds, which on a busy machine are not enough.
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
    from aenv_ray.actors.fabric import entrance as connections
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.config import settings
    from aenv_ray.engines.node.directory import node_path
    from aenv_ray.hub import hub_actor
    from aenv_ray.serve.gateway import deployment
    from aenv_ray.serve.gateway.settings import GatewaySettings

    connections.init(fabric.ray_address)
    try:
        console.say("starting the hub …")
        hub = hub_actor.ensure_hub()
        token = fabric.token or asyncio.run(up_token.renewed(hub))
        console.say("starting the gateway …")
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
        connections.shutdown()
        ray_api.leave()
    place = node_path(settings().runtime_dir, scope) if fabric.owns_ray else None
    fabric = fabric.model_copy(update={"token": token, "node_dir": place})
    if not is_healthy(fabric):
        raise FabricUnavailable(
            f"the gateway at {fabric.url} does not answer", hint="try again: aenv up"
        )
    return fabric


def take_down(fabric: LocalFabric) -> None:
    """End what a fabric started, and forget it."""
    from aenv_ray import local_fabric
    from aenv_ray.cli.local import local_ray
    from aenv_ray.config import settings

    up_token.end(fabric)
    if fabric.owns_ray:
        local_ray.end(fabric, console.say)
    elif fabric.ray_answers():
        _leave_ray(fabric)
    local_fabric.forget(settings().data_dir)


def _leave_ray(fabric: LocalFabric) -> None:
    """End gateway, its instances and the hub on a Ray that goes on."""
    from aenv_ray.actors.fabric import entrance as connections
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.hub import hub_actor
    from aenv_ray.serve.gateway import deployment

    connection = connections.init(fabric.ray_address)
    try:
        hub = hub_actor.find_hub()
        leased = _leased(hub) if hub is not None else []
        deployment.undeploy()
        if leased:
            connection.release(leased)
        hub_actor.end_hub()
    finally:
        connections.shutdown()
        ray_api.leave()


def _leased(hub: Any) -> list[Any]:
    """Return the ids of the instances that were made through the gateway."""
    from aenv_ray.hub.records import LeaseQuery

    async def all_of_them() -> list[Any]:
        found: list[Any] = []
        cursor: str | None = None
        while True:
            page = await hub.leases(LeaseQuery(limit=1000, cursor=cursor))
            found += [lease.id for lease in page.items]
            cursor = page.cursor
            if cursor is None:
                return found

    return asyncio.run(all_of_them())


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _free_ports(host: str, *wanted: int) -> list[int]:
    """Return ports that nobody listens on, in place of 0 any.

    Raises:
        ConfigError: One is taken, or this machine has no such address.
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
                    f"port {port} of {host} cannot be listened on: {exc.strerror}",
                    hint=f"choose another one with {option}, or 0 for any that is free",
                ) from None
            ports.append(int(sock.getsockname()[1]))
    return ports


@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Keep other ``aenv up`` and ``aenv down`` of this user waiting."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        file = (data_dir / _LOCK).open("a")
    except OSError as exc:
        raise ConfigError(
            f"{data_dir} cannot be used: {exc.strerror}", hint="set AENV_DATA_DIR"
        ) from exc
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.say("waiting for another aenv up or aenv down …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Make SIGTERM and SIGHUP a KeyboardInterrupt too: what was begun is then undone."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send to standard error what Ray writes to standard output, which is for data."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
