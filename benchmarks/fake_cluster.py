"""A cluster of several nodes on this machine whose sandboxes are those of the fake engine.

With them the fabric alone is measured: thousands of sandboxes cost little more than a thread each.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

import aenv_ray
from aenv_ray.actors.fabric import driver_api

PER_NODE: Final = 2_500
"""Sandboxes on each node, as a host has four open files for each; all nodes are on this machine."""
_SPARE_SLOTS: Final = 64


@contextlib.contextmanager
def fake_cluster(sandboxes: int) -> Iterator[int]:
    """Connect to a new cluster with room for `sandboxes`; yield its number of nodes."""
    os.environ["AENV_ENGINE"] = "fake"
    nodes = math.ceil(sandboxes / PER_NODE)
    head: dict[str, Any] = {
        "resources": {"env_slot": PER_NODE + _SPARE_SLOTS},
        "include_dashboard": False,
        "num_cpus": 2,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(resources=head["resources"], num_cpus=2)
        ray.init(cluster.address, logging_level="warning")
        driver_api.init().shared_hosts(sandboxes)  # each node starts its host
        yield nodes
    finally:
        aenv_ray.shutdown()
        ray.shutdown()
        cluster.shutdown()
