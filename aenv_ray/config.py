"""Every setting an operator can make, read from the environment once, here and nowhere else.

| variable | meaning | default |
|---|---|---|
| ``AENV_DATA_DIR`` | caches: unpacked projects, virtual environments | ``~/.cache/aenv`` |
| ``AENV_RUNTIME_DIR`` | sockets, logs; short path | ``/dev/shm/aenv-<uid>``, else in ``/tmp`` |
| ``AENV_ENGINE`` | engine when neither caller nor project names one | ``process`` |
| ``AENV_ENGINE_SLOTS`` | ``engine=slots,…``: the first with slots is that default | none |
| ``AENV_ISOLATION`` | namespaces: ``auto``, ``required`` or ``none`` | ``auto`` |
| ``AENV_DOCKER_IMAGE`` | image of projects that name none, with Python 3.11 or newer | none |
| ``AENV_DOCKER_RUNTIME`` | OCI runtime of projects that name none | the daemon's |
| ``DOCKER_HOST`` | the node's Docker daemon | ``unix:///var/run/docker.sock`` |
| ``AENV_KUBERNETES_NAMESPACE`` | of instances that are pods; it must be the host's | the host's |
| ``AENV_KUBERNETES_IMAGE`` | image of projects that name none, with Python 3.11 or newer | none |
| ``AENV_KUBERNETES_RUNTIME_CLASS`` | of projects that name no runtime | the cluster's |
| ``AENV_KUBERNETES_NODE_SELECTOR`` | ``label=value,…`` of nodes that instances run on | none |
| ``AENV_KUBERNETES_PULL_SECRETS`` | names of Secrets for private registries, by commas | none |
| ``AENV_KUBERNETES_PRIORITY_CLASS`` | of instances | none |
| ``AENV_KUBERNETES_CARRIER_IMAGE`` | with this package, for images without Python | the host's |
| ``AENV_KUBERNETES_REQUESTS`` | share of their limits that pods ask for | ``1`` |
| ``AENV_KUBERNETES_LIFE`` | how far renewals can move a pod's deadline | ``24h`` |
| ``POD_NAME`` | the pod that this process runs in | the machine's name |
| ``RAY_USAGE_STATS_KUBERAY_IN_USE`` | set by KubeRay: this process runs in one of its pods | none |
| ``AENV_REDIS_URL`` | the hub's Redis: ``redis://``, ``rediss://``, sentinel, cluster | bundled |
| ``AENV_REDIS_PREFIX`` | of the hub's keys: hubs that share a Redis differ in it | ``aenv`` |
| ``AENV_ARTIFACTS_URL`` | published archives: directory or fsspec URL | ``artifacts`` there |
| ``AENV_STORAGE_DIR`` | services' storage, where all nodes have the directory | each its own |
| ``AENV_STORAGE_ACCESS`` | ``many``: several sandboxes may write to a storage at once | ``one`` |
| ``AENV_KUBERNETES_STORAGE_CLASS`` | of services' claims | the cluster's |
| ``DOCKER_CONFIG`` | directory of Docker's ``config.json``: logins for registries | ``~/.docker`` |
| ``AENV_SYSTEM_URL`` | gateway that `Environment` talks to instead of Ray | none |
| ``AENV_API_KEY`` | token for that gateway | the config file's, else ``aenv up``'s |
| ``DUMMY_INSTANCE_IP`` | address of one ``aenv run`` server that `Environment` talks to | none |
| ``RAY_ADDRESS`` | Ray cluster to join | start or find a local one |
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray.errors import ConfigError


class Settings(BaseModel):
    """The settings of this process."""

    model_config = ConfigDict(frozen=True)

    data_dir: Path
    """Caches, which may be deleted when nothing runs; ``hub``, ``artifacts`` and ``storage`` must
    not be."""
    runtime_dir: Path
    """Sockets and locks: private to the user, lives as long as the machine is up."""
    engine: str = "process"
    isolation: Literal["auto", "required", "none"] = "auto"
    docker_image: str | None = None
    docker_runtime: str | None = None
    docker_host: str = "unix:///var/run/docker.sock"
    kubernetes_namespace: str | None = None
    kubernetes_image: str | None = None
    kubernetes_runtime_class: str | None = None
    kubernetes_node_selector: str = ""
    kubernetes_pull_secrets: str = ""
    kubernetes_priority_class: str | None = None
    kubernetes_carrier_image: str | None = None
    kubernetes_requests: float = Field(default=1.0, gt=0.0, le=1.0)
    kubernetes_life: str = "24h"
    pod_name: str | None = None
    is_in_kuberay: bool = False
    redis_url: str | None = Field(default=None, repr=False)
    redis_prefix: str = Field(default="aenv", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    artifacts_url: str | None = Field(default=None, repr=False)
    """Directory or fsspec URL of published archives. None: in the data directory."""
    storage_dir: Path | None = None
    """Services' storage, where all nodes have this directory. None: ``storage`` there."""
    storage_access: Literal["one", "many"] = "one"
    """How many sandboxes may have a storage at once."""
    kubernetes_storage_class: str | None = None
    docker_config: Path
    """The directory of Docker's own ``config.json``, with the logins for registries."""
    """Whether ``aenv build`` uses BuildKit where it is there."""
    system_url: str | None = None
    api_key: str | None = Field(default=None, repr=False)
    dummy_instance: str | None = None
    ray_address: str | None = None


def read_settings() -> Settings:
    """Return the settings that the environment gives now.

    Raises:
        ConfigError: A variable has a value that cannot be used.
    """
    environment = os.environ
    uid = os.getuid() if hasattr(os, "getuid") else 0
    try:
        return Settings(
            data_dir=Path(environment.get("AENV_DATA_DIR") or Path.home() / ".cache" / "aenv"),
            runtime_dir=Path(
                environment.get("AENV_RUNTIME_DIR") or _memory_directory() / f"aenv-{uid}"
            ),
            engine=environment.get("AENV_ENGINE")
            or _first_with_slots(environment.get("AENV_ENGINE_SLOTS") or ""),
            isolation=environment.get("AENV_ISOLATION") or "auto",
            docker_image=environment.get("AENV_DOCKER_IMAGE") or None,
            docker_runtime=environment.get("AENV_DOCKER_RUNTIME") or None,
            docker_host=environment.get("DOCKER_HOST") or "unix:///var/run/docker.sock",
            kubernetes_namespace=environment.get("AENV_KUBERNETES_NAMESPACE") or None,
            kubernetes_image=environment.get("AENV_KUBERNETES_IMAGE") or None,
            kubernetes_runtime_class=environment.get("AENV_KUBERNETES_RUNTIME_CLASS") or None,
            kubernetes_node_selector=environment.get("AENV_KUBERNETES_NODE_SELECTOR") or "",
            kubernetes_pull_secrets=environment.get("AENV_KUBERNETES_PULL_SECRETS") or "",
            kubernetes_priority_class=environment.get("AENV_KUBERNETES_PRIORITY_CLASS") or None,
            kubernetes_carrier_image=environment.get("AENV_KUBERNETES_CARRIER_IMAGE") or None,
            kubernetes_requests=environment.get("AENV_KUBERNETES_REQUESTS") or 1.0,
            kubernetes_life=environment.get("AENV_KUBERNETES_LIFE") or "24h",
            pod_name=environment.get("POD_NAME") or None,
            is_in_kuberay=bool(environment.get("RAY_USAGE_STATS_KUBERAY_IN_USE")),
            redis_url=environment.get("AENV_REDIS_URL") or None,
            redis_prefix=environment.get("AENV_REDIS_PREFIX") or "aenv",
            artifacts_url=environment.get("AENV_ARTIFACTS_URL") or None,
            storage_dir=_path(environment.get("AENV_STORAGE_DIR")),
            storage_access=environment.get("AENV_STORAGE_ACCESS") or "one",
            kubernetes_storage_class=environment.get("AENV_KUBERNETES_STORAGE_CLASS") or None,
            docker_config=Path(environment.get("DOCKER_CONFIG") or Path.home() / ".docker"),
            system_url=environment.get("AENV_SYSTEM_URL") or None,
            api_key=environment.get("AENV_API_KEY") or None,
            dummy_instance=environment.get("DUMMY_INSTANCE_IP") or None,
            ray_address=environment.get("RAY_ADDRESS") or None,
        )
    except ValidationError as exc:
        problem = exc.errors()[0]
        name = f"AENV_{str(problem['loc'][0]).upper()}"
        raise ConfigError(f"environment variable {name}: {problem['msg']}") from None


def _first_with_slots(engine_slots: str) -> str:
    """Return the first engine of ``engine=slots,…`` that has slots, ``process`` if none has.

    Raises:
        ConfigError: An entry is malformed.
    """
    for entry in filter(None, engine_slots.split(",")):
        engine, _, slots = entry.partition("=")
        if not slots.strip().isdigit():
            raise ConfigError(
                f"environment variable AENV_ENGINE_SLOTS: invalid entry {entry!r}",
                hint="write it as engine=slots, such as kubernetes=64,process=0",
            )
        if int(slots) > 0:
            return engine.strip()
    return "process"


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _memory_directory() -> Path:
    """Return where files cost no disk: a socket on ext4 takes ten times as long to make."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path("/tmp")


@cache
def settings() -> Settings:
    """Return the settings, read at the first use."""
    return read_settings()
