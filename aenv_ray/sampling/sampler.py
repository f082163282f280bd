"""The sampler: runs episodes concurrently, each on a new instance, and streams their records."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from enum import StrEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, TypeVar

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.driver_api import connector
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.references import resolve_environment
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.project.project import Project
from aenv_ray.sampling.attribution import FailureRewards
from aenv_ray.sampling.loop_watch import LoopWatch
from aenv_ray.sampling.metrics import SamplingMetrics
from aenv_ray.sampling.policies.base import AgentPolicy, name_of, portable
from aenv_ray.sampling.policies.named import checked_policy
from aenv_ray.sampling.resuming import check_same_run, digests_of, warn_if_changed
from aenv_ray.sampling.runners.concurrency import (
    ConcurrencyBounds,
    ConcurrencyLimit,
    concurrency_bounds,
)
from aenv_ray.sampling.runners.groups import GroupFeed
from aenv_ray.sampling.runners.local_runner import DriverRunners, LocalRunner
from aenv_ray.sampling.runners.runner import INFRA_RETRIES, EpisodeRules
from aenv_ray.sampling.runners.runner_pool import RunnerPool, Runners
from aenv_ray.sampling.tasks.environment_tasks import environment_tasks
from aenv_ray.sampling.tasks.feed import TaskFeed, TaskSource
from aenv_ray.trajectories.attachments import AttachmentFiles
from aenv_ray.trajectories.output_lock import OutputLock
from aenv_ray.trajectories.reading import finished_episodes, read
from aenv_ray.trajectories.schema import Attachment, Episode
from aenv_ray.trajectories.shards import (
    EpisodeOutput,
    check_output,
    lock_output,
    open_output,
    state_of,
)
from aenv_ray.trajectories.statistics import RunningSummary, Summary
from aenv_ray.units import parse_duration_s

T = TypeVar("T")

logger = logging.getLogger("aenv_ray")

_BLOCKED_S: Final = 10.0
"""An event loop that does not react for this long is taken to be blocked by an async policy."""
_LOOK_S: Final = 1.0
"""How often to look whether the event loop is blocked, while no episode finishes."""
_CONTENT_S: Final = 60.0
"""How long the object store may take to return an attachment, which may be on a disk."""
RUNNERS_FROM: Final = 256
"""A run of fewer episodes is played in the driver: it would end while runners start."""
_UNREAD: Final = 1024
"""Maximum number of finished episodes that wait to be read; then no more are collected."""


class Where(StrEnum):
    """Where episodes are played."""

    AUTO = "auto"
    """Play on the nodes if the policy can be sent there and the run is long; else in the driver."""
    NODES = "nodes"
    """Play on the nodes, next to the sandboxes."""
    DRIVER = "driver"
    """In the process that samples."""


class Sampling:
    """Yields episodes as they finish: iterate with ``for`` or ``async for``, then call `summary`.

    A reader that is more than a thousand episodes behind holds up the run.

    Leaving the loop early, an exception in it, or Ctrl-C cancels all episodes and releases their
    instances. It can be iterated once.
    """

    def __init__(
        self,
        environment: str,
        policy: AgentPolicy | type,
        tasks: GroupFeed,
        *,
        concurrency: ConcurrencyBounds,
        where: Where,
        rules: EpisodeRules,
        options: CreateOptions,
        out: Path | None,
        out_state: frozenset[tuple[str, int, int]] | None,
        kept: list[Episode],
        is_resumed: bool,
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._tasks = tasks
        self._concurrency = ConcurrencyLimit(concurrency, tasks.group_size)
        self._where = where
        self._rules = rules
        self._options = options
        self._out = out
        self._out_state = out_state
        self._is_resumed = is_resumed
        self._output: EpisodeOutput | None = None
        self._keep(kept)
        self._held: list[Episode] = []
        """Finished episodes of a run without an output that can be read."""
        self._has_output = False
        self._is_output_lost = False
        self._attachments: dict[str, Any] = {}
        """Ray references to attachments that are in no file, by digest."""
        self._is_draining = False
        self._drain: Callable[[], object] | None = None
        """Drains the pool of runners while there is one."""
        self._playing = self._waiting = 0
        self._watch = LoopWatch()
        self._started = 0.0
        self._wall_s = 0.0

    def _keep(self, kept: list[Episode]) -> None:
        self._kept = kept
        """Episodes of an earlier run, until they are in the output."""
        self._kept_count = len(kept)
        self._kept_digests = digests_of(kept)
        self._summary = RunningSummary(None if self._tasks.repeats_ids else self._tasks.samples)
        for episode in kept:
            self._summary.add(episode, is_new=False)

    @property
    def total(self) -> int | None:
        """The number of episodes; None if the tasks have no length."""
        return self._tasks.total

    @property
    def kept(self) -> int:
        """The number of episodes that an earlier run finished; they are not yielded."""
        return self._kept_count

    @property
    def finished(self) -> int:
        """The number of episodes finished so far, including those of an earlier run."""
        return self._summary.rollouts

    @property
    def playing(self) -> int:
        """The number of episodes that are being played; those that are `waiting` do not count."""
        return self._playing

    @property
    def waiting(self) -> int:
        """The number of episodes that wait for room in the cluster, as of the last few seconds."""
        return self._waiting

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent episodes at present; see `sample`."""
        return self._concurrency.limit

    @property
    def output_failure(self) -> ConfigError | None:
        """Why episodes are missing in the output at present; None if none are.

        While the disk is full, they are held, and tried again every 10 seconds and at the end. What
        then is left is raised.
        """
        return None if self._output is None else self._output.failure

    @property
    def episodes(self) -> list[Episode]:
        """The episodes finished so far, including those of an earlier run.

        Without `out`, they are in the order in which they finished. With `out`, this process does
        not keep them: each access reads them from the output, in order of their index. Those that
        were in an output that others have removed, moved or replaced are missing.

        Raises:
            ConfigError: The output cannot be read any more.
        """
        if not self._has_output:
            return self._kept + self._held
        assert self._out is not None
        assert self._output is not None
        is_there = not self._output.is_gone and self._out.exists()
        found = {one.index: one for one in read(self._out)} if is_there else {}
        found |= {one.index: one for one in self._output.unwritten}
        return [found[index] for index in sorted(found)]

    def summary(self) -> Summary:
        """Return the summary of the episodes finished so far."""
        return self._summary.summary(self._wall_s)

    def attachment(self, attachment: Attachment | str) -> bytes:
        """Return the content of an attachment of a step, or of its digest.

        With `out`, attachments are files beside it. Otherwise they are in Ray's object store, until
        this object or the process ends.

        Raises:
            ConfigError: No finished episode has it.
            FabricUnavailable: The object store has lost it, or this process has disconnected.
        """
        digest = attachment if isinstance(attachment, str) else attachment.digest
        reference = self._attachments.get(digest)
        if reference is not None:
            if not ray_api.is_connected():
                raise FabricUnavailable(
                    f"the attachment {digest} was in Ray, from which this process has disconnected",
                    hint="give out= to have attachments in files",
                )
            content: bytes = ray_api.wait(
                reference, f"the attachment {digest}", _CONTENT_S, lambda _: None, look_s=_CONTENT_S
            )
            return content
        if self._out is None:
            raise ConfigError(
                f"no finished episode has the attachment {digest}",
                hint="pass an attachment of a step of an episode of this sampling",
            )
        return AttachmentFiles(self._out, is_directory=self._out.is_dir()).read(digest)

    def _keep_attachments(self, episode: Episode) -> None:
        """Keep the attachments of an episode in Ray unless they are written, and nowhere else.

        Those that are to be written later also stay in the episode.
        """
        output = self._output
        if output is not None and output.failure is None:
            self._attachments.clear()  # what could not be written before is written, too
            episode.contents.clear()
            return
        for digest, data in episode.contents.items():
            if digest not in self._attachments:
                self._attachments[digest] = ray_api.put(data)
        if output is None:
            episode.contents.clear()
        elif output.is_final:
            episode.contents.clear()
            if not self._is_output_lost:
                self._is_output_lost = True
                for one in output.unwritten:
                    one.contents.clear()

    @property
    def is_draining(self) -> bool:
        """Whether `drain` was called."""
        return self._is_draining

    def drain(self) -> None:
        """Begin no more tasks: the iteration ends once the running episodes have finished.

        May be called from any thread and from signal handlers, at any time and repeatedly.
        """
        self._is_draining = True
        drain = self._drain
        if drain is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                drain()

    # --- iterating ------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[Episode, None]:
        async with contextlib.aclosing(self._batches()) as batches:
            async for batch in batches:
                for episode in batch:
                    yield episode

    async def _batches(self) -> AsyncGenerator[list[Episode], None]:
        """Run all episodes; yield those that have finished since the last batch."""
        finished = _Unread()
        runner = asyncio.create_task(self._run(finished))
        runner.add_done_callback(lambda _: finished.end())
        try:
            while batch := await finished.get():
                yield batch
            await runner
        finally:
            runner.cancel()
            await asyncio.wait([runner])

    def __iter__(self) -> Iterator[Episode]:
        results: SimpleQueue[list[Episode] | BaseException | None] = SimpleQueue()
        loop = asyncio.new_event_loop()
        stop, has_room = asyncio.Event(), asyncio.Event()
        given = read = 0  # each is changed by one thread

        async def pump() -> None:
            async def forward() -> None:
                nonlocal given
                # Closed here, so that the run has ended when the loop does, wherever this stops.
                async with contextlib.aclosing(self._batches()) as batches:
                    async for batch in batches:
                        given += len(batch)
                        results.put(batch)
                        if given - read >= _UNREAD:
                            has_room.clear()
                            if given - read >= _UNREAD:  # otherwise it was read meanwhile
                                await has_room.wait()

            task = asyncio.create_task(forward())
            stopper = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait([task, stopper], return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    results.put(error)
            finally:
                stopper.cancel()
                results.put(None)

        thread = threading.Thread(target=loop.run_until_complete, args=(pump(),), daemon=True)
        thread.start()
        try:
            while (batch := self._next_of(results)) is not None:
                if isinstance(batch, BaseException):
                    raise batch
                for episode in batch:
                    read += 1
                    if given - read == _UNREAD - 1:
                        loop.call_soon_threadsafe(has_room.set)
                    yield episode
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
            if _has_ended(thread, loop):
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

    def _next_of(self, results: SimpleQueue[T]) -> T:
        """Return what the loop of another thread puts next; report a loop that is blocked."""
        while True:
            try:
                return results.get(timeout=_LOOK_S)
            except Empty:
                self._watch.report()

    def run(self) -> Summary:
        """Run all episodes and return the summary.

        Raises:
            ConfigError: Episodes are missing in the output: it could not be written (`episodes`
                and `summary` still have all), or others have removed, moved or replaced it
                (`summary` has all); another run writes to it; or a task of an iterator is invalid
                or belongs to another run.
            Exception: Raised by the iterator of tasks, after the running episodes have ended.
        """
        for _ in self:
            pass
        return self.summary()

    # --- running --------------------------------------------------------------------------------

    async def _run(self, finished: _Unread) -> None:
        if self._started:
            raise ConfigError("a sampling can be iterated once", hint="call sample() again")
        self._started = time.perf_counter()
        tasks, lock = self._tasks, None
        try:
            if self._out is not None:
                lock = await lock_output(self._out)
                if self._is_resumed:
                    self._read_again(self._out)
            await tasks.skip(self._kept, str(self._out))
            await self._run_all(tasks, finished, lock)
        finally:
            tasks.close()
            if lock is not None:
                lock.close()
        for failure in (tasks.failure, self.output_failure):
            if failure is not None:
                raise failure

    def _read_again(self, out: Path) -> None:
        """Keep what the run that is resumed has written since the output was read.

        Raises:
            ConfigError: It is another run.
        """
        state = state_of(out)
        if state != self._out_state:
            self._out_state = state
            self._keep(_kept_of(out, self._tasks, self._policy))

    async def _run_all(self, tasks: GroupFeed, finished: _Unread, lock: OutputLock | None) -> None:
        metrics, policy = SamplingMetrics(self._environment), name_of(self._policy)
        output = None
        if self._out is not None:
            output = self._output = open_output(self._out, self._kept, self._out_state, lock=lock)
            self._has_output = self._out.is_dir() or self._out.is_file()  # a pipe is neither
        if self._has_output:
            self._kept = []
        total = self.total

        def note_left() -> None:
            if total is not None:
                metrics.note_left(total - self.finished)

        def note_playing(playing: int, waiting: int) -> None:
            self._playing, self._waiting = playing, waiting
            metrics.note_playing(playing, waiting)

        def report(finished_one: Episode) -> None:
            episode = finished_one.model_copy(update={"policy": policy})
            if output is not None:
                output.write(episode)
            self._keep_attachments(episode)
            if not self._has_output:
                self._held.append(episode)
            self._summary.add(episode)
            metrics.add(episode)
            note_left()
            self._wall_s = time.perf_counter() - self._started
            finished.put(episode)

        try:
            note_left()
            pool = RunnerPool(
                await self._runners(),
                tasks.take,
                report,
                finished.room,
                concurrency=self._concurrency,
                most_attempts=self._rules.infra_retries + 1,
                group_size=tasks.group_size,
                may_read_ahead=tasks.known is not None,
                on_playing=note_playing,
            )
            self._drain = functools.partial(
                asyncio.get_running_loop().call_soon_threadsafe, pool.drain
            )
            if self._is_draining:
                pool.drain()
            await pool.play()
        finally:
            self._drain = None
            if total is not None:
                metrics.note_left(0)  # those that are left are not played any more
            if output is not None:
                output.close()
                if output.failure is None:
                    self._attachments.clear()

    async def _runners(self) -> Runners:
        connect = connector()

        def resolved() -> tuple[Fabric, Project]:
            fabric = connect()
            return fabric, resolve_environment(self._environment, lambda: fabric)

        fabric, project = await asyncio.to_thread(resolved)
        warn_if_changed(self._kept_digests, project.digest, self._environment)
        packed = self._portable()
        if packed is not None:
            return self._node_runners(fabric, project, packed)
        return DriverRunners(
            lambda: LocalRunner.open(
                fabric, project, self._options, self._policy, self._rules, watch=self._watch
            )
        )

    def _portable(self) -> bytes | None:
        """Return the policy for runners; None if the episodes are played in the driver.

        Raises:
            ConfigError: The policy must run on the nodes, and cannot.
        """
        if self._where is Where.DRIVER:
            return None
        left = None if self.total is None else self.total - self.kept
        if self._where is Where.AUTO and left is not None and left < RUNNERS_FROM:
            return None
        packed = portable(self._policy)
        if packed is None and self._where is Where.NODES:
            raise ConfigError(
                "the policy cannot be sent to runners: it holds something that cannot be pickled, "
                "or a mutable object of the driver",
                hint='make it a function of a module, or a class; or give runners="driver"',
            )
        return packed

    def _node_runners(self, fabric: Fabric, project: Project, policy: bytes) -> Runners:
        from aenv_ray.sampling.runners.runner_actor import (
            NodeRunners,
            RunnerSetup,
            variables_for_runners,
        )

        variables = variables_for_runners()
        setup = RunnerSetup(policy, self._rules, self._options, project.digest, variables)
        return NodeRunners(fabric, project, setup)


class _Unread:
    """Finished episodes that wait for their reader."""

    def __init__(self) -> None:
        self._episodes: list[Episode] = []
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_over = False

    def put(self, episode: Episode) -> None:
        self._episodes.append(episode)
        self._news.set()
        if len(self._episodes) >= _UNREAD:
            self._has_room.clear()

    def end(self) -> None:
        """No more will follow."""
        self._is_over = True
        self._news.set()

    async def get(self) -> list[Episode]:
        """Return the episodes that have finished since the last call; none at the end."""
        self._has_room.set()
        await self._news.wait()
        episodes, self._episodes = self._episodes, []
        if not self._is_over:
            self._news.clear()
        return episodes

    async def room(self) -> None:
        """Wait until the reader has read enough of them."""
        await self._has_room.wait()


def _has_ended(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> bool:
    """Wait for a loop's thread to end; return False for a blocked one, which is abandoned."""
    while thread.is_alive():
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        thread.join(_BLOCKED_S)
        if thread.is_alive() and not turned.is_set():
            logger.warning(
                "an async policy blocks the event loop of all episodes and is abandoned; its "
                "instances end with this Ray job; use await in it, or make it a sync function"
            )
            return False
    return True


def _where(text: str) -> Where:
    try:
        return Where(text)
    except ValueError:
        raise ConfigError(
            f"unknown runners {text!r}", hint=f"use one of {', '.join(map(repr, Where))}"
        ) from None


def _kept_of(out: Path, tasks: GroupFeed, policy: AgentPolicy | type) -> list[Episode]:
    """Return the episodes of the run that is resumed.

    Raises:
        ConfigError: The output cannot be read, or is of another run.
    """
    kept = finished_episodes(out, tasks.known)
    check_same_run(kept, out, policy=name_of(policy), samples=tasks.samples)
    return kept


def sample(  # noqa: PLR0913  # each is an option
    environment: str | Path,
    policy: AgentPolicy | type | str,
    tasks: TaskSource | None = None,
    *,
    concurrency: int | tuple[int, int] | str = 16,
    samples_per_task: int = 1,
    hedge: int = 0,
    runners: Literal["auto", "nodes", "driver"] | str = "auto",
    infra_retries: int = INFRA_RETRIES,
    episode_timeout: str | float | None = None,
    reward_on_death: float = 0.0,
    reward_on_timeout: float | None = 0.0,
    reward_on_failure: float | None = 0.0,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    actor: str = "shared",
    **options: Any,
) -> Sampling:
    """Run one episode per task and stream the records as episodes finish.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        policy: ``policy(env, task)``, sync or async; a class that is created without arguments and
            whose instances are called in this way; a method of a Ray actor or a Serve handle, see
            `RemotePolicy`; or a name such as ``reference`` or ``module:function``.
        tasks: Tasks, mappings with their fields, a table or a file, see `TaskSource`; None: the
            environment's own. A file, list or table is checked here. An iterator, async or not, may
            be slow or endless: a task is taken when an episode can start. If it raises, the running
            episodes are finished first.
        concurrency: Maximum number of concurrent episodes, each with an instance, on all nodes
            together; at least 1. A group that is larger is played alone. ``(MIN, MAX)``, or
            ``"MIN-MAX"``: begin with the minimum, and play as many as the cluster's room, the load
            of its nodes and the throughput of the policy make worthwhile.
        samples_per_task: Episodes of each task. They form a group: they get their instances
            together or not at all, and their records have the same ``group`` and a ``sample``.
        hedge: Further episodes of each task to start; the first `samples_per_task` that finish are
            kept, and the others are cancelled. This shortens the wait for slow episodes, but
            favours fast episodes among the samples of a task.
        runners: Where the policy runs. ``nodes``: on each node, next to the sandboxes, in processes
            that have no GPU and get the driver's environment variables. ``driver``: in this
            process. ``auto``: on the nodes from 256 episodes on, if the policy can be pickled and
            holds no mutable object through which the driver may read its results.
        infra_retries: Restarts of an episode after infrastructure failures.
        episode_timeout: Limit for the policy in an episode: 90, "90s", "30m". Then the policy is
            cancelled, and the episode is ``timed_out``. None: the life of the instance.
        reward_on_death: Reward of episodes whose sandbox the agent ended, exhausted or kept from
            answering, on purpose or not; they are ``died_inside``, counted in means, and not
            restarted. A finite number.
        reward_on_timeout: Reward of episodes that are ``timed_out`` because of calls to the
            sandbox: they took a tenth of the policy's time or more, or one reached its timeout and
            the policy did not handle that. None leaves them out of means.
        reward_on_failure: Reward of episodes in which the reward raised after the policy had acted
            (``reward_failed``), or in which the policy did not handle the error of a tool call
            (``policy_failed``). None leaves them out of means.
        out: File that gets one line of JSON for each finished episode. A directory, or a new path
            without suffix, gets shards of JSON Lines and a manifest; a new path with the suffix
            ``.parquet``, shards of Parquet. It is locked during the run. If it cannot be written,
            the run continues and tries again; what is missing after the last episode raises
            ConfigError.
        resume: Keep the episodes in `out` of an interrupted run, and run the rest; episodes with
            infrastructure failures run again. The tasks, the policy and `samples_per_task` must be
            those of that run; if the environment has changed, a warning is logged. The summary
            covers all episodes, except that `wall_s` and `calls_per_s` cover only this run.
        overwrite: Replace the episodes that `out` has. Otherwise, and unless they are resumed, such
            an `out` is refused. Files that are not of episodes are never replaced.
        actor: Density of the instances; shared is a hundred times cheaper.
        options: Further options of `aenv_ray.create`.

    Returns:
        An iterator of `Episode`; nothing runs before it is iterated, or `Sampling.run` is called.

    Raises:
        ConfigError: An invalid file, option or task; a policy that does not exist, is not callable
            or is a generator; or `out` has content that is neither resumed nor to be overwritten,
            or is to be resumed with another policy, other tasks or other `samples_per_task`.
    """
    rewards = FailureRewards(reward_on_death, reward_on_timeout, reward_on_failure)
    bounds = concurrency_bounds(concurrency)
    chosen = checked_policy(policy)
    if samples_per_task < 1 or hedge < 0:
        raise ConfigError(
            f"samples_per_task must be at least 1 and hedge at least 0, not {samples_per_task!r} "
            f"and {hedge!r}",
            hint="samples_per_task=1, hedge=0 plays each task once",
        )
    limit_s = None
    if episode_timeout is not None:
        limit_s = parse_duration_s(episode_timeout, what="episode_timeout")
    file = Path(out) if out is not None else None
    variables = options.get("environment_variables")
    given = environment_tasks(environment, variables) if tasks is None else tasks
    feed = GroupFeed(TaskFeed(given), samples_per_task, hedge)
    if resume and file is None:
        raise ConfigError("resume requires out", hint="give the output file of the run to resume")
    if resume and overwrite:
        raise ConfigError(
            "resume and overwrite exclude each other",
            hint="resume=True keeps the episodes of the earlier run, overwrite=True deletes them",
        )
    state = None if file is None or overwrite else state_of(file)
    if file is not None and not resume:
        check_output(file, overwrite=overwrite)
    kept = _kept_of(file, feed, chosen) if resume and file is not None else []
    return Sampling(
        str(environment),
        chosen,
        feed,
        concurrency=bounds,
        where=_where(runners),
        rules=EpisodeRules(infra_retries, rewards, limit_s),
        options=CreateOptions(actor=actor, **options),
        out=file,
        out_state=state,
        kept=kept,
        is_resumed=resume,
    )
