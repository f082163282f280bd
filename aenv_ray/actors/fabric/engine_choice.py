"""Which engines an instance may run on."""

from __future__ import annotations

from typing import Final, NamedTuple

from aenv_ray.config import settings
from aenv_ray.errors import ConfigError
from aenv_ray.policy import Policy
from aenv_ray.project import project
from aenv_ray.project.config import DeployChanges, NetworkMode

_ENGINES: Final = ("process", "docker", "kubernetes", "fake")
WITH_CONTAINERS: Final = ("docker", "kubernetes")
_NETWORKS: Final = {
    "process": (NetworkMode.NONE, NetworkMode.HOST),
    "docker": tuple(NetworkMode),
    "kubernetes": (NetworkMode.NONE, NetworkMode.INTERNET),
}
"""By engine: the networks with which it may be chosen for a project that names no engine."""


class PossibleEngines(NamedTuple):
    """Engines that an instance may run on."""

    names: tuple[str, ...]
    """At least one, the preferred one first."""
    is_fixed: bool
    """Whether the caller, the project or the setting named the engine. Otherwise the node where the
    instance finds room decides."""


def possible_engines(
    source: project.Project,
    policy: Policy,
    explicit: str | None = None,
    changes: DeployChanges | None = None,
) -> PossibleEngines:
    """Return the engines that instances may run on.

    The engine is `explicit`, else the one of the project's config, else the one of the setting. If
    none of these names one, all engines are possible that offer what the project needs and that the
    policy allows, first those of the workers that may join. If the policy allows none of them, all
    are returned, and the check of the policy refuses the instances.

    Raises:
        ConfigError: There is no engine with this name, or it has no container beside the instance,
            which the project needs.
    """
    given = settings()
    named = explicit or source.config.deploy.engine or given.engine
    deploy = (changes.made_to(source.config) if changes else source.config).deploy
    if named:
        if named not in _ENGINES:
            raise ConfigError(f"unknown engine {named!r}", hint=f"engines: {', '.join(_ENGINES)}")
        if named == "process" and deploy.is_dual:
            raise ConfigError(
                f"{source.config.reference}: the process engine has no second container "
                f"(deployConfig.podTemplate is {deploy.pod_template!r})",
                hint='use the docker engine: engine="docker", or deployConfig.engine',
            )
        return PossibleEngines((named,), is_fixed=True)
    needs_container = deploy.is_dual or deploy.container.image is not None
    able = [
        engine
        for engine, networks in _NETWORKS.items()
        if (deploy.network is None or deploy.network in networks)
        and (engine in WITH_CONTAINERS or not needs_container)
    ]
    allowed = [engine for engine in able if policy.allows_engine(engine)] or able
    order = (*given.joining_engines, *able)
    return PossibleEngines(tuple(sorted(allowed, key=order.index)), is_fixed=False)


def likely_engine(
    source: project.Project,
    policy: Policy,
    explicit: str | None = None,
    changes: DeployChanges | None = None,
) -> str:
    """Return the engine that an instance would get now, as far as nodes declare their engines.

    Use it where the engine must be known before there is an instance. The other arguments and
    errors are those of `possible_engines`.
    """
    from aenv_ray.actors.controller.placement import usable
    from aenv_ray.actors.ray_shell import ray_api

    names, is_fixed = possible_engines(source, policy, explicit, changes)
    if is_fixed or not ray_api.is_connected():
        return names[0]
    nodes = usable(ray_api.alive_nodes()).values()
    present = {facts.engine for facts in nodes}
    return next((name for name in names if name in present), names[0])
