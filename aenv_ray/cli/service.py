"""``aenv service``: environments that run for long, with replicas."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    ApiKey,
    AsData,
    EnvironmentHere,
    Output,
    SystemUrl,
    Timeout,
    Yes,
    confirm,
    gateway,
    reference_here,
    variables,
)
from aenv_ray.cli.terminal.output import Columns, Format, moment, printable, show, show_rows
from aenv_ray.errors import DeadlineExceeded, SandboxStartFailed

if TYPE_CHECKING:
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_records import ServiceAnswer

service = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Run environments as services, with replicas.\n\n"
    "Example:\n  aenv service create mini-terminal",
)  # fmt: skip

ServiceId = Annotated[str, typer.Argument(metavar="ID", help="The service's id, its name.")]
Replicas = Annotated[
    int | None, typer.Option("--replicas", "-r", min=0, help="Sandboxes; 0 parks the service.")
]
Scale = Annotated[str | None, typer.Option("--autoscale", help="MIN:MAX replicas, chosen by load.")]
Variables = Annotated[
    list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE for its code; repeatable.")
]
Wait = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds until it must be healthy; 0: no wait.")
]
Cpu = Annotated[
    str | None, typer.Option("--cpu", help="Cores of each sandbox: 2, 500m; '' as the environment.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Of each sandbox: 4Gi; '' as the environment.")
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="process, docker or kubernetes; '' as the environment."),
]
Image = Annotated[
    str | None, typer.Option("--image", help="Of sandboxes that are containers, else its own.")
]
Port = Annotated[
    int | None,
    typer.Option("--port", "-p", min=0, max=65535, help="Of a server inside, to be passed on to."),
]
Storage = Annotated[
    bool | None,
    typer.Option("--enable-storage/--no-storage", help="Keep a directory beyond its sandboxes."),
]
Size = Annotated[str | None, typer.Option("--storage-size", help="Of that: 10Gi; it may grow.")]
Mount = Annotated[str | None, typer.Option("--mount-path", help="Where its code sees that.")]

_COLUMNS: Final[Columns] = {
    "ID": lambda s: s["id"],
    "ENVIRONMENT": lambda s: s["environment"],
    "OWNER": lambda s: s.get("owner"),
    "STATUS": lambda s: s.get("status"),
    "REPLICAS": lambda s: f"{s.get('available_replicas')}/{s.get('replicas')}",
    "CREATED": lambda s: moment(s.get("created_at")),
}
_LOOK_S: Final = 0.5
_UP: Final = frozenset({"Running", "Pending"})


@service.command()
def create(  # noqa: PLR0913, PLR0917  # each is an option
    environment: EnvironmentHere = None,
    service_name: Annotated[
        str | None,
        typer.Option("--service-name", "-s", help="Its id: a-z, 0-9 and -. Else made up."),
    ] = None,
    replicas: Replicas = None,
    autoscale: Scale = None,
    env: Variables = None,
    engine: Engine = None,
    image: Image = None,
    cpu: Cpu = None,
    memory: Memory = None,
    port: Port = None,
    enable_storage: Storage = None,
    storage_size: Size = None,
    mount_path: Mount = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Default: the config file's, else the token's.")
    ] = None,
    wait: Wait = 120.0,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Make a service of a published environment.

    Example:
      aenv service create mini-terminal@1.0.1 --replicas 2
      aenv service create agent --service-name helpdesk --autoscale 1:4
      aenv service create notes -s notes --enable-storage --storage-size 10Gi
    """
    from aenv_ray.cli.terminal import config_file

    name = environment or reference_here("service")
    with gateway(system_url, api_key, timeout) as door:
        made = door.services.create(
            name,
            service_name=service_name,
            replicas=replicas,
            autoscale=autoscale,
            environment_variables=variables(env or [], "--env") or None,
            engine=engine,
            owner=owner or config_file.find().values.owner,
            image=image,
            cpu=cpu,
            memory=memory,
            port=port,
            enable_storage=enable_storage,
            storage_size=storage_size,
            mount_path=mount_path,
        )
        console.say(f"created service {made.id}")
        _show(_settled(door, made, wait), output)


@service.command("list")
def list_(
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Only of this NAME[@VERSION].")
    ] = None,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """List services, the newest first.

    Example:
      aenv service list --name mini-terminal
      aenv service list -o json
    """
    with gateway(system_url, api_key, timeout) as door:
        found = door.services.find(name)
    rows = [one.shown() | {"environment": one.environment} for one in found]
    show_rows(rows, output, _COLUMNS, empty="no services; make one with: aenv service create")


@service.command()
def get(
    service_id: ServiceId,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show one service.

    Example:
      aenv service get helpdesk -o json
    """
    with gateway(system_url, api_key, timeout) as door:
        _show(door.services.get(service_id), output)


@service.command()
def update(  # noqa: PLR0913, PLR0917  # each is an option
    service_id: ServiceId,
    replicas: Replicas = None,
    autoscale: Annotated[
        str | None,
        typer.Option("--autoscale", help="MIN:MAX replicas, chosen by load; '' ends it."),
    ] = None,
    env: Variables = None,
    to: Annotated[str | None, typer.Option("--to", help="Another version: NAME@VERSION.")] = None,
    engine: Engine = None,
    image: Image = None,
    cpu: Cpu = None,
    memory: Memory = None,
    port: Port = None,
    enable_storage: Storage = None,
    storage_size: Size = None,
    mount_path: Mount = None,
    wait: Wait = 120.0,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Change a service; new replicas are healthy before old go.

    Variables are added to those that it has. Of a storage with one writer the old replica lets go
    first, and calls wait for the new one; it comes back when that does not get healthy.

    Example:
      aenv service update helpdesk --replicas 3
      aenv service update helpdesk --to agent@1.1.0 -e MODEL=small --memory 4Gi
    """
    changes = {
        "replicas": replicas,
        "autoscale": autoscale,
        "environment_variables": variables(env or [], "--env") or None,
        "envName": to,
        "engine": engine,
        "image": image,
        "cpu": cpu,
        "memory": memory,
        "port": port,
        "enable_storage": enable_storage,
        "storage_size": storage_size,
        "mount_path": mount_path,
    }
    if all(value is None for value in changes.values()):
        raise typer.BadParameter("say what changes, for example --replicas, --to or --env")
    with gateway(system_url, api_key, timeout) as door:
        changed = door.services.update(service_id, **changes)
        _show(_settled(door, changed, wait), output)


@service.command()
def logs(
    service_id: ServiceId,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="The last lines of each replica.")
    ] = None,
    output: AsData = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show what the replicas of a service printed.

    Example:
      aenv service logs helpdesk --tail 20
    """
    with gateway(system_url, api_key, timeout) as door:
        text = door.services.logs(service_id, tail)
    if output in {None, Format.TABLE}:
        sys.stdout.write(printable(text, keep="\n\t"))
    else:
        show({"id": service_id, "text": text}, output)


@service.command()
def delete(
    service_id: ServiceId,
    delete_storage: Annotated[
        bool, typer.Option("--delete-storage", help="Delete what it kept, too.")
    ] = False,
    yes: Yes = False,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """End a service; calls under way end first.

    What it kept stays, and a service of the same name and owner finds it again, unless it is
    deleted too.

    Example:
      aenv service delete helpdesk --yes
      aenv service delete notes --delete-storage --yes
    """
    with gateway(system_url, api_key, timeout) as door:
        what = " and delete its storage" if delete_storage else ""
        confirm(f"End service {service_id}{what}?", yes)
        door.services.delete(service_id, delete_storage=delete_storage)
    show({"id": service_id, "deleted": True}, output, service_id)


def _settled(door: Gateway, found: ServiceAnswer, wait_s: float) -> ServiceAnswer:
    """Return a service once it is as it should be.

    Raises:
        SandboxStartFailed: It cannot become so.
        DeadlineExceeded: It did not become so in time.
    """
    until = time.monotonic() + wait_s
    while wait_s:
        found = door.services.get(found.id)
        if found.status in _UP and found.available_replicas >= found.replicas:
            break
        if found.status == "Failed":
            answer = found.available_replicas
            raise SandboxStartFailed(
                f"service {found.id} is Failed: {found.reason}",
                hint=f"{answer} of its replicas answer all the same"
                if answer
                else f"change it with: aenv service update {found.id}, or delete it",
            )
        if time.monotonic() > until:
            raise DeadlineExceeded(
                f"service {found.id} is {found.status} after {wait_s:g} s",
                hint=f"look again: aenv service get {found.id}",
            )
        time.sleep(_LOOK_S)
    return found


def _show(found: ServiceAnswer, output: Any) -> None:
    lines = {
        "id": found.id,
        "environment": found.environment,
        "status": found.status,
        "reason": found.reason,
        "replicas": f"{found.available_replicas}/{found.replicas}",
        "autoscale": found.autoscale,
        "owner": found.owner,
        "engine": found.engine,
        "image": found.image,
        "cpu": found.cpu,
        "memory": found.memory,
        "port": found.port,
        "storage": f"{found.storage_size} at {found.mount_path} ({found.pvc_name})"
        if found.pvc_name
        else "",
        "variables": found.environment_variables,
        "mcp": found.mcp_url,
        "functions": f"{found.service_url}/functions" if found.service_url else "",
        "created": moment(found.created_at),
        "updated": moment(found.updated_at),
    }
    show(found.shown(), output, lines)
