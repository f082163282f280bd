"""The settings of a process, read from its environment variables once, here and nowhere else.

The variable of a setting is ``AENV_`` and its name in capitals, unless the field has an alias. An
empty variable counts as not set. ``docs/operations.md`` describes all of them for operators.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray import units
from aenv_ray.errors import ConfigError
from aenv_ray.validation import problems_of


def _memory_directory() -> Path:
    """Return a directory in memory, where sockets are created ten times as fast as on ext4."""
    uid = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK | os.X_OK) else Path("/tmp")
    return parent / f"aenv-{uid}"


class Settings(BaseModel):
    """The settings of this process."""

    model_config = ConfigDict(
        frozen=True,
        populate_by_name=True,
        alias_generator=lambda name: f"AENV_{name.upper()}",
    )

    data_dir: Path = Field(default_factory=lambda: Path.home() / ".cache" / "aenv")
    """Caches, which may be deleted when nothing runs; ``hub``, ``artifacts`` and ``storage`` in it
    must be kept."""
    runtime_dir: Path = Field(default_factory=_memory_directory)
    """Sockets, locks and logs of this machine. Short, since a socket's path holds 107 bytes."""
    engine: str | None = None
    """Engine, if neither the caller nor the project names one. None: one that the nodes have."""
    engine_slots: str = ""
    """``engine=slots,…``: the engines of the workers that may join the cluster."""
    isolation: Literal["auto", "required", "none"] | None = None
    """Whether process sandboxes have namespaces; ``auto``: if the kernel allows it. None:
    ``required`` where a gateway runs, else ``auto``."""
    cgroup: Path | None = None
    """cgroup v2 directory, delegated to the user of Ray, for a control group of each process
    sandbox. None: the memory of sandboxes is measured."""
    local_door: bool = True
    """Whether callers on a sandbox's node connect to it directly."""
    spare_hosts: int = Field(default=2, ge=0, le=64)
    """How many dedicated host actors a node keeps ready; 0 for none."""
    source_builds: Literal["auto", "yes", "no"] = "auto"
    """Whether requirements without a wheel are built; ``auto``: unless isolation is required."""
    requirements_cache: Path | None = None
    """Directory of the virtual environments of projects with requirements; several data directories
    can share it. None: ``environments`` in `data_dir`."""
    package_hosts: str = ""
    """``host,host:port,…`` that package indexes send their clients to."""
    docker_image: str | None = None
    """Image of projects that name none; needs Python 3.11 or newer."""
    docker_runtime: str | None = None
    """OCI runtime of projects that name none. None: the daemon's default."""
    docker_disk: str = "16Gi"
    """Limit of what a container writes to its image's directories, if neither project nor policy
    names one."""
    docker_host: str = Field(default="unix:///var/run/docker.sock", alias="DOCKER_HOST")
    kubernetes_namespace: str | None = None
    """Namespace of instances that are pods; must be the host's. None: the host's."""
    kubernetes_image: str | None = None
    """As `docker_image`."""
    kubernetes_runtime_class: str | None = None
    """RuntimeClass of projects that name no runtime. None: the cluster's default."""
    kubernetes_node_selector: str = ""
    """``label=value,…`` of the nodes that instances run on."""
    kubernetes_pull_secrets: str = ""
    """Names of the Secrets for private registries, separated by commas."""
    kubernetes_priority_class: str | None = None
    kubernetes_user_namespaces: bool = False
    """Whether each pod has a user namespace of its own: its users are nobody on the node."""
    kubernetes_carrier_image: str | None = None
    """Image with this package, for images without Python. None: the host's."""
    kubernetes_requests: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of an instance's limits that its pod requests."""
    kubernetes_memory: str = "2Gi"
    """Memory limit of each container of a pod, if neither project nor policy names one."""
    kubernetes_disk: str = "4Gi"
    """Limit of what each writes to its image's directories, if neither names one."""
    kubernetes_life: str = "24h"
    """Longest lifetime of a pod, including renewals."""
    pod_name: str | None = Field(default=None, alias="POD_NAME")
    """The pod of this process. None: the machine's name."""
    is_in_kuberay: bool = Field(default=False, alias="RAY_USAGE_STATS_KUBERAY_IN_USE")
    """Whether this process runs in a pod of KubeRay, which sets the variable."""
    log_format: Literal["text", "json"] = "text"
    """How hosts, controller, hub, gateway, runners and services write their logs."""
    policy: Literal["auto", "open", "strict"] = "auto"
    """What environments may request; ``auto``: ``strict`` where a gateway runs, else ``open``. The
    next settings, up to `max_ttl`, change single parts of it; see `aenv_ray.policy.Policy`."""
    allow_networks: str | None = None
    """Networks, separated by commas; ``*`` for any. The next eight have the same format."""
    allow_destinations: str | None = None
    """IPv4 ranges that are not public and that allow-lists may open."""
    allow_capabilities: str | None = None
    allow_users: str | None = None
    """Users of containers; ``nonroot`` for any numeric user but 0."""
    allow_root_sidecars: str | None = None
    """Images whose sidecars may have any user, in the format of `allow_images`."""
    allow_images: str | None = None
    """Patterns of registry and repository, such as ``ghcr.io/acme/*``."""
    allow_runtimes: str | None = None
    allow_engines: str | None = None
    allow_chat_models: str | None = None
    """Names of environments that may ask the chat model below."""
    max_cpu: str | None = None
    """Maximum cores of an instance; one that names none gets as many. The next two work alike."""
    max_memory: str | None = None
    max_disk: str | None = None
    max_pids: int | None = Field(default=None, ge=16)
    """Largest ``container.pids``; the default of projects is 1,024."""
    max_replicas: int | None = Field(default=None, ge=0)
    """Replicas of all services of one owner."""
    max_warm: int | None = Field(default=None, ge=0)
    """Largest ``warm`` of a project, and of all that one owner uses on a shared host together."""
    max_ttl: str | None = None
    """Longest TTL of a create or renewal."""
    redis_url: str | None = Field(default=None, repr=False)
    """The hub's Redis. None: the bundled one."""
    redis_password: str | None = Field(default=None, repr=False)
    """Password of a `redis_url` that contains none."""
    redis_prefix: str = Field(default="aenv", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Prefix of the hub's keys; hubs that share a Redis need different ones."""
    artifacts_url: str | None = Field(default=None, repr=False)
    """Directory or fsspec URL of published archives. None: in the data directory."""
    artifact_quota: str = "20Gi"
    """Total size of the artifacts that one owner may store through the gateway."""
    cache_size: str = "20Gi"
    """Size of each cache on a node (projects, virtual environments, runtimes for images) above
    which what nothing uses is deleted."""
    cache_age: str = "30d"
    """Time without use after which it is deleted anyway, when something else is added."""
    storage_dir: Path | None = None
    """Directory of services' storage that all nodes share. None: ``storage`` in `data_dir`."""
    storage_access: Literal["one", "many"] = "one"
    """How many sandboxes may use a storage volume at once."""
    kubernetes_storage_class: str | None = None
    """StorageClass of services' claims. None: the cluster's default."""
    docker_config: Path = Field(
        default_factory=lambda: Path.home() / ".docker", alias="DOCKER_CONFIG"
    )
    """Directory of Docker's own ``config.json``, with the logins for registries."""
    chat_model_url: str | None = None
    """OpenAI-compatible endpoint, up to ``/v1``, that environments may ask through their hosts."""
    chat_model: str | None = None
    """The model's name there."""
    chat_model_key_env: str = "AENV_CHAT_MODEL_KEY"
    """Variable of this process that holds the endpoint's key."""
    chat_model_max_tokens: int = Field(default=2_000_000, ge=1)
    """Tokens that one instance may use; the request that exceeds it is the last one."""
    chat_model_max_requests: int = Field(default=5_000, ge=1)
    tau2: Path | None = None
    """Checkout of tau2-bench for the built-in environment ``tau2``."""
    system_url: str | None = None
    """The gateway that `Environment` and ``aenv`` use. None: Ray."""
    api_key: str | None = Field(default=None, repr=False)
    """Token for that gateway."""
    dummy_instance: str | None = Field(default=None, alias="DUMMY_INSTANCE_IP")
    """Address of an ``aenv run`` server that `Environment` uses instead of Ray."""
    ray_address: str | None = Field(default=None, alias="RAY_ADDRESS")
    """The Ray cluster to join. None: a local one."""

    @property
    def joining_engines(self) -> tuple[str, ...]:
        """The engines in `engine_slots` with slots, in that order.

        Raises:
            ConfigError: An entry is malformed.
        """
        found = []
        for entry in filter(None, self.engine_slots.split(",")):
            engine, _, slots = entry.partition("=")
            if not slots.strip().isdigit():
                raise ConfigError(
                    f"environment variable AENV_ENGINE_SLOTS: invalid entry {entry!r}",
                    hint="write it as engine=slots, such as kubernetes=64,process=0",
                )
            if int(slots) > 0:
                found.append(engine.strip())
        return tuple(found)

    @property
    def cache_limits(self) -> tuple[int, float]:
        """The limits of a cache: its size in bytes, and the age of an entry in seconds.

        Raises:
            ConfigError: `cache_size` or `cache_age` is malformed.
        """
        size = units.parse_memory_bytes(self.cache_size, what="AENV_CACHE_SIZE")
        return size, units.parse_duration_s(self.cache_age, what="AENV_CACHE_AGE")


def read_settings() -> Settings:
    """Return the settings that the environment gives now.

    Raises:
        ConfigError: A variable has an invalid value.
    """
    return parse_settings(os.environ)


def parse_settings(variables: Mapping[str, str]) -> Settings:
    """Return the settings that these environment variables give; empty ones count as not set.

    Raises:
        ConfigError: A variable has an invalid value.
    """
    try:
        return Settings.model_validate({name: value for name, value in variables.items() if value})
    except ValidationError as exc:
        raise ConfigError(
            f"environment variable {problems_of(exc)}",
            hint="correct it or unset it; docs/operations.md lists all variables",
        ) from None


def secret(variable: str) -> str | None:
    """Return a secret from an environment variable that the user names; None if it is not set.

    Raises:
        ConfigError: It has characters that an HTTP header must not have; it is not shown.
    """
    value = os.environ.get(variable, "").strip()  # files often end with a line break
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(
            f"environment variable {variable} has line breaks or other characters that an HTTP "
            "header must not have",
            hint="set it to the value alone",
        )
    return value or None


@cache
def settings() -> Settings:
    """Return the settings, read at the first use."""
    return read_settings()
