"""What a policy may be, and raise: its own failure, never the end of the loop of all episodes."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.errors import CallCancelled, CallOutcomeUnknown, ConfigError
from aenv_ray.models import ToolResult
from aenv_ray.sampling import Episode, Usage, episode_env, sample
from aenv_ray.sampling.episode_env import EpisodeEnv, EpisodeLog, SyncEpisodeEnv
from aenv_ray.sampling.policies.base import AgentPolicy
from aenv_ray.sampling.runners.runner import act


class Instance:
    instance_id = "none-1"


def run_in_thread(policy: AgentPolicy) -> BaseException | None:
    """Return what `act` raises on a loop like the sampler's, which is not the main thread's."""
    found: list[BaseException | None] = []

    async def episode() -> None:
        try:
            await act(policy, Instance(), None)  # type: ignore[arg-type]  # only its name is read
        except BaseException as exc:  # noqa: BLE001  # the test looks at it
            found.append(exc)
        else:
            found.append(None)

    thread = threading.Thread(target=lambda: asyncio.run(episode()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("form", ["async", "sync", "sync that gives an awaitable"])
def test_an_exception_that_would_end_the_event_loop_fails_the_policy(
    error: BaseException, form: str
) -> None:
    async def policy(env: Any, task: Any) -> None:
        raise error

    def sync(env: Any, task: Any) -> None:
        raise error

    class Awaitable:
        def __await__(self) -> Any:
            return policy(None, None).__await__()

    def gives_awaitable(env: Any, task: Any) -> Any:
        return Awaitable()

    raised = run_in_thread({"async": policy, "sync": sync}.get(form, gives_awaitable))
    assert isinstance(raised, RuntimeError)
    assert f"the policy raised {type(error).__name__}" in str(raised)


def test_a_sync_wrapper_of_an_async_policy_fails_the_policy() -> None:
    """Its coroutine could call no tool, which would look like a failure of the infrastructure."""

    async def acts(env: Any, task: Any) -> None:
        env.call_tool("count")

    def wrapper(*args: Any) -> Any:
        return acts(*args)

    raised = run_in_thread(wrapper)
    assert isinstance(raised, ConfigError)
    assert "acts, which was not run: write the policy, and what wraps it" in str(raised)


def test_a_cancelled_episode_does_not_fail_its_policy() -> None:
    async def policy(env: Any, task: Any) -> None:
        await asyncio.Event().wait()

    async def cancel() -> None:
        episode = asyncio.create_task(act(policy, Instance(), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        episode.cancel()
        await episode

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


def test_an_object_that_cannot_act_is_refused_before_anything_starts() -> None:
    def yields(env: Any, task: Any) -> Any:
        yield

    async def yields_too(env: Any, task: Any) -> Any:
        yield

    wrong: list[Any] = [yields, yields_too, 3, None]
    for policy in wrong:
        with pytest.raises(ConfigError, match=r"the policy .* (is a generator|is not callable)"):
            sample("mini-terminal", policy, [])


# --- what a policy adds to the record -------------------------------------------------------------


def test_messages_and_usage_are_recorded() -> None:
    log = EpisodeLog()
    env = EpisodeEnv(InstanceOfOne(), log)  # type: ignore[arg-type]  # only its id is read
    env.record_message({"role": "user", "content": "go"})
    env.record_usage(prompt_tokens=10, completion_tokens=2)
    env.record_usage(prompt_tokens=20, completion_tokens=3, cost=0.5)
    episode = Episode(index=0, task_id="t", status="completed", reward=None, **log.fields())  # type: ignore[arg-type]
    assert episode.messages == ({"role": "user", "content": "go"},)
    assert episode.usage == Usage(requests=2, prompt_tokens=30, completion_tokens=5, cost=0.5)
    assert Episode.model_validate_json(episode.model_dump_json()) == episode


def test_the_last_list_of_tools_is_recorded_if_the_episode_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = EpisodeLog()
    env = EpisodeEnv(InstanceOfOne(), log)  # type: ignore[arg-type]  # only its id is read
    env.record_tools([{"type": "function"}])
    loop: Any = None  # recording needs none
    SyncEpisodeEnv(env, loop).record_tools([{"type": "custom"}])
    assert log.tools is not None
    assert json.loads(log.contents[log.tools.digest]) == [{"type": "custom"}]
    with pytest.raises(ConfigError, match="not JSON"):
        env.record_tools([{"default": float("nan")}])
    monkeypatch.setattr(episode_env, "ATTACHMENTS_BYTES", 100)
    env.record_tools([{"text": "x" * 100}])
    assert log.tools is None


@pytest.mark.parametrize("message", [{"content": object()}, {"content": float("nan")}])
def test_a_message_that_is_not_json_is_refused(message: dict[str, Any]) -> None:
    env = EpisodeEnv(InstanceOfOne(), EpisodeLog())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not JSON"):
        env.record_message(message)


class InstanceOfOne:
    handle = Instance()


def test_an_episode_does_not_wait_for_threads_left_by_its_policy() -> None:
    may_end = threading.Event()
    left: list[threading.Thread] = []

    def leaves_threads(env: Any, task: Any) -> None:
        for _ in range(3):
            left.append(threading.Thread(target=may_end.wait, args=(60.0,), daemon=True))
            left[-1].start()

    assert run_in_thread(leaves_threads) is None
    assert all(thread.is_alive() for thread in left)
    may_end.set()
    for thread in left:
        thread.join(60.0)


def test_the_attachments_of_an_episode_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 14: an agent that fills the memory of its runner would void the episodes there."""
    monkeypatch.setattr(episode_env, "ATTACHMENTS_BYTES", 60_000)
    log = EpisodeLog()
    instance: Any = SimpleNamespace(handle=Instance())  # only its name is read
    env = EpisodeEnv(instance, log)
    call = episode_env._Call("read", {}, "c1", 0.0, 60.0)
    for letter in "abac":
        env._tool_calls[call.id] = call
        env._note(call, letter * 25_000, False, None)
    assert sum(map(len, log.contents.values())) == log.contents_bytes == 50_000
    assert [len(step.attachments) for step in log.steps] == [1, 1, 1, 0]
    assert log.steps[2].attachments == log.steps[0].attachments, "it is kept once"
    assert "[not attached: 25000 bytes" in log.steps[3].text


# --- calls without a result -----------------------------------------------------------------------


class Silent:
    """An instance whose tools never answer, except ``fails``, which loses the answer."""

    handle = Instance()

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def call_tool(self, name: str, *_: Any) -> ToolResult:
        if name == "fails":
            raise CallOutcomeUnknown("no answer", instance_id="none-1")
        self.called.set()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def exec(self, *_: Any) -> None:
        """Do nothing."""

    async def write_file(self, *_: Any) -> int:
        return 1


def _silent() -> tuple[EpisodeEnv, EpisodeLog, Silent]:
    log, instance = EpisodeLog(), Silent()
    return EpisodeEnv(instance, log), log, instance  # type: ignore[arg-type]


async def test_a_cancelled_call_is_a_step() -> None:
    """Invariant 12: the record shows what kept an episode until its time was up."""
    env, log, instance = _silent()
    call = asyncio.create_task(env.call_tool("hangs", {"n": 1}, 600))
    await instance.called.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert env.end()
    (step,) = log.steps
    assert (step.tool, step.arguments, step.timeout_s) == ("hangs", {"n": 1}, 600)
    assert (step.is_error, step.error) == (True, "call_cancelled")


async def test_a_call_under_way_at_the_end_of_its_episode_is_a_step_once() -> None:
    env, log, instance = _silent()
    call = asyncio.create_task(env.call_tool("hangs"))
    await instance.called.wait()
    assert not env.end()
    assert [(step.tool, step.error) for step in log.steps] == [("hangs", "call_cancelled")]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(CallCancelled):
        await env.call_tool("late")
    assert env.end()
    assert len(log.steps) == 1, "it was cancelled later, and a late call never reached a tool"


async def test_a_call_whose_answer_was_lost_is_a_step() -> None:
    """The call may have ended the sandbox; without it a replay would not repeat that."""
    env, log, _ = _silent()
    with pytest.raises(CallOutcomeUnknown):
        await env.call_tool("fails")
    assert [(step.tool, step.error) for step in log.steps] == [("fails", "call_outcome_unknown")]


async def test_commands_and_written_files_are_counted_since_no_replay_repeats_them() -> None:
    env, log, _ = _silent()
    await env.exec("true")
    await env.write_file("a", "b")
    assert log.fields()["unrecorded_calls"] == 2
    assert log.steps == []
