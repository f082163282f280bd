"""``aenv doctor``: what works on this machine, what is missing, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import OutputOption
from aenv_ray.cli.terminal.output import Format, show_findings

if TYPE_CHECKING:
    from aenv_ray.findings import Finding


def doctor(
    security: Annotated[
        bool, typer.Option("--security", help="Report what is defended here, and what is not.")
    ] = False,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="With --security: judge as if a gateway ran here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    output: OutputOption = None,
) -> None:
    """Check what aenv needs on this machine.

    Starts and stops a process sandbox and, if AENV_DOCKER_IMAGE is set, a
    container. In a cluster on Kubernetes, a worker also creates a pod. Exits with
    1 if no engine works, or if the default engine (AENV_ENGINE) does not.

    With --security, reports how publishers, agents, owners and other users of the
    machine are separated. Exits with 1 if something has to be configured where a
    gateway runs; see docs/security.md.

    Example:
      aenv doctor
      aenv doctor --security --gateway -o json
    """
    form = Format.JSON if as_json else output
    if security:
        _security(form, gateway=gateway)
    else:
        _general(form)


def _security(form: Format | None, *, gateway: bool) -> None:
    from aenv_ray import local_fabric
    from aenv_ray.cli.checks import security as security_checks
    from aenv_ray.config import settings
    from aenv_ray.findings import Verdict

    given = settings()
    fabric = local_fabric.read(given.data_dir)
    has_gateway = gateway or fabric is not None or given.is_in_kuberay
    console.say("checking sandboxes, settings, files and addresses …")
    found = security_checks.findings(given, fabric, behind_gateway=has_gateway)
    show_findings(found, form)
    if not has_gateway:
        console.say("\nno gateway runs here; judge as if one did with: --gateway")
    if any(finding.verdict is Verdict.FAILED for finding in found):
        raise typer.Exit(1)


def _general(form: Format | None) -> None:
    from aenv_ray.config import read_settings
    from aenv_ray.findings import Verdict

    checks = _all_checks()
    show_findings(checks, form)
    works = {
        check.name.removeprefix("engine "): check.verdict is not Verdict.FAILED
        for check in checks
        if check.name.startswith("engine ")
    }
    given = read_settings()
    wanted = given.engine or next(iter(given.joining_engines), "")
    if not any(works.values()) or not works.get(wanted, True):
        raise typer.Exit(1)


def _all_checks() -> list[Finding]:
    from aenv_ray import local_fabric
    from aenv_ray.cli.checks import kubernetes as kubernetes_checks
    from aenv_ray.cli.checks import node as node_checks
    from aenv_ray.config import settings

    console.say("trying the engines …")
    given = settings()
    has_pods = kubernetes_checks.applies(given)
    is_up = local_fabric.read(given.data_dir) is not None
    # In a cluster on Kubernetes, the gateway uses the two ports.
    ports = [] if has_pods else node_checks.ports("127.0.0.1", (8080, 8081), is_up)
    return [
        node_checks.versions(),
        *node_checks.engines(given),
        *(kubernetes_checks.engine(given) if has_pods else []),
        node_checks.ray(given),
        node_checks.redis(given),
        *ports,
        *node_checks.disk(given),
        node_checks.internet(),
    ]
