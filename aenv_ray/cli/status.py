"""``aenv status`` and ``aenv hub``: the fabric on this machine, the configured gateway, its hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import ApiKey, Output, SystemUrl, Timeout, gateway, knows_gateway
from aenv_ray.cli.terminal.output import Columns, moment, show, show_rows, size
from aenv_ray.errors import AenvError

if TYPE_CHECKING:
    from aenv_ray.local_fabric import LocalFabric

_HINTS: Final = {
    "starting": "if no aenv up is running, start it with: aenv up; or end it with: aenv down",
    "broken": "repair it with: aenv up; or end it with: aenv down",
}

_AUDIT: Final[Columns] = {
    "ID": lambda r: r["id"],
    "TIME": lambda r: moment(r["at"]),
    "WHO": lambda r: r["actor"],
    "ROLE": lambda r: r["role"],
    "ACTION": lambda r: r["action"],
    "SUBJECT": lambda r: r["subject"],
    "OUTCOME": lambda r: r["outcome"],
    "DETAIL": lambda r: ", ".join(f"{key}={value}" for key, value in r["detail"].items()),
}


def status(
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
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
    if knows_gateway(system_url):
        facts |= _remote(system_url, api_key, timeout)
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


def _remote(system_url: str | None, api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    with gateway(system_url, api_key, timeout_s) as door:
        facts: dict[str, Any] = {"url": door.url}
        try:
            door.health()
            facts["instances"] = door.count_instances()
            facts["hub"] = door.hub()
        except AenvError as exc:
            return facts | {"gateway": exc.message}
    return facts | {"gateway": "ok"}


hub = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Show the hub, which stores environments, leases and tokens.\n\n"
    "Example:\n  aenv hub status",
)  # fmt: skip


@hub.command("status")
def hub_status(
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show the hub's contents, storage and start time.

    Example:
      aenv hub status -o json
    """
    with gateway(system_url, api_key, timeout) as door:
        show(door.hub(), output)


@hub.command()
def audit(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Records.")] = 50,
    before: Annotated[
        str | None, typer.Option("--before", help="Only records older than this id.")
    ] = None,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show who changed what, the latest first; needs an admin token.

    Example:
      aenv hub audit -n 20
    """
    with gateway(system_url, api_key, timeout) as door:
        rows = door.audit_log(limit, before)
    show_rows(rows, output, _AUDIT, empty="the audit log is empty")
