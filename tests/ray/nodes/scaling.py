"""A Ray cluster whose autoscaler makes nodes on this machine, and removes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from aenv_ray.actors.ray_shell.nodes import ENGINE_LABEL
from aenv_ray.cli.local.free_ports import free_port
from tests.contract.processes import signal_all
from tests.ray.cluster import FRUGAL
from tests.ray.faults import eventually_empty, processes_of

ENGINES: Final = ("process", "fake")
"""The engines of its nodes, in the order of their types in the autoscaler's configuration."""
SLOTS: Final = 3
MOST_NODES: Final = 2
_HEAD: Final = "f" * 51 + "00000"
"""The id by which Ray's fake provider knows the head."""


class ScalingCluster:
    """A head that takes no instances, and up to `MOST_NODES` nodes with `SLOTS` slots each.

    Each node has one of `ENGINES`.

    Args:
        root: For all its files; on a short path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.variables = {
            "RAY_ADDRESS": self.address,
            "RAY_TMPDIR": str(root),
            "RAY_AUTH_MODE": "disabled",
            "AENV_RUNTIME_DIR": str(root / "r"),
            "AENV_DATA_DIR": str(root / "d"),
        }
        config = root / "autoscaler.yaml"
        config.write_text(json.dumps(_config(self.address)))
        subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}",
                "--node-ip-address=127.0.0.1", "--num-cpus=0", "--include-dashboard=false",
                f"--temp-dir={root}", f"--autoscaling-config={config}", "--disable-usage-stats",
                f"--ray-client-server-port={free_port()}",
            ],
            env={
                **{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
                **{k: v for k, v in self.variables.items() if k != "RAY_ADDRESS"},
                **FRUGAL,
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": _HEAD,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
                "RAY_worker_niceness": "0",
                "AENV_ENGINE_SLOTS": ",".join(f"{engine}={SLOTS}" for engine in ENGINES),
            },
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def close(self) -> None:
        """End all its processes."""

        def end() -> dict[int, str]:
            found = processes_of(self.root)
            signal_all(found)
            return found

        eventually_empty(end, 60.0)


def _config(address: str) -> dict[str, object]:
    unused = (
        "setup_commands", "head_setup_commands", "worker_setup_commands", "rsync_filter",
        "initialization_commands", "head_start_ray_commands", "worker_start_ray_commands",
        "cluster_synced_files", "rsync_exclude",
    )  # fmt: skip
    return {
        **{key: [] for key in unused},
        "cluster_name": "scaling",
        "max_workers": MOST_NODES,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "external",
            "module": "tests.ray.nodes.fake_nodes.FakeNodes",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": _HEAD,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            **{
                engine: {
                    "resources": {"CPU": 1, "env_slot": SLOTS},
                    "labels": {ENGINE_LABEL: engine},
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": MOST_NODES,
                }
                for engine in ENGINES
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    }
