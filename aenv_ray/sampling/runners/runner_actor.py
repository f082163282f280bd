"""Runners as Ray actors, one on each node, next to the sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.actors.controller.placement import usable
from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.fabric import LOOK_S, Fabric
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.daemon import raise_file_limit
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable
from aenv_ray.ids import new_call_id
from aenv_ray.project.project import Project
from aenv_ray.sampling.policies.base import received
from aenv_ray.sampling.runners.assignments import Group
from aenv_ray.sampling.runners.local_runner import LocalRunner
from aenv_ray.sampling.runners.runner import EpisodeRules
from aenv_ray.sampling.runners.runner_pool import RunnerLink, RunnerLost
from aenv_ray.trajectories.schema import Episode

logger = logging.getLogger("aenv_ray")

LABEL: Final = "aenv/runner"
"""Label of the instances of a runner; its value is the runner's name."""
_LINGER_S: Final = 0.25
"""A busy runner collects finished episodes for this long."""
_BEAT_S: Final = 5.0
"""A runner without finished episodes answers after this long."""
_SILENT_S: Final = 30.0
"""A runner that does not answer for this long is reported: its event loop is blocked."""
_OPEN_S: Final = 120.0
_SLOW_S: Final = 10.0
"""After so long, the others no longer leave a runner that is starting its share of the episodes."""
_RETRY_S: Final = 60.0
"""A node on which a runner could not be opened, such as one with a full disk, is tried again after
this long."""
_PLACING_S: Final = 15.0
"""A run that is to be near an actor without a node waits for its node for this long."""
_PLACING_LOOK_S: Final = 1.0
"""How often it looks meanwhile."""
_CLOSE_S: Final = 70.0
"""Longer than a release may take."""
_OWN_SETTINGS: Final = ("AENV_", "RAY_")
"""Prefixes of the variables that each node has for itself."""


@dataclass(frozen=True)
class RunnerSetup:
    """What every runner of a run needs."""

    policy: bytes = field(repr=False)
    """See `portable`."""
    rules: EpisodeRules
    options: CreateOptions
    digest: str
    """The digest of the project."""
    variables: Mapping[str, str] = field(repr=False)
    """The variables of the driver; a runner takes those that it does not have, such as keys of
    endpoints."""


def variables_for_runners() -> dict[str, str]:
    """Return the environment variables of this process, without the settings of its node."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_OWN_SETTINGS)}


class RunnerShell:
    """The Ray actor: a `LocalRunner` in a process of its own.

    Args:
        name: The name of this runner.
        setup: The setup of the run.
        archive: The project's files.
    """

    def __init__(self, name: str, setup: RunnerSetup, archive: bytes) -> None:
        self._name = name
        self._setup = setup
        self._archive = archive
        self._runner: LocalRunner | None = None

    async def open(self) -> None:
        """Load the policy and connect to the fabric.

        Raises:
            ConfigError: The policy cannot be loaded here.
            AenvError: The project cannot be stored, or the fabric does not answer.
        """
        raise_file_limit()
        logs.configure("runner")
        # Ray warns of every `ray.get` in an async actor, also in threads, where ours are.
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
        setup = self._setup
        for key, value in setup.variables.items():
            os.environ.setdefault(key, value)
        policy = received(setup.policy)
        projects = HostProjects(settings().data_dir / "projects", ray_api.node_id())
        if not projects.has(setup.digest):
            await projects.put(setup.digest, self._archive)
        fabric = await asyncio.to_thread(driver_api.init)
        options = setup.options
        # `NodeRunners` has resolved `near`, which may mean the driver's node.
        options.near, options.near_node = None, ray_api.node_id()
        labels = {LABEL: self._name}
        self._runner = await LocalRunner.open(
            fabric, projects.source(setup.digest), options, policy, setup.rules, labels
        )
        gc.freeze()  # Ray and all modules: a full collection would look at them between episodes

    async def give(self, groups: Sequence[Group], limit: int, has_more: bool) -> None:
        """See `RunnerQueue.give`."""
        await self._opened().give(groups, limit, has_more=has_more)

    async def take_back(self, most: int) -> list[int]:
        """See `RunnerQueue.take_back`."""
        return await self._opened().take_back(most)

    async def finished(self) -> tuple[bytes, dict[str, bytes], int]:
        """Return finished episodes as JSON Lines, the contents of their attachments, and `queued`.

        There are no episodes if none has finished for a while.
        """
        runner = self._opened()
        episodes = await runner.finished(linger_s=_LINGER_S, wait_s=_BEAT_S)
        contents: dict[str, bytes] = {}
        for episode in episodes:
            contents |= episode.contents
        lines = b"\n".join(episode.model_dump_json().encode() for episode in episodes)
        return lines, contents, runner.queued

    async def close(self) -> None:
        """End all episodes and release their instances."""
        if self._runner is not None:
            await self._runner.close()

    def _opened(self) -> LocalRunner:
        if self._runner is None:
            raise FabricUnavailable(f"the runner {self._name} was not opened")
        return self._runner


@functools.cache
def _runner_actor() -> Any:
    """Return the actor class; cached, because each `ray.remote` exports the class again."""
    return ray_api.disposable_actor(RunnerShell, max_concurrency=100)


class RemoteRunner:
    """A runner on a node; see `RunnerLink`.

    Args:
        name: The name of the runner.
        node: The node that it runs on.
        actor: The actor.
        gate: The gate of the connection: after its end nothing may be sent, which would start
            another Ray.
    """

    is_remote = True

    def __init__(self, name: str, node: str, actor: Any, gate: ShutdownGate) -> None:
        self.name = name
        self.node = node
        self.queued = 0
        self.is_open = False
        """Whether it can play."""
        self._actor = actor
        self._gate = gate

    async def open(self) -> None:
        """Wait until it can play.

        Raises:
            RunnerLost: It did not start.
            ConfigError: It cannot load the policy.
            AenvError: Its node cannot store the project, or does not reach the fabric.
        """
        await self._answer(self._actor.open.remote, "starting", _OPEN_S)

    async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
        """See `RunnerQueue.give`."""
        await self._answer(
            lambda: self._actor.give.remote(list(groups), limit, has_more), "tasks", None
        )

    async def take_back(self, most: int) -> list[int]:
        """See `RunnerQueue.take_back`."""
        taken: list[int] = await self._answer(
            lambda: self._actor.take_back.remote(most), "tasks that have not begun", None
        )
        return taken

    async def finished(self) -> list[Episode]:
        """See `RunnerQueue.finished`."""
        found = await self._answer(self._actor.finished.remote, "episodes", None)
        lines: bytes = found[0]
        contents: dict[str, bytes] = found[1]
        self.queued = found[2]
        episodes = [Episode.model_validate_json(line) for line in lines.splitlines()]
        if contents:
            for episode in episodes:
                names = {one.digest for one in episode.attachments}
                episode.contents.update({name: contents[name] for name in names})
        return episodes

    async def _answer(self, send: Callable[[], Any], what: str, deadline_s: float | None) -> Any:
        """Send a request and return the answer of the actor.

        Raises:
            RunnerLost: It is gone, or `deadline_s` passed.
            FabricUnavailable: This process has disconnected.
            AenvError: What it raised.
        """
        with self._gate:
            answer = asyncio.ensure_future(_translated(send(), what))
            try:
                await self._settled(answer, deadline_s)
                return answer.result()
            except AenvError as exc:
                if ray_api.is_from_ray(exc):
                    raise RunnerLost(exc.message) from exc
                raise
            finally:
                answer.cancel()

    async def _settled(self, answer: asyncio.Future[Any], deadline_s: float | None) -> None:
        """Wait for an answer; report a runner that has not answered for long."""
        loop = asyncio.get_running_loop()
        asked_at, reported_s = loop.time(), 0.0
        while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
            self._gate.check()
            waited_s = loop.time() - asked_at
            if deadline_s is not None and waited_s >= deadline_s:
                raise RunnerLost(f"no answer within {deadline_s:g} s")
            if deadline_s is None and waited_s - reported_s >= _SILENT_S:
                reported_s = waited_s
                logger.warning(
                    "the runner %s has not answered for %.0f s: if the policy is async, it blocks "
                    "the event loop; use await in it, or make it a sync function",
                    self.name,
                    waited_s,
                )

    async def close(self) -> None:
        """End its episodes, release their instances, and end it."""
        with contextlib.suppress(AenvError, RunnerLost):  # its instances end with this Ray job
            await self._answer(self._actor.close.remote, "closing", _CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        if ray_api.is_connected():
            ray_api.kill(self._actor)


async def _translated(reference: Any, what: str) -> Any:
    with ray_api.translated(f"a runner: {what}"):
        return await reference


class NodeRunners:
    """One runner on each node that takes instances; see `Runners`.

    With the option `near`, only on that node, while it takes instances and can open a runner. When
    its runner is open, those of other nodes leave, as after the actor that it is near has moved.

    Args:
        fabric: The connection.
        project: Sent to the nodes.
        setup: The setup of the run.
    """

    def __init__(self, fabric: Fabric, project: Project, setup: RunnerSetup) -> None:
        self._fabric = fabric
        self._project = project
        self._setup = setup
        self._archive: Any = None
        self._runners: dict[str, RemoteRunner] = {}
        """Runners by node, including those that are being opened."""
        self._opening: dict[asyncio.Task[RunnerLink | None], float] = {}
        """Runners that are being opened, with the time when that began."""
        self._again_at: dict[str, float] = {}
        """The nodes that could not open a runner when last tried, and when to try them again."""
        self._usable: set[str] = set()
        """The nodes that may have a runner, as of the last look."""
        self._placing_until: float | None = None
        """How long to wait for the node of the actor that the run is to be near."""
        self._lost: set[str] = set()
        self._leaving: set[str] = set()

    async def new(self, wait_s: float) -> list[RunnerLink]:
        """See `Runners.new`; a node that starts its runner slowly does not hold up the others."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        try:
            for runner in await self._start_missing():
                self._opening[asyncio.create_task(self._opened(runner))] = loop.time()
        except FabricUnavailable as exc:
            if not self._opening:
                raise
            logger.warning("new nodes cannot be looked for at the moment: %s", exc.message)
        await self._release_lost()
        left_s = max(0.0, deadline - loop.time())
        if self._is_placing():
            left_s = min(left_s, _PLACING_LOOK_S)
        if not self._opening:
            await asyncio.sleep(left_s)
            return []
        done, _ = await asyncio.wait(
            self._opening, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            del self._opening[task]
        return [opened for task in done if (opened := task.result()) is not None]

    @property
    def expected(self) -> int:
        """See `Runners.expected`."""
        now = asyncio.get_running_loop().time()
        return sum(now - began < _SLOW_S for began in self._opening.values())

    async def _start_missing(self) -> list[RemoteRunner]:
        """Start a runner on each node that has none."""
        if self._archive is None:
            archive = await asyncio.to_thread(self._project.archive)
            self._archive = ray_api.put(archive)
        with ray_api.translated("listing the nodes"):
            alive = await asyncio.to_thread(ray_api.alive_nodes)
        nodes = set(usable(alive))
        draining = {node for node, facts in alive.items() if facts.is_draining}
        # Without another node, the runners of draining nodes stay: their creates wait for one.
        draining = draining if nodes else set()
        # Where every node joins on demand, the creates of a first runner are that demand.
        nodes = self._usable = nodes or {ray_api.node_id()}
        near, is_there = await self._near(), False
        if near is not None and near in nodes and near not in self._again_at:
            nodes = {near}
            is_there = near in self._runners and self._runners[near].is_open
        self._leaving = {
            runner.name
            for node, runner in self._runners.items()
            if node in draining or (is_there and node not in nodes)
        }
        now = asyncio.get_running_loop().time()
        if near != "":
            self._placing_until = None
        elif self._placing_until is None:
            self._placing_until = now + _PLACING_S
        if self._is_placing():
            return []
        due = {node for node in nodes if now >= self._again_at.get(node, now)}
        return [self._started(node) for node in due - self._runners.keys()]

    async def _near(self) -> str | None:
        """Return the node that the run is to be near; empty for an actor without one."""
        near = self._setup.options.near
        if near is None:
            return None
        with ray_api.translated("looking for the node of an actor"):
            return await asyncio.to_thread(ray_api.node_of, near)

    def _is_placing(self) -> bool:
        """Whether no runner is to be started, since the actor may soon have a node."""
        until = self._placing_until
        return until is not None and asyncio.get_running_loop().time() < until

    def _started(self, node: str) -> RemoteRunner:
        name = f"runner-{node[:8]}-{new_call_id()[:8]}"
        options = {"scheduling_strategy": ray_api.pinned(node)}
        actor = _runner_actor().options(**options).remote(name, self._setup, self._archive)
        runner = self._runners[node] = RemoteRunner(name, node, actor, self._fabric.gate)
        return runner

    async def _opened(self, runner: RemoteRunner) -> RunnerLink | None:
        """Return a runner once it is open; None if its node cannot open one at the moment.

        Raises:
            ConfigError: It cannot load the policy, which ends the run.
            FabricUnavailable: This process has disconnected.
            AenvError: As None, but there is no other runner, and no other node to try.
        """
        try:
            await runner.open()
        except (RunnerLost, AenvError) as exc:
            runner.kill()
            if isinstance(exc, ConfigError) or self._fabric.gate.is_closed:
                raise
            again_at = asyncio.get_running_loop().time()
            if not isinstance(exc, RunnerLost | FabricUnavailable):
                others = self._runners.keys() | (self._usable - self._again_at.keys())
                if others == {runner.node}:
                    raise
                again_at += _RETRY_S
            self._again_at[runner.node] = again_at
            logger.warning("no runner on node %s: %s", runner.node[:8], exc)
            del self._runners[runner.node]
            return None
        except BaseException:
            runner.kill()
            raise
        self._again_at.pop(runner.node, None)
        runner.is_open = True
        return runner

    def leaving(self) -> set[str]:
        """See `Runners.leaving`."""
        return self._leaving

    async def lost(self, runner: RunnerLink) -> None:
        """See `Runners.lost`."""
        for node, known in list(self._runners.items()):
            if known is runner:
                del self._runners[node]
                known.kill()
        self._lost.add(runner.name)
        await self._release_lost()

    async def _release_lost(self) -> None:
        """Release the instances of lost runners; repeated, since some may have been starting."""
        if not self._lost:
            return
        try:
            infos = await asyncio.to_thread(self._fabric.list_instances)
            left = [one.id for one in infos if one.labels.get(LABEL) in self._lost]
            if left:
                await asyncio.to_thread(self._fabric.release, left)
        except AenvError as exc:
            logger.warning("the instances of lost runners end with this Ray job: %s", exc)

    async def close(self) -> None:
        """See `Runners.close`."""
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)
        for task in self._opening:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("a runner that was not needed any more failed: %s", error)
        for runner in self._runners.values():
            runner.kill()
        await self._release_lost()
