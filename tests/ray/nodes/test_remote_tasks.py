"""Work for a worker, asked for from a process that is not one."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.remote_tasks import on_a_worker
from aenv_ray.errors import DeadlineExceeded, FabricUnavailable
from tests.ray.cluster import Cluster

LABEL = ("ray.io/node-id", "")
WITHIN_S = 60.0


def test_work_is_done_on_a_node_that_takes_it_and_its_failure_comes_back(cluster: Cluster) -> None:
    del cluster
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    here = (LABEL[0], str(nodes[0]["Labels"][LABEL[0]]))
    assert on_a_worker(ray_api.node_id, here, WITHIN_S) == nodes[0]["NodeID"]
    assert ray_api.is_connected()  # as it was
    with pytest.raises(FabricUnavailable, match="no worker that accepts instances"):
        on_a_worker(ray_api.node_id, ("nobody", "has"), WITHIN_S)

    def fail() -> None:
        raise RuntimeError("a reason")

    with pytest.raises(FabricUnavailable, match="a reason"):
        on_a_worker(fail, here, WITHIN_S)

    def stay() -> None:
        import threading

        threading.Event().wait(WITHIN_S)

    with pytest.raises(DeadlineExceeded):
        on_a_worker(stay, here, 1.0)
