"""Asks the shared hosts to keep sandboxes ready: `aenv_ray.warm` (design D9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray import units
from aenv_ray.actors.controller.placement import spread
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import CREATE_DEADLINE_S
from aenv_ray.actors.fabric.entrance import init
from aenv_ray.actors.fabric.references import resolve
from aenv_ray.actors.fabric.waits import run_blocking
from aenv_ray.actors.host.warm_requests import WarmRequest
from aenv_ray.errors import ConfigError

_ANSWER_S: Final = 30.0
"""A host says within this that it was asked, beyond what it was asked to wait for."""


def warm(
    environment: str | Path,
    count: int,
    *,
    wait: bool = False,
    lifetime: Literal["job", "detached"] = "job",
    idle_timeout: str | float = "30m",
    engine: str | None = None,
    environment_variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    datasource: str = "",
) -> int:
    """Keep sandboxes ready in the cluster, so that creates of shared density need not start them.

    They are divided among the shared hosts that there are now, started in the background at a
    bounded rate, and replaced as they are taken. A create takes one whose `engine`,
    `environment_variables`, `arguments`, `labels` and `datasource` are equal; TTL, idle timeout and
    owner are its own. A repeated request of a job for the same pool replaces the earlier one.

    Args:
        environment: As in `create`.
        count: How many in the whole cluster. 0: none, and none by recent demand either; those that
            this was asked for before, and nobody took, are gone when it returns.
        wait: Return only when all are ready.
        lifetime: ``job``: ends with the Ray job of the caller; ``detached``: until asked for 0 with
            the same `lifetime`.
        idle_timeout: They are ended when nobody created one for this long, and come back with the
            next create.
        engine: As in `create`, like the options below.
        environment_variables: Their sandboxes are started with these.
        arguments: Like `environment_variables`.
        labels: Like `environment_variables`.
        datasource: Like `environment_variables`.

    Returns:
        How many are ready now.

    Raises:
        EnvironmentNotFound: No such environment or project.
        ConfigError: A malformed option.
        CapacityExceeded: So many do not fit.
        FabricUnavailable: A host does not answer; others may keep their share ready.
        SandboxStartFailed: One did not start, when that was waited for; it is tried again.
        DeadlineExceeded: They are not ready after five minutes, when that was waited for.
    """
    if count < 0:
        raise ConfigError(f"count {count!r} is not a number of sandboxes, 0 or more")
    options = CreateOptions(
        actor="shared", lifetime=lifetime, engine=engine, arguments=arguments, labels=labels,
        environment_variables=environment_variables, datasource=datasource,
    )  # fmt: skip
    idle_s = units.parse_duration_s(idle_timeout, what="idle timeout")
    source = resolve(environment, init)
    fabric = init()
    (pattern,) = options.specs(source, 1, job_id=fabric.ray.job_id())
    hosts = fabric.shared_hosts(count)
    shares = spread(count, [load for load, _ in hosts])
    asked: list[tuple[str, Any]] = []
    for load, host in hosts:
        share = shares.get(load.name, 0)
        if share:
            run_blocking(fabric.protocol.send_if_missing(source, load.node_id, host))
        request = WarmRequest(spec=pattern, count=share, idle_timeout_s=idle_s)
        wait_s = CREATE_DEADLINE_S if wait and share else None
        asked.append((load.name, host.warm.remote(request, wait_s)))
    deadline_s = _ANSWER_S + (CREATE_DEADLINE_S if wait else 0.0)
    return sum(fabric.wait(ref, f"warming {name}", deadline_s) for name, ref in asked)
