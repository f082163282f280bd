"""Episodes that a trainer plays: honest outcomes, and nothing left of them."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv_ray import trajectories
from aenv_ray.errors import ConfigError, InstanceReleased, SandboxLost
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.openai import OpenAITools
from aenv_ray.integrations.slime import AenvSandbox
from aenv_ray.sampling import EpisodeStatus
from aenv_ray.trajectories import Generation
from tests.contract.processes import signal_all
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, Driver, eventually, eventually_empty

TASK = {"id": "t", "reward": {"arguments": {"value": 0.5}}}


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[EpisodePool]:
    del cluster
    with EpisodePool(PROBE) as made:
        yield made


@pytest.mark.parametrize("name", ["episodes", "episodes.jsonl"])
def test_a_trainer_that_starts_again_keeps_its_records(
    name: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Invariant 12; with a directory, so do workers that run at the same time."""
    del cluster
    workers = 1 if name.endswith(".jsonl") else 2
    for _ in range(2):
        with contextlib.ExitStack() as pools:
            for _ in range(workers):
                pool = pools.enter_context(EpisodePool(PROBE, out=tmp_path / name))
                pool.begin_blocking(TASK).finish()
    assert len(trajectories.read(tmp_path / name)) == 2 * workers


async def test_an_episode_is_scored_once_and_recorded(cluster: Cluster, tmp_path: Path) -> None:
    """Setup, calls as a framework makes them, tokens, versions of the weights, and one reward."""
    del cluster
    out = tmp_path / "episodes.jsonl"
    with EpisodePool(PROBE, out=out) as pool:
        pool.policy_version = 3
        setup = {"function": "double", "arguments": {"value": 4}}
        episode = await pool.begin({**TASK, "setup": setup})
        assert episode.setup_result == 8
        call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
        tools = OpenAITools(episode)
        assert "add" in {tool["function"]["name"] for tool in await tools.chat_tools()}
        [message] = await tools.answer_chat({"role": "assistant", "tool_calls": [call]})
        assert message["content"] == "2"
        pool.policy_version = 4
        tokens = Generation(
            prompt_ids=(1,), response_ids=(2, 3), response_mask=(1, 0), logprobs=(-0.5, 0.0)
        )
        outcome = await episode.finish(tokens)
        assert (outcome.reward, outcome.is_void) == (0.5, False)
        assert await episode.finish() == outcome
        with pytest.raises(InstanceReleased, match="has ended"):
            await episode.call_tool("count")
    [record] = trajectories.read(out)
    assert record.status is EpisodeStatus.COMPLETED
    assert (record.policy_versions, record.generation) == ((3, 4), tokens)
    assert [step.tool for step in record.steps] == ["add"]


def test_a_sandbox_that_is_lost_makes_its_episode_void_and_no_other(
    pool: EpisodePool, cluster: Cluster
) -> None:
    """Invariant 2, for a trainer that continues with its step."""
    lost = pool.begin_blocking(TASK)
    signal_all(cluster.sandboxes())
    other = pool.begin_blocking(TASK)
    with pytest.raises(SandboxLost):
        lost.call_tool("count")
    assert other.call_tool("count").data == 1
    void, scored = lost.finish(), other.finish()
    assert (void.is_void, void.reward) == (True, None)
    assert void.episode.status is EpisodeStatus.INFRA_FAILED
    assert (scored.is_void, scored.reward) == (False, 0.5)


def test_a_sandbox_that_the_agent_ends_is_an_outcome(pool: EpisodePool) -> None:
    """Invariant 14: a model cannot have an episode masked that it is losing."""
    episode = pool.begin_blocking(TASK)
    with pytest.raises(SandboxLost):
        episode.call_tool("leave", {"code": 1})
    outcome = episode.finish()
    assert (outcome.is_void, outcome.reward) == (False, 0.0)


def test_a_setup_that_fails_is_a_void_episode_and_no_exception(pool: EpisodePool) -> None:
    """A trainer that resets its environments in a loop continues."""
    episode = pool.begin_blocking({**TASK, "setup": {"function": "nonsense"}})
    with pytest.raises(InstanceReleased, match="nonsense"):
        episode.call_tool("count")
    assert episode.finish().is_void


def test_a_wrong_task_or_option_is_refused(pool: EpisodePool) -> None:
    with pytest.raises(ConfigError, match="reward"):
        pool.begin_blocking({"reward": "nonsense"})
    with pytest.raises(ConfigError, match="reward_on_death"):
        EpisodePool(PROBE, reward_on_death=float("nan"))
    copy = pickle.loads(pickle.dumps(pool))
    pool.close()
    with pytest.raises(ConfigError, match="closed"):
        pool.begin_blocking(TASK)
    with copy:
        assert copy.begin_blocking(TASK).finish().reward == 0.5


async def test_a_group_starts_together(pool: EpisodePool) -> None:
    """Its records name the group, and the abandoned sample has none."""
    episodes = await pool.begin_group(TASK, 3)
    assert len({episode.instance_id for episode in episodes}) == 3
    await episodes[0].abandon()
    with pytest.raises(InstanceReleased, match="abandoned"):
        await episodes[0].finish()
    records = [(await episode.finish()).episode for episode in episodes[1:]]
    assert {(record.sample, record.group) for record in records} == {
        (1, records[0].group),
        (2, records[0].group),
    }


def test_reserved_instances_run_before_their_episodes_begin(
    pool: EpisodePool, cluster: Cluster
) -> None:
    """A trainer that resets one environment after the other waits for one start, not for all."""
    pool.reserve(3)
    eventually(lambda: len(cluster.sandboxes()) == 3, what=cluster.sandboxes)
    ready = set(cluster.sandboxes())
    episodes = [pool.begin_blocking(TASK) for _ in range(3)]
    assert set(cluster.sandboxes()) == ready
    for episode in episodes:
        episode.finish()
    eventually(lambda: len(set(cluster.sandboxes()) - ready) == 3, what=cluster.sandboxes)


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_trainer_that_ends_leaves_no_instances(
    cluster: Cluster, driver: Callable[[str], Driver], end: str
) -> None:
    """Killed in the middle of a step, or gone without having closed its pool."""
    program = driver(
        "from aenv_ray.integrations.episodes import EpisodePool\n"
        f"pool = EpisodePool({str(PROBE)!r})\n"
        "pool.reserve(2)\n"
        "episode = pool.begin_blocking({'id': 't'})\n"
        "say(episode.call_tool('count').data)"
    )
    assert program.said() == 1
    assert cluster.sandboxes()
    if end == "kill":
        program.kill()
    else:
        program.finish()
    eventually_empty(cluster.sandboxes)


async def test_slime_can_use_an_instance_as_its_sandbox(cluster: Cluster, tmp_path: Path) -> None:
    """As its coding agents use one; a lost sandbox is no exit code, and ends the episode."""
    async with AenvSandbox(str(PROBE)) as sandbox:
        assert await sandbox.exec("echo out; echo no >&2; exit 3") == (3, "out\n", "no\n")
        with pytest.raises(RuntimeError, match=r"exit code 3 of 'echo why .*: why"):
            await sandbox.exec("echo why >&2; exit 3", check=True)
        (tmp_path / "local.txt").write_text("from a file")
        for content in ("from text", b"from bytes", tmp_path / "local.txt"):
            await sandbox.write_file("a.txt", content)
            assert (await sandbox.read_file("a.txt")).startswith("from ")
        assert await sandbox.read_file("missing.txt") == ""
        signal_all(cluster.sandboxes())
        with pytest.raises(SandboxLost):
            await sandbox.exec("true")


def test_a_killed_slime_agent_leaves_no_sandbox(
    cluster: Cluster, driver: Callable[[str], Driver]
) -> None:
    program = driver(
        "import asyncio\n"
        "from aenv_ray.integrations.slime import AenvSandbox\n"
        "async def main():\n"
        f"    async with AenvSandbox({str(PROBE)!r}) as sandbox:\n"
        "        say((await sandbox.exec('echo here'))[1])\n"
        "        await sandbox.exec('sleep 600', timeout=600)\n"
        "asyncio.run(main())"
    )
    assert program.said() == "here\n"
    assert cluster.sandboxes()
    program.kill()
    eventually_empty(cluster.sandboxes)
