"""``aenv service``: long-running environments with replicas."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    DataFormatOption,
    EnvironmentArgument,
    GatewayOptions,
    OutputOption,
    VariablesOption,
    YesOption,
    confirm,
    reference_here,
    variables,
    with_gateway,
)
from aenv_ray.cli.terminal.output import Columns, Format, moment, printable, show, show_rows
from aenv_ray.errors import DeadlineExceeded, SandboxStartFailed

if TYPE_CHECKING:
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_records import ServiceAnswer

service = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Run environments as services with replicas.\n\n"
    "Example:\n  aenv service create mini-terminal",
)  # fmt: skip

ServiceIdArgument = Annotated[str, typer.Argument(metavar="ID", help="Service id.")]
ReplicasOption = Annotated[
    int | None,
    typer.Option("--replicas", "-r", min=0, help="Number of sandboxes; 0 pauses the service."),
]
AutoscaleOption = Annotated[
    str | None, typer.Option("--autoscale", help="MIN:MAX replicas, depending on load.")
]
WaitOption = Annotated[
    float,
    typer.Option("--wait", min=0, help="Seconds to wait until it is healthy; 0 does not wait."),
]
CpuOption = Annotated[
    str | None, typer.Option("--cpu", help="Cores of each sandbox: 2, 500m; '' for the default.")
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help="Memory of each sandbox: 4Gi; '' for the default.")
]
ServiceEngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="process, docker or kubernetes; '' for the default."),
]
ServiceImageOption = Annotated[
    str | None, typer.Option("--image", help="Container image. Default: the environment's.")
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port", "-p", min=0, max=65535, help="Forward requests to this port inside the sandbox."
    ),
]
StorageOption = Annotated[
    bool | None,
    typer.Option("--enable-storage/--no-storage", help="Keep a directory when sandboxes end."),
]
StorageSizeOption = Annotated[
    str | None, typer.Option("--storage-size", help="Storage size: 10Gi; can be increased.")
]
MountPathOption = Annotated[
    str | None, typer.Option("--mount-path", help="Path of the storage in the sandbox.")
]

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
@with_gateway
def create(  # noqa: PLR0913, PLR0917  # each is an option
    gateway: GatewayOptions,
    environment: EnvironmentArgument = None,
    service_name: Annotated[
        str | None,
        typer.Option(
            "--service-name", "-s", help="Service id: a-z, 0-9 and -. Default: generated."
        ),
    ] = None,
    replicas: ReplicasOption = None,
    autoscale: AutoscaleOption = None,
    env: VariablesOption = None,
    engine: ServiceEngineOption = None,
    image: ServiceImageOption = None,
    cpu: CpuOption = None,
    memory: MemoryOption = None,
    port: PortOption = None,
    enable_storage: StorageOption = None,
    storage_size: StorageSizeOption = None,
    mount_path: MountPathOption = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Default: config file, else the token's owner.")
    ] = None,
    wait: WaitOption = 120.0,
    output: OutputOption = None,
) -> None:
    """Create a service of a published environment.

    Example:
      aenv service create mini-terminal@1.0.0 --replicas 2
      aenv service create agent --service-name helpdesk --autoscale 1:4
      aenv service create notes -s notes --enable-storage --storage-size 10Gi
    """
    from aenv_ray.cli.terminal import config_file

    name = environment or reference_here("service")
    client = gateway.connect()
    made = client.services.create(
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
    _show(_settled(client, made, wait), output)


@service.command("list")
@with_gateway
def list_(
    gateway: GatewayOptions,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Only this NAME[@VERSION].")
    ] = None,
    output: OutputOption = None,
) -> None:
    """List services, the newest first.

    Example:
      aenv service list --name mini-terminal
      aenv service list -o json
    """
    found = gateway.connect().services.find(name)
    rows = [one.shown() | {"environment": one.environment} for one in found]
    show_rows(rows, output, _COLUMNS, empty="no services; create one with: aenv service create")


@service.command()
@with_gateway
def get(
    gateway: GatewayOptions,
    service_id: ServiceIdArgument,
    output: OutputOption = None,
) -> None:
    """Show one service.

    Example:
      aenv service get helpdesk -o json
    """
    _show(gateway.connect().services.get(service_id), output)


@service.command()
@with_gateway
def update(  # noqa: PLR0913, PLR0917  # each is an option
    gateway: GatewayOptions,
    service_id: ServiceIdArgument,
    replicas: ReplicasOption = None,
    autoscale: Annotated[
        str | None,
        typer.Option("--autoscale", help="MIN:MAX replicas, depending on load; '' disables it."),
    ] = None,
    env: VariablesOption = None,
    to: Annotated[str | None, typer.Option("--to", help="Another version: NAME@VERSION.")] = None,
    engine: ServiceEngineOption = None,
    image: ServiceImageOption = None,
    cpu: CpuOption = None,
    memory: MemoryOption = None,
    port: PortOption = None,
    enable_storage: StorageOption = None,
    storage_size: StorageSizeOption = None,
    mount_path: MountPathOption = None,
    wait: WaitOption = 120.0,
    output: OutputOption = None,
) -> None:
    """Change a service; old replicas end when new ones are healthy.

    Variables are added to the existing ones. If the storage allows one writer, the old replica ends
    first and calls wait for the new one; if that does not become healthy, the old one is restored.

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
        raise typer.BadParameter("no change given, for example --replicas, --to or --env")
    client = gateway.connect()
    changed = client.services.update(service_id, **changes)
    _show(_settled(client, changed, wait), output)


@service.command()
@with_gateway
def logs(
    gateway: GatewayOptions,
    service_id: ServiceIdArgument,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only this many last lines of each replica.")
    ] = None,
    output: DataFormatOption = None,
) -> None:
    """Print the output of a service's replicas.

    Example:
      aenv service logs helpdesk --tail 20
    """
    text = gateway.connect().services.logs(service_id, tail)
    if output in {None, Format.TABLE}:
        sys.stdout.write(printable(text, keep="\n\t"))
    else:
        show({"id": service_id, "text": text}, output)


@service.command()
@with_gateway
def delete(
    gateway: GatewayOptions,
    service_id: ServiceIdArgument,
    delete_storage: Annotated[
        bool, typer.Option("--delete-storage", help="Also delete its storage.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """End a service after its running calls.

    Its storage is kept for a service with the same name and owner, unless --delete-storage is
    given.

    Example:
      aenv service delete helpdesk --yes
      aenv service delete notes --delete-storage --yes
    """
    client = gateway.connect()
    what = " and delete its storage" if delete_storage else ""
    confirm(f"End service {service_id}{what}?", yes)
    client.services.delete(service_id, delete_storage=delete_storage)
    show({"id": service_id, "deleted": True}, output, service_id)


def _settled(client: Gateway, found: ServiceAnswer, wait_s: float) -> ServiceAnswer:
    """Return a service once all its replicas are available.

    Raises:
        SandboxStartFailed: The service failed.
        DeadlineExceeded: The replicas were not available in time.
    """
    until = time.monotonic() + wait_s
    while wait_s:
        found = client.services.get(found.id)
        if found.status in _UP and found.available_replicas >= found.replicas:
            break
        if found.status == "Failed":
            answer = found.available_replicas
            raise SandboxStartFailed(
                f"service {found.id} is Failed: {found.reason}",
                hint=f"{answer} of its replicas still answer; see: aenv service logs {found.id}"
                if answer
                else f"change it with: aenv service update {found.id}, or delete it",
            )
        if time.monotonic() > until:
            raise DeadlineExceeded(
                f"service {found.id} is {found.status} after {wait_s:g} s",
                hint=f"check it with: aenv service get {found.id}",
            )
        time.sleep(_LOOK_S)
    return found


def _chosen(found: ServiceAnswer) -> str:
    return f"{found.chosen_engine} (chosen by the cluster)" if found.chosen_engine else ""


def _show(found: ServiceAnswer, output: Any) -> None:
    lines = {
        "id": found.id,
        "environment": found.environment,
        "status": found.status,
        "reason": found.reason,
        "replicas": f"{found.available_replicas}/{found.replicas}",
        "autoscale": found.autoscale,
        "owner": found.owner,
        "engine": found.engine or _chosen(found),
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
