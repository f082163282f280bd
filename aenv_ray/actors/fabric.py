"""The entrance for Ray code: `init`, `create`, `create_many`, `get`, `list_instances`, `shutdown`.

These functions block; in async code, call them in a thread or use `aenv_ray.Environment`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray import ids, project, units
from aenv_ray.actors.handle import EnvHandle
from aenv_ray.actors.placement import HostLoad, spread
from aenv_ray.config import settings
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InstanceError,
    InstanceNotFound,
)
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec, InstanceStatus, Lifetime

logger = logging.getLogger("aenv_ray")

CREATE_DEADLINE_S: Final = 300.0
"""Longest wait for a create: it may build a virtual environment first."""
TELL_S: Final = 5.0
"""A create that takes longer says what it waits for, this often."""
_ENGINES: Final = ("process", "docker", "fake")


class Fabric:
    """A connection of this process to the fabric of a Ray cluster."""

    def __init__(self, address: str | None = None) -> None:
        from aenv_ray.actors import controller, ray_api

        self.ray = ray_api
        self.owns_ray = ray_api.ensure_ray(address)
        self.controller = controller.ensure_controller()
        self._hosts: list[tuple[HostLoad, Any]] = []
        self._placed: dict[str, int] = {}
        self._shipped: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._noticed: set[str] = set()
        self.wait(self.controller.ping.remote(), "the controller", 120.0)

    def wait(self, reference: Any, what: str, deadline_s: float = CREATE_DEADLINE_S) -> Any:
        """Return what a reference becomes, with our errors instead of Ray's.

        Raises:
            FabricUnavailable: The actor behind it is gone, or `deadline_s` passed.
            AenvError: What the actor raised.
        """
        import ray

        with self.ray.translated(what):
            try:
                return ray.get(reference, timeout=deadline_s)
            except ray.exceptions.GetTimeoutError as exc:
                raise FabricUnavailable(f"{what} did not answer within {deadline_s:g} s") from exc

    def _wait_telling(self, reference: Any, what: str, source: project.Project) -> Any:
        """Wait as `wait` does, saying now and then what takes so long."""
        import ray

        waited_s = 0.0
        while waited_s < CREATE_DEADLINE_S and not ray.wait([reference], timeout=TELL_S)[0]:
            waited_s += TELL_S
            installs = (source.path / "requirements.txt").is_file()
            doing = "the node installs its requirements" if installs else "the cluster is busy"
            logger.warning("%s: %s, %.0f s so far", what, doing, waited_s)
        return self.wait(reference, what, max(1.0, CREATE_DEADLINE_S - waited_s))

    # --- creating -------------------------------------------------------------------------------

    def specs(
        self, source: project.Project, count: int, options: CreateOptions
    ) -> list[InstanceSpec]:
        """Return the specs of `count` new instances of a project."""
        deploy = source.config.deploy
        ttl = deploy.ttl if options.ttl is None else options.ttl
        ttl_s = units.DEFAULT_TTL_S if ttl is None else units.parse_duration_s(ttl, what="ttl")
        idle = deploy.idle_timeout if options.idle_timeout is None else options.idle_timeout
        job_id = None if options.lifetime is Lifetime.DETACHED else self.ray.job_id()
        return [
            InstanceSpec(
                instance_id=ids.new_instance_id(source.config.name),
                reference=source.reference,
                digest=source.digest,
                ttl_s=ttl_s,
                idle_timeout_s=None
                if idle is None
                else units.parse_duration_s(idle, what="idle timeout"),
                environment_variables=options.environment_variables,
                arguments=options.arguments,
                labels=options.labels,
                owner=options.owner,
                datasource=options.datasource,
                engine=_engine(options.engine or deploy.engine or settings().engine),
                job_id=job_id,
            )
            for _ in range(count)
        ]

    def create(
        self, source: project.Project, count: int, options: CreateOptions
    ) -> list[EnvHandle]:
        """Make `count` instances, all or none."""
        self._notice(source)
        specs = self.specs(source, count, options)
        try:
            if options.actor is ActorDensity.DEDICATED:
                pairs = self._create_dedicated(source, specs)
            else:
                pairs = self._create_shared(source, specs)
        except BaseException:
            # Cancelled or half done: whatever came to be must not live on.
            self.controller.release.remote([spec.instance_id for spec in specs])
            raise
        failures = [outcome for _, outcome in pairs if isinstance(outcome, AenvError)]
        if failures:
            made = [o.id for _, o in pairs if isinstance(o, InstanceInfo)]
            self.wait(self.controller.release.remote(made), "releasing a failed group")
            raise _named(failures[0], len(failures), count)
        return [
            EnvHandle(spec.instance_id, spec.reference, host, self.controller)
            for spec, (host, _) in zip(specs, pairs, strict=True)
        ]

    def _create_dedicated(
        self, source: project.Project, specs: Sequence[InstanceSpec]
    ) -> list[tuple[Any, InstanceInfo | AenvError]]:
        reference = self.controller.create_dedicated.remote(list(specs), source.archive())
        what = f"creating {len(specs)} of {source.reference}"
        return list(self._wait_telling(reference, what, source))

    def _create_shared(
        self, source: project.Project, specs: Sequence[InstanceSpec]
    ) -> list[tuple[Any, InstanceInfo | AenvError]]:
        for attempt in (1, 2):
            groups = self._place(specs, refresh=attempt > 1)
            try:
                return self._start_on(groups, source)
            except (CapacityExceeded, FabricUnavailable):
                # Others filled the hosts, or a node went: look at them anew, once.
                if attempt == 2:
                    raise
        raise AssertionError

    def _place(
        self, specs: Sequence[InstanceSpec], *, refresh: bool
    ) -> list[tuple[str, Any, list[InstanceSpec]]]:
        with self._lock:
            if refresh or not self._hosts:
                reference = self.controller.shared_hosts.remote()
                self._hosts = self.wait(reference, "the shared hosts")
                self._placed = {load.name: load.instances for load, _ in self._hosts}
            loads = [
                HostLoad(h.name, h.node_id, min(self._placed[h.name], h.capacity), h.capacity)
                for h, _ in self._hosts
            ]
            if len(loads) > 1 or refresh:
                shares = spread(len(specs), loads)
            else:
                # One host: it knows its own load better than this count does.
                shares = {loads[0].name: len(specs)} if loads else {}
            if not shares and specs:
                raise FabricUnavailable("no node of the cluster has a host")
            groups, start = [], 0
            for load, host in self._hosts:
                share = shares.get(load.name, 0)
                if share:
                    groups.append((load.name, host, list(specs[start : start + share])))
                    self._placed[load.name] += share
                    start += share
        return groups

    def _start_on(
        self, groups: list[tuple[str, Any, list[InstanceSpec]]], source: project.Project
    ) -> list[tuple[Any, InstanceInfo | AenvError]]:
        for name, host, _ in groups:
            self._ship(name, host, source)
        references = [host.control.remote("start", specs) for _, host, specs in groups]
        pairs: list[tuple[Any, InstanceInfo | AenvError]] = []
        for (name, host, _), reference in zip(groups, references, strict=True):
            outcomes = self._wait_telling(reference, f"creating on {name}", source)
            pairs += [(host, outcome) for outcome in outcomes]
        return pairs

    def _ship(self, name: str, host: Any, source: project.Project) -> None:
        """Make sure that a host's node has the project's files."""
        if (name, source.digest) in self._shipped:
            return
        if not self.wait(host.control.remote("has_project", source.digest), f"host {name}"):
            reference = host.control.remote("put_project", source.digest, source.archive())
            self.wait(reference, f"sending the project to {name}")
        self._shipped.add((name, source.digest))

    def _notice(self, source: project.Project) -> None:
        if source.config.deploy.network is None and source.digest not in self._noticed:
            self._noticed.add(source.digest)
            logger.warning(
                "%s names no deployConfig.network: its instances use the node's network and can "
                'reach Ray; write "network": "none" unless its tools need more',
                source.reference,
            )

    # --- finding --------------------------------------------------------------------------------

    def get(self, instance_id: str) -> EnvHandle:
        """Return a handle to a live instance."""
        reference = self.controller.locate.remote(instance_id)
        host, info = self.wait(reference, f"finding {instance_id}", 60.0)
        if info.status is not InstanceStatus.RUNNING:
            raise InstanceNotFound(
                f"{instance_id} has ended", instance_id=instance_id, hint="create a new instance"
            )
        return EnvHandle(info.id, info.reference, host, self.controller)

    def count_processes(self) -> int:
        """Return how many sandbox processes the cluster runs, by its operating systems."""
        return int(self.wait(self.controller.count_processes.remote(), "counting", 60.0))

    def list_instances(self) -> list[InstanceInfo]:
        """Return the live instances."""
        return list(self.wait(self.controller.list_instances.remote(), "listing instances", 60.0))


class CreateOptions:
    """The optional arguments of a create, parsed."""

    def __init__(
        self,
        *,
        actor: str = "dedicated",
        lifetime: str = "job",
        ttl: str | float | None = None,
        idle_timeout: str | float | None = None,
        engine: str | None = None,
        environment_variables: Mapping[str, str] | None = None,
        arguments: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        owner: str | None = None,
        datasource: str = "",
    ) -> None:
        self.actor = _member(ActorDensity, actor, "actor")
        self.lifetime = _member(Lifetime, lifetime, "lifetime")
        self.ttl = None if ttl == "" else ttl  # AEnvironment's clients send "" for none
        self.idle_timeout = None if idle_timeout == "" else idle_timeout
        self.engine = engine
        self.environment_variables = _strings(environment_variables, "environment_variables")
        for name in self.environment_variables:
            if not name or "=" in name:
                raise ConfigError(f"environment_variables[{name!r}] is no name of a variable")
        self.arguments = _texts(arguments, "arguments")
        self.labels = _strings(labels, "labels")
        self.owner = None if owner is None else _text(owner, "owner")
        self.datasource = _text(datasource, "datasource")


def _member(kind: Any, value: str, what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{what} {value!r} is unknown", hint=f"it is one of {known}") from None


def _strings(values: Mapping[Any, Any] | None, what: str) -> dict[str, str]:
    if not isinstance(values, Mapping | None):
        raise ConfigError(f"{what} is {type(values).__name__}, not a mapping of text to text")
    return {
        _text(key, f"a key of {what}"): _text(value, f"{what}[{key!r}]")
        for key, value in (values or {}).items()
    }


def _texts(values: Sequence[Any] | None, what: str) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence | None):
        raise ConfigError(f"{what} {values!r} is not a list of texts", hint="write it as a list")
    return tuple(_text(value, f"{what}[{n}]") for n, value in enumerate(values or ()))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{what} is {type(value).__name__}, not text",
            hint="convert it with str(), or leave it out",
        )
    if "\0" in value:
        raise ConfigError(f"{what} holds a NUL character, which no process can be given")
    return value


def _engine(name: str) -> str:
    if name not in _ENGINES:
        raise ConfigError(f"there is no engine {name!r}", hint=f"engines: {', '.join(_ENGINES)}")
    return name


def _named(error: AenvError, failed: int, count: int) -> AenvError:
    if count > 1 and isinstance(error, InstanceError):
        return type(error)(
            f"{failed} of {count} instances failed, so none was made; the first: {error.message}",
            instance_id=error.instance_id,
            hint=error.hint,
        )
    return error


_fabric: Fabric | None = None
_fabric_lock = threading.Lock()


def init(address: str | None = None) -> Fabric:
    """Connect this process to the fabric, bringing up Ray and the fabric where they are missing.

    Args:
        address: Ray cluster. None: ``RAY_ADDRESS``, a local Ray that runs, or a new local one.

    Raises:
        FabricUnavailable: Ray or the controller does not answer.
    """
    global _fabric
    with _fabric_lock:
        import ray

        if _fabric is None or not ray.is_initialized():
            _fabric = Fabric(address)
        return _fabric


def shutdown() -> None:
    """Forget the connection; a local Ray that `init` started ends, with every instance on it."""
    global _fabric
    with _fabric_lock:
        fabric, _fabric = _fabric, None
    if fabric is not None and fabric.owns_ray:
        import ray

        ray.shutdown()


def create(
    environment: str | Path,
    *,
    actor: Literal["dedicated", "shared"] = "dedicated",
    lifetime: Literal["job", "detached"] = "job",
    ttl: str | float | None = None,
    idle_timeout: str | float | None = None,
    engine: str | None = None,
    environment_variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    owner: str | None = None,
    datasource: str = "",
) -> EnvHandle:
    """Make an instance and return its handle once it answers calls.

    Args:
        environment: ``name@version`` or ``name`` of a built-in environment, or a project's path.
        actor: ``dedicated``: an actor of its own, visible in ``ray list actors``; ``shared``: a
            place on an actor of the node, a hundred times cheaper.
        lifetime: ``job``: ends with the Ray job of the caller; ``detached``: does not.
        ttl: Ends it after this long, renewable: ``"30m"``, ``"2h"``, or seconds. None: the
            project's ``deployConfig.ttl``, else 30 minutes.
        idle_timeout: Ends it after this long without a call. None: the project's, else never.
        engine: None: the project's, else ``AENV_ENGINE``, else ``process``.
        environment_variables: Added to the project's.
        arguments: ``sys.argv[1:]`` of its code.
        labels: For people and listings.
        owner: Whom it is accounted to.
        datasource: Given to it as ``AENV_DATASOURCE``.

    Raises:
        EnvironmentNotFound: No such environment or project.
        ConfigError: A malformed reference, project, TTL or option.
        SandboxStartFailed: Its code does not load, or its sandbox does not start.
        CapacityExceeded: The cluster is full.
        FabricUnavailable: Ray does not answer.
    """
    options = CreateOptions(
        actor=actor, lifetime=lifetime, ttl=ttl, idle_timeout=idle_timeout, engine=engine,
        environment_variables=environment_variables, arguments=arguments, labels=labels,
        owner=owner, datasource=datasource,
    )  # fmt: skip
    source = project.resolve(environment)
    return init().create(source, 1, options)[0]


def create_many(
    environment: str | Path,
    count: int,
    *,
    actor: Literal["dedicated", "shared"] = "shared",
    **options: Any,
) -> list[EnvHandle]:
    """Make `count` instances in one round trip to each node, all of them or none.

    Args:
        environment: As in `create`.
        count: How many, at least 1.
        actor: As in `create`, but shared by default.
        options: The other options of `create`.

    Raises:
        AenvError: As `create`; nothing is left then.
    """
    if count < 1:
        raise ConfigError(f"count {count!r} is not at least 1")
    parsed = CreateOptions(actor=actor, **options)
    return init().create(project.resolve(environment), count, parsed)


def get(instance_id: str) -> EnvHandle:
    """Return a handle to a live instance, from any driver.

    Raises:
        InstanceNotFound: No host has it, or it has ended.
    """
    return init().get(instance_id)


def list_instances() -> list[InstanceInfo]:
    """Return the live instances of the cluster, oldest first."""
    return init().list_instances()


def release_many(handles: Sequence[EnvHandle]) -> None:
    """End instances in one round trip to each node; from every state, any number of times."""
    fabric = init()
    ids_of = [handle.instance_id for handle in handles]
    fabric.wait(fabric.controller.release.remote(ids_of), f"releasing {len(ids_of)} instances")
