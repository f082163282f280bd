"""The runner: plays episodes, each on an instance of its own."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aenv_ray import logs
from aenv_ray.actors.fabric.create_options import OwnOptions
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    InsideCause,
    InstanceExpired,
    QuotaExceeded,
    QuotaTooSmall,
    ResetFailed,
    SandboxDiedInside,
    SandboxExhausted,
    SandboxLost,
    ToolError,
    ToolNotFound,
    as_tool_error,
    is_infrastructure,
)
from aenv_ray.models import InstanceStatus
from aenv_ray.sampling.attribution import (
    NO_ACTIVITY,
    SUBMITTED,
    FailureRewards,
    PolicyActivity,
    Stage,
)
from aenv_ray.sampling.episode_env import CALL_TIMEOUT_S, EpisodeEnv, EpisodeLog, SyncEpisodeEnv
from aenv_ray.sampling.policies.base import AgentPolicy, is_async
from aenv_ray.sampling.runners.assignments import Assignment
from aenv_ray.sampling.runners.instance_source import GroupStart, Instance, InstanceSource
from aenv_ray.sampling.runners.task_images import TaskImages
from aenv_ray.sampling.tasks.archives import check_archives, packed
from aenv_ray.sampling.user_code import PolicyTimedOut, call, hand_over, outcome, place_of, within
from aenv_ray.trajectories.attachments import TEXT_LIMIT
from aenv_ray.trajectories.schema import (
    Call,
    Episode,
    EpisodeStatus,
    Task,
    recordable_task,
    reward_number,
)
from aenv_ray.trajectories.storable import shown

T = TypeVar("T")

logger = logging.getLogger("aenv_ray")

UNCLEAN_IN_A_ROW: Final = 3
"""After this many instances that were not clean after their episode, none is reused."""
INFRA_RETRIES: Final = 2
"""Restarts of an episode, on a new instance, after infrastructure failures."""
_NOT_FOR_RESETS: Final = {"reward", "reference", "wrong", "instance", "timeout_s", "unsupported"}
RETRY_PAUSE_S: Final = 0.5
"""Pause before a restart, multiplied by the number of attempts."""
OUTAGE_S: Final = 300.0
"""For so long after an instance has started, creates that the fabric refuses are repeated: it has
worked, and its head, a host or a daemon is probably being replaced."""
OUTAGE_PAUSE_S: Final = 5.0
"""Longest pause between two of them."""
_REASONS_CHARACTERS: Final = 2000
_SUBMISSION: Final = "submission"
"""Key of what an episode submits, until its reward runs; not a field of its record."""


@dataclass(frozen=True)
class EpisodeRules:
    """How episodes are played; see `aenv_ray.sample`."""

    infra_retries: int
    rewards: FailureRewards
    episode_timeout_s: float | None


class Runner:
    """Plays episodes. Use it on one event loop; any number of episodes may be played at once.

    Args:
        policy: Acts in each episode.
        source: Provides the instances.
        rules: How episodes are played.
        images: Builds the images that tasks bring.
        may_restart: Whether the episode of the current context may be restarted; None: always.
        is_connected: Whether the fabric can still be reached: not after `aenv_ray.shutdown`.
        owner: The owner of the instances, which the logs name.
        blocked_s: See `CallClock`.
    """

    def __init__(
        self,
        policy: AgentPolicy,
        source: InstanceSource,
        rules: EpisodeRules,
        images: TaskImages,
        may_restart: Callable[[], bool] | None = None,
        is_connected: Callable[[], bool] = lambda: True,
        owner: str | None = None,
        blocked_s: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        self._policy = policy
        self._source = source
        self._rules = rules
        self._images = images
        self._may_restart = may_restart
        self._is_connected = is_connected
        self._owner = owner
        self._blocked_s = blocked_s
        self._resets = Resets()
        self._outage = Outage()

    async def play(self, assignment: Assignment, start: GroupStart) -> Episode:
        """Run one episode, and restart it after infrastructure failures.

        Args:
            assignment: The task of the episode.
            start: The joint start of the group that the episode belongs to.
        """
        attempt, tries = assignment.attempt, itertools.count()
        if assignment.task.unsupported is not None:
            return _refused(assignment, assignment.task.unsupported)
        while True:
            with logs.about(episode=assignment.index, task=assignment.task.id, owner=self._owner):
                episode = await self._attempt(assignment, start, attempt, tries)
                logs.events.info(
                    "episode %d, attempt %d: %s", assignment.index, attempt, _end_of(episode),
                    extra={"instance": episode.instance_id},
                )  # fmt: skip
            if (
                episode.status is not EpisodeStatus.INFRA_FAILED
                or attempt > self._rules.infra_retries
                or not (self._may_restart is None or self._may_restart())
            ):
                return episode
            await asyncio.sleep(RETRY_PAUSE_S * attempt)
            attempt += 1

    async def _attempt(
        self, assignment: Assignment, start: GroupStart, attempt: int, tries: Iterator[int]
    ) -> Episode:
        task, log = assignment.task, EpisodeLog()
        started = time.perf_counter()
        fields: dict[str, Any] = {
            "index": assignment.index,
            "task_id": task.id,
            "task": recordable_task(task),
            "group": assignment.group,
            "sample": assignment.sample,
            "seed": task.seed,
            "attempts": attempt,
        }
        instance: Instance | None = None
        phases = _Phases()
        is_reusable = False
        try:
            await check_archives(task)
            own = None
            if task.datasource or task.instance is not None:
                with phases.measured("image"):
                    own = await self._images.options(task)
            with phases.measured("queue"):
                instance = await self._outlasting(
                    lambda: start.take(self._source, next(tries), own)
                )
            while not await self._prepare(instance, task, phases):
                self._source.release(instance)
                instance = None
                with phases.measured("queue"):
                    instance = await self._outlasting(lambda: self._source.acquire(own))
            fields |= _facts(instance)
            if not self._resets.gives_seeds:
                fields["seed"] = None
            env = self._environment(instance.env, log)
            with logs.about(instance=fields["instance_id"]):
                try:
                    fields |= await self._roll_out(instance.env, task, env, phases)
                finally:
                    is_idle = env.end()
            # A call that is still under way could reach the next episode.
            is_reusable = is_idle and fields["status"] is EpisodeStatus.COMPLETED
            if _SUBMISSION in fields:
                submission, left = fields.pop(_SUBMISSION), instance
                instance = None
                self._source.release(left)
                fields |= await self._score_elsewhere(task, own, submission, env, phases)
        except _NewInstanceNotReset as exc:
            fields |= self._failed(task, exc.cause, Stage.SETUP)
        except INFRASTRUCTURE as exc:
            fields |= _failure(EpisodeStatus.INFRA_FAILED, exc)
        finally:
            if instance is not None and not (
                is_reusable and self._resets.reuses and self._source.reuse(instance)
            ):
                self._source.release(instance)
        duration_s = time.perf_counter() - started
        episode = Episode(duration_s=duration_s, phases=phases.seconds, **log.fields(), **fields)
        episode.contents.update(log.contents)
        return episode

    def _environment(self, instance: AsyncEnvHandle, log: EpisodeLog) -> EpisodeEnv:
        return EpisodeEnv(instance, log, self._blocked_s)

    async def _outlasting(self, take: Callable[[], Awaitable[Instance]]) -> Instance:
        """Return an instance; take one again and again while a quota is full or an outage lasts.

        Nothing of the episode has been played, so these tries count as no restart.

        Raises:
            AenvError: It does not start, although others start, or none has within `OUTAGE_S`.
        """
        since: float | None = None
        while True:
            try:
                instance = await take()
            except QuotaTooSmall:
                raise
            except (FabricUnavailable, QuotaExceeded) as exc:
                now = time.monotonic()
                since = now if since is None else since
                is_full = isinstance(exc, QuotaExceeded)
                decide = self._outage.full if is_full else self._outage.refused
                pause_s = decide(since, now, exc.message)
                if pause_s is None or not self._is_connected():
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._outage.started(time.monotonic())
                return instance

    async def _prepare(self, instance: Instance, task: Task, phases: _Phases) -> bool:
        """Connect to an instance and reset it; False if it must be replaced.

        Raises:
            _NewInstanceNotReset: The reset of a new instance failed.
            AenvError: The infrastructure failed.
        """
        phases.seconds["create"] = instance.create_s
        try:
            await self._source.connect(instance)
            with phases.measured("reset"):
                return await self._resets.run(instance, task)
        except AenvError as exc:
            if instance.is_used:
                return False  # whatever its last episode did to it
            if is_infrastructure(exc):
                raise
            _raise_if_no_room(exc, NO_ACTIVITY)
            raise _NewInstanceNotReset(exc) from exc

    async def _roll_out(
        self, instance: AsyncEnvHandle, task: Task, env: EpisodeEnv, phases: _Phases
    ) -> dict[str, Any]:
        """Run setup, policy and reward; infrastructure failures are raised."""
        try:
            if task.setup is not None:
                function, given = task.setup.function or "", await packed(task.setup)
                with phases.measured("setup"):
                    env.setup_result = await _environment_result(
                        instance.call_function(function, given, _timeout_s(task.setup))
                    )
        except ToolError as exc:
            return self._failed(task, exc, Stage.SETUP)
        try:
            return await self._act_and_score(instance, task, env, phases)
        except (SandboxDiedInside, SandboxExhausted, InstanceExpired) as exc:
            _raise_if_no_room(exc, env.activity())
            return self._failed(task, exc, Stage.POLICY, env.activity())
        except CallOutcomeUnknown as exc:
            end = await _why_silent(instance, exc)
            return self._failed(task, end, Stage.POLICY, env.activity())

    def _failed(
        self, task: Task, exc: Exception, stage: Stage, activity: PolicyActivity = NO_ACTIVITY
    ) -> dict[str, Any]:
        end = self._rules.rewards.end_of(exc, stage, activity)
        reward = None if task.reward is None else end.reward
        place = place_of(exc) if stage is Stage.POLICY else None
        return _failure(end.status, exc, place) | {"reward": reward}

    async def _act_and_score(
        self, instance: AsyncEnvHandle, task: Task, env: EpisodeEnv, phases: _Phases
    ) -> dict[str, Any]:
        """Run policy and reward; infrastructure failures and deaths from inside are raised."""
        try:
            playing = act(self._policy, env, task)
            limits_s = [self._rules.episode_timeout_s, task.timeout_s]
            limit_s = min((one for one in limits_s if one is not None), default=None)
            with phases.measured("policy"), env.policy_time():
                output = await within(playing, limit_s, lambda: _expect(instance))
        except INFRASTRUCTURE:
            raise
        except PolicyTimedOut as exc:
            if env.failure is not None:
                raise env.failure from exc
            return self._failed(task, DeadlineExceeded(str(exc)), Stage.POLICY, env.activity())
        except Exception as exc:  # every exception of a policy is its failure
            if env.failure is not None:
                raise env.failure from exc
            return self._failed(task, env.cause_of(exc), Stage.POLICY)
        if env.failure is not None:
            raise env.failure  # suppressed by the policy; it must not become a reward (invariant 2)
        env.end()  # what the policy has left running must not act while the reward runs
        fields: dict[str, Any] = {"status": EpisodeStatus.COMPLETED, "reward": None}
        fields["output"] = _recordable(output)
        if task.reward is None:
            return fields
        try:
            if task.submission is not None:
                function = task.submission.function or ""
                given = await packed(task.submission)
                with phases.measured("submission"):
                    fields[_SUBMISSION] = await _environment_result(
                        instance.call_function(function, given, _timeout_s(task.submission))
                    )
                return fields
            return fields | await _score(instance, task.reward, phases)
        except SandboxExhausted:
            raise
        except ToolError as exc:
            return self._failed(task, exc, Stage.REWARD, env.activity())

    async def _unused(self, own: OwnOptions | None) -> Instance:
        """Return an instance in which no agent has acted, since none is reset before a reward."""
        while True:
            instance = await self._outlasting(lambda: self._source.acquire(own))
            if not instance.is_used:
                return instance
            self._source.release(instance)

    async def _score_elsewhere(
        self,
        task: Task,
        own: OwnOptions | None,
        submission: Any,
        env: EpisodeEnv,
        phases: _Phases,
    ) -> dict[str, Any]:
        """Run the reward on a new instance.

        Raises:
            AenvError: The infrastructure failed.
        """
        call = task.reward or Call()
        call = call.model_copy(update={"arguments": call.arguments | {SUBMITTED: submission}})
        with phases.measured("grader"):
            grader = await self._unused(own)
        try:
            await self._source.connect(grader)
            await self._resets.seed(grader, task)
            return await _score(grader.env, call, phases)
        except (SandboxDiedInside, SandboxExhausted, InstanceExpired) as exc:
            _raise_if_no_room(exc, NO_ACTIVITY)  # in this instance
            return self._failed(task, exc, Stage.POLICY, env.activity())
        except ToolError as exc:
            return self._failed(task, exc, Stage.GRADER, env.activity())
        except CallOutcomeUnknown as exc:
            end = await _why_silent(grader.env, exc)
            return self._failed(task, end, Stage.POLICY, env.activity())
        finally:
            self._source.release(grader)


class Outage:
    """Decides whether creates that the fabric refuses are repeated, and when.

    A fabric that has started nothing yet may be set up wrongly, and one that starts other instances
    is not away: these refusals are passed on. A full quota has room when other episodes end.
    """

    def __init__(self) -> None:
        self._works_at: float | None = None
        """When the last instance started."""
        self._is_told = False
        """Whether a create was refused after that."""

    def started(self, now: float) -> None:
        """Note that an instance has started."""
        self._works_at, self._is_told = now, False

    def refused(self, since: float, now: float, why: str) -> float | None:
        """Note that a create is refused, the first time at `since`.

        Returns:
            The pause before the next try; None if the create has failed.
        """
        works_at = self._works_at
        if works_at is None or works_at > since or now - works_at > OUTAGE_S:
            return None
        return self._pause_s(since, now, why)

    def full(self, since: float, now: float, why: str) -> float | None:
        """Note that a quota has no room for an instance; as `refused`."""
        if now - max(since, self._works_at or since) > OUTAGE_S:
            return None
        return self._pause_s(since, now, why)

    def _pause_s(self, since: float, now: float, why: str) -> float:
        if not self._is_told:
            self._is_told = True
            logger.warning("no instance can be created at the moment; episodes wait: %s", why)
        return min(OUTAGE_PAUSE_S, RETRY_PAUSE_S + now - since)


class Resets:
    """Resets instances at the beginning of episodes, if their environment registers a reset.

    A new instance is reset too: the environment's function is given every task and seed. Instances
    of other environments are only given the seed.
    """

    def __init__(self) -> None:
        self._has_reset = True
        """Unless an instance says otherwise."""
        self._unclean = 0
        """Instances in a row that were not clean after an episode."""
        self._takes_seeds = True
        """Unless an instance says otherwise."""

    @property
    def reuses(self) -> bool:
        """Whether instances are to be reused."""
        return self._has_reset and self._unclean < UNCLEAN_IN_A_ROW

    @property
    def gives_seeds(self) -> bool:
        """Whether the environment gets the seeds of tasks."""
        return self._has_reset or self._takes_seeds

    async def run(self, instance: Instance, task: Task) -> bool:
        """Reset an instance, unless it is new and needs none; return whether it can be used.

        Raises:
            ResetFailed: A new instance is not clean.
            AenvError: The reset failed.
        """
        if not self._has_reset:
            await self.seed(instance, task)
            return True
        given = recordable_task(task).model_dump(mode="json", exclude=_NOT_FOR_RESETS)
        try:
            result = await instance.env.reset(given, task.seed, CALL_TIMEOUT_S)
        except (ToolNotFound, ConfigError):  # no reset, or an image with a runtime without resets
            if instance.is_used:
                return False  # it had a reset: its last episode has changed that
            self._has_reset = False
            await self.seed(instance, task)
            return True
        if result.clean:
            self._unclean = 0 if instance.is_used else self._unclean
            return True
        reasons = "; ".join(result.reasons)[:_REASONS_CHARACTERS]
        if not instance.is_used:
            raise ResetFailed(
                f"a new instance is not clean: {reasons}",
                hint="correct the environment's reset, which must leave a new instance clean",
            )
        self._unclean += 1
        logger.info("%s is replaced, it is not clean: %s", instance.env.instance_id, reasons)
        if not self.reuses:
            logger.warning(
                "instances are not reused any more: %d in a row were not clean after an episode, "
                "the last one because of: %s", self._unclean, reasons,
            )  # fmt: skip
        return False

    async def seed(self, instance: Instance, task: Task) -> None:
        """Give an instance that is not reset the seed of its episode, if the task has one.

        Raises:
            AenvError: The infrastructure failed.
        """
        if task.seed is None or not self._takes_seeds:
            return
        try:
            await instance.env.set_seed(task.seed, CALL_TIMEOUT_S)
        except ConfigError as exc:
            self._takes_seeds = False
            logger.warning(
                "the environment gets no seeds, since %s has an older runtime; build its image "
                "again: %s", instance.env.instance_id, exc.message,
            )  # fmt: skip


class _NewInstanceNotReset(Exception):
    """The reset of a new instance failed: an outcome, as that of a setup is."""

    def __init__(self, cause: AenvError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Phases:
    """How long the phases of an episode took; also of one that failed in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            before = self.seconds.get(phase, 0.0)
            self.seconds[phase] = before + time.perf_counter() - started


async def act(policy: AgentPolicy, env: EpisodeEnv, task: Task) -> Any:
    """Run a policy, a sync one in a thread, and return its result, see `outcome`.

    Raises:
        ConfigError: A sync policy returned a coroutine. It could not act: its environment is that
            of the thread, which has ended.
        Exception: Raised by the policy.
    """
    if is_async(policy):
        return await outcome(policy(env, task), "the policy")
    loop = asyncio.get_running_loop()
    sync_env = SyncEpisodeEnv(env, loop)
    done: asyncio.Future[Any] = loop.create_future()
    # A daemon thread, so that a policy that does not return cannot block the end of the process.
    thread = threading.Thread(target=_run_policy, args=(policy, sync_env, task, done), daemon=True)
    thread.start()
    try:
        output = await done
    finally:
        sync_env.abandon()
    if inspect.iscoroutine(output):
        output.close()
        raise ConfigError(
            f"the sync policy {policy!r} returned the coroutine {output.__qualname__}, which was "
            "not run: write the policy, and what wraps it, with async def",
            hint="a sync policy runs in a thread, and its environment ends with it",
        )
    return await outcome(output, "the policy") if inspect.isawaitable(output) else output


def _run_policy(
    policy: AgentPolicy, env: SyncEpisodeEnv, task: Task, done: asyncio.Future[Any]
) -> None:
    """Run a sync policy in its thread and pass its outcome to the loop."""
    hand_over(done, *call(lambda: policy(env, task), "the policy"))


async def _score(instance: AsyncEnvHandle, reward: Call, phases: _Phases) -> dict[str, Any]:
    """Run a reward.

    Raises:
        AenvError: It raised, returned no number, or the infrastructure failed.
    """
    given = await packed(reward)
    with phases.measured("reward"):
        detail = await _environment_result(
            instance.call_reward(given, reward.name, _timeout_s(reward))
        )
    return {"reward": reward_number(detail), "reward_detail": detail}


async def _environment_result(result: Awaitable[T]) -> T:
    """Return the result of a call that runs code of the environment.

    Raises:
        ToolError: What the sandbox answered instead, whatever it claims to be.
        AenvError: The sandbox ended, or the infrastructure failed.
    """
    try:
        return await result
    except INFRASTRUCTURE:
        raise
    except AenvError as exc:
        raise as_tool_error(exc) from exc


def _raise_if_no_room(exc: AenvError, activity: PolicyActivity) -> None:
    """Raise a lack of room for an inner instance as what it is, if no agent can have caused it.

    Raises:
        SandboxLost: The sandbox has ended because of it, and no agent has acted there.
    """
    is_room = isinstance(exc, SandboxDiedInside) and exc.died_of is InsideCause.ROOM
    if is_room and not activity.has_acted:
        raise SandboxLost(exc.message, hint=exc.hint) from exc


def _timeout_s(call: Call) -> float:
    return CALL_TIMEOUT_S if call.timeout_s is None else call.timeout_s


def _end_of(episode: Episode) -> str:
    """Return status and error code; the message of an error may quote the environment."""
    code = (episode.error or "").partition(":")[0]
    return f"{episode.status.value}, {code}" if code else episode.status.value


def _facts(instance: Instance) -> dict[str, Any]:
    """Return what a record says about its instance."""
    spec, info = instance.created.spec, instance.created.info
    return {
        "create_s": instance.create_s,
        "instance_id": info.id,
        "environment": spec.reference,
        "environment_digest": spec.digest,
        "start_mode": "reset" if instance.is_used else info.start_mode,
        "node_id": info.node_id,
    }


def _refused(assignment: Assignment, why: str) -> Episode:
    """Return the record of a task that cannot be played here."""
    return Episode(
        index=assignment.index,
        task_id=assignment.task.id,
        task=recordable_task(assignment.task),
        group=assignment.group,
        sample=assignment.sample,
        status=EpisodeStatus.REFUSED,
        reward=None,
        error=f"unsupported: {why}",
    )


def _failure(status: EpisodeStatus, exc: BaseException, place: str | None = None) -> dict[str, Any]:
    code = exc.code if isinstance(exc, AenvError) else type(exc).__name__
    message = exc.message if isinstance(exc, AenvError) else str(exc)
    where = "" if place is None else f" ({place})"
    return {"status": status, "reward": None, "error": f"{code}: {message}{where}"}


async def _why_silent(instance: AsyncEnvHandle, exc: CallOutcomeUnknown) -> Exception:
    """Return what ended an episode in which a call had no answer.

    The call may have been lost with a server in the sandbox that an agent has ended or keeps busy.

    Raises:
        AenvError: The infrastructure failed.
    """
    try:
        await instance.list_tools()
    except (SandboxDiedInside, InstanceExpired) as end:
        return end
    except CallOutcomeUnknown:
        pass  # it runs, and still does not answer
    except AenvError as end:
        if is_infrastructure(end):
            raise
    return exc


async def _expect(instance: AsyncEnvHandle) -> None:
    """Raise the error of a call if the instance has ended; otherwise make no call."""
    if (await instance.info()).status is not InstanceStatus.RUNNING:
        await instance.list_tools()


def _recordable(output: Any) -> Any:
    """Return what a policy returned, or as text if a record cannot hold it."""
    try:
        json.dumps(output, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        return shown(output)[:TEXT_LIMIT]
    return output
