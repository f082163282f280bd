"""What a runner does with the instances of its episodes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.engines import door
from aenv_ray.engines.base import EndCause
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    ConfigError,
    FabricUnavailable,
    FunctionFailed,
    InsideCause,
    QuotaExceeded,
    QuotaTooSmall,
    SandboxDiedInside,
    SandboxLost,
    SandboxStartFailed,
    ToolNotFound,
)
from aenv_ray.ids import InstanceId
from aenv_ray.models import Isolation, ResetResult, ToolResult
from aenv_ray.sampling import Episode, EpisodeStatus, OpenAIPolicy, Task
from aenv_ray.sampling.attribution import FailureRewards
from aenv_ray.sampling.episode_env import EpisodeEnv, EpisodeLog
from aenv_ray.sampling.loop_watch import LoopWatch
from aenv_ray.sampling.policies.scripted import null
from aenv_ray.sampling.runners import runner as runner_module
from aenv_ray.sampling.runners import runner_actor
from aenv_ray.sampling.runners.assignments import Assignment
from aenv_ray.sampling.runners.instance_source import GroupStart, Instance
from aenv_ray.sampling.runners.runner import (
    OUTAGE_S,
    EpisodeRules,
    Outage,
    Resets,
    Runner,
    _Phases,
    _recordable,
)
from aenv_ray.sampling.tasks import archives
from aenv_ray.sampling.user_code import PolicyTimedOut
from aenv_ray.trajectories.schema import Call
from tests.emulators.model_endpoint import completion, refusal, serving, tool_call


class _Handle:
    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.handle = self

    async def close(self) -> None:
        """There is no connection."""


class _Source:
    """Hands out three instances, of which only the last was not used."""

    def __init__(self) -> None:
        self.left = [self._instance(n, is_used=n < 2) for n in range(3)]
        self.released: list[str] = []

    def _instance(self, number: int, *, is_used: bool) -> Instance:
        handle = cast("Any", _Handle(str(number)))
        created = cast("Any", SimpleNamespace(spec=SimpleNamespace(owner=None)))
        return Instance(handle, created, 0.0, 0.0, is_used=is_used)

    async def acquire(self, own: Any = None) -> Instance:
        del own
        return self.left.pop(0)

    def reuse(self, instance: Instance) -> bool:
        del instance
        return False

    def release(self, instance: Instance) -> None:
        self.released.append(instance.env.instance_id)


async def test_a_reward_runs_where_no_agent_has_acted() -> None:
    """D19: instances that wait for a reset are not clean yet."""
    source, rules = _Source(), EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(null, cast("Any", source), rules, cast("Any", None))
    grader = await runner._unused(None)
    assert grader.env.instance_id == "2"
    assert source.released == ["0", "1"]


class _NoRoom(_Handle):
    """An instance that ends in its setup, or in its reward, because of a lack of room."""

    handle = _Handle("1")

    def __init__(self, where: str) -> None:
        super().__init__("1")
        self._where = where

    def _end_in(self, where: str) -> None:
        if where == self._where:
            raise SandboxDiedInside("no room", instance_id="1", died_of=InsideCause.ROOM)

    async def call_function(self, *_: Any) -> None:
        self._end_in("setup")

    async def call_reward(self, *_: Any) -> float:
        self._end_in("reward")
        return 1.0

    async def call_tool(self, *_: Any) -> ToolResult:
        return ToolResult([])


@pytest.mark.parametrize(
    ("where", "acts", "reward"),
    [("setup", True, None), ("reward", False, None), ("reward", True, 0.0)],
)
async def test_a_lack_of_room_counts_once_an_agent_has_acted(
    where: str, acts: bool, reward: float | None
) -> None:
    """Invariants 2 and 14: an agent whose code runs in the runtime can choose the moment."""

    async def policy(env: Any, task: Any) -> None:
        if acts:
            await env.call_tool("act")

    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(policy, cast("Any", None), rules, cast("Any", None))
    instance = cast("Any", _NoRoom(where))
    task = Task(id="t", setup=Call(function="f"), reward=Call())
    env = EpisodeEnv(instance, EpisodeLog())
    playing = runner._roll_out(instance, task, env, _Phases())
    if reward is None:
        with pytest.raises(SandboxLost, match="no room"):
            await playing
    else:
        assert (await playing)["status"] is EpisodeStatus.DIED_INSIDE


class _Slow(_NoRoom):
    """An instance whose setup takes five minutes, and each call 80 s, on a clock of the test."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.now_s = 0.0

    async def call_function(self, *_: Any) -> None:
        self.now_s += 300.0

    async def call_tool(self, *_: Any) -> ToolResult:
        self.now_s += 80.0
        return ToolResult([])


class _Acted(_Handle):
    """An instance that notes what is called, and whose reward takes some turns of the loop."""

    def __init__(self) -> None:
        super().__init__("1")
        self.is_graded = asyncio.Event()
        self.called: list[str] = []

    async def call_tool(self, *_: Any) -> ToolResult:
        self.called.append("tool")
        return ToolResult([])

    async def exec(self, *_: Any) -> None:
        self.called.append("command")

    async def call_function(self, *_: Any) -> None:
        self.called.append("submission")
        await self._grade()

    async def call_reward(self, *_: Any) -> float:
        self.called.append("reward")
        await self._grade()
        raise FunctionFailed("wrong")

    async def _grade(self) -> None:
        self.is_graded.set()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("submits", [False, True])
async def test_what_a_policy_has_left_running_does_not_act_beside_the_reward(
    submits: bool,
) -> None:
    """Invariant 14; a call that is refused is also no activity of the policy."""
    left: list[asyncio.Task[None]] = []
    instance = _Acted()

    async def go_on(env: Any) -> None:
        await instance.is_graded.wait()
        for act in (lambda: env.call_tool("act"), lambda: env.exec("true")):
            with pytest.raises(CallCancelled):
                await act()

    async def policy(env: Any, task: Any) -> None:
        left.append(asyncio.create_task(go_on(env)))

    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(policy, cast("Any", None), rules, cast("Any", None))
    submission = Call(function="f") if submits else None
    task = Task(id="t", submission=submission, reward=Call())
    env = EpisodeEnv(cast("Any", instance), EpisodeLog())
    await runner._roll_out(cast("Any", instance), task, env, _Phases())
    await left[0]
    assert instance.called == (["submission"] if submits else ["reward"])
    assert not env.activity().has_acted
    assert env.end(), "no call is under way, so the instance can be used again"


class _OfDoor(_Handle):
    """An instance whose sandbox is at the other end of a socket."""

    def __init__(self, sandbox: DoorSandbox) -> None:
        super().__init__("1")
        self._sandbox = sandbox

    async def call_tool(self, *_: Any) -> ToolResult:
        return ToolResult([])

    async def call_reward(self, *_: Any) -> float:
        return float(await self._sandbox.request_json("aenv/reward", b"{}", deadline_s=30))

    async def list_tools(self) -> None:
        await self._sandbox.request_json("tools/list", b"{}", deadline_s=30)


async def test_an_agent_that_keeps_its_sandbox_from_reading_gets_a_failed_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 14: it must not be able to void an episode that goes badly."""
    monkeypatch.setattr(door, "MAX_UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(door, "STALLED_S", 0.05)

    async def no_cause() -> EndCause:
        return EndCause("its process ended")

    reader, host = socket.socketpair()
    sandbox = DoorSandbox(InstanceId("e-1"), Isolation(kind="none"), "test", no_cause)
    sandbox.connect(host)
    handle = cast("Any", _OfDoor(sandbox))
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    large: list[asyncio.Task[bytes]] = []

    async def policy(env: Any, task: Task) -> None:
        await env.call_tool("run")
        large.append(
            asyncio.create_task(sandbox.request_json("tools/call", b" " * (4 << 20), deadline_s=30))
        )
        await asyncio.sleep(0)  # it is being sent

    runner = Runner(policy, cast("Any", _Source()), rules, cast("Any", None))
    env = EpisodeEnv(handle, EpisodeLog())
    try:
        fields = await runner._roll_out(handle, Task(id="t", reward=Call()), env, _Phases())
    finally:
        large[0].cancel()
        await sandbox.close()
        reader.close()
    assert (fields["status"], fields["reward"]) == (EpisodeStatus.DIED_INSIDE, 0.0)
    assert "has not read" in fields["error"]


class _Painter(_NoRoom):
    """An instance whose tool returns an image that only begins like one."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    async def list_tools(self) -> list[dict[str, Any]]:
        return [{"name": "paint", "inputSchema": {"type": "object"}}]

    async def call_tool(self, *_: Any) -> ToolResult:
        data = base64.b64encode(b"\x89PNG\r\n\x1a\n, or so").decode()
        return ToolResult([{"type": "image", "data": data, "mimeType": "image/png"}])


@pytest.mark.parametrize("is_down", [False, True])
async def test_an_image_that_the_model_cannot_read_does_not_void_an_episode(is_down: bool) -> None:
    """Invariant 14; if the model answers nothing else either, it is void (invariant 2)."""
    paints = completion(None, tool_call("paint", {}))
    unreadable = refusal(400, "cannot identify image file")
    own = unreadable if is_down else completion("Hello.")
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, -1.0), None)
    instance = cast("Any", _Painter())
    env = EpisodeEnv(instance, EpisodeLog())
    with serving(paints, unreadable, own, unreadable) as endpoint:
        policy = OpenAIPolicy("m", base_url=endpoint.url, images=True)
        runner = Runner(policy, cast("Any", None), rules, cast("Any", None))
        fields = await runner._roll_out(instance, Task(id="t", reward=Call()), env, _Phases())
    assert fields["status"] is EpisodeStatus.POLICY_FAILED
    assert fields["reward"] == (None if is_down else -1.0)
    assert fields["error"].startswith("config_error" if is_down else "conversation_refused")


async def test_a_slow_setup_does_not_void_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 14: of the policy's 600 s, calls took 80 s; a tenth of it counts."""
    instance = _Slow()
    monkeypatch.setattr(time, "perf_counter", lambda: instance.now_s)

    async def policy(env: Any, task: Any) -> None:
        await env.call_tool("act")
        instance.now_s += 520.0
        raise PolicyTimedOut("the policy did not end within 600 s")

    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(policy, cast("Any", None), rules, cast("Any", None))
    env = EpisodeEnv(cast("Any", instance), EpisodeLog())
    task = Task(id="t", setup=Call(function="f"))
    fields = await runner._roll_out(cast("Any", instance), task, env, _Phases())
    assert (fields["status"], fields["reward"]) == (EpisodeStatus.TIMED_OUT, 0.0)


class _Quick(_NoRoom):
    """An instance whose calls take a millisecond."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    async def call_tool(self, *_: Any) -> ToolResult:
        await asyncio.sleep(0.001)
        return ToolResult([])


async def test_a_policy_that_blocks_the_loop_is_not_scored() -> None:
    """Invariant 2: a call of one episode lasts while another one blocks the loop."""

    async def policy(env: Any, task: Any) -> None:
        while True:
            await env.call_tool("act")
            time.sleep(0.5)  # noqa: ASYNC251  # as a request to a model that is not awaited

    watch = LoopWatch()
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), 1.0)
    runner = Runner(policy, cast("Any", None), rules, cast("Any", None), blocked_s=watch.blocked_s)

    async def played() -> dict[str, Any]:
        instance = cast("Any", _Quick())
        env = runner._environment(instance, EpisodeLog())
        return await runner._roll_out(instance, Task(id="t", reward=Call()), env, _Phases())

    watch.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(played()) for _ in range(2)]
    finally:
        watch.stop()
    for one in both:
        fields = one.result()
        assert (fields["status"], fields["reward"]) == (EpisodeStatus.TIMED_OUT, None)


class _Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def _nested() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("output", "recorded"),
    [
        ({"a": [1, "b", None]}, {"a": [1, "b", None]}),
        ({1, 2}, "{1, 2}"),
        (b"data", "b'data'"),
        ("half \ud800", "'half \\ud800'"),
        (_Unshowable(), "an object of _Unshowable that cannot be shown"),
        (_nested(), "an object of list that cannot be shown"),
    ],
    ids=["json", "set", "bytes", "surrogate", "broken repr", "deeply nested"],
)
def test_a_policy_result_that_json_cannot_represent_is_recorded_as_text(
    output: Any, recorded: Any
) -> None:
    found = _recordable(output)
    assert found == recorded
    episode = Episode(
        index=0, task_id="t", status=EpisodeStatus.COMPLETED, reward=None, output=found
    )
    assert Episode.model_validate_json(episode.model_dump_json()).output == recorded


async def test_a_runner_with_a_blocked_event_loop_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_actor, "LOOK_S", 0.01)
    monkeypatch.setattr(runner_actor, "_SILENT_S", 0.02)
    runner = runner_actor.RemoteRunner("runner-1", "node", actor=None, gate=ShutdownGate())
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Answers(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not answer.done():
                answer.set_result(None)

    handler = Answers()
    runner_actor.logger.addHandler(handler)
    try:
        async with asyncio.timeout(30.0):
            await runner._settled(answer, None)
    finally:
        runner_actor.logger.removeHandler(handler)
    assert "runner-1 has not answered" in caplog.text
    assert "blocks the event loop" in caplog.text


class _FailingSource(_Source):
    """Raises these errors, one for each request, None for an instance."""

    def __init__(self, errors: list[AenvError | None]) -> None:
        super().__init__()
        self._errors = errors

    async def acquire(self, own: Any = None) -> Instance:
        del own
        error = self._errors.pop(0)
        if error is not None:
            raise error
        return self._instance(len(self._errors), is_used=False)


async def test_an_episode_waits_out_a_fabric_that_worked_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that does not start is not used for 10 s, longer than all restarts together take."""
    monkeypatch.setattr(runner_module, "RETRY_PAUSE_S", 0.0)
    refused = FabricUnavailable("no host runs on any node")
    source = _FailingSource([refused, None, *[refused] * 9, None])
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(null, cast("Any", source), rules, cast("Any", None))
    with pytest.raises(FabricUnavailable):  # it may be set up wrongly
        await runner._unused(None)
    assert (await runner._unused(None)).env.instance_id == "10"
    assert (await runner._unused(None)).env.instance_id == "0"
    assert caplog.text.count("no host runs on any node") == 1


async def test_an_episode_waits_while_a_quota_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the start: the episodes beside it may use the whole quota."""
    monkeypatch.setattr(runner_module, "RETRY_PAUSE_S", 0.0)
    full, too_small = QuotaExceeded("owner:eve has 3 of 3"), QuotaTooSmall("3, and 4 at once")
    source = _FailingSource([full, full, None, too_small])
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(null, cast("Any", source), rules, cast("Any", None))
    assert (await runner._unused(None)).env.instance_id == "1"
    with pytest.raises(QuotaTooSmall):
        await runner._unused(None)


class _Playing(Runner):
    """Plays episodes in which nothing happens."""

    async def _prepare(self, *_: Any) -> bool:
        return True

    async def _roll_out(self, *_: Any) -> dict[str, Any]:
        return {"status": EpisodeStatus.COMPLETED, "reward": None}


async def test_an_episode_with_a_submission_records_how_long_its_instance_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "_facts", lambda i: {"instance_id": i.env.instance_id})

    class _NewSource(_Source):
        async def acquire(self, own: Any = None) -> Instance:
            del own
            created = cast("Any", SimpleNamespace(spec=SimpleNamespace(owner=None)))
            return Instance(cast("Any", _OfOlderRuntime()), created, 2.5, 0.0)

        async def connect(self, instance: Instance) -> None:
            del instance

    class _Submitting(Runner):
        async def _roll_out(self, *_: Any) -> dict[str, Any]:
            return {"status": EpisodeStatus.COMPLETED, "reward": None, "submission": "patch"}

        async def _score_elsewhere(self, *_: Any) -> dict[str, Any]:
            return {"reward": 1.0}

    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = _Submitting(null, cast("Any", _NewSource()), rules, cast("Any", None))
    episode = await runner.play(Assignment(0, Task(id="t")), GroupStart(1))
    assert (episode.reward, episode.phases["create"]) == (1.0, 2.5)


def test_the_times_of_a_repeated_phase_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that cannot be reset is replaced, for which the episode waits again."""
    phases = _Phases()
    times = iter([0.0, 2.0, 10.0, 13.0])
    with monkeypatch.context() as patched:
        patched.setattr(runner_module.time, "perf_counter", lambda: next(times))
        for _ in range(2):
            with phases.measured("queue"):
                pass
    assert phases.seconds == {"queue": 5.0}


async def test_no_episode_is_lost_to_an_outage_longer_than_all_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(runner_module, "_facts", lambda i: {"instance_id": i.env.instance_id})
    refused = FabricUnavailable("no host runs on any node")
    source = _FailingSource([None, *[refused] * 9, None])
    rules = EpisodeRules(2, FailureRewards(0.0, 0.0, 0.0), None)
    runner = _Playing(null, cast("Any", source), rules, cast("Any", None))
    episodes = [
        await runner.play(Assignment(index, Task(id=str(index))), GroupStart(1))
        for index in range(2)
    ]
    assert [(e.status, e.attempts) for e in episodes] == [(EpisodeStatus.COMPLETED, 1)] * 2


async def test_no_episode_waits_for_a_connection_that_was_shut_down() -> None:
    gate = ShutdownGate()
    refused = FabricUnavailable("this connection to the fabric was shut down")
    source = _FailingSource([None, refused])
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(
        null, cast("Any", source), rules, cast("Any", None),
        is_connected=lambda: not gate.is_closed,
    )  # fmt: skip
    await runner._unused(None)
    gate.close(0.0)
    with pytest.raises(FabricUnavailable, match="shut down"):
        await runner._unused(None)


def test_an_outage_ends_five_minutes_after_the_last_start() -> None:
    outage = Outage()
    assert outage.refused(0.0, 0.0, "why") is None
    outage.started(10.0)
    assert [outage.refused(20.0, now, "why") for now in (20.0, 22.0, 30.0)] == [0.5, 2.5, 5.0]
    assert outage.refused(20.0, 10.0 + OUTAGE_S + 1.0, "why") is None
    outage.started(400.0)
    assert outage.refused(401.0, 401.0, "why") == 0.5


def test_a_create_that_is_refused_while_others_start_is_not_repeated() -> None:
    """No node has the engine that its task asks for: it would wait for as long as the run lasts."""
    outage = Outage()
    outage.started(10.0)
    assert outage.refused(11.0, 11.0, "no node can run docker") is not None
    outage.started(12.0)
    assert outage.refused(11.0, 13.0, "no node can run docker") is None


async def test_a_group_that_waits_out_an_outage_starts_together() -> None:
    """Its episodes ask again together, also after a restart: no start is taken twice."""
    begun: list[int] = []

    class _Groups(_Source):
        def begin_group(self, count: int, own: Any = None) -> asyncio.Task[list[Instance]]:
            del own
            begun.append(count)

            async def start() -> list[Instance]:
                if len(begun) in {2, 3}:
                    raise FabricUnavailable("no host runs on any node")
                if len(begun) == 4:
                    raise SandboxStartFailed("it did not start", instance_id="e-1")
                return [self._instance(n, is_used=False) for n in range(count)]

            return asyncio.create_task(start())

    source, rules = _Groups(), EpisodeRules(1, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(null, cast("Any", source), rules, cast("Any", None))
    first, second = GroupStart(2), GroupStart(2)
    counts = itertools.count()
    await runner._outlasting(lambda: first.take(cast("Any", source), next(counts)))

    async def take() -> str:
        tries = itertools.count()
        for _ in range(2):
            try:
                taken = await runner._outlasting(
                    lambda: second.take(cast("Any", source), next(tries))
                )
                return str(taken.env.instance_id)
            except SandboxStartFailed:
                continue
        return ""

    async with asyncio.timeout(60.0):
        assert sorted(await asyncio.gather(take(), take())) == ["0", "1"]
    assert begun == [2] * 5


@pytest.mark.parametrize("call", ["setup", "submission", "reward"])
@pytest.mark.parametrize("fault", ["missing", "too large"])
async def test_a_task_whose_archives_cannot_be_packed_fails_alone_and_before_its_agent_acts(
    call: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 10)
    path = tmp_path / "tests"
    if fault == "too large":
        path.write_text("content")
    source = _FailingSource([])  # an episode that asks for an instance raises IndexError
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(null, cast("Any", source), rules, cast("Any", None))
    task = Task.model_validate(
        {"id": "t", call: {"function": "f", "archives": {"tests": [str(path)]}}}
    )
    episode = await runner.play(Assignment(0, task), GroupStart(1))
    assert (episode.status, episode.reward) == (EpisodeStatus.INFRA_FAILED, None)
    assert str(path) in str(episode.error)


async def test_an_archive_that_can_no_longer_be_packed_ends_only_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_facts", lambda i: {"instance_id": i.env.instance_id})
    path = tmp_path / "tests"
    path.write_text("content")

    async def policy(env: Any, task: Any) -> None:
        path.unlink()

    class _Prepared(Runner):
        async def _prepare(self, *_: Any) -> bool:
            return True

    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = _Prepared(policy, cast("Any", _FailingSource([None])), rules, cast("Any", None))
    task = Task(id="t", reward=Call(archives={"tests": (str(path),)}))
    episode = await runner.play(Assignment(0, task), GroupStart(1))
    assert (episode.status, episode.reward) == (EpisodeStatus.INFRA_FAILED, None)
    assert str(path) in str(episode.error)


class _OfOlderRuntime(_Handle):
    """An instance whose runtime has neither resets nor seeds."""

    def __init__(self) -> None:
        super().__init__("1")
        self.asked: list[int] = []

    async def reset(self, *_: Any) -> None:
        raise ToolNotFound("no reset", tool_name="reset")

    async def set_seed(self, seed: int, timeout_s: float) -> None:
        del timeout_s
        self.asked.append(seed)
        raise ConfigError("unknown method 'aenv/seed'", hint="")


async def test_a_seed_that_an_environment_does_not_take_is_not_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle, resets = _OfOlderRuntime(), Resets()
    created = cast("Any", SimpleNamespace(spec=SimpleNamespace(owner=None)))
    instance = Instance(cast("Any", handle), created, 0.0, 0.0, is_used=False)
    assert await resets.run(instance, Task(id="t"))
    assert (handle.asked, resets.gives_seeds) == ([], True)
    for _ in range(2):
        assert await resets.run(instance, Task(id="t", seed=7))
    assert (handle.asked, resets.gives_seeds) == ([7], False)
    (warned,) = caplog.messages
    assert "gets no seeds, since 1 has an older runtime" in warned


class _Resettable(_Handle):
    """Its environment has a reset."""

    def __init__(self) -> None:
        super().__init__("1")
        self.given: list[dict[str, Any]] = []

    async def reset(self, task: dict[str, Any], *_: Any) -> ResetResult:
        self.given.append(task)
        return ResetResult(clean=True)


async def test_a_reset_gets_a_task_with_values_that_json_lacks() -> None:
    """As an image of a multimodal data set; otherwise it would end the run of all."""
    handle, resets = _Resettable(), Resets()
    created = cast("Any", SimpleNamespace(spec=SimpleNamespace(owner=None)))
    instance = Instance(cast("Any", handle), created, 0.0, 0.0, is_used=False)
    task = {"id": "a", "instruction": "half \ud83d", "images": [b"\xff", object]}
    assert await resets.run(instance, Task.model_validate(task))
    (given,) = handle.given
    assert given["instruction"] == "half \ufffd"
    assert given["images"] == ["b'\\xff'", "<class 'object'>"]


class _Losing(_Handle):
    """An instance whose tool ``loses`` fails for infrastructure, and ``hangs`` never answers."""

    async def call_tool(self, name: str, *_: Any) -> ToolResult:
        if name == "loses":
            raise FabricUnavailable("the node is gone")
        return await asyncio.Event().wait()  # type: ignore[return-value]


class _OneInstance:
    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    async def take(self, *_: Any) -> Instance:
        return self._instance

    async def connect(self, instance: Instance) -> None:
        """It is connected."""

    def release(self, instance: Instance) -> None:
        """Do nothing."""


async def test_the_calls_of_an_episode_that_the_infrastructure_ended_are_in_its_record() -> None:
    """Invariant 12: also those that were under way."""

    async def policy(env: Any, task: Any) -> None:
        hanging = asyncio.create_task(env.call_tool("hangs"))
        await asyncio.sleep(0)
        await env.call_tool("loses")
        await hanging

    spec = SimpleNamespace(owner=None, reference="e@1", digest="sha256:0")
    info = SimpleNamespace(id="1", start_mode="template", node_id="n")
    created = cast("Any", SimpleNamespace(spec=spec, info=info))
    source = cast("Any", _OneInstance(Instance(cast("Any", _Losing("1")), created, 0.0, 0.0)))
    rules = EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(policy, source, rules, cast("Any", None))
    runner._resets._has_reset = False
    episode = await runner.play(Assignment(0, Task(id="t")), source)
    assert episode.status is EpisodeStatus.INFRA_FAILED
    assert [(step.tool, step.error) for step in episode.steps] == [
        ("loses", "fabric_unavailable"), ("hangs", "call_cancelled"),
    ]  # fmt: skip
