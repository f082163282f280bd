"""Which episodes without a result count: an agent cannot leave the mean (invariant 14)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    ConversationRefused,
    DeadlineExceeded,
    FunctionFailed,
    InsideCause,
    InstanceExpired,
    SandboxDiedInside,
    SandboxExhausted,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from aenv_ray.sampling import EpisodeStatus
from aenv_ray.sampling.attribution import (
    NO_ACTIVITY,
    SANDBOX_SHARE,
    CallClock,
    FailureRewards,
    PolicyActivity,
    Stage,
)

REWARDS = FailureRewards(on_death=-1.0, on_timeout=-2.0, on_failure=-3.0)
BUSY = PolicyActivity(has_acted=True, busy_s=5.0, duration_s=10.0)
THINKING = PolicyActivity(has_acted=True, busy_s=0.5, duration_s=10.0)


@pytest.mark.parametrize("stage", [Stage.POLICY, Stage.REWARD])
@pytest.mark.parametrize(
    "exc",
    [
        SandboxDiedInside("gone", instance_id="i", died_of=InsideCause.EXIT),
        SandboxExhausted("full", died_of=InsideCause.DISK),
        CallOutcomeUnknown("silent", instance_id="i"),
    ],
)
def test_an_episode_whose_sandbox_ends_or_stops_answering_counts(
    exc: AenvError, stage: Stage
) -> None:
    """Whenever it happens: the agent can have caused it."""
    for activity in (BUSY, NO_ACTIVITY):
        end = REWARDS.end_of(exc, stage, activity)
        assert (end.status, end.reward) == (EpisodeStatus.DIED_INSIDE, -1.0)


@pytest.mark.parametrize(
    "exc", [DeadlineExceeded("too late"), InstanceExpired("TTL", instance_id="i")]
)
def test_a_timeout_counts_if_calls_used_the_time(exc: AenvError) -> None:
    """A slow model is void, a sandbox that plays for time is not."""
    ends = [REWARDS.end_of(exc, Stage.POLICY, one) for one in (BUSY, THINKING, NO_ACTIVITY)]
    assert [one.reward for one in ends] == [-2.0, None, None]
    assert {one.status for one in ends} == {EpisodeStatus.TIMED_OUT}


def test_an_unhandled_tool_error_counts() -> None:
    """An exception of the policy's own is void."""
    late = REWARDS.end_of(ToolTimeout("slow", tool_name="t"), Stage.POLICY, THINKING)
    wrong = REWARDS.end_of(ToolNotFound("no such tool"), Stage.POLICY, THINKING)
    own = REWARDS.end_of(KeyError("action"), Stage.POLICY, BUSY)
    unreadable = REWARDS.end_of(ConversationRefused("an image"), Stage.POLICY, BUSY)
    assert (unreadable.status, unreadable.reward) == (EpisodeStatus.POLICY_FAILED, -3.0)
    assert (late.status, late.reward) == (EpisodeStatus.TIMED_OUT, -2.0)
    assert (wrong.status, wrong.reward) == (EpisodeStatus.POLICY_FAILED, -3.0)
    assert (own.status, own.reward) == (EpisodeStatus.POLICY_FAILED, None)


def test_a_reward_that_raises_counts_once_the_agent_has_acted() -> None:
    """Before that, and for what the task itself asks for wrongly, no agent is to blame."""
    for exc in (FunctionFailed("ValueError"), ToolTimeout("slow")):
        assert REWARDS.end_of(exc, Stage.REWARD, THINKING).reward == -3.0
        assert REWARDS.end_of(exc, Stage.REWARD, NO_ACTIVITY).reward is None
    for wrong in (ToolNotFound("no such reward"), ToolInputInvalid("arguments")):
        assert REWARDS.end_of(wrong, Stage.REWARD, BUSY).reward is None
    assert REWARDS.end_of(ToolNotFound("no such reward"), Stage.GRADER, BUSY).reward is None


@pytest.mark.parametrize(
    ("argument", "reward"), [("submission", -3.0), (None, -3.0), ("", None), ("other", None)]
)
def test_a_submission_that_does_not_fit_the_reward_counts(
    argument: str | None, reward: float | None
) -> None:
    """An agent chooses it, unlike the other arguments. If in doubt, the episode counts."""
    end = REWARDS.end_of(ToolInputInvalid("wrong", argument=argument), Stage.GRADER, BUSY)
    assert (end.status, end.reward) == (EpisodeStatus.REWARD_FAILED, reward)


def test_a_setup_that_raises_is_void() -> None:
    setup = REWARDS.end_of(FunctionFailed("ValueError"), Stage.SETUP)
    assert (setup.status, setup.reward) == (EpisodeStatus.REWARD_FAILED, None)


def test_rewards_are_finite_numbers_or_left_out() -> None:
    """A death from inside always counts."""
    assert FailureRewards(on_timeout=None, on_failure=None).on_death == 0.0
    with pytest.raises(ConfigError, match="reward_on_timeout"):
        FailureRewards(on_timeout=float("inf"))
    with pytest.raises(ConfigError, match="reward_on_death"):
        FailureRewards(on_death=None)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=8))
def test_calls_that_overlap_are_measured_once(calls: list[tuple[float, float]]) -> None:
    """The clock shows how long any call was under way, whatever their order."""
    clock = CallClock()
    spans = [(start, start + length) for start, length in calls]
    events = sorted([(at, 0) for at, _ in spans] + [(at, 1) for _, at in spans])
    for at, is_end in events:
        (clock.end if is_end else clock.begin)(at)
    covered, last = 0.0, 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    assert clock.busy_s(1000.0) == pytest.approx(covered, abs=1e-6)


def test_a_call_under_way_counts_until_now() -> None:
    """A call that never returns uses up the whole time."""
    clock = CallClock()
    clock.begin(2.0)
    assert clock.busy_s(12.0) == 10.0
    assert PolicyActivity(clock.has_acted, clock.busy_s(12.0), 12.0).is_slow_by_sandbox
    assert not PolicyActivity(True, SANDBOX_SHARE * 12.0 - 0.01, 12.0).is_slow_by_sandbox


def test_a_call_does_not_last_while_the_loop_is_blocked() -> None:
    """The policy of another episode that blocks the loop is not a slow sandbox (invariant 2)."""
    blocked = {1.0: 5.0, 2.0: 5.0, 7.0: 9.0, 20.0: 9.0, 30.0: 19.5, 40.0: 19.5}
    clock = CallClock(blocked.__getitem__)
    clock.begin(1.0)
    clock.begin(2.0)
    clock.end(2.0)
    assert clock.busy_s(7.0) == 2.0
    clock.end(7.0)
    clock.begin(20.0)
    clock.end(30.0)  # a little more was blocked than the call lasted
    assert clock.busy_s(40.0) == 2.0
