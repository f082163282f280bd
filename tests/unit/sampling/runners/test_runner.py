"""What a runner does with the instances of its episodes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.sampling import Episode, EpisodeStatus
from aenv_ray.sampling.policies.scripted import null
from aenv_ray.sampling.runners import runner_actor
from aenv_ray.sampling.runners.attribution import FailureRewards
from aenv_ray.sampling.runners.instance_source import Instance
from aenv_ray.sampling.runners.runner import EpisodeRules, Runner, _recordable


class _Handle:
    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id

    async def close(self) -> None:
        """There is no connection."""


class _Source:
    """Hands out three instances, of which only the last was not used."""

    def __init__(self) -> None:
        self.left = [self._instance(n, is_used=n < 2) for n in range(3)]
        self.released: list[str] = []

    def _instance(self, number: int, *, is_used: bool) -> Instance:
        handle, created = cast("Any", _Handle(str(number))), cast("Any", None)
        return Instance(handle, created, 0.0, 0.0, is_used=is_used)

    async def acquire(self, own: Any = None) -> Instance:
        del own
        return self.left.pop(0)

    def release(self, instance: Instance) -> None:
        self.released.append(instance.env.instance_id)


async def test_a_reward_runs_where_no_agent_has_acted() -> None:
    """D19: instances that wait for a reset are not clean yet."""
    source, rules = _Source(), EpisodeRules(0, FailureRewards(0.0, 0.0, 0.0), None)
    runner = Runner(null, cast("Any", source), rules, cast("Any", None))
    grader = await runner._unused(None)
    assert grader.env.instance_id == "2"
    assert source.released == ["0", "1"]


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
def test_what_a_policy_returns_is_recorded_as_text_if_json_lacks_it(
    output: Any, recorded: Any
) -> None:
    found = _recordable(output)
    assert found == recorded
    episode = Episode(
        index=0, task_id="t", status=EpisodeStatus.COMPLETED, reward=None, output=found
    )
    assert Episode.model_validate_json(episode.model_dump_json()).output == recorded


async def test_a_runner_whose_loop_a_policy_blocks_is_reported(
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
