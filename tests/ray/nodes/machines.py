"""A cluster of several machines' nodes on this one, made by the script that users run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.hub.redis.server import find_program
from tests.contract.processes import signal_all
from tests.ray.cluster import FRUGAL
from tests.ray.faults import eventually, eventually_empty, processes_of
from tests.ray.nodes.nodes import HEALTH

LOCAL: Final = Path(__file__).parents[3] / "clusters" / "local"
SCRIPT: Final = LOCAL / "node.py"
RUN_S: Final = 300.0
_PASSWORD: Final = "p%ss word"


def load_script() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("node", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _command(pid: int) -> bytes:
    """Return a process's command; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Machines:
    """Nodes of one cluster, with a Redis for its head.

    Args:
        root: For all files; on a short path.
        ip: The head's address.
    """

    def __init__(self, root: Path, ip: str = "127.0.0.1") -> None:
        self.root = root
        self._ip = ip
        self.address = f"{ip}:{free_port()}"
        self._redis_port = free_port()
        self._redis = self._started_redis()
        self.variables = {
            "AENV_RUNTIME_DIR": str(root / "r"),
            "AENV_DATA_DIR": str(root / "d"),
            "AENV_REDIS_URL": f"redis://:p%25ss%20word@127.0.0.1:{self._redis_port}/0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(root / "token"),
        }

    def _started_redis(self) -> subprocess.Popen[str]:
        program, _ = find_program(None)
        redis = subprocess.Popen(
            [program, "-", "--dir", str(self.root), "--appendonly", "yes",
             "--port", str(self._redis_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        assert redis.stdin is not None
        redis.stdin.write(f'requirepass "{_PASSWORD}"\n')
        redis.stdin.close()
        return redis

    def lose_redis(self) -> None:
        """SIGKILL of Redis, and return once the head's control plane has ended for that reason."""
        self._redis.kill()
        self._redis.wait(60)
        eventually(lambda: self.run("head", "status").returncode == 1, 120.0)

    def start_redis(self) -> None:
        """Start the lost Redis again, with its data."""
        self._redis = self._started_redis()

    def run(
        self, name: str, *arguments: str, inside: Sequence[str] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the script for the node of that name, as an argument of the command `inside`."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AENV_"))},
            **FRUGAL,
            **self.variables,
            "AENV_CLUSTER_PORT": self.address.rpartition(":")[2],
            "AENV_NODE_IP": self._ip,
            "AENV_DASHBOARD": "0",
            "AENV_CLIENT_PORT": str(free_port()),
            "RAY_TMPDIR": str(self.root),
            "RAY_worker_niceness": "0",
            **{f"RAY_{key}": str(value) for key, value in HEALTH.items()},
            **variables,
        }
        return subprocess.run(
            [*inside, sys.executable, str(SCRIPT), "--name", self._named(name), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )

    def head(self) -> str:
        """Start the head, which takes no instances; return what the script says."""
        done = self.run("head", "head", AENV_CPUS="0")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def worker(
        self, name: str, slots: int, *, ip: str | None = None, inside: Sequence[str] = ()
    ) -> str:
        """Start a worker; return what the script says."""
        done = self.run(
            name, "worker", self.address, inside=inside,
            AENV_CPUS="1", AENV_SLOTS=str(slots), AENV_NODE_IP=ip or self._ip,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, name: str) -> dict[int, str]:
        """Return the processes of a node."""
        found: dict[int, str] = load_script().processes(self._named(name))
        return found

    def _named(self, name: str) -> str:
        """Return the name of a node on this machine, where other tests have clusters as well."""
        return f"{self.root.name}-{name}"

    def sandboxes(self) -> list[int]:
        """Return the pids of the sandboxes of all nodes."""
        places = [path for path in (self.root / "r").iterdir() if path.is_dir()]
        return [pid for place in places for pid in live_processes(place)]

    def alive(self, pids: Iterable[int]) -> list[int]:
        """Return which of these processes run; a sandbox is found without its launcher too."""
        return [pid for pid in pids if _command(pid)]

    def lose(self, name: str) -> None:
        """SIGKILL of everything on a node: what becomes of it when its power goes."""

        def end() -> dict[int, str]:
            found = self.processes(name)
            signal_all(found)
            return found

        eventually_empty(end, 60.0)

    def close(self) -> None:
        """End everything."""

        def end() -> dict[int, str]:
            found = processes_of(self.root)
            found.pop(self._redis.pid, None)
            signal_all(found)
            return found

        eventually_empty(end, 60.0)
        self._redis.kill()
        eventually(lambda: self._redis.poll() is not None, 60.0)
