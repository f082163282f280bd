"""Instances as sandboxes of NeMo Gym, whose provider ``aenv`` is registered on install.

    provider: {aenv: {aenv_url: "http://gateway.example:8080"}}
    sandbox = AsyncSandbox({"aenv": {"environment": "mini-terminal"}}, SandboxSpec())

A specification with an image runs in a container of it; one without an image, in an instance of the
provider's environment.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from aenv_ray.client.environment import Environment
from aenv_ray.errors import AenvError, ConfigError, ToolTimeout
from aenv_ray.integrations.support.projects import image_project
from aenv_ray.integrations.support.requirement import require
from aenv_ray.models import InstanceStatus

require(
    "nemo-gym", "nemo-gym", "0.4", "1",  # the extra is empty for earlier Pythons
    way_out="pip install 'aenv-ray[nemo-gym]' with Python 3.12 or later",
)  # fmt: skip

from nemo_gym.sandbox.providers.base import (  # noqa: E402
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

EXEC_S: Final = 180.0
"""NeMo Gym's own timeout of a command."""
_NO_EXIT_CODE: Final = 125
"""Exit code of a command that has none, as NeMo Gym's providers use it."""
_STATUS: Final = {
    InstanceStatus.PENDING: SandboxStatus.STARTING,
    InstanceStatus.RUNNING: SandboxStatus.RUNNING,
    InstanceStatus.FAILED: SandboxStatus.ERROR,
    InstanceStatus.TERMINATED: SandboxStatus.STOPPED,
}


class AenvProvider:
    """Creates sandboxes.

    Args:
        environment: Of sandboxes without an image. None: each needs an image.
        network: As ``deployConfig.network``, of sandboxes with an image.
        options: Options of `Environment`, for example ``aenv_url`` and ``api_key`` of a gateway.
            Images need Ray.
    """

    name = "aenv"

    def __init__(
        self, *, environment: str | None = None, network: str = "none", **options: Any
    ) -> None:
        self._environment = environment
        self._network = network
        self._options = options
        self._live: dict[str, Environment] = {}

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Create a sandbox, and return it once it answers.

        Raises:
            SandboxCreateError: It cannot be created, or as specified.
        """
        if spec.entrypoint or spec.resources.gpu:
            what = "an entrypoint" if spec.entrypoint else "a GPU"
            raise SandboxCreateError(f"the provider aenv has no sandboxes with {what}")
        options: dict[str, Any] = {"environment_variables": spec.env, **self._options}
        if spec.ttl_s is not None:
            options["ttl"] = float(spec.ttl_s)
        if spec.ready_timeout_s is not None:
            options["startup_timeout"] = float(spec.ready_timeout_s)
        if spec.metadata:
            options["labels"] = {**options.get("labels", {}), **spec.metadata}
        try:
            environment = Environment(await asyncio.to_thread(self._reference, spec), **options)
            await environment.initialize()
        except AenvError as exc:
            raise SandboxCreateError(exc.message_and_hint) from exc
        sandbox_id = environment.instance_id or environment.env_name
        self._live[sandbox_id] = environment
        return SandboxHandle(sandbox_id, self.name, environment)

    def _reference(self, spec: SandboxSpec) -> str:
        wanted = spec.resources
        if spec.image is None:
            if self._environment is None:
                raise ConfigError(
                    "the specification has no image, and the provider no environment",
                    hint="set one of them",
                )
            if wanted.cpu or wanted.memory_mib or wanted.disk_gib:
                raise ConfigError(
                    f"the resources of {self._environment} are those of its project",
                    hint="leave resources out, or set an image",
                )
            return self._environment
        limits: dict[str, Any] = {
            "cpu": None if wanted.cpu is None else f"{wanted.cpu:g}",
            "memory": None if wanted.memory_mib is None else f"{wanted.memory_mib}Mi",
            "ephemeralStorage": None if wanted.disk_gib is None else f"{wanted.disk_gib}Gi",
        }
        given = {name: limit for name, limit in limits.items() if limit is not None}
        return str(image_project(spec.image, "nemo-gym", network=self._network, **given))

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command; one without an exit code has an ``error_type``.

        Raises:
            ConfigError: `user` is given: a sandbox has one user.
        """
        if user is not None:
            raise ConfigError(
                f"commands of {handle.sandbox_id} cannot run as {user!r}: it has one user",
                hint="leave user out",
            )
        limit_s = EXEC_S if timeout_s is None else float(timeout_s)
        try:
            done = await handle.raw.exec(command, cwd=cwd, env=env, timeout=limit_s)
        except ToolTimeout as exc:
            return SandboxExecResult(None, exc.message, _NO_EXIT_CODE, "timeout")
        except AenvError as exc:
            return SandboxExecResult(None, exc.message, _NO_EXIT_CODE, "sandbox")
        stderr = done.stderr.decode(errors="replace")
        return SandboxExecResult(done.text(), stderr, done.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy a file into the sandbox."""
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        await handle.raw.write_file(target_path, data)

    async def download_file(
        self, handle: SandboxHandle, source_path: str, target_path: Path
    ) -> None:
        """Copy a file out of the sandbox."""
        data = await handle.raw.read_file(source_path)
        await asyncio.to_thread(Path(target_path).write_bytes, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Return whether the sandbox runs."""
        if handle.sandbox_id not in self._live:
            return SandboxStatus.STOPPED
        try:
            found = await handle.raw.get_env_info()
        except AenvError:
            return SandboxStatus.UNKNOWN
        try:
            return _STATUS[InstanceStatus(found["status"])]
        except ValueError:
            return SandboxStatus.UNKNOWN

    async def close(self, handle: SandboxHandle) -> None:
        """End the sandbox, any number of times."""
        environment = self._live.pop(handle.sandbox_id, None)
        if environment is not None:
            await environment.release()

    async def aclose(self) -> None:
        """End all sandboxes that are left."""
        while self._live:
            _, environment = self._live.popitem()
            await environment.release()
