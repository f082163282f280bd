"""How the process engine makes instances of a project: interpreter, walls, variables, template."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec, check_os
from aenv_ray.engines.node.local_storage import LocalDirectory
from aenv_ray.engines.node.variables import shared_variables
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.models import Isolation
from aenv_ray.project.config import EnvironmentConfig, NetworkMode
from aenv_ray.project.storage import shown_size
from aenv_ray.runtime.fork.jail_spec import WORK, JailSpec

NETWORK_MODES: Final = frozenset({"none", "host"})
_OWN_VARIABLES: Final = frozenset({"AENV_INSTANCE_ID", "AENV_LABELS", "AENV_DATASOURCE"})
"""Variables that differ between instances of a project."""


class Plan:
    """How instances of one project are made: interpreter, walls, base environment."""

    def __init__(
        self,
        spec: SandboxSpec,
        python: Path | None,
        isolation: str,
        runtime_path: Path,
        directory: LocalDirectory | None = None,
    ) -> None:
        deploy = spec.config.deploy
        network = deploy.network or NetworkMode.HOST
        jail = JailSpec(
            project=str(spec.project_dir),
            network=network.value,
            hide_source=deploy.hide_source,
            storage_bytes=_bytes(deploy.ephemeral_storage),
            memory_bytes=_bytes(deploy.memory),
            cpu_cores=units.parse_cpu_cores(deploy.cpu) if deploy.cpu else None,
        )
        self.python = str(python or sys.executable)
        if spec.storage is not None and directory is not None:
            check_storage_path(spec.storage.mount_path, self.python)
            jail = replace(
                jail,
                storage=str(directory.data),
                storage_lock=str(directory.lock),
                storage_is_shared=spec.storage.is_shared,
                storage_path=spec.storage.mount_path,
                storage_size=shown_size(spec.storage.size_bytes),
            )
        self._setups: dict[bool, tuple[str, dict[str, Any]]] = {}
        self._base = {
            "python": [self.python, "-P"],
            "isolation": isolation,
            "jail": asdict(jail),
            "env": {
                **shared_variables(spec, WORK, self.python),
                "PYTHONPATH": str(runtime_path),
            },
        }

    def setup(self, *, preload: bool) -> tuple[str, dict[str, Any]]:
        """Return the template's key and what the launcher makes it from."""
        if preload not in self._setups:
            setup = {**self._base, "preload": preload}
            key = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:32]
            self._setups[preload] = key, setup
        return self._setups[preload]


def check_project(config: EnvironmentConfig) -> None:
    """Refuse a project that asks for what this engine does not have.

    Raises:
        ConfigError: It does; the message says for what.
    """
    deploy = config.deploy
    check_os(config, sys.platform, "this node")
    if deploy.is_dual:
        raise ConfigError(
            f"{config.reference}: the process engine has no second container "
            f"(deployConfig.podTemplate is {deploy.pod_template!r})",
            hint='use the docker engine: engine="docker", or deployConfig.engine',
        )
    network = deploy.network or NetworkMode.HOST
    if network not in NETWORK_MODES:
        raise ConfigError(
            f"{config.reference}: the process engine has no network {network.value!r}",
            hint='use the docker engine, or network "none" or "host"',
        )


def check_storage_path(mount_path: str, python: str) -> None:
    """Refuse a storage over, or in, what the sandbox's Python needs of this machine.

    Raises:
        ConfigError: It is there.
    """
    package = Path(__file__).resolve().parents[2]
    needed = {sys.prefix, sys.base_prefix, str(package), str(Path(python).parent.parent)}
    needed |= {os.path.realpath(path) for path in needed}
    for path in needed:
        if f"{path}/".startswith(f"{mount_path}/") or mount_path.startswith(f"{path}/"):
            raise ConfigError(
                f"mount path {mount_path} and {path}, where this machine's Python is, are in "
                "each other's way",
                hint="choose another mount path, such as /home/admin/data or /data",
            )


def with_storage(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a template whose instances have a storage.

    Raises:
        SandboxStartFailed: There is no template, or no storage in it.
    """
    if "failed" in report:
        raise SandboxStartFailed(f"the sandbox cannot be made: {report['failed']}")
    if report["isolation"]["kind"] != "namespaces":
        raise SandboxStartFailed(
            "the process engine has no storage without namespaces: "
            f"{'; '.join(report['isolation']['missing'])}",
            hint="use the docker engine, or let this user make namespaces",
        )
    return report


def loaded(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a template that is there.

    Raises:
        SandboxStartFailed: It is not, because the code does not load.
    """
    if "failed" in report:
        raise SandboxStartFailed(
            f"the environment's code does not load: {report['failed']}",
            hint="mend the project; `aenv run` shows the same error",
        )
    return report


def own_at_import(spec: SandboxSpec, shared: Mapping[str, str], report: Mapping[str, Any]) -> str:
    """Return why code that was imported once for all would not suit this instance; "" if it does.

    Args:
        spec: The instance.
        shared: The variables with which its template imported the code.
        report: The template's, with ``env_reads``: what the code read then.
    """
    if spec.arguments:
        return "it has arguments, which its code may read when it is imported"
    seen = set(report["env_reads"])
    given = {**spec.config.deploy.variables, **spec.environment_variables}
    read = {n for n, v in given.items() if shared.get(n) != v and ("*" in seen or n in seen)}
    read |= seen & _OWN_VARIABLES
    return f"its code reads {', '.join(sorted(read)[:3])} when it is imported" if read else ""


def _bytes(value: str | int | None) -> int | None:
    return units.parse_memory_bytes(value) if value else None


def isolation_of(ready: Mapping[str, Any]) -> Isolation:
    """Return the facts that a template reported of its instances."""
    return Isolation.model_validate(ready["isolation"])
