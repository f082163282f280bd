"""OpenEnv's images as instances: a container provider for OpenEnv's clients.

    provider = InstanceProvider(ttl="1h")
    env = await EchoEnv.from_docker_image("registry.example.com/echo-env:1.0", provider=provider)

The container runs on a node of the cluster, with the isolation, quotas and lifetime of an instance
of the docker engine, and without a port on the network: connections reach it through Ray.
"""

from __future__ import annotations

import shlex
import time
from typing import Any, Final

import httpx

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.loop_thread import LoopThread
from aenv_ray.errors import AenvError, ConfigError, SandboxLost
from aenv_ray.integrations.support.port_forward import PortForward
from aenv_ray.integrations.support.projects import image_project
from aenv_ray.integrations.support.requirement import require
from aenv_ray.models import InstanceStatus

require("openenv-core", "openenv", "0.3", "1")

from openenv.core.containers.runtime.providers import ContainerProvider  # noqa: E402

COMMAND: Final = "cd /app/env && exec uvicorn server.app:app --host 127.0.0.1 --port 8000"
"""How images of OpenEnv's template start their server."""
PORT: Final = 8000
_LOG: Final = "/tmp/openenv-server.log"
_LOG_BYTES: Final = 4000
_POLL_S: Final = 0.2
_EXEC_S: Final = 60.0


class InstanceProvider(ContainerProvider):
    """Runs one container at a time.

    Args:
        command: What starts the image's server, for its shell.
        network: As ``deployConfig.network``.
        options: Options of `aenv_ray.create`, for example ``ttl`` and ``labels``.
    """

    def __init__(self, command: str = COMMAND, *, network: str = "none", **options: Any) -> None:
        self._command = command
        self._network = network
        self._options = options
        self._loop: LoopThread | None = None
        self._env: AsyncEnvHandle | None = None
        self._forward: PortForward | None = None

    @property
    def instance_id(self) -> str | None:
        """Id of the instance; None if none runs."""
        return None if self._env is None else self._env.instance_id

    def start_container(
        self,
        image: str,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> str:
        """Start an image's server, and return the address at which this process reaches it.

        Args:
            image: Name of the image, which the nodes can pull.
            port: Port of the server in the container. None: 8000.
            env_vars: Variables of the server.
            kwargs: Further options of `aenv_ray.create`.

        Raises:
            ConfigError: A container runs already, or the image has no shell.
            AenvError: The instance cannot be created.
        """
        if self._env is not None:
            raise ConfigError(
                f"this provider runs {self._env.instance_id} already",
                hint="call stop_container first, or make another provider",
            )
        project = image_project(image, "openenv", network=self._network)
        options = CreateOptions(environment_variables=env_vars or {}, **{**self._options, **kwargs})
        self._loop = LoopThread("aenv-openenv")
        try:
            number = self._loop.wait(self._start(str(project), options, port or PORT))
        except BaseException:
            self.stop_container()
            raise
        return f"http://127.0.0.1:{number}"

    async def _start(self, project: str, options: CreateOptions, port: int) -> int:
        self._env = env = await AsyncEnvHandle.create(project, options)
        # In a session of its own, so that it outlives the command that starts it.
        begin = f"setsid sh -c {shlex.quote(self._command)} >{_LOG} 2>&1 </dev/null &"
        done = await env.exec(begin, _EXEC_S)
        if done.exit_code:
            raise ConfigError(
                f"the server was not started: {done.stderr.decode(errors='replace')}",
                hint="correct InstanceProvider(command=…), which the image's shell runs",
            )
        self._forward = PortForward(env.handle, port)
        return await self._forward.open()

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Wait until the server answers at ``/health``.

        Raises:
            TimeoutError: It does not in time; the message ends with the server's output.
            SandboxLost: The container has ended.
        """
        gives_up = time.monotonic() + timeout_s
        while time.monotonic() < gives_up:
            try:
                # Not through a proxy of the environment: the port is forwarded on loopback.
                answer = httpx.get(f"{base_url}/health", timeout=timeout_s, trust_env=False)
                if answer.status_code == 200:
                    return
            except httpx.HTTPError:
                self._check_runs()
            time.sleep(_POLL_S)
        raise TimeoutError(
            f"the server in {self.instance_id} did not answer at /health within {timeout_s:g} s; "
            f"its output: {self._output()}"
        )

    def _check_runs(self) -> None:
        if self._env is None or self._loop is None:
            raise SandboxLost("no container runs", hint="call start_container")
        info = self._loop.wait(self._env.info())
        if info.status is not InstanceStatus.RUNNING:
            raise SandboxLost(f"the container {info.id} has ended", instance_id=info.id)

    def _output(self) -> str:
        if self._env is None or self._loop is None:
            return "none"
        try:
            told = self._loop.wait(self._env.read_file(_LOG))
        except AenvError as exc:
            return f"unknown, {exc.message}"
        return told[-_LOG_BYTES:].decode(errors="replace") or "none"

    def stop_container(self) -> None:
        """End the container, any number of times."""
        loop, self._loop = self._loop, None
        env, self._env = self._env, None
        forward, self._forward = self._forward, None
        if loop is None:
            return
        try:
            if forward is not None:
                loop.wait(forward.close())
            if env is not None:
                loop.wait(env.release())
                loop.wait(env.close())
        finally:
            loop.close()
