"""``aenv status`` and ``aenv version``: the fabric, the configured gateway, what is installed."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import aenv_ray
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import GatewayOptions, OutputOption, with_gateway
from aenv_ray.cli.terminal.output import Format, moment, show, size
from aenv_ray.errors import AenvError
from aenv_ray.units import counted

if TYPE_CHECKING:
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.local_fabric import LocalFabric

_PACKAGES: Final = ("ray", "fastmcp", "mcp")
_HINTS: Final = {
    "starting": "if no aenv up is running, start it with: aenv up; or end it with: aenv down",
    "broken": "repair it with: aenv up; or end it with: aenv down",
}


@with_gateway
def status(gateway: GatewayOptions, output: OutputOption = None) -> None:
    """Show the fabric of `aenv up` and the configured gateway.

    Exits with 0 only if everything is up.

    Example:
      aenv status
      aenv status -o json
    """
    from aenv_ray import local_fabric
    from aenv_ray.config import settings

    fabric = local_fabric.read(settings().data_dir)
    facts: dict[str, Any] = {"state": "down"}
    if fabric is not None:
        facts = _local(fabric)
    if gateway.is_known():
        facts |= _remote(gateway.connect())
    if facts.get("gateway") == "ok" and facts["state"] == "down":
        facts["state"] = "up"
    elif facts.get("gateway") != "ok" and facts["state"] == "up":
        facts["state"] = "broken"
    show(facts, output, _lines(facts))
    if facts["state"] in _HINTS:
        console.say(_HINTS[facts["state"]])
    if facts["state"] != "up":
        raise typer.Exit(1)


def _lines(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with readable names and units."""
    lines = dict(facts)
    if "started" in facts:
        lines["started"] = moment(facts["started"])
    if "nodes" in facts:
        lines["nodes"] = [
            f"{one['machine']} ({one['node_id'][:12]}): {one['status']}, "
            f"{counted(one['instances'], 'instance')}"
            for one in facts["nodes"]
        ]
    for name, value in lines.pop("hub", {}).items():
        is_size = name.endswith("_bytes")
        lines[name.removesuffix("_bytes")] = size(value) if is_size else value
    return lines


def _local(fabric: LocalFabric) -> dict[str, Any]:
    from aenv_ray.cli.local import local_ray
    from aenv_ray.local_fabric import Phase

    answers = fabric.ray_answers()
    state = "starting" if fabric.phase is Phase.STARTING else "up" if answers else "broken"
    facts: dict[str, Any] = {
        "state": state,
        "started": fabric.started_at,
        "by": fabric.user,
        "ray": fabric.ray_address,
        "ray_answers": answers,
        "ray_is_its_own": fabric.owns_ray,
    }
    if fabric.owns_ray:
        facts["processes"] = len(local_ray.processes(fabric))
    return facts


def _remote(client: Gateway) -> dict[str, Any]:
    facts: dict[str, Any] = {"url": client.url}
    try:
        client.health()
        facts["instances"] = client.count_instances()
        facts["nodes"] = [one.shown() for one in client.nodes()]
        facts["hub"] = client.hub().shown()
    except AenvError as exc:
        return facts | {"gateway": exc.message}
    return facts | {"gateway": "ok"}


def version(
    short: Annotated[
        bool, typer.Option("--short", "-s", help="Only the version of aenv-ray.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Same as -o json.")] = False,
    output: OutputOption = None,
) -> None:
    """Show the versions of aenv-ray and of the packages it runs on.

    Example:
      aenv version --json
    """
    facts: dict[str, str | None] = {"aenv-ray": aenv_ray.__version__}
    if not short:
        facts["python"] = platform.python_version()
        facts |= {name: _installed(name) for name in _PACKAGES}
        facts["platform"] = platform.platform()
    lines = {name: value or "not installed" for name, value in facts.items()}
    show(facts, Format.JSON if as_json else output, aenv_ray.__version__ if short else lines)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
