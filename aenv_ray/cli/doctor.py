"""``aenv doctor``: what works on this machine, what is missing, and the command that mends it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output

if TYPE_CHECKING:
    from aenv_ray.findings import Finding


def doctor(output: Output = None) -> None:
    """Try what aenv needs on this machine.

    Starts a sandbox of each engine, and ends it. In a cluster on Kubernetes that
    is a pod as well, made by a worker. Exits with 1 when no engine works, or not
    the one that AENV_ENGINE names.

    Example:
      aenv doctor
      aenv doctor -o json
    """
    from aenv_ray.cli.checks.printing import show_findings
    from aenv_ray.findings import Verdict

    checks = _all_checks()
    show_findings(checks, output)
    works = {
        check.name.removeprefix("engine "): check.verdict is not Verdict.FAILED
        for check in checks
        if check.name.startswith("engine ")
    }
    if not any(works.values()) or not works.get(os.environ.get("AENV_ENGINE", ""), True):
        raise typer.Exit(1)


def _all_checks() -> list[Finding]:
    from aenv_ray import local_fabric
    from aenv_ray.cli.checks import kubernetes as checks_kubernetes
    from aenv_ray.cli.checks import node as checks
    from aenv_ray.config import settings

    console.say("trying the engines …")
    given = settings()
    in_pod = checks_kubernetes.is_here(given)
    is_up = local_fabric.read(given.data_dir) is not None
    return [
        checks.versions(),
        *checks.engines(given),
        *(checks_kubernetes.engine(given) if in_pod else []),
        checks.ray(given),
        checks.redis(given),
        *([] if in_pod else checks.ports("127.0.0.1", (8080, 8081), is_up)),  # the gateway's there
        *checks.disk(given),
        checks.internet(),
    ]
