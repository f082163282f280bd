"""Variables of an instance and the size of its directory, the same for all engines."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.project.config import DeployConfig, EnvironmentConfig
from aenv_ray.runtime.fork.jail_spec import DEFAULT_STORAGE_BYTES, WORK

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def shared_variables(config: EnvironmentConfig, home: str, python: str) -> dict[str, str]:
    """Return the variables that all instances of a project share; none comes from the host."""
    return {
        "PATH": f"{Path(python).parent}:{_PATH}",
        "HOME": home,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "envNAME": config.name,
        "envversion": config.version,
        **config.deploy.variables,
    }


def instance_variables(spec: SandboxSpec, isolation: str, python: str) -> dict[str, str]:
    """Return an instance's variables; those of the caller override the others.

    Args:
        spec: The instance.
        isolation: Kind of isolation. Only ``namespaces`` has a fixed work directory; elsewhere the
            runtime sets ``HOME``.
        python: Path of its interpreter.
    """
    variables = shared_variables(spec.config, WORK, python)
    if isolation != "namespaces":
        del variables["HOME"]
    labels = ",".join(f"{key}={value}" for key, value in spec.labels.items())
    return {
        **variables,
        "AENV_INSTANCE_ID": spec.instance_id,
        **({"AENV_LABELS": labels} if labels else {}),
        **({"AENV_DATASOURCE": spec.datasource} if spec.datasource else {}),
        **spec.environment_variables,
    }


def work_bytes(deploy: DeployConfig) -> int:
    """Return the size of the work directory."""
    if not deploy.ephemeral_storage:
        return DEFAULT_STORAGE_BYTES
    return units.parse_memory_bytes(deploy.ephemeral_storage)
