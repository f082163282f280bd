"""What chaos kills: each victim by name, for real."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import aenv_ray
from aenv_ray.testing.chaos_stage import Stage, kill

if TYPE_CHECKING:
    from aenv_ray.actors.calls.handle import EnvHandle
    from aenv_ray.testing.chaos_daemon import OwnDaemon

DRIVER: Final = "driver"
"""The driver that made the instances; `aenv_ray.testing.chaos` starts and kills one."""
DISK_LIMIT_BYTES: Final = 256 << 20
MEMORY_LIMIT_BYTES: Final = 1 << 30
"""What the tools that ruin their sandbox take at most, should nothing stop them."""


class Scene:
    """One round, as its victim sees it.

    Args:
        stage: Where it plays.
        handles: The round's instances.
        dice: For what is left to chance.
        daemon: The Docker daemon, when it is ours.
    """

    def __init__(
        self,
        stage: Stage,
        handles: list[EnvHandle],
        dice: random.Random,
        daemon: OwnDaemon | None,
    ) -> None:
        self.stage = stage
        self.handles = handles
        self.dice = dice
        self.daemon = daemon


def _kill_host(scene: Scene) -> None:
    handle = scene.dice.choice(scene.handles)
    info = aenv_ray.init().wait(handle.info.remote(), f"the host of {handle.instance_id}")
    kill(scene.stage.actor_pid(info.host))


def _kill_controller(scene: Scene) -> None:
    from aenv_ray.actors.ray_shell.ray_api import CONTROLLER_NAME

    kill(scene.stage.actor_pid(CONTROLLER_NAME))


def _kill_sandbox(scene: Scene) -> None:
    if scene.stage.engine == "docker":
        _container(scene).kill()
    else:
        kill(scene.dice.choice(scene.stage.sandbox_pids()))


def _kill_launcher(scene: Scene) -> None:
    for pid in scene.stage.pids_of("aenv_ray.engines.process.launcher "):
        kill(pid)


def _kill_janitor(scene: Scene) -> None:
    for pid in scene.stage.pids_of("aenv_ray.engines.docker.janitor"):
        kill(pid)


def _remove_container(scene: Scene) -> None:
    _container(scene).remove(force=True)


def _container(scene: Scene) -> Any:
    return scene.dice.choice(scene.stage.containers())


def _kill_daemon(scene: Scene) -> None:
    assert scene.daemon is not None
    scene.daemon.kill()
    scene.daemon.start()


VICTIMS: Final[Mapping[str, Callable[[Scene], None]]] = {
    "host": _kill_host,
    "controller": _kill_controller,
    "sandbox": _kill_sandbox,
    "launcher": _kill_launcher,
    "janitor": _kill_janitor,
    "container": _remove_container,
    "dockerd": _kill_daemon,
}
"""Killed from outside, by name."""
TOOLS: Final[Mapping[str, tuple[str, dict[str, int]]]] = {
    "disk": ("fill_disk", {"limit_bytes": DISK_LIMIT_BYTES}),
    "memory": ("eat_memory", {"limit_bytes": MEMORY_LIMIT_BYTES}),
}
"""Ruined from inside, by a tool with its arguments."""


def victims(engine: str, *, owns_daemon: bool) -> list[str]:
    """Return the names of what can be killed with an engine."""
    found = [DRIVER, "host", "controller"]
    if engine != "fake":  # its sandboxes are threads, without limits and nobody to kill
        found += ["sandbox", *TOOLS]
    if engine == "process":
        found.append("launcher")
    if engine == "docker":
        found += ["janitor", "container"]
    return [*found, "dockerd"] if owns_daemon else found
