"""``aenv cluster nodes``, ``drain`` and ``undrain``: which nodes take instances."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import OutputOption
from aenv_ray.cli.terminal.output import Columns, show, show_rows
from aenv_ray.errors import ConfigError, DeadlineExceeded, FabricUnavailable
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.actors.controller.draining import NodeState
    from aenv_ray.actors.fabric.fabric import Fabric

T = TypeVar("T")
_POLL_S: Final = 2.0
_DRAIN_S: Final = 1800.0

NodeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NODE]",
        help="Node id or its beginning, or the machine's name. Default: this node.",
    ),
]

COLUMNS: Final[Columns] = {
    "NODE": lambda n: n["node_id"][:12],
    "MACHINE": lambda n: n["machine"],
    "STATUS": lambda n: n["status"],
    "INSTANCES": lambda n: n["instances"],
    "SAMPLINGS": lambda n: n["runners"],
    "REPLICAS": lambda n: n["replicas"],
}


def nodes(output: OutputOption = None) -> None:
    """List the nodes, and whether they take instances.

    Run it where RAY_ADDRESS is set, or on the machine of `aenv up`.

    Example:
      aenv cluster nodes
    """
    rows = [_shown(state) for state in _fabric().nodes()]
    show_rows(rows, output, COLUMNS, empty="the cluster has no nodes")


def drain(
    node: NodeArgument = None,
    move_services: Annotated[
        bool,
        typer.Option(
            "--move-services",
            help="Also move replicas of services to other nodes, which cannot be undone.",
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the node has no instances.")
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0, help="Maximum seconds to wait, also for a head that is away."
        ),
    ] = _DRAIN_S,
    output: OutputOption = None,
) -> None:
    """Prepare a node to be stopped: it takes no new instances.

    Its present instances continue until their end or deadline. Samplings finish the
    episodes that they play there and move to other nodes; warm sandboxes end. With
    --wait, returns once the node can be stopped; exits with 1 if it still has
    instances after the timeout. Run it where RAY_ADDRESS is set.

    Replicas of services stay, with their instances, unless --move-services is given:
    each then ends after another one runs elsewhere. The node cannot be undrained after
    that; stop it, and start it again.

    Example:
      aenv cluster drain worker-3
      aenv cluster drain --move-services && python clusters/local/node.py stop
    """
    from aenv_ray.actors.ray_shell import ray_api

    ends = time.monotonic() + timeout
    fabric = _with_head(_fabric, ends)
    state = _with_head(
        lambda: fabric.drain(node or ray_api.node_id(), is_leaving=move_services), ends
    )
    if wait:
        try:
            state = _await_drained(fabric, state, ends, timeout)
        except KeyboardInterrupt:
            console.say(f"node {state.node_id[:12]} stays draining; see aenv cluster undrain")
            raise
    show(_shown(state), output)


def undrain(node: NodeArgument = None, output: OutputOption = None) -> None:
    """Let a node take instances again.

    Example:
      aenv cluster undrain worker-3
    """
    from aenv_ray.actors.ray_shell import ray_api

    fabric = _fabric()
    show(_shown(fabric.undrain(node or ray_api.node_id())), output)


def _with_head(act: Callable[[], T], ends: float) -> T:
    """Return what `act` returns; while the head is away, try again until `ends`.

    The `preStop` hook of a worker drains it: if the hook failed because the head is restarting, the
    kubelet would end the worker at once, with all its instances.

    Raises:
        FabricUnavailable: The head is still away at `ends`.
    """
    is_said = False
    while True:
        try:
            return act()
        except FabricUnavailable as exc:
            if time.monotonic() >= ends:
                raise
            if not is_said:
                console.say(f"waiting until the cluster answers: {exc.message}")
                is_said = True
        time.sleep(_POLL_S)


def _await_drained(fabric: Fabric, state: NodeState, ends: float, timeout_s: float) -> NodeState:
    """Wait until a node is drained; one that has left the cluster is, too."""
    from aenv_ray.actors.controller.draining import NodeStatus

    said = ""
    while state.status is not NodeStatus.DRAINED:
        line = f"waiting for {_rest(state)}"
        if line != said:
            console.say(line)
            said = line
        if time.monotonic() >= ends:
            raise DeadlineExceeded(
                f"node {state.node_id[:12]} still has {_rest(state)} after {timeout_s:g} s",
                hint="it stays draining: wait longer, end them, move replicas of services with "
                "--move-services, or use aenv cluster undrain",
            )
        time.sleep(_POLL_S)
        found = {one.node_id: one for one in _with_head(fabric.nodes, ends)}
        if state.node_id not in found:
            console.say("the node has left the cluster")
            return dataclasses.replace(
                state, status=NodeStatus.DRAINED, instances=0, runners=0, replicas=0, silent=0
            )
        state = found[state.node_id]
    return state


def _rest(state: NodeState) -> str:
    """Return what a node still has."""
    silent = f", and {counted(state.silent, 'host')} without an answer" if state.silent else ""
    return (
        f"{counted(state.instances, 'instance')}, {counted(state.runners, 'sampling')} and "
        f"{counted(state.replicas, 'replica')} of services{silent}"
    )


def _fabric() -> Fabric:
    """Return a connection to the cluster, whatever its version; none is started.

    A worker drains also if the head has been replaced by one of another version: see `_with_head`.
    """
    from aenv_ray import local_fabric
    from aenv_ray.actors.fabric.driver_api import connect_inner
    from aenv_ray.actors.fabric.fabric import Fabric
    from aenv_ray.config import settings

    address = settings().ray_address
    if address is None:
        fabric = local_fabric.read(settings().data_dir)
        address = fabric.ray_address if fabric is not None else None
    if not address:
        raise ConfigError(
            "no cluster is configured", hint="set RAY_ADDRESS, or run this on a node of the cluster"
        )
    return Fabric(connect_inner, address, any_version=True)


def _shown(state: NodeState) -> dict[str, Any]:
    return {**dataclasses.asdict(state), "status": str(state.status)}
