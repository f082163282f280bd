"""What Ray's autoscaler makes of waiting creates, with the workers of the manifests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray._raylet import GcsClient
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.nodes import SlotDemand
from aenv_ray.cluster import manifests
from tests.ray.cluster import Cluster
from tests.ray.faults import eventually

SLOTS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> AutoscalingConfig:
    """The autoscaler's configuration for a cluster with workers of every engine."""
    root = tmp_path_factory.mktemp("manifests") / "all"
    manifests.copy_to(root)
    overlay = root / "overlays" / "dev"
    path = overlay / "kustomization.yaml"
    path.write_text(path.read_text().replace("# - ../../components/", "- ../../components/"))
    groups = ("workers", "processWorkers", "dockerWorkers")
    values = {f"{group}.envSlots": f"'{SLOTS}'" for group in groups}
    objects = manifests.load(str(overlay), None, values | {"workers.minReplicas": "0"})
    (cluster,) = [one for one in objects if one["kind"] == "RayCluster"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        group |= {"minReplicas": 0, "replicas": 0}
    return AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(cluster))


@pytest.fixture
def cluster_without_demand(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    ray_api.demand_slots([])


def launched(cluster: Cluster, config: AutoscalingConfig, demands: list[SlotDemand]) -> Any:
    """Return how many workers of each group Ray's autoscaler starts for these demands."""
    ray_api.demand_slots(demands)

    def state() -> Any:
        found = get_cluster_resource_state(GcsClient(cluster.address))
        pending = found.pending_gang_resource_requests
        return found if len(pending) == len(demands) else None

    found = eventually(state)
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=found.pending_resource_requests,
            gang_resource_requests=found.pending_gang_resource_requests,
            disable_launch_config_check=True,
        )
    )
    assert not reply.infeasible_gang_resource_requests
    started = {one.instance_type: one.count for one in reply.to_launch}
    started.pop("headgroup", None)  # this Ray is not one that the autoscaler started
    return started


@pytest.mark.parametrize("engine", ["kubernetes", "process", "docker"])
def test_a_demand_starts_workers_of_its_engine(
    cluster_without_demand: Cluster, config: AutoscalingConfig, engine: str
) -> None:
    """As many as have the slots, and none of another engine."""
    demands = [SlotDemand(SLOTS, (engine,)), SlotDemand(3, (engine,)), SlotDemand(4, (engine,))]
    assert launched(cluster_without_demand, config, demands) == {engine: 2}


def test_a_demand_of_several_engines_starts_one_of_them(
    cluster_without_demand: Cluster, config: AutoscalingConfig
) -> None:
    either = ("kubernetes", "docker")
    started = launched(cluster_without_demand, config, [SlotDemand(2, either)])
    assert len(started) == 1
    assert started.keys() <= set(either)


def test_each_demand_of_a_mixed_queue_gets_its_workers(
    cluster_without_demand: Cluster, config: AutoscalingConfig
) -> None:
    demands = [SlotDemand(SLOTS, ("docker",)), SlotDemand(SLOTS, ("process",)), SlotDemand(1, ())]
    started = launched(cluster_without_demand, config, demands)
    assert {"docker", "process"} <= started.keys()
    assert sum(started.values()) == 3, "the last one needs another worker, of any engine"
