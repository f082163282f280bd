"""What chaos runs on: a local Ray, and what is left of it and of a Docker daemon."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.engines.docker.names import docker_scope
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.engines.node.docker_labels import DIRECTORY_LABEL, SCOPE_LABEL
from aenv_ray.errors import FabricUnavailable

GONE_S: Final = 10.0
"""Invariant 3: nothing outlives its deadline by more than this."""
END_S: Final = 30.0
"""How long everything may take to end after Ray was stopped."""
_ASK_S: Final = 120.0
_POLL_S: Final = 0.1


class ChaosNode:
    """A local Ray with separate directories, from `open` to `close`."""

    def __init__(self, engine: str, docker_host: str | None, image: str | None) -> None:
        self.engine = engine
        # Short: a socket's path holds 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="aenv-c", dir="/tmp"))
        self._docker_host = docker_host
        self._image = image
        self._node_dir = self.root
        self._scope = ""
        self.address = ""

    def open(self) -> None:
        """Start Ray and the fabric."""
        for name in ("RAY_ADDRESS", "AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP"):
            os.environ.pop(name, None)
        os.environ |= {
            "AENV_RUNTIME_DIR": str(self.root / "r"),
            "AENV_DATA_DIR": str(self.root / "d"),
            "RAY_TMPDIR": str(self.root),
            "AENV_ENGINE": self.engine,
        }
        if self._docker_host is not None:
            os.environ |= {"DOCKER_HOST": self._docker_host, "AENV_DOCKER_IMAGE": self._image or ""}
        settings.cache_clear()
        from aenv_ray.actors.ray_shell import ray_api

        self.address = ray_api.start_local(num_cpus=4)
        os.environ["RAY_ADDRESS"] = self.address  # for drivers that join
        aenv_ray.init()
        self._node_dir = node_directory(settings().runtime_dir, ray_api.session_scope())
        self._scope = docker_scope(ray_api.session_scope())

    def close(self) -> list[str]:
        """Stop Ray, and return what is left of it and of the engines, in words."""
        from aenv_ray.actors.ray_shell import ray_api

        aenv_ray.shutdown()
        ray_api.leave()
        left = await_empty(lambda: [*self._processes().values(), *self._docker_things()], END_S)
        for pid in self._processes():
            kill(pid)
        shutil.rmtree(self.root, ignore_errors=True)
        return left

    # --- what runs ------------------------------------------------------------------------------

    def sandbox_pids(self) -> list[int]:
        """Return the pids of sandbox processes, from the process table."""
        return sorted(live_processes(self._node_dir))

    def left_over(self) -> list[str]:
        """Return the processes and containers of sandboxes, in words."""
        containers = [f"container {one.name}" for one in self.containers()]
        return [f"process {pid}" for pid in self.sandbox_pids()] + containers

    def containers(self) -> list[Any]:
        """Return the containers of this node in any state, sorted by name."""
        if self._docker_host is None:
            return []
        listed = self._daemon().containers.list(
            all=True, filters={"label": SCOPE_LABEL}, ignore_removed=True
        )
        return sorted(filter(self._is_ours, listed), key=lambda one: str(one.name))

    def _docker_things(self) -> list[str]:
        if self._docker_host is None:
            return []
        daemon, ours = self._daemon(), {"label": f"{SCOPE_LABEL}={self._scope}"}
        return [
            *(f"container {one.name}" for one in self.containers()),
            *(f"network {one.name}" for one in daemon.networks.list(filters=ours)),
            *(f"volume {one.name}" for one in daemon.volumes.list(filters=ours)),
        ]

    def _is_ours(self, container: Any) -> bool:
        return str(self.root) in container.labels.get(DIRECTORY_LABEL, "")

    def _daemon(self) -> Any:
        from docker import client

        return client.DockerClient(base_url=self._docker_host, timeout=int(_ASK_S))  # type: ignore[no-untyped-call]

    def pids_of(self, module: str) -> list[int]:
        """Return the pids of this node's processes that run a module of aenv-ray."""
        return sorted(pid for pid, command in self._processes().items() if module in command)

    def _processes(self) -> dict[int, str]:
        """Return the processes with this node's directory in their arguments or environment."""
        mark, found = os.fsencode(self.root), {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = Path("/proc", name, "cmdline").read_bytes()
                if not command or int(name) == os.getpid():  # a zombie or a kernel thread
                    continue
                if mark in command or mark in Path("/proc", name, "environ").read_bytes():
                    found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace")[:150]
            except OSError:  # it ended, or belongs to another user
                continue
        return found

    def actor_pid(self, name: str) -> int:
        """Return the pid of an actor of aenv-ray.

        Raises:
            FabricUnavailable: The actor does not exist or does not answer.
        """
        from aenv_ray.actors.ray_shell import ray_api

        actor = ray_api.find_actor(name)
        if actor is None:
            raise FabricUnavailable(f"there is no actor {name}")
        reference = actor.__ray_call__.remote(lambda _: os.getpid())
        return int(aenv_ray.init().wait(reference, f"the pid of {name}", _ASK_S))


def kill(pid: int) -> None:
    """Send SIGKILL to a process; reports one that has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        say(f"  process {pid} had already ended")


def await_empty(look: Callable[[], list[str]], within_s: float) -> list[str]:
    """Poll `look` until it returns nothing; return what it still finds after `within_s`."""
    ends = time.monotonic() + within_s
    while (found := look()) and time.monotonic() < ends:
        time.sleep(_POLL_S)
    return found


def say(text: str) -> None:
    """Print a line for people, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
