"""``aenv instance``: what is done with instances that run."""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.instance_create import create
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    ApiKey,
    AsData,
    Output,
    SystemUrl,
    Timeout,
    Yes,
    confirm,
    gateway,
    variables,
)
from aenv_ray.cli.terminal.output import Columns, Format, chosen, moment, show, show_rows
from aenv_ray.errors import FabricUnavailable

if TYPE_CHECKING:
    from aenv_ray.actors.fabric.fabric import Fabric
    from aenv_ray.client.gateway_records import InstanceAnswer

instance = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Make, use and end instances.\n\n"
    "Example:\n  aenv instance create mini-terminal",
)  # fmt: skip

instance.command()(create)

InstanceId = Annotated[str, typer.Argument(metavar="ID", help="The instance's id.")]

_COLUMNS: Final[Columns] = {
    "ID": lambda i: i["id"],
    "ENVIRONMENT": lambda i: i["environment"],
    "STATUS": lambda i: i.get("status"),
    "OWNER": lambda i: i.get("owner"),
    "ENGINE": lambda i: i.get("engine"),
    "CREATED": lambda i: moment(i.get("created_at")),
    "ENDS": lambda i: moment(i.get("deadline")),
}


@instance.command("list")
def list_(
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Only of this environment.")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="Only of this version; needs --name.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only of this owner.")] = None,
    label: Annotated[
        str | None, typer.Option("--label", "-l", help="Only with this KEY=VALUE.")
    ] = None,
    status: Annotated[
        str | None, typer.Option("--status", help="Only with this status, such as Running.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows at most.")] = 1000,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """List instances, the newest first.

    Example:
      aenv instance list --name mini-terminal
      aenv instance list -o json
    """
    if version is not None and name is None:
        raise typer.BadParameter("it needs --name", param_hint="--version")
    variables([label] if label else [], "--label")
    env = f"{name}@{version}" if version else name
    filters = {"env": env, "owner": owner, "label": label, "status": status}
    with gateway(system_url, api_key, timeout) as door:
        found = door.instances(limit, **filters)
    of = f" of {env}" if env else ""
    show_rows([_data(one) for one in found], output, _COLUMNS, empty=f"no instances{of} run")


@instance.command()
def get(
    instance_id: InstanceId,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show one instance.

    Example:
      aenv instance get mini-terminal-abc12345 -o json
    """
    with gateway(system_url, api_key, timeout) as door:
        found = door.instance(instance_id)
    show(found.shown(), output, _lines(found))


@instance.command()
def info(
    instance_id: InstanceId,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show one instance, its health and what can be called.

    Example:
      aenv instance info mini-terminal-abc12345
    """
    with gateway(system_url, api_key, timeout) as door:
        found = door.instance(instance_id)
        health = door.check_health(instance_id)
        tools, functions = door.tools(instance_id), door.functions_of(instance_id)
    lines = _lines(found) | {
        "health": health.get("status"),
        "tools": [tool.get("name") for tool in tools],
        "functions": [function.get("name") for function in functions],
    }
    more = {"health": health, "tools": tools, "functions": functions}
    show(found.shown() | more, output, lines)


@instance.command()
def delete(
    instance_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Their ids.")],
    yes: Yes = False,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """End instances.

    Example:
      aenv instance delete mini-terminal-abc12345 --yes
    """
    with gateway(system_url, api_key, timeout) as door:
        confirm(f"End {', '.join(instance_ids)}?", yes)
        for instance_id in instance_ids:
            door.delete(instance_id)
            console.say(f"ended {instance_id}")
    rows = [{"id": instance_id, "deleted": True} for instance_id in instance_ids]
    show(rows, output, "\n".join(instance_ids))


@instance.command(context_settings={"allow_interspersed_args": False})
def exec(
    instance_id: InstanceId,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="One word is a line for the shell."),
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds; then it is stopped.")
    ] = 60.0,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Run a command in an instance; exits as the command does.

    Options come before ID. With -o json or yaml the result is printed as data,
    and the exit code is 0.

    Example:
      aenv instance exec mini-terminal-abc12345 ls /
      aenv instance exec mini-terminal-abc12345 "ls | wc -l"
    """
    if command[0] == "--":  # as for ssh, docker exec and kubectl exec
        command = command[1:]
    if not command:
        raise typer.BadParameter("name a command after --", param_hint="COMMAND")
    with gateway(system_url, api_key) as door:
        done = door.exec(instance_id, command[0] if len(command) == 1 else command, timeout)
    if chosen(output) is not Format.TABLE:
        show(done, output)
        return
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.buffer.write(_output(done, name))
        stream.flush()
    if done.get("truncated"):
        console.say("aenv: output beyond the limit was cut")
    raise typer.Exit(int(done.get("exit_code", 1)))


@instance.command()
def renew(
    instance_id: InstanceId,
    ttl: Annotated[str, typer.Argument(metavar="TTL", help="From now on: 30m, 2h.")],
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Let an instance live TTL from now on.

    Example:
      aenv instance renew mini-terminal-abc12345 2h
    """
    with gateway(system_url, api_key, timeout) as door:
        found = door.renew(instance_id, ttl)
    show(found.shown(), output, f"{found.id} ends {moment(found.deadline)}")


@instance.command()
def logs(
    instance_id: InstanceId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Last lines only. Default: all kept.")
    ] = None,
    output: AsData = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Print what an instance printed.

    Where no gateway is known it is looked for on the Ray that RAY_ADDRESS
    names, or that runs on this machine.

    Example:
      aenv instance logs mini-terminal-abc12345
      aenv instance logs mini-terminal-abc12345 -f --tail 10
    """
    from aenv_ray.cli.terminal.options import knows_gateway

    as_data = None if output is Format.TABLE else output
    if follow and as_data is not None:
        raise typer.BadParameter("what goes on has no end to write", param_hint="--follow with -o")
    if not knows_gateway(system_url):
        _print(_logs_over_ray(instance_id, tail, follow), instance_id, as_data)
        return
    with gateway(system_url, api_key, timeout) as door:
        _print(door.logs(instance_id, tail, follow), instance_id, as_data)


def _print(pieces: Iterator[str], instance_id: str, as_data: Format | None) -> None:
    with contextlib.closing(pieces):  # type: ignore[type-var]  # all are generators
        if as_data is not None:
            show({"id": instance_id, "text": "".join(pieces)}, as_data)
            return
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()


def _logs_over_ray(instance_id: str, tail: int | None, follow: bool) -> Iterator[str]:
    from aenv_ray.actors.fabric import entrance
    from aenv_ray.actors.ray_shell import ray_api

    # Ray prints its warnings on standard output, which is for the log.
    with contextlib.redirect_stdout(sys.stderr):
        connection = _join()
    try:
        pieces = connection.get(instance_id).logs.remote(tail, follow)
        try:
            for piece in pieces:
                yield connection.wait(piece, f"the log of {instance_id}")
        finally:
            ray_api.cancel(pieces)
    finally:
        entrance.shutdown()


def _join() -> Fabric:
    """Connect to the Ray that runs; starting one would find no instances."""
    from aenv_ray.actors.fabric import entrance
    from aenv_ray.config import settings

    address = settings().ray_address
    try:
        return entrance.init(address or "auto")
    except FabricUnavailable as exc:
        if address is not None:
            raise
        raise FabricUnavailable(
            "no Ray runs on this machine", hint="name the cluster with RAY_ADDRESS"
        ) from exc


def _data(found: InstanceAnswer) -> dict[str, Any]:
    return found.shown() | {"environment": found.environment}


def _lines(found: InstanceAnswer) -> dict[str, Any]:
    return {
        "id": found.id,
        "environment": found.environment,
        "status": found.status,
        "reason": found.reason,
        "owner": found.owner,
        "labels": found.labels,
        "engine": found.engine,
        "created": moment(found.created_at),
        "ends": moment(found.deadline),
        "MCP": found.mcp_url,
    }


def _output(done: dict[str, Any], name: str) -> bytes:
    text = str(done.get(name) or "")
    if done.get("encoding") == "base64":
        return base64.b64decode(text)
    return text.encode(errors="surrogateescape")
