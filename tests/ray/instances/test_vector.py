"""`aenv_ray.vector`: many instances stepped together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray

import aenv_ray
from aenv_ray.client.vector import StepOutcome, VectorEnvironment
from aenv_ray.errors import ConfigError, DeadlineExceeded, SandboxLost, ToolInputInvalid
from aenv_ray.testing.contract_bench import eventually
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE

COUNT = 4


@pytest.fixture(params=["shared", "dedicated"])
def vector(
    request: pytest.FixtureRequest, cluster: Cluster, nothing_left: None
) -> Iterator[VectorEnvironment]:
    del cluster, nothing_left
    with aenv_ray.vector(PROBE, COUNT, actor=request.param) as made:
        yield made


@pytest.fixture
def shared_vector(cluster: Cluster, nothing_left: None) -> Iterator[VectorEnvironment]:
    del cluster, nothing_left
    with aenv_ray.vector(PROBE, COUNT, near="me") as made:
        yield made


def values(outcomes: list[StepOutcome]) -> list[object]:
    return [one.data if isinstance(one, aenv_ray.ToolResult) else type(one) for one in outcomes]


def test_a_step_calls_every_instance_in_order(vector: VectorEnvironment) -> None:
    texts = [{"text": f"t{n}"} for n in range(COUNT)]
    for _ in range(5):  # by the hosts at first, later directly
        assert values(vector.step("echo", texts)) == ["t0", "t1", "t2", "t3"]
    assert values(vector.step("echo", texts[:2], indices=[3, 1])) == ["t0", "t1"]
    references = vector.step_refs("count", [None] * 2, indices=[3, 0])
    assert values(ray.get(references)) == [1, 1]
    assert values(vector.step("count", [None] * COUNT)) == [2, 1, 1, 2]


def test_the_error_of_one_instance_does_not_affect_the_others(
    shared_vector: VectorEnvironment,
) -> None:
    """Invariant 2: the loss is typed, and has no result."""
    vector = shared_vector
    (gone,) = vector.step("leave", [{"code": 3}], indices=[2])
    assert isinstance(gone, SandboxLost)
    lost = type(gone)
    assert values(vector.step("count", [None] * COUNT)) == [1, 1, lost, 1]
    wrong = [{}, {"a": 1}, {"a": 1}, {"a": "x"}]
    assert values(vector.step("add", wrong)) == [ToolInputInvalid, 2, lost, ToolInputInvalid]
    assert values(ray.get(vector.step_refs("count", [None] * COUNT))) == [2, 2, lost, 2]


def test_what_is_ready_first_is_received_first(shared_vector: VectorEnvironment) -> None:
    """A slow instance holds up no other one."""
    vector = shared_vector
    vector.send("hold", [{"key": "go"}], indices=[1])
    vector.send("count", [None] * 3, indices=[0, 2, 3])
    ready = vector.recv(min_ready=3)
    assert [(one.index, values([one.outcome])) for one in ready] == [(0, [1]), (2, [1]), (3, [1])]
    with pytest.raises(DeadlineExceeded, match="only 0 of 1 instance became ready"):
        vector.recv(timeout_s=0.01)
    with pytest.raises(ConfigError, match=r"calls to the instances \[1\] are under way"):
        vector.step("count", [None] * COUNT)
    vector.send("count", [None], indices=[0])
    assert [one.index for one in vector.recv(min_ready=1)] == [0]
    ray.get(vector.handles[1].write_file.remote("go", ""))
    (held,) = vector.recv(min_ready=COUNT)
    assert (held.index, values([held.outcome])) == (1, ["held go"])
    with pytest.raises(ConfigError, match="no call is under way"):
        vector.recv()


async def test_event_loops_step_too(cluster: Cluster, nothing_left: None) -> None:
    del cluster, nothing_left
    async with aenv_ray.vector(PROBE, 2, actor="shared") as vector:
        assert values(await vector.step_async("count", [None] * 2)) == [1, 1]
        vector.send("count", [None] * 2)
        assert [one.index for one in await vector.recv_async(min_ready=2)] == [0, 1]
    with pytest.raises(ConfigError, match="was released"):
        vector.send("count", [None] * 2)


async def test_an_instance_has_one_call_at_a_time(cluster: Cluster, nothing_left: None) -> None:
    """Also of steps from several tasks or threads, which would come in any order."""
    del cluster, nothing_left
    busy = r"calls to the instances \[0\] are under way"
    async with aenv_ray.vector(PROBE, 2) as vector:
        first = asyncio.create_task(vector.step_async("hold", [{"key": "a"}], indices=[0]))
        await eventually(lambda: vector._stepping, "the step begins")
        with pytest.raises(ConfigError, match=busy):
            await vector.step_async("count", [None] * 2)
        with pytest.raises(ConfigError, match=busy):
            await asyncio.to_thread(vector.step, "count", [None], indices=[0])
        for act in (vector.send, vector.step_refs):
            with pytest.raises(ConfigError, match=busy):
                act("count", [None], indices=[0])
        assert values(await vector.step_async("count", [None], indices=[1])) == [1]
        await asyncio.to_thread(ray.get, vector.handles[0].write_file.remote("a", ""))
        assert values(await first) == ["held a"]
        assert values(await vector.step_async("count", [None] * 2)) == [1, 2]
        cancelled = asyncio.create_task(vector.step_async("hold", [{"key": "b"}], indices=[0]))
        await eventually(lambda: vector._stepping, "the step begins")
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert values(await vector.step_async("count", [None] * 2)) == [2, 3]


def test_a_release_cancels_what_is_under_way(cluster: Cluster, nothing_left: None) -> None:
    del cluster, nothing_left
    vector = aenv_ray.vector(PROBE, 2)
    vector.send("hold", [{"key": "never"}] * 2)
    vector.release()
    vector.release()
    ids = {handle.instance_id for handle in vector.handles}
    assert ids.isdisjoint(info.id for info in aenv_ray.list_instances())


@pytest.mark.parametrize(
    ("arguments", "indices"),
    [([None], None), ([None] * 2, [0, 0]), ([None], [COUNT]), ([None], [-1])],
)
def test_wrong_numbers_are_refused_before_any_call(
    shared_vector: VectorEnvironment, arguments: list[None], indices: list[int] | None
) -> None:
    for act in (shared_vector.step, shared_vector.send, shared_vector.step_refs):
        with pytest.raises(ConfigError, match=r"arguments for|invalid indices"):
            act("count", arguments, indices=indices)
    assert values(shared_vector.step("count", [None] * COUNT)) == [1] * COUNT


@pytest.mark.parametrize("near", ["here", "", 3, "ab" * 27])
def test_near_names_a_node_or_an_actor(cluster: Cluster, near: object) -> None:
    del cluster
    with pytest.raises(ConfigError, match="is neither a node nor an actor"):
        aenv_ray.create(PROBE, near=near)  # type: ignore[arg-type]
