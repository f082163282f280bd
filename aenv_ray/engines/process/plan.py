"""How the process engine starts instances of a project: interpreter, isolation, variables."""

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
from aenv_ray.project.storage import StorageMount, shown_size
from aenv_ray.runtime.fork.jail_spec import WORK, JailSpec

NO_NAMESPACES_HINT: Final = (
    "allow this user to create namespaces (docs/isolation.md), or use another engine; the operator "
    "can set AENV_ISOLATION=auto, and then code runs there with the rights of this node's user"
)
NETWORK_MODES: Final = frozenset({"none", "host"})
_OWN_VARIABLES: Final = frozenset({"AENV_INSTANCE_ID", "AENV_LABELS", "AENV_DATASOURCE"})
"""Variables that differ between instances of a project."""


class Plan:
    """How instances of one project start; the same for all of them."""

    def __init__(
        self,
        project_dir: Path,
        config: EnvironmentConfig,
        python: Path | None,
        isolation: str,
        runtime_path: Path,
        storage: tuple[StorageMount, LocalDirectory] | None = None,
        *,
        cgroup: Path | None = None,
    ) -> None:
        self.config = config
        deploy = config.deploy
        network = deploy.network or NetworkMode.HOST
        jail = JailSpec(
            project=str(project_dir),
            network=network.value,
            hide_source=deploy.hide_source,
            storage_bytes=_bytes(deploy.ephemeral_storage),
            memory_bytes=_bytes(deploy.memory),
            cpu_cores=units.parse_cpu_cores(deploy.cpu) if deploy.cpu else None,
        )
        self.python = str(python or sys.executable)
        if storage is not None:
            mount, directory = storage
            check_storage_path(mount.mount_path, self.python)
            jail = replace(
                jail,
                storage=str(directory.data),
                storage_lock=str(directory.lock),
                storage_is_shared=mount.is_shared,
                storage_path=mount.mount_path,
                storage_size=shown_size(mount.size_bytes),
            )
        self._setups: dict[bool, tuple[str, dict[str, Any]]] = {}
        self._base = {
            "python": [self.python, "-P"],
            "runtime_path": str(runtime_path),
            "isolation": isolation,
            "cgroup": str(cgroup or ""),
            "holds": [str(project_dir)] + ([str(python.parent.parent)] if python else []),
            "jail": asdict(jail),
            "env": {
                **shared_variables(config, WORK, self.python),
                "PYTHONPATH": str(runtime_path),
            },
        }

    def setup(self, *, preload: bool) -> tuple[str, dict[str, Any]]:
        """Return the template's key and the data that the launcher starts it from."""
        if preload not in self._setups:
            setup = {**self._base, "preload": preload}
            key = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:32]
            self._setups[preload] = key, setup
        return self._setups[preload]


def check_project(config: EnvironmentConfig) -> None:
    """Check that this engine has what a project asks for.

    Raises:
        ConfigError: It has not; the message names the setting.
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
    """Check that a storage volume's mount path does not overlap this machine's Python.

    Raises:
        ConfigError: They overlap.
    """
    package = Path(__file__).resolve().parents[2]
    pythons = {str(Path(p).parent.parent) for p in (python, os.path.realpath(python))}
    needed = {sys.prefix, sys.base_prefix, str(package), *pythons}
    needed |= {os.path.realpath(path) for path in needed}
    for path in needed:
        if f"{path}/".startswith(f"{mount_path}/") or mount_path.startswith(f"{path}/"):
            raise ConfigError(
                f"mount path {mount_path} overlaps {path}, which this machine's Python needs",
                hint="choose another mount path, such as /home/admin/data or /data",
            )


def with_storage(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a template whose instances have storage.

    Raises:
        SandboxStartFailed: The template failed, or it runs without namespaces.
    """
    if "failed" in report:
        raise SandboxStartFailed(
            f"the sandbox cannot be started: {report['failed']}",
            hint="check the process engine of this node with: aenv doctor",
        )
    if report["isolation"]["kind"] != "namespaces":
        raise SandboxStartFailed(
            "the process engine needs namespaces for storage: "
            f"{'; '.join(report['isolation']['missing'])}",
            hint="use the docker engine, or allow this user to create namespaces",
        )
    return report


def loaded(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a template that has loaded the code.

    Raises:
        SandboxStartFailed: The code does not load, or the kernel allows no namespaces.
    """
    if report.get("lacks_namespaces"):  # not its text, which the project's code may choose
        raise SandboxStartFailed(
            f"the process engine cannot create sandboxes here: {report['failed']}",
            hint=NO_NAMESPACES_HINT,
        )
    if "failed" in report:
        raise SandboxStartFailed(
            f"the environment's code does not load: {report['failed']}",
            hint="correct the project; `aenv run` shows the same error",
        )
    return report


def why_not_from_template(
    spec: SandboxSpec, shared: Mapping[str, str], report: Mapping[str, Any]
) -> str:
    """Return why an instance must import the code itself; empty if the template's import suits.

    Args:
        spec: The instance.
        shared: The variables with which the template imported the code.
        report: The template's report; its ``env_reads`` are the variables that the code read then.
    """
    if spec.arguments:
        return "it has arguments, which its code may read at import"
    seen = set(report["env_reads"])
    variables = {**spec.config.deploy.variables, **spec.environment_variables}
    read = {n for n, v in variables.items() if shared.get(n) != v and ("*" in seen or n in seen)}
    read |= seen & _OWN_VARIABLES
    return f"its code reads {', '.join(sorted(read)[:3])} at import" if read else ""


def _bytes(value: str | int | None) -> int | None:
    return units.parse_memory_bytes(value) if value else None


def isolation_of(ready: Mapping[str, Any]) -> Isolation:
    """Return the isolation that a template reported for its instances."""
    return Isolation.model_validate(ready["isolation"])
