"""The node of the emulated cluster: runs pods as processes, and reports their status to the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import aenv_ray
from tests.emulators.kubernetes.pod import START_ERROR
from tests.emulators.kubernetes.store import timestamp

NODE: Final = "node-1"
PYTHON_IMAGE: Final = "emulated/python:3"
SHELL_IMAGE: Final = "emulated/shell:1"
RAY_IMAGE: Final = "emulated/ray:2"
OPENSSL_CONF: Final = "/etc/ssl/of-the-image.cnf"
"""A variable of `SHELL_IMAGE`."""
VOLUME_IMAGE: Final = "emulated/volume:1"
"""Has Python, and ``VOLUME /data``."""
IMAGES: Final = frozenset({PYTHON_IMAGE, SHELL_IMAGE, RAY_IMAGE, VOLUME_IMAGE})
_SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_END_S: Final = 30.0


class Delays(NamedTuple):
    """How long the cluster takes for what it does here in no time, in seconds."""

    schedule_s: float = 0.0
    """From the creation of a pod until it has a node."""
    start_s: float = 0.0
    """Until its containers run."""
    report_s: float = 0.0
    """Until the API says so."""
    end_s: float = 0.0
    """From the end of a deleted pod's containers until it is gone."""


REAL: Final = Delays(schedule_s=0.02, start_s=0.7, report_s=0.3, end_s=0.9)
"""As measured on Kubernetes 1.34 with containerd 2.3, on one node with two cores."""

SetStatus = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Called with a pod and its new status; ignores deleted pods."""


class EmulatedNode:
    """Runs pods on the current event loop.

    Args:
        set_status: Reports a pod's status to the API.
    """

    def __init__(self, set_status: SetStatus) -> None:
        self._set_status = set_status
        self.delays = Delays()
        self._running: dict[str, _RunningPod] = {}
        self._numbers = 0
        self._directory = Path(tempfile.mkdtemp(prefix="aenv-node-"))
        self._directory.chmod(0o755)
        self._disk = Path(tempfile.mkdtemp(prefix="aenv-node-", dir="/var/tmp"))  # /tmp: in memory?
        self._disk.chmod(0o755)
        self._socket = self._directory / "pods"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process that forks pods."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.emulators.kubernetes.pod", str(self._socket),
            start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(_END_S):
            assert self._process.stdout is not None
            await self._process.stdout.readline()

    async def stop(self) -> None:
        """End all pods, and the process that forks them."""
        try:
            for uid in self.uids:
                await self.end(uid, 0.0)
        finally:
            if self._process is not None:
                self._process.kill()
                await self._process.wait()
            shutil.rmtree(self._directory)
            shutil.rmtree(self._disk)

    def address(self) -> str:
        """Return an unused loopback address."""
        self._numbers += 1
        return f"127.{16 + os.getpid() % 200}.{self._numbers // 250}.{1 + self._numbers % 250}"

    async def run(self, pod: dict[str, Any]) -> None:
        """Run a pod to its end, reporting its status."""
        running = _RunningPod(
            pod, self._socket, self._disk, self.address(), self._set_status, self.delays
        )
        self._running[pod["metadata"]["uid"]] = running
        try:
            await running.run()
        finally:
            del self._running[pod["metadata"]["uid"]]

    async def end(self, uid: str, grace_s: float) -> None:
        """End a pod's processes, and return when they are gone.

        Args:
            uid: Of the pod.
            grace_s: From SIGTERM to each container's process 1 until SIGKILL. The kernel drops a
                SIGTERM for which process 1 has no handler.
        """
        running = self._running.get(uid)
        if running is not None:
            await running.end(grace_s)
            await asyncio.sleep(self.delays.end_s)

    def kill(self, uid: str) -> None:
        """SIGKILL process 1 of a pod's first container."""
        self._running[uid].kill()

    def mark(self, uid: str, status: Mapping[str, Any]) -> None:
        """Add to the status that a pod will end with, for example ``{"reason": "Evicted"}``."""
        self._running[uid].marks.update(status)

    @property
    def uids(self) -> list[str]:
        """The pods that have processes."""
        return list(self._running)

    def log(self, name: str, container: str) -> str:
        """Return the output of a container."""
        path = self._directory / f"{name}-{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class _RunningPod:
    def __init__(
        self,
        pod: dict[str, Any],
        server: Path,
        disk: Path,
        address: str,
        set_status: SetStatus,
        delays: Delays,
    ) -> None:
        self._pod = pod
        self._delays = delays
        self._server = server
        self._directory = server.parent
        self._disk = disk
        self._address = address
        self._set = set_status
        self._states: dict[str, dict[str, Any]] = {}
        self._pids: dict[str, int] = {}
        self._pid = 0
        self._is_ending = False
        self._phase = ""
        self._gone = asyncio.Event()
        self.marks: dict[str, Any] = {}

    # --- status ---------------------------------------------------------------------------------

    def _tell(self, phase: str) -> None:
        if self._phase == "Failed":
            phase = "Failed"  # for good: what its processes reported before may be read after
        self._phase = phase
        spec = self._pod["spec"]

        def row(container: Mapping[str, Any]) -> dict[str, Any]:
            name = container["name"]
            waits = {"waiting": {"reason": "ContainerCreating"}}
            state = self._states.get(name, waits)
            return {
                "name": name, "image": container["image"], "imageID": "", "restartCount": 0,
                "ready": "running" in state, "started": "running" in state, "state": state,
            }  # fmt: skip

        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [row(container) for container in spec["containers"]],
            **({"podIP": self._address} if phase == "Running" else {}),
        }
        if "initContainers" in spec:
            status["initContainerStatuses"] = [row(each) for each in spec["initContainers"]]
        if phase == "Failed":
            status |= self.marks
        self._set(self._pod, status)

    async def run(self) -> None:
        spec = self._pod["spec"]
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        try:
            for container in containers:
                if container["image"] not in IMAGES:
                    await self._fail_to_pull(container)
                    return
            self._tell("Pending")
            await asyncio.sleep(self._delays.start_s)
            if not self._is_ending:
                await self._run_process()
        finally:
            self._gone.set()

    async def _fail_to_pull(self, container: Mapping[str, Any]) -> None:
        image = container["image"]
        words = f'failed to resolve reference "{image}": {image}: not found'
        for reason in ("ErrImagePull", "ImagePullBackOff"):
            waiting = {"reason": reason, "message": words if "Err" in reason else "Back-off"}
            self._states[container["name"]] = {"waiting": waiting}
            self._tell("Pending")

    async def _run_process(self) -> None:
        name = self._pod["metadata"]["name"]
        with_first = {container["name"] for container in self._pod["spec"]["containers"][1:]}
        with tempfile.TemporaryDirectory(dir=self._directory) as root:
            os.chmod(root, 0o755)  # its user must come through
            reader, writer = await asyncio.open_unix_connection(self._server, limit=1 << 20)
            writer.write(json.dumps(self._order(name, root)).encode() + b"\n")
            with contextlib.suppress(ConnectionResetError):  # killed before it read its order
                async for line in reader:
                    message = json.loads(line)
                    if "started" in message and message["started"] not in with_first:
                        await asyncio.sleep(self._delays.report_s)  # once for those of a pod
                    self._hear(message)
            writer.close()

    def _hear(self, message: Mapping[str, Any]) -> None:
        names = [container["name"] for container in self._pod["spec"]["containers"]]
        if "pod" in message:
            self._pid = message["pod"]
            if self._is_ending:
                self._kill_all()
            return
        if "started" in message:
            self._pids[message["started"]] = message["pid"]
            self._states[message["started"]] = {"running": {"startedAt": timestamp()}}
        else:
            text = message["message"]
            ended = {
                "exitCode": message["code"], "message": text, "reason": "Error",
                "finishedAt": timestamp(),
            }  # fmt: skip
            if message["code"] == 0:
                ended["reason"] = "Completed"
            if text.startswith(START_ERROR):
                ended |= {"reason": "StartError", "message": text.removeprefix(START_ERROR)}
            self._pids.pop(message["ended"], None)
            self._states[message["ended"]] = {"terminated": ended}
        ended_codes = [
            state["terminated"]["exitCode"]
            for state in self._states.values()
            if "terminated" in state
        ]
        over = [name for name in names if "terminated" in self._states.get(name, {})]
        if any(ended_codes):
            self._tell("Failed")
        elif len(over) == len(names):
            self._tell("Failed" if self.marks else "Succeeded")
        elif all(name in self._states for name in names):
            self._tell("Running")
        else:
            self._tell("Pending")

    # --- ends -----------------------------------------------------------------------------------

    async def end(self, grace_s: float) -> None:
        self._is_ending = True
        if self._pids and grace_s:
            for pid in self._pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._gone.wait()
        if not self._gone.is_set():
            if not self._has_ended:  # else its phase is known
                self._tell("Failed")
            self._kill_all()
            async with asyncio.timeout(_END_S):
                await self._gone.wait()

    @property
    def _has_ended(self) -> bool:
        """Whether all containers have ended by themselves."""
        names = [container["name"] for container in self._pod["spec"]["containers"]]
        return all("terminated" in self._states.get(name, {}) for name in names)

    def _kill_all(self) -> None:
        if self._pid and not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        first = self._pod["spec"]["containers"][0]["name"]
        os.kill(self._pids[first], signal.SIGKILL)

    # --- what it runs ---------------------------------------------------------------------------

    def _order(self, name: str, root: str) -> dict[str, Any]:
        spec = self._pod["spec"]
        return {
            "directory": root,
            "is_root": os.geteuid() == 0,
            "hostname": spec.get("hostname") or name,
            "volumes": {volume["name"]: self._volume(volume) for volume in spec["volumes"]},
            "init": [self._container(name, each) for each in spec.get("initContainers", ())],
            "containers": [self._container(name, each) for each in spec["containers"]],
        }

    def _volume(self, volume: Mapping[str, Any]) -> dict[str, Any]:
        if "emptyDir" in volume:
            return dict(volume["emptyDir"])
        claimed = self._directory / "claims" / volume["persistentVolumeClaim"]["claimName"]
        claimed.mkdir(parents=True, exist_ok=True)
        return {"claimed": str(claimed)}

    def _image_volumes(self, pod_name: str, container: Mapping[str, Any]) -> dict[str, str]:
        """Return directories on disk for the volumes of an image, by path, as containerd does."""
        if container["image"] != VOLUME_IMAGE:
            return {}
        directory = self._disk / f"{pod_name}-{container['name']}"
        directory.mkdir(exist_ok=True)
        directory.chmod(0o777)
        return {"/data": str(directory)}

    def _container(self, pod_name: str, container: Mapping[str, Any]) -> dict[str, Any]:
        message = self._directory / f"{pod_name}-{container['name']}.message"
        message.write_text("")
        message.chmod(0o666)
        variables = {
            "PATH": _path(container["image"]),
            "HOSTNAME": pod_name,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }
        if container["image"] == RAY_IMAGE:
            variables["PYTHONPATH"] = _package()
        if container["image"] == SHELL_IMAGE:
            variables["OPENSSL_CONF"] = OPENSSL_CONF
        for entry in container.get("env", ()):
            variables[entry["name"]] = entry.get("value", self._address)
        return {
            "name": container["name"],
            "command": [*container["command"], *container.get("args", ())],
            "directory": container.get("workingDir", "/"),
            "environment": variables,
            "mounts": [
                {
                    "name": mount["name"],
                    "path": mount["mountPath"],
                    "read_only": mount.get("readOnly", False),
                }
                for mount in container["volumeMounts"]
            ],
            "image_volumes": self._image_volumes(pod_name, container),
            "shown": _shown(container["image"]),
            "drops_capabilities": _drops_capabilities(container["securityContext"]),
            "uid": container["securityContext"]["runAsUser"],
            "gid": container["securityContext"]["runAsGroup"],
            "message_path": str(message),
            "log_path": str(self._directory / f"{pod_name}-{container['name']}.log"),
        }


def _drops_capabilities(security: Mapping[str, Any]) -> bool:
    """Return whether a container has no capability; one that adds some here has all."""
    capabilities = security.get("capabilities") or {}
    return "ALL" in capabilities.get("drop", ()) and not capabilities.get("add")


def _path(image: str) -> str:
    return {
        PYTHON_IMAGE: f"{sys.base_prefix}/bin:{_SYSTEM_PATH}",
        VOLUME_IMAGE: f"{sys.base_prefix}/bin:{_SYSTEM_PATH}",
        SHELL_IMAGE: "/tools",
        RAY_IMAGE: f"{sys.prefix}/bin:{_SYSTEM_PATH}",
    }[image]


def _package() -> str:
    """Return where this package is, which the image has like any other installed one."""
    return str(Path(aenv_ray.__file__).parent.parent)


def _shown(image: str) -> list[str]:
    """Return the directories of this machine that an image has in addition to the system's."""
    return {
        PYTHON_IMAGE: [sys.base_prefix],
        VOLUME_IMAGE: [sys.base_prefix],
        SHELL_IMAGE: [],
        # Parent directories first.
        RAY_IMAGE: sorted([sys.base_prefix, sys.prefix, _package()], key=len),
    }[image]
