"""``python -m aenv_ray.testing.chaos --rounds N --engine process|docker|fake [--seed S]``.

Each round starts instances on a Ray of its own, makes calls, kills something at random in the
middle, and then looks at what the machine itself says. What must hold whatever was killed:

- ``leaked``: nothing of ours is left 10 s after its deadline, and nothing at all after the end;
- ``run_twice``: no call ran twice in a sandbox;
- ``untyped_failures``: every failure is an error of ours, with its cause in words.

The same seed kills the same things in the same order, each before any a second time. Exit code 1
when any of the three is not zero.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.testing.chaos_daemon import OwnDaemon
from aenv_ray.testing.chaos_stage import GONE_S, Stage, await_empty, kill, say
from aenv_ray.testing.chaos_victims import DRIVER, TOOLS, VICTIMS, Scene, victims

if TYPE_CHECKING:
    from aenv_ray.actors.calls.handle import EnvHandle

ENVIRONMENT: Final = Path(__file__).parent / "chaos_environment"
CALL_DEADLINE_S: Final = 120.0
"""A restarted host is back long before."""
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


@dataclass
class Tally:
    """What was found, over all rounds."""

    rounds: int = 0
    leaked: int = 0
    run_twice: int = 0
    untyped_failures: int = 0
    findings: list[str] = field(default_factory=list)
    """Each of them, in words."""
    victims: list[str] = field(default_factory=list)

    def leak(self, left: Sequence[str]) -> None:
        """Count what should be gone."""
        self.leaked += len(left)
        self._tell([f"left: {one}" for one in left])

    def twice(self, key: str, runs: int) -> None:
        """Count a call that ran more than once."""
        if runs > 1:
            self.run_twice += 1
            self._tell([f"call {key} ran {runs} times"])

    def failed(self, error: BaseException) -> None:
        """Take a failure; one of ours with words is as it should be."""
        if isinstance(error, AenvError) and error.message.strip():
            say(f"  {type(error).__name__}: {error.message.splitlines()[0][:150]}")
            return
        self.untyped_failures += 1
        self._tell([f"untyped: {error!r}"])

    def _tell(self, findings: list[str]) -> None:
        self.findings += findings
        for one in findings:
            say(f"  FOUND {one}")

    @property
    def is_clean(self) -> bool:
        """Whether everything held."""
        return not (self.leaked or self.run_twice or self.untyped_failures)


class Round:
    """One round: instances, calls, a death, and what is left.

    Args:
        stage: Where it plays.
        victim: What dies.
        number: Of the round; with the seed it decides everything else that is left to chance.
        seed: Of the run.
        tally: Told what is found.
        daemon: The Docker daemon, when it may be killed.
    """

    def __init__(
        self,
        stage: Stage,
        victim: str,
        number: int,
        seed: int,
        tally: Tally,
        daemon: OwnDaemon | None,
    ) -> None:
        self._stage = stage
        self._tally = tally
        self._daemon = daemon
        self._number = number
        self._dice = random.Random(f"{seed}/{number}")
        self._victim = victim
        self._densities = self._dice.choices(
            ["shared", "dedicated"], weights=[3, 1], k=self._dice.randint(2, 4)
        )
        self._is_released = self._dice.random() < 0.5
        self._calls: list[tuple[str, Any]] = []

    def play(self) -> None:
        """Play it."""
        ends = "release" if self._is_released else "their TTL"
        what = f"{len(self._densities)} instances, {self._victim} dies, {ends} ends them"
        say(f"round {self._number}: {what}")
        if self._victim == DRIVER:
            self._kill_driver()
            due = time.monotonic()
        else:
            due = self._kill_during_calls()
        self._tally.leak(
            await_empty(self._stage.left_over, max(0.0, due - time.monotonic()) + GONE_S)
        )

    # --- the driver dies ------------------------------------------------------------------------

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

    # --- something else dies --------------------------------------------------------------------

    def _kill_during_calls(self) -> float:
        """Return when everything is to be gone, on the monotonic clock."""
        ttl_s = LONG_TTL_S if self._is_released else SHORT_TTL_S
        handles = [h for d in self._densities if (h := self._create(d, ttl_s)) is not None]
        due = time.monotonic() + ttl_s
        for handle in handles:
            for _ in range(_CALLS):
                self._call(handle, self._dice.uniform(0.1, 0.6))
        if handles:
            self._strike(handles)
        for handle in handles:
            self._call(handle, 0.0)
        self._gather()
        for handle in handles:
            self._read_traces(handle)
        if (later := self._create("shared", ttl_s)) is not None:  # the fabric goes on
            handles.append(later)
            self._call(later, 0.0)
            self._gather()
        due = max(due, time.monotonic() + ttl_s)
        if not self._is_released:
            return due
        try:
            aenv_ray.release_many(handles)
        except Exception as exc:  # noqa: BLE001  # which it is, is what matters
            self._tally.failed(exc)
        return time.monotonic()

    def _create(self, density: str, ttl_s: float) -> EnvHandle | None:
        try:
            return aenv_ray.create(
                ENVIRONMENT, actor="dedicated" if density == "dedicated" else "shared", ttl=ttl_s
            )
        except Exception as exc:  # noqa: BLE001  # which it is, is what matters
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

    def _strike(self, handles: list[EnvHandle]) -> None:
        try:
            if self._victim in TOOLS:
                name, arguments = TOOLS[self._victim]
                reference = self._dice.choice(handles).call_tool.remote(name, arguments)
                result = self._wait(reference, f"tool {name}")
                if result is not None:
                    say(f"  {name}: {result.text().splitlines()[-1][:150]}")
            else:
                VICTIMS[self._victim](Scene(self._stage, handles, self._dice, self._daemon))
        except Exception as exc:  # noqa: BLE001  # which it is, is what matters
            self._tally.failed(exc)

    def _read_traces(self, handle: EnvHandle) -> None:
        data = self._wait(handle.read_file.remote("traces.txt"), "reading the traces")
        for key, runs in Counter((data or b"").decode().split()).items():
            self._tally.twice(key, runs)

    def _wait(self, reference: Any, what: str) -> Any:
        """Return what a reference becomes; None when that is a failure, or was waited for."""
        if reference is None:
            return None
        try:
            return aenv_ray.init().wait(reference, what, CALL_DEADLINE_S)
        except Exception as exc:  # noqa: BLE001  # which it is, is what matters
            self._tally.failed(exc)
            return None


def _decks(names: Sequence[str], seed: int) -> Iterator[str]:
    """Yield names for ever: all of them in some order, then all in another."""
    dice = random.Random(seed)
    while True:
        yield from dice.sample(names, len(names))


def run(
    rounds: int, engine: str, seed: int, *, image: str | None = None, own_daemon: bool = False
) -> Tally:
    """Play some rounds on a Ray of their own, and end everything.

    Args:
        rounds: How many.
        engine: ``process``, ``docker`` or ``fake``.
        seed: Decides what is killed, when.
        image: Of the containers, with Python 3.11 or newer; for docker.
        own_daemon: Start a Docker daemon for this run, which may be killed as well; as root.

    Raises:
        ConfigError: The docker engine without an image.
        FabricUnavailable: Ray or the daemon does not come up.
    """
    if engine == "docker" and not image:
        raise ConfigError("containers need an image", hint="name one with --image")
    tally = Tally()
    with contextlib.ExitStack() as stack:
        daemon = None
        if own_daemon and image:
            daemon = OwnDaemon(image)
            stack.callback(daemon.end)
        docker_host = daemon.address if daemon is not None else settings().docker_host
        stage = Stage(engine, docker_host if engine == "docker" else None, image)
        stack.callback(lambda: tally.leak(stage.close()))
        stage.open()
        names = victims(engine, owns_daemon=daemon is not None)
        for number, victim in enumerate(itertools.islice(_decks(names, seed), rounds)):
            tally.victims.append(victim)
            Round(stage, victim, number, seed, tally, daemon).play()
            tally.rounds += 1
    return tally


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aenv_ray.testing.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, required=True, metavar="N")
    parser.add_argument("--engine", choices=["process", "docker", "fake"], default="process")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--image", default=settings().docker_image, help="of the containers; or AENV_DOCKER_IMAGE"
    )
    parser.add_argument(
        "--own-daemon", action="store_true", help="start a Docker daemon, which may die too; root"
    )
    options = parser.parse_args()
    try:
        tally = run(options.rounds, options.engine, options.seed, image=options.image,
                    own_daemon=options.own_daemon and options.engine == "docker")  # fmt: skip
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
