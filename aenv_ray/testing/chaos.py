"""``python -m aenv_ray.testing.chaos --rounds N --engine process|docker|fake [--seed S]``.

Each round creates instances on a local Ray, makes calls, and kills a random part of the fabric
meanwhile. It counts, from the machine's process table and the Docker daemon:

- ``leaked``: what is left 10 s after its deadline, or after the end of the run;
- ``run_twice``: calls that ran more than once in a sandbox;
- ``untyped_failures``: failures that are not an `AenvError` with its cause in words.

Victims are drawn in a random order that the seed determines; all are killed once before any is
killed again. The exit code is 1 if one of the counts is not zero.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.testing.chaos_node import GONE_S, ChaosNode, await_empty, kill, say

if TYPE_CHECKING:
    from aenv_ray.actors.calls.handle import EnvHandle

ENVIRONMENT: Final = Path(__file__).parent / "chaos_environment"
CALL_DEADLINE_S: Final = 120.0
"""Longer than the restart of a host takes."""
LONG_TTL_S: Final = 600.0
SHORT_TTL_S: Final = 12.0
_CALLS: Final = 4
_READY: Final = "the driver is ready"
_DRIVER: Final = f"""
import sys, aenv_ray
handles = aenv_ray.create_many(sys.argv[1], int(sys.argv[2]), ttl={LONG_TTL_S})
references = [h.call_tool.remote("trace", {{"key": "d", "seconds": 60.0}}) for h in handles]
print({_READY!r}, flush=True)
sys.stdin.read()
"""


DRIVER: Final = "driver"
"""A driver that created the instances; chaos starts and kills one."""
DISK_LIMIT_BYTES: Final = 256 << 20
MEMORY_LIMIT_BYTES: Final = 1 << 30
"""Limits of the tools that exhaust their sandbox, if nothing else stops them."""


class Daemon(Protocol):
    """A Docker daemon that chaos may kill."""

    address: str

    def kill(self) -> None:
        """Kill it."""

    def start(self) -> None:
        """Start it again, and return when it answers."""


@dataclass(frozen=True)
class Attack:
    """One round, for the function that kills its victim."""

    node: ChaosNode
    handles: list[EnvHandle]
    """The round's instances."""
    random: random.Random
    daemon: Daemon | None
    """The Docker daemon, if it may be killed."""


def _kill_host(attack: Attack) -> None:
    handle = attack.random.choice(attack.handles)
    info = aenv_ray.init().wait(handle.info.remote(), f"the host of {handle.instance_id}")
    kill(attack.node.actor_pid(info.host))


def _kill_controller(attack: Attack) -> None:
    from aenv_ray.actors.ray_shell.ray_api import CONTROLLER_NAME

    kill(attack.node.actor_pid(CONTROLLER_NAME))


def _kill_sandbox(attack: Attack) -> None:
    if attack.node.engine == "docker":
        _container(attack).kill()
    else:
        kill(attack.random.choice(attack.node.sandbox_pids()))


def _kill_module(attack: Attack, module: str) -> None:
    for pid in attack.node.pids_of(module):
        kill(pid)


def _remove_container(attack: Attack) -> None:
    _container(attack).remove(force=True)


def _container(attack: Attack) -> Any:
    return attack.random.choice(attack.node.containers())


def _kill_daemon(attack: Attack) -> None:
    assert attack.daemon is not None
    attack.daemon.kill()
    attack.daemon.start()


VICTIMS: Final[Mapping[str, Callable[[Attack], None]]] = {
    "host": _kill_host,
    "controller": _kill_controller,
    "sandbox": _kill_sandbox,
    "launcher": lambda attack: _kill_module(attack, "aenv_ray.engines.process.launcher "),
    "janitor": lambda attack: _kill_module(attack, "aenv_ray.engines.docker.janitor"),
    "container": _remove_container,
    "dockerd": _kill_daemon,
}
"""How to kill each victim from outside."""
TOOLS: Final[Mapping[str, tuple[str, dict[str, int]]]] = {
    "disk": ("fill_disk", {"limit_bytes": DISK_LIMIT_BYTES}),
    "memory": ("eat_memory", {"limit_bytes": MEMORY_LIMIT_BYTES}),
}
"""Tools, with their arguments, that exhaust their sandbox from inside."""


def victims(engine: str, *, may_kill_daemon: bool) -> list[str]:
    """Return the names of the victims that exist with an engine."""
    found = [DRIVER, "host", "controller"]
    if engine != "fake":  # its sandboxes are threads without limits, and cannot be killed
        found += ["sandbox", *TOOLS]
    if engine == "process":
        found.append("launcher")
    if engine == "docker":
        found += ["janitor", "container"]
    return [*found, "dockerd"] if may_kill_daemon else found


@dataclass
class Tally:
    """The counts of all rounds."""

    rounds: int = 0
    leaked: int = 0
    run_twice: int = 0
    untyped_failures: int = 0
    findings: list[str] = field(default_factory=list)
    """Each problem in words."""
    victims: list[str] = field(default_factory=list)

    def leak(self, left: Sequence[str]) -> None:
        """Count what is left and should be gone."""
        self.leaked += len(left)
        self._report([f"left: {one}" for one in left])

    def twice(self, key: str, runs: int) -> None:
        """Count a call that ran more than once."""
        if runs > 1:
            self.run_twice += 1
            self._report([f"call {key} ran {runs} times"])

    def failed(self, error: BaseException) -> None:
        """Count a failure, unless it is an `AenvError` with a message."""
        if isinstance(error, AenvError) and error.message.strip():
            say(f"  {type(error).__name__}: {error.message.splitlines()[0][:150]}")
            return
        self.untyped_failures += 1
        self._report([f"untyped: {error!r}"])

    def _report(self, findings: list[str]) -> None:
        self.findings += findings
        for one in findings:
            say(f"  FOUND {one}")

    @property
    def is_clean(self) -> bool:
        """Return whether nothing was found."""
        return not (self.leaked or self.run_twice or self.untyped_failures)


class Round:
    """One round: create instances, make calls, kill the victim, count what is left."""

    def __init__(
        self,
        node: ChaosNode,
        victim: str,
        number: int,
        seed: int,
        tally: Tally,
        daemon: Daemon | None,
    ) -> None:
        self._node = node
        self._tally = tally
        self._daemon = daemon
        self._number = number
        self._random = random.Random(f"{seed}/{number}")
        self._victim = victim
        self._densities = self._random.choices(
            ["shared", "dedicated"], weights=[3, 1], k=self._random.randint(2, 4)
        )
        self._is_released = self._random.random() < 0.5
        self._calls: list[tuple[str, Any]] = []

    def run(self) -> None:
        """Run the round."""
        ends = "release" if self._is_released else "TTL"
        what = f"{len(self._densities)} instances, kill {self._victim}, ended by {ends}"
        say(f"round {self._number}: {what}")
        if self._victim == DRIVER:
            self._kill_driver()
            due = time.monotonic()
        else:
            due = self._kill_during_calls()
        self._tally.leak(
            await_empty(self._node.left_over, max(0.0, due - time.monotonic()) + GONE_S)
        )

    # --- killing the driver ---------------------------------------------------------------------

    def _kill_driver(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(ENVIRONMENT), str(len(self._densities))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            is_ready = any(_READY in line for line in process.stdout)
            kill(process.pid)
        if not is_ready:
            self._tally.failed(RuntimeError(f"the driver ended: {process.returncode}"))

    # --- killing something else -----------------------------------------------------------------

    def _kill_during_calls(self) -> float:
        """Return when everything must be gone, on the monotonic clock."""
        ttl_s = LONG_TTL_S if self._is_released else SHORT_TTL_S
        handles = [h for d in self._densities if (h := self._create(d, ttl_s)) is not None]
        due = time.monotonic() + ttl_s
        for handle in handles:
            for _ in range(_CALLS):
                self._call(handle, self._random.uniform(0.1, 0.6))
        if handles:
            self._kill_victim(handles)
        for handle in handles:
            self._call(handle, 0.0)
        self._gather()
        for handle in handles:
            self._read_traces(handle)
        if (later := self._create("shared", ttl_s)) is not None:  # the fabric still works
            handles.append(later)
            self._call(later, 0.0)
            self._gather()
        due = max(due, time.monotonic() + ttl_s)
        if not self._is_released:
            return due
        try:
            aenv_ray.release_many(handles)
        except Exception as exc:  # noqa: BLE001  # counted by its type
            self._tally.failed(exc)
        return time.monotonic()

    def _create(self, density: str, ttl_s: float) -> EnvHandle | None:
        try:
            return aenv_ray.create(
                ENVIRONMENT, actor="dedicated" if density == "dedicated" else "shared", ttl=ttl_s
            )
        except Exception as exc:  # noqa: BLE001  # counted by its type
            self._tally.failed(exc)
            return None

    def _call(self, handle: EnvHandle, seconds: float) -> None:
        key = f"{self._number}-{len(self._calls)}"
        arguments = {"key": key, "seconds": seconds}
        self._calls.append((key, handle.call_tool.remote("trace", arguments)))

    def _gather(self) -> None:
        for key, reference in self._calls:
            result = self._wait(reference, f"call {key}")
            if result is not None and not result.is_error:
                self._tally.twice(key, result.data)
        self._calls = [(key, None) for key, _ in self._calls]

    def _kill_victim(self, handles: list[EnvHandle]) -> None:
        try:
            if self._victim in TOOLS:
                name, arguments = TOOLS[self._victim]
                reference = self._random.choice(handles).call_tool.remote(name, arguments)
                result = self._wait(reference, f"tool {name}")
                if result is not None:
                    say(f"  {name}: {result.text().splitlines()[-1][:150]}")
            else:
                VICTIMS[self._victim](Attack(self._node, handles, self._random, self._daemon))
        except Exception as exc:  # noqa: BLE001  # counted by its type
            self._tally.failed(exc)

    def _read_traces(self, handle: EnvHandle) -> None:
        data = self._wait(handle.read_file.remote("traces.txt"), "reading the traces")
        for key, runs in Counter((data or b"").decode().split()).items():
            self._tally.twice(key, runs)

    def _wait(self, reference: Any, what: str) -> Any:
        """Return the value of a reference; None if it failed or was collected before."""
        if reference is None:
            return None
        try:
            return aenv_ray.init().wait(reference, what, CALL_DEADLINE_S)
        except Exception as exc:  # noqa: BLE001  # counted by its type
            self._tally.failed(exc)
            return None


def _shuffled(names: Sequence[str], seed: int) -> Iterator[str]:
    """Yield names without end: all in a random order, then all in another."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(names, len(names))


def run(
    rounds: int, engine: str, seed: int, *, image: str | None = None, daemon: Daemon | None = None
) -> Tally:
    """Run some rounds on a local Ray, and stop everything.

    Args:
        rounds: Number of rounds.
        engine: ``process``, ``docker`` or ``fake``.
        seed: Determines the victims and all other random choices.
        image: For docker: the image of the containers, with Python 3.11 or newer.
        daemon: For docker: a daemon that has the image and may be killed. None: ``DOCKER_HOST``.

    Raises:
        ConfigError: The docker engine without an image.
        FabricUnavailable: Ray does not start.
    """
    if engine == "docker" and not image:
        raise ConfigError("the docker engine needs an image", hint="set --image")
    tally = Tally()
    with contextlib.ExitStack() as stack:
        docker_host = daemon.address if daemon is not None else settings().docker_host
        node = ChaosNode(engine, docker_host if engine == "docker" else None, image)
        stack.callback(lambda: tally.leak(node.close()))
        node.open()
        names = victims(engine, may_kill_daemon=daemon is not None)
        for number, victim in enumerate(itertools.islice(_shuffled(names, seed), rounds)):
            tally.victims.append(victim)
            Round(node, victim, number, seed, tally, daemon).run()
            tally.rounds += 1
    return tally


def main(make_daemon: Callable[[str], Daemon] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        make_daemon: For docker: returns a daemon that has an image and may be killed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m aenv_ray.testing.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, required=True, metavar="N")
    parser.add_argument("--engine", choices=["process", "docker", "fake"], default="process")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the counts to FILE")
    parser.add_argument(
        "--image",
        default=settings().docker_image,
        help="image of the containers; default: AENV_DOCKER_IMAGE",
    )
    options = parser.parse_args()
    try:
        is_docker = options.engine == "docker" and options.image
        daemon = make_daemon(options.image) if make_daemon is not None and is_docker else None
        tally = run(
            options.rounds, options.engine, options.seed, image=options.image, daemon=daemon
        )
    except AenvError as exc:
        say(f"error: {exc}")
        return 1
    figures = {
        "rounds": tally.rounds, "leaked": tally.leaked, "run_twice": tally.run_twice,
        "untyped_failures": tally.untyped_failures, "engine": options.engine,
        "seed": options.seed, "victims": tally.victims, "findings": tally.findings,
    }  # fmt: skip
    text = json.dumps(figures, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
