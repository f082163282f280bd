"""Where a handle goes, and how an instance is found: tasks, actors, other drivers, listings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import InstanceNotFound, ToolNotFound
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, Driver


def test_a_handle_works_in_a_task_and_in_an_actor(env: Any) -> None:
    """A handle is pickled into any Ray code and back, and stays the same instance."""

    @ray.remote(num_cpus=0)
    def task(handle: Any) -> Any:
        return handle, ray.get(handle.call_tool.remote("echo", {"text": "from a task"})).data

    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        async def call(self) -> Any:
            return (await self.handle.call_tool.remote("echo", {"text": "from an actor"})).data

    returned, text = ray.get(task.remote(env))
    assert text == "from a task"
    assert returned.instance_id == env.instance_id
    assert ray.get(returned.call_tool.remote("add", {"a": 1})).data == 2
    actor = Actor.remote(env)
    assert ray.get(actor.call.remote()) == "from an actor"


def test_errors_keep_their_type_through_a_task(env: Any) -> None:
    """Our errors survive Ray's pickling with message and context."""

    @ray.remote(num_cpus=0)
    def task(handle: Any) -> None:
        ray.get(handle.call_tool.remote("nonsense"))

    with pytest.raises(ToolNotFound) as caught:
        ray.get(task.remote(env))
    assert "nonsense" in str(caught.value)


def test_create_works_inside_a_task(cluster: Cluster) -> None:
    """A task creates, uses and releases its own instance."""
    del cluster
    path = str(PROBE)

    @ray.remote(num_cpus=0)
    def task() -> Any:
        import aenv_ray as fabric

        handle = fabric.create(path, actor="shared")
        result = ray.get(handle.call_tool.remote("add", {"a": 1}))
        ray.get(handle.release.remote())
        return result.data

    assert ray.get(task.remote()) == 2


def test_get_attaches_from_another_driver(
    make: Callable[..., Any], driver: Callable[..., Driver], density: str
) -> None:
    """Any driver of the cluster finds an instance by id and sees the same state."""
    handle = make(actor=density)
    ray.get(handle.call_tool.remote("count"))
    other = driver(
        f"env = aenv_ray.get({handle.instance_id!r})\n"
        "result = ray.get(env.call_tool.remote('count'))\n"
        "ids = [i.id for i in aenv_ray.list_instances()]\n"
        "say([env.reference, result.data, ids])"
    )
    reference, count, ids = other.said()
    assert (reference, count) == ("probe@1.2.0", 2)
    assert handle.instance_id in ids
    other.finish()
    assert ray.get(handle.call_tool.remote("count")).data == 3


def test_get_of_an_unknown_id_is_a_typed_error(cluster: Cluster) -> None:
    """`InstanceNotFound` with the way to see what lives."""
    del cluster
    with pytest.raises(InstanceNotFound, match="probe-zzzzzzzz") as caught:
        aenv_ray.get("probe-zzzzzzzz")
    assert "list_instances" in str(caught.value.hint)


def test_list_instances_shows_the_live_ones(make: Callable[..., Any]) -> None:
    """Oldest first, both densities, and gone after a release."""
    ours = [make(actor="shared"), make(actor="dedicated"), make(actor="shared")]
    ids = [h.instance_id for h in ours]
    assert [i.id for i in aenv_ray.list_instances() if i.id in ids] == ids
    ray.get(ours[1].release.remote())
    assert [i.id for i in aenv_ray.list_instances() if i.id in ids] == [ids[0], ids[2]]


def test_a_dedicated_instance_is_a_named_actor(make: Callable[..., Any]) -> None:
    """It shows in Ray's listing under its own id; a shared one does not."""
    dedicated, shared = make(actor="dedicated"), make(actor="shared")
    names = {
        row["name"]
        for row in ray.util.list_named_actors(all_namespaces=True)
        if row["namespace"] == ray_api.NAMESPACE
    }
    assert dedicated.instance_id in names
    assert shared.instance_id not in names
    assert ray.get(dedicated.info.remote()).host == dedicated.instance_id
