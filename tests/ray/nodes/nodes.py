"""A Ray cluster of several nodes on this machine, and a driver that joined it.

Ray can be joined once in a process, and the process of these tests has joined its own: what is done
on this cluster is done by a driver, line by line.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.experimental import internal_kv

from aenv_ray.config import settings
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.engines.node.directory import node_directory
from tests.contract.processes import signal_all
from tests.ray.cluster import FRUGAL, FRUGAL_HEAD
from tests.ray.faults import Driver, eventually_empty, kill, processes_of, settled

HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
"""Ray sees the death of a node within about two seconds, rather than fifteen."""

_CONSOLE = """
from aenv_ray.actors.ray_shell import ray_api
names = {"ray": ray, "aenv_ray": aenv_ray, "ray_api": ray_api}
for line in sys.stdin:
    kind, source = json.loads(line)
    try:
        value = exec(source, names) if kind == "do" else eval(source, names)
        say(["value", value])
    except Exception as exc:
        say(["error", [c.__name__ for c in type(exc).__mro__], str(exc)])
"""


class RemoteError(AssertionError):
    """What a line raised in the driver."""

    def __init__(self, classes: list[str], text: str) -> None:
        super().__init__(f"{classes[0]}: {text}")
        self.classes = classes


class Console(Driver):
    """A driver that runs the code it is sent, line by line."""

    def __init__(self, environment: dict[str, str | None], inside: Sequence[str] = ()) -> None:
        super().__init__(_CONSOLE, environment, inside)

    def _ask(self, kind: str, source: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([kind, source]) + "\n")
        self.process.stdin.flush()
        answer, *rest = self.said()
        if answer == "error":
            raise RemoteError(*rest)
        return rest[0]

    def do(self, source: str) -> None:
        """Run statements."""
        self._ask("do", source)

    def value(self, expression: str) -> Any:
        """Return the value of an expression, which JSON can hold."""
        return self._ask("value", expression)


@dataclass(frozen=True)
class Node:
    """One raylet with what belongs to it."""

    node_id: str
    directory: Path
    raylet: int

    def sandboxes(self) -> list[int]:
        """Return the pids of its sandbox processes, from the process table."""
        return settled(lambda: live_processes(self.directory))

    def leftovers(self) -> list[str]:
        """Return what its launcher runs: the launcher itself, templates and sandboxes."""
        found = processes_of(self.directory).values()
        return [command for command in found if "aenv_ray" in command]

    def kill(self) -> None:
        """SIGKILL of the raylet: what becomes of a machine's Ray when its power goes."""
        kill(self.raylet)


class Nodes:
    """The cluster.

    Args:
        root: For all its files; on a short path. The environment must name it already.
        node_directories: Of the launchers, `AENV_RUNTIME_DIR`.
    """

    def __init__(self, root: Path, node_directories: Path) -> None:
        self.root = root
        self._node_directories = node_directories
        head = {
            "num_cpus": 1, "include_dashboard": False, "_system_config": HEALTH, **FRUGAL_HEAD,
        }  # fmt: skip
        self._cluster = RayCluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.head = self._node(self._cluster.head_node)

    def _node(self, node: Any) -> Node:
        scope = f"{Path(node.get_session_dir_path()).name}/{node.node_id}"
        raylet = node.all_processes["raylet"][0].process.pid
        return Node(node.node_id, node_directory(self._node_directories, scope), raylet)

    def add(
        self,
        *,
        slots: int | None = None,
        labels: Mapping[str, str] | None = None,
        **variables: str,
    ) -> Node:
        """Add a node, whose processes have these environment variables too.

        With `slots`, it takes so many instances, and nodes without any take none.
        """
        resources = {} if slots is None else {"resources": {"env_slot": slots}}
        return self._node(
            self._cluster.add_node(
                num_cpus=1, env_vars=variables or None, labels=dict(labels or {}), **resources
            )
        )

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()
        if ray.is_initialized():  # Ray's utility cut off this process's own connection as well
            internal_kv._initialize_internal_kv(ray._private.worker.global_worker.gcs_client)


@contextlib.contextmanager
def own_root(prefix: str) -> Iterator[Path]:
    """Give a cluster a directory for all its files; afterwards no process of it is left."""
    root = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("AENV_RUNTIME_DIR", str(root / "r"))
        patch.setenv("AENV_DATA_DIR", str(root / "d"))
        patch.setenv("RAY_TMPDIR", str(root))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in FRUGAL.items():
            patch.setenv(name, value)
        settings.cache_clear()
        try:
            yield root
        finally:
            signal_all(processes_of(root))  # Ray's agents outlive a killed raylet by half a minute
            eventually_empty(lambda: processes_of(root), 60.0)
            shutil.rmtree(root, ignore_errors=True)
    settings.cache_clear()


def by_node(console: Console, handles: str) -> dict[str, list[str]]:
    """Return the ids of instances by the node that they are on."""
    rows = console.value(
        f"[(i.node_id, i.id) for i in ray.get([h.info.remote() for h in {handles}], timeout=60)]"
    )
    found: dict[str, list[str]] = {}
    for node_id, instance_id in rows:
        found.setdefault(node_id, []).append(instance_id)
    return found


def raised(act: Callable[[], Any]) -> list[str]:
    """Return the names of the class, and its bases, that `act` raises in the driver."""
    try:
        value = act()
    except RemoteError as exc:
        return exc.classes
    raise AssertionError(f"nothing was raised, but: {value!r}")
