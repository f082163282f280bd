"""What environments may request: the operator's policy, as pure decisions.

Settings make it (``AENV_POLICY``, ``AENV_ALLOW_…`` and ``AENV_MAX_…``, see ``docs/operations.md``).
Without a gateway everything is allowed: the publisher of an environment also runs it. Where a
gateway runs, the defaults are those of `STRICT`. The policy is checked when an environment is
published, when an instance or a service is created, and by the host that starts a sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Network
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from aenv_ray import units
from aenv_ray.config import Settings
from aenv_ray.errors import ConfigError, PolicyRefused
from aenv_ray.project.config import EnvironmentConfig, NetworkMode
from aenv_ray.project.destinations import is_public, parse_destination
from aenv_ray.units import counted

ANY: Final = "*"
NOT_ROOT: Final = "nonroot"
"""In `Policy.users`: any numeric user but 0. The image decides what a name means."""
_HUB: Final = "docker.io"
_REGISTRY: Final = re.compile(r"[^/]*[.:][^/]*|localhost")
_NUMERIC_USER: Final = re.compile(r"0*[1-9][0-9]*(:[0-9]+)?")


class Policy(BaseModel):
    """Allow-lists and limits; a list holds patterns such as ``ghcr.io/acme/*``, ``*`` for any."""

    model_config = ConfigDict(frozen=True)

    networks: tuple[str, ...] = (ANY,)
    destinations: tuple[str, ...] = (ANY,)
    """IPv4 ranges that are not public and that allow-lists may open."""
    capabilities: tuple[str, ...] = (ANY,)
    """Linux capabilities that containers may add."""
    users: tuple[str, ...] = (ANY,)
    """Users that containers may name; also `NOT_ROOT`."""
    root_sidecars: tuple[str, ...] = (ANY,)
    """Images, as `images`, whose sidecars may have any user, root included."""
    images: tuple[str, ...] = (ANY,)
    """Images by registry and repository, without tag or digest."""
    runtimes: tuple[str, ...] = (ANY,)
    """OCI runtimes that projects may name."""
    engines: tuple[str, ...] = (ANY,)
    chat_models: tuple[str, ...] = (ANY,)
    """Names of environments whose instances may ask the operator's chat model."""
    isolation: Literal["auto", "required", "none"] = "auto"
    """Whether process sandboxes, and the installation of requirements, have namespaces."""
    max_cpu: float | None = None
    """Cores; None: no limit."""
    max_memory_bytes: int | None = None
    max_disk_bytes: int | None = None
    """Limit for the work directory, and for a container's writable layer."""
    max_pids: int | None = None
    """Processes and threads of a container, as ``container.pids``."""
    max_replicas: int | None = None
    """Replicas of all services of one owner: each is a process beside its sandbox."""
    max_warm: int | None = None
    """Warm sandboxes that projects' ``warm`` may keep ready for one owner, on each shared host. A
    project that requests more gets as many as there is room for: it is not refused."""
    max_ttl_s: float | None = None
    """The longest TTL of a create, and of each renewal."""
    fills: tuple[str, ...] = ()
    """Fields among ``cpu``, ``memory`` and ``ephemeral_storage`` that get their maximum if a
    project names none: those whose maximum the operator set."""

    # --- what a project requests --------------------------------------------------------------

    def check(self, config: EnvironmentConfig, engine: str | None = None) -> None:
        """Check a project's configuration.

        Args:
            config: The project's config, with the caller's changes applied.
            engine: The engine of the instances; None: the project's.

        Raises:
            PolicyRefused: The policy does not allow it; the hint names the setting.
        """
        deploy, what = config.deploy, config.reference
        if engine or deploy.engine:
            self._allow(self.engines, engine or deploy.engine or "", what, "engine")
        if deploy.network is not None:
            self._allow(self.networks, deploy.network.value, what, "network")
        for entry in deploy.allow or ():
            block = parse_destination(entry, what="deployConfig.allow").block
            if block:
                self.check_destination(block, what)
        for capability in (*deploy.container.cap_add, *deploy.container.sidecar_cap_add):
            name = capability.upper().removeprefix("CAP_")
            self._allow(self.capabilities, name, what, "capability", plural="capabilities")
        if deploy.container.user is not None:
            self.check_user(deploy.container.user, what)
        if deploy.container.runtime:
            self._allow(self.runtimes, deploy.container.runtime, what, "runtime")
        named = [
            deploy.container.image,
            *(a.content for a in config.artifacts if a.type == "image"),
        ]
        for image in filter(None, named):
            self.check_image(image, what)
        self._check_sizes(config)
        if deploy.ttl is not None:
            self.check_ttl(units.parse_duration_s(deploy.ttl), what)

    def applied(self, config: EnvironmentConfig, engine: str) -> EnvironmentConfig:
        """Check a configuration, and return it with what the policy decides for the project.

        A project that names no network gets network `host` if it may have that; else `internet` if
        its engine can block private addresses; else `none`.

        Raises:
            PolicyRefused: As `check`.
        """
        self.check(config, engine)
        return self.filled(config, engine)

    def filled(self, config: EnvironmentConfig, engine: str) -> EnvironmentConfig:
        """Return a configuration with what the policy decides for the project; see `applied`."""
        deploy = config.deploy
        changes: dict[str, Any] = {}
        if deploy.network is None and not _matches(self.networks, NetworkMode.HOST):
            has_internet = engine in ("docker", "kubernetes")
            is_open = has_internet and _matches(self.networks, NetworkMode.INTERNET)
            changes["network"] = NetworkMode.INTERNET if is_open else NetworkMode.NONE
        most: Mapping[str, Any] = {
            "cpu": self.max_cpu,
            "memory": self.max_memory_bytes,
            "ephemeral_storage": self.max_disk_bytes,
        }
        changes |= {name: most[name] for name in self.fills if not getattr(deploy, name)}
        if not changes:
            return config
        return config.model_copy(update={"deploy": deploy.model_copy(update=changes)})

    def allows_chat_model(self, name: str) -> bool:
        """Return whether instances of an environment may ask the operator's chat model."""
        return _matches(self.chat_models, name)

    def allows_engine(self, engine: str) -> bool:
        """Return whether instances may use an engine."""
        return _matches(self.engines, engine)

    # --- single decisions, for engines that learn more ------------------------------------------

    def check_image(self, reference: str, what: str = "the environment") -> None:
        """Check the name of an image.

        Raises:
            PolicyRefused: Its registry or repository is not allowed.
        """
        self._allow(self.images, repository_of(reference), what, "image")

    def allows_image(self, reference: str) -> bool:
        """Return whether the policy allows the name of an image."""
        return _matches(self.images, repository_of(reference))

    def refuse_image_id(self, reference: str, what: str) -> None:
        """Refuse an image that has no allowed name, unless every image is allowed.

        Raises:
            PolicyRefused: The policy allows images by name.
        """
        if ANY not in self.images:
            raise PolicyRefused(
                f"{what} requests an image by its id, {reference[:80]!r}, and it has no name that "
                f"this cluster allows (allowed: {', '.join(self.images) or 'none'})",
                hint="push it and name it with its registry and a tag, or have the operator set "
                "AENV_ALLOW_IMAGES",
            )

    def check_destination(self, block: str, what: str = "the environment") -> None:
        """Check addresses that an allow-list opens, in the form ``a.b.c.d/n``.

        Raises:
            PolicyRefused: Some are not public, and the policy does not allow them.
        """
        asked = IPv4Network(block)
        if ANY in self.destinations or is_public(block):
            return
        if not any(asked.subnet_of(IPv4Network(range_)) for range_ in self.destinations):
            raise PolicyRefused(
                f"{what} requests destination {block}, which is neither public nor allowed by this "
                f"cluster (allowed: {', '.join(self.destinations) or 'none'})",
                hint="request public addresses, or have the operator add this range to "
                "AENV_ALLOW_DESTINATIONS",
            )

    def check_user(self, user: str, what: str = "the environment") -> None:
        """Check the user of a container, such as ``1000:1000``.

        Raises:
            PolicyRefused: It is not allowed; a name needs an entry of its own, even `NOT_ROOT`.
        """
        if not self._allows_user(user):
            raise _not_allowed(self.users, user, what, "user")

    def check_sidecar_user(self, user: str, names: Sequence[str], what: str) -> None:
        """Check the user of a sidecar, which its image decides.

        Args:
            user: The user.
            names: The names of its image.
            what: Who requests it.

        Raises:
            PolicyRefused: Neither the user nor the image is allowed.
        """
        images = [repository_of(name) for name in names]
        if self._allows_user(user) or any(_matches(self.root_sidecars, one) for one in images):
            return
        raise PolicyRefused(
            f"{what} requests a sidecar with image {', '.join(images)[:200] or 'without a name'}, "
            f"which runs as user {user[:200]!r}, and this cluster does not allow that user "
            f"(allowed: {', '.join(self.users) or 'none'})",
            hint="have its Dockerfile set a numeric USER, such as 1000, or have the operator add "
            "the image to AENV_ALLOW_ROOT_SIDECARS",
        )

    def _allows_user(self, user: str) -> bool:
        if NOT_ROOT in self.users and is_not_root(user):
            return True
        return _matches(tuple(entry for entry in self.users if entry != NOT_ROOT), user)

    def check_ttl(self, ttl_s: float, what: str = "the instance") -> None:
        """Check the time to live of an instance, or its extension.

        Raises:
            PolicyRefused: It is longer than `max_ttl_s`.
        """
        if self.max_ttl_s is not None and ttl_s > self.max_ttl_s:
            raise _too_much(what, f"a TTL of {ttl_s:.15g} s", f"{self.max_ttl_s:.15g} s", "TTL")

    def check_replicas(self, number: int, owner: str) -> None:
        """Check how many replicas the services of an owner may have together.

        Raises:
            PolicyRefused: It is more than `max_replicas`.
        """
        if self.max_replicas is not None and number > self.max_replicas:
            asked = f"{counted(number, 'replica')} of its services"
            raise _too_much(f"owner {owner!r}", asked, f"{self.max_replicas}", "REPLICAS")

    def _check_sizes(self, config: EnvironmentConfig) -> None:
        deploy, what = config.deploy, config.reference
        if deploy.cpu and self.max_cpu is not None:
            cores = units.parse_cpu_cores(deploy.cpu)
            if cores > self.max_cpu:
                raise _too_much(what, f"{cores:g} cores", f"{self.max_cpu:g}", "CPU")
        pids = deploy.container.pids
        if self.max_pids is not None and pids > self.max_pids:
            raise _too_much(what, f"{pids} processes and threads", f"{self.max_pids}", "PIDS")
        for value, most, name in (
            (deploy.memory, self.max_memory_bytes, "MEMORY"),
            (deploy.ephemeral_storage, self.max_disk_bytes, "DISK"),
        ):
            size = units.parse_memory_bytes(value) if value else 0
            if most is not None and size > most:
                raise _too_much(
                    what, f"{size >> 20} MiB of {name.lower()}", f"{most >> 20} MiB", name
                )

    @staticmethod
    def _allow(
        patterns: tuple[str, ...], value: str, what: str, kind: str, *, plural: str | None = None
    ) -> None:
        if not _matches(patterns, value):
            raise _not_allowed(patterns, value, what, kind, plural=plural)


STRICT: Final = Policy(
    networks=(NetworkMode.NONE, NetworkMode.INTERNET, NetworkMode.ALLOWLIST),
    destinations=(),
    capabilities=(),
    users=(NOT_ROOT,),
    root_sidecars=("docker.io/swebench/*",),
    images=(
        "docker.io/*", "ghcr.io/*", "quay.io/*", "public.ecr.aws/*", "mcr.microsoft.com/*",
        "nvcr.io/*", "registry.k8s.io/*",
    ),
    runtimes=("runsc", "kata*"),
    engines=("process", "docker", "kubernetes"),
    chat_models=(),
    isolation="required",
    max_cpu=64.0,
    max_memory_bytes=256 << 30,
    max_disk_bytes=1 << 40,
    max_pids=4096,
    max_replicas=16,
    max_warm=4,
    max_ttl_s=7 * 86_400.0,
)  # fmt: skip
"""The defaults where a gateway runs."""


def policy_of(settings: Settings, *, behind_gateway: bool) -> Policy:
    """Return the policy that settings make.

    Args:
        settings: The operator's settings.
        behind_gateway: Whether a gateway runs, so that ``AENV_POLICY=auto`` means ``strict``, and
            isolation is required unless ``AENV_ISOLATION`` says otherwise.

    Raises:
        ConfigError: A limit is malformed.
    """
    is_strict = settings.policy == "strict" or (settings.policy == "auto" and behind_gateway)
    given: dict[str, Any] = {
        name: tuple(part.strip() for part in text.split(",") if part.strip())
        for name, text in {
            "networks": settings.allow_networks,
            "destinations": settings.allow_destinations,
            "users": settings.allow_users,
            "root_sidecars": settings.allow_root_sidecars,
            "images": settings.allow_images,
            "runtimes": settings.allow_runtimes,
            "engines": settings.allow_engines,
            "chat_models": settings.allow_chat_models,
        }.items()
        if text is not None
    }
    if "destinations" in given:
        given["destinations"] = tuple(map(_range, given["destinations"]))
    given["isolation"] = settings.isolation or (
        "required" if is_strict or behind_gateway else "auto"
    )
    if settings.allow_capabilities is not None:
        names = settings.allow_capabilities.upper().split(",")
        given["capabilities"] = tuple(name.strip().removeprefix("CAP_") for name in names)
    fills = []
    if settings.max_cpu is not None:
        given["max_cpu"] = units.parse_cpu_cores(settings.max_cpu)
        fills.append("cpu")
    if settings.max_memory is not None:
        given["max_memory_bytes"] = units.parse_memory_bytes(
            settings.max_memory, what="AENV_MAX_MEMORY"
        )
        fills.append("memory")
    if settings.max_disk is not None:
        given["max_disk_bytes"] = units.parse_memory_bytes(settings.max_disk, what="AENV_MAX_DISK")
        fills.append("ephemeral_storage")
    if settings.max_pids is not None:
        given["max_pids"] = settings.max_pids
    if settings.max_replicas is not None:
        given["max_replicas"] = settings.max_replicas
    if settings.max_warm is not None:
        given["max_warm"] = settings.max_warm
    if settings.max_ttl is not None:
        given["max_ttl_s"] = units.parse_duration_s(settings.max_ttl, what="AENV_MAX_TTL")
    return (STRICT if is_strict else Policy()).model_copy(update={**given, "fills": tuple(fills)})


def _range(text: str) -> str:
    """Return an entry of ``AENV_ALLOW_DESTINATIONS`` as ``a.b.c.d/n``, or `ANY`."""
    if text == ANY:
        return ANY
    parsed = parse_destination(text, what="AENV_ALLOW_DESTINATIONS")
    if not parsed.block or parsed.port is not None:
        raise ConfigError(
            f"AENV_ALLOW_DESTINATIONS: {text!r} is not a range of IPv4 addresses",
            hint="write it as 10.1.0.0/16",
        )
    return parsed.block


def repository_of(reference: str) -> str:
    """Return registry and repository of an image, such as ``docker.io/library/python``."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    name = f"{head}{slash}{last.partition(':')[0]}"
    first, slash, rest = name.partition("/")
    if slash and _REGISTRY.fullmatch(first):
        registry, repository = first.lower(), rest
    else:
        registry, repository = _HUB, name
    if registry in (_HUB, f"index.{_HUB}", f"registry-1.{_HUB}"):
        registry = _HUB
        if "/" not in repository:
            repository = f"library/{repository}"
    return f"{registry}/{repository}"


def is_not_root(user: str) -> bool:
    """Return whether a user of a container is certainly not root: a number, and not 0."""
    return _NUMERIC_USER.fullmatch(user) is not None


def _matches(patterns: tuple[str, ...], value: str) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def _not_allowed(
    patterns: tuple[str, ...], value: str, what: str, kind: str, *, plural: str | None = None
) -> PolicyRefused:
    allowed = ", ".join(patterns) or "none"
    setting = f"AENV_ALLOW_{(plural or kind + 's').upper()}"
    return PolicyRefused(
        f"{what} requests {kind} {value[:200]!r}, which this cluster does not allow "
        f"(allowed: {allowed})",
        hint=f"request another one, or have the operator add it to {setting}",
    )


def _too_much(what: str, asked: str, most: str, name: str) -> PolicyRefused:
    return PolicyRefused(
        f"{what} requests {asked}, more than the {most} that this cluster allows",
        hint=f"request less, or have the operator raise AENV_MAX_{name}",
    )
