"""`aenv_ray.warm`: ask the shared hosts to keep sandboxes ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray import units
from aenv_ray.actors.controller.placement import spread
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import CREATE_DEADLINE_S
from aenv_ray.actors.fabric.driver_api import init
from aenv_ray.actors.fabric.references import resolve_environment
from aenv_ray.actors.host.pool import WarmRequest
from aenv_ray.actors.ray_shell import operator_policy, ray_api
from aenv_ray.blocking import run_blocking
from aenv_ray.errors import ConfigError

_ANSWER_S: Final = 30.0
"""Deadline of a host's answer, in addition to the requested wait."""


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
    """Keep warm sandboxes in the cluster, so that creates with ``actor="shared"`` start faster.

    The sandboxes are divided among the present shared hosts, started in the background at a limited
    rate, and replaced when they are taken. A create takes a sandbox with the same `engine`,
    `environment_variables`, `arguments`, `labels` and `datasource`; TTL, idle timeout and owner are
    those of the create. If a job asks again for the same pool, the new request replaces the old.

    Args:
        environment: As in `create`.
        count: Number of sandboxes in the whole cluster. 0: no warm sandboxes, not even by recent
            demand; those of an earlier request are gone when this returns.
        wait: Return only when all are ready.
        lifetime: ``job``: the request ends with the Ray job of the caller; ``detached``: it lasts
            until a request for 0 with the same `lifetime`.
        idle_timeout: The sandboxes end once no create has used the pool for this long, and come
            back with the next create.
        engine: As in `create`, like the options below.
        environment_variables: The sandboxes start with these.
        arguments: Like `environment_variables`.
        labels: Like `environment_variables`.
        datasource: Like `environment_variables`.

    Returns:
        The number of sandboxes that are ready now.

    Raises:
        EnvironmentNotFound: The environment or project does not exist.
        ConfigError: An option is invalid.
        CapacityExceeded: The hosts do not have that many free slots.
        FabricUnavailable: A host does not answer; the others keep their share ready.
        SandboxStartFailed: With `wait`: a sandbox did not start; the host tries again.
        DeadlineExceeded: With `wait`: the sandboxes are not ready after five minutes.
    """
    if count < 0:
        raise ConfigError(
            f"count {count!r} is negative", hint="pass the number of sandboxes, or 0 for none"
        )
    options = CreateOptions(
        actor="shared", lifetime=lifetime, engine=engine, arguments=arguments, labels=labels,
        environment_variables=environment_variables, datasource=datasource,
    )  # fmt: skip
    idle_s = units.parse_duration_s(idle_timeout, what="idle timeout")
    source = resolve_environment(environment, init)
    fabric = init()
    (pattern,) = options.specs(source, 1, job_id=ray_api.job_id(), policy=operator_policy.current())
    hosts = fabric.shared_hosts(count, pattern.possible_engines)
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
