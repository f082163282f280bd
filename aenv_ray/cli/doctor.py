"""``aenv doctor``: what works on this machine, what is missing, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output

if TYPE_CHECKING:
    from aenv_ray.findings import Finding


def doctor(output: Output = None) -> None:
    """Check what aenv needs on this machine.

    Starts and stops a sandbox with each engine. In a cluster on Kubernetes, a
    worker also creates a pod. Exits with 1 if no engine works, or if the default
    engine (AENV_ENGINE) does not.

    Example:
      aenv doctor
      aenv doctor -o json
    """
    from aenv_ray.cli.checks.printing import show_findings
    from aenv_ray.config import read_settings
    from aenv_ray.findings import Verdict

    checks = _all_checks()
    show_findings(checks, output)
    works = {
        check.name.removeprefix("engine "): check.verdict is not Verdict.FAILED
        for check in checks
        if check.name.startswith("engine ")
    }
    if not any(works.values()) or not works.get(read_settings().engine, True):
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
