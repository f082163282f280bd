"""An agent sends signals to process 1, to end a sandbox in which it fails."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.kubernetes import engine as kubernetes_engine
from aenv_ray.errors import InsideCause, SandboxDiedInside
from aenv_ray.testing.contract_bench import Bench, call, eventually, execute, value_of
from tests.contract.docker.docker_node import base_image, shell_image
from tests.contract.engines import engine_on
from tests.contract.kubernetes.kubernetes_node import KubernetesNode
from tests.emulators.kubernetes.node import PYTHON_IMAGE

_EVERY_SIGNAL: Final = "for n in $(seq 1 64); do kill -$n 1 2>/dev/null; done; echo sent"
_WITH_HANDLERS: Final = """
import os, signal
from aenv_ray.runtime import register_tool

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
    signal.signal(number, lambda *_: os._exit(1))


@register_tool
def echo(text: str) -> str:
    return text
"""
_SIDECAR: Final = """
from aenv_ray.runtime import register_tool, sidecar


@register_tool
def run(command: str) -> str:
    return sidecar.exec(command).text()
"""


async def _outlives_every_signal(bench: Bench, sandbox: Sandbox) -> None:
    assert (await execute(sandbox, _EVERY_SIGNAL)).text() == "sent\n"
    assert await value_of(sandbox, "echo", text="alive") == "alive"
    await bench.engine.stop([sandbox.instance_id])
    assert await bench.running() == set()


@pytest.mark.ordinary_user
async def test_no_signal_from_inside_ends_a_sandbox(either_engine: Bench) -> None:
    """Invariants 14 and 4: none has an effect on process 1, and a release still ends it."""
    await _outlives_every_signal(either_engine, await either_engine.start())


_EVERY_LIMIT: Final = (
    "for l in as core cpu data fsize memlock msgqueue nice nofile nproc rss rtprio rttime "
    "sigpending stack; do prlimit --pid 1 --$l=0:0 2>/dev/null && echo $l; done; echo tried"
)
_USE_CPU: Final = (
    "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.1: pass"
)


@pytest.mark.ordinary_user
async def test_no_limit_that_an_agent_sets_ends_a_sandbox(either_engine: Bench) -> None:
    """Invariant 14: with a limit of CPU time, the kernel kills process 1, as if from outside."""
    sandbox = await either_engine.start()
    assert (await execute(sandbox, _EVERY_LIMIT)).text() == "tried\n"
    await call(sandbox, "evaluate", {"source": _USE_CPU})
    assert await value_of(sandbox, "echo", text="alive") == "alive"


@pytest.mark.namespaces
async def test_a_limit_that_code_in_the_runtime_sets_for_itself_is_an_outcome(
    walled: Bench,
) -> None:
    """Invariant 14: the kernel sends the same SIGKILL as when the node has no memory left."""
    sandbox = await walled.start()
    source = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"
    with pytest.raises(SandboxDiedInside, match="SIGXCPU"):
        await call(sandbox, "evaluate", {"source": source})


@pytest.mark.docker
async def test_no_limit_that_an_agent_sets_ends_the_second_container(dockered: Bench) -> None:
    """Invariant 14: an agent of swebench or terminal-bench acts there as root."""
    deploy = {"podTemplate": "DualContainer", "network": "none"}
    project = dockered.project({"tools.py": _SIDECAR}, {"deployConfig": deploy})
    sandbox = await dockered.start(project, datasource=base_image())
    assert await value_of(sandbox, "run", command=_EVERY_LIMIT) == "tried\n"
    assert await value_of(sandbox, "run", command="seq 300000 | tail -n 1") == "300000\n"


async def test_handlers_of_a_project_do_not_open_process_one_to_signals(
    either_engine: Bench,
) -> None:
    """Invariant 14: process 1 would handle a signal from anybody."""
    project = either_engine.project({"tools.py": _WITH_HANDLERS})
    await _outlives_every_signal(either_engine, await either_engine.start(project))


@pytest.mark.docker
async def test_no_signal_from_inside_ends_the_second_container(dockered: Bench) -> None:
    """Invariant 14: process 1 of the sidecar is as deaf."""
    deploy = {"podTemplate": "DualContainer", "network": "none"}
    project = dockered.project({"tools.py": _SIDECAR}, {"deployConfig": deploy})
    sandbox = await dockered.start(project, datasource=shell_image())
    assert await value_of(sandbox, "run", command=_EVERY_SIGNAL) == "sent\n"
    assert await value_of(sandbox, "run", command="echo alive") == "alive\n"


# --- pods: the instance's process is not process 1, so that the agent can kill it -----------------


@pytest.mark.namespaces
@pytest.mark.timeout(120)
async def test_an_agent_that_ends_its_pod_gets_an_outcome(
    pods: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 14: process 1 is deaf, and an end of the instance's process is attributed."""
    async with engine_on(pods) as engine:
        bench = Bench(engine, tmp_path)
        for number in ("KILL", "STOP", "TERM"):
            sandbox = await bench.start()
            for each in ("TERM", "INT", "HUP", "QUIT", "USR1"):
                await execute(sandbox, f"kill -{each} 1")
            assert await value_of(sandbox, "echo", text="alive") == "alive"
            with pytest.raises(SandboxDiedInside) as raised:
                await call(sandbox, "evaluate", {"source": _KILL_OWN.format(number=number)})
            assert raised.value.died_of is InsideCause.SIGNAL, number
        await eventually(lambda: not pods.left_over(), "nothing is left")


_KILL_OWN: Final = """
import os, subprocess
subprocess.run(["kill", "-{number}", str(os.getpid())])
subprocess.run(["sleep", "30"])
"""


_FORGED_SIGTERM: Final = """
import ctypes, os, platform, signal, struct, time

number = {"x86_64": 129, "aarch64": 138}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
ready, begun = os.pipe()
child = os.fork()
if child == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
    os.write(begun, b"x")
    time.sleep(60)
os.read(ready, 1)


def send(pid, signal_number):
    info = struct.pack("5i", signal_number, 0, -1, 0, 0).ljust(128, b"\\0")  # SI_QUEUE
    return libc.syscall(number, pid, signal_number, info)


while send(child, 40) == 0:  # until the user's queue is full, so that the kernel drops the sender
    pass
print("queued", ctypes.get_errno() == 11, send(1, 15), flush=True)
time.sleep(60)
"""
"""Sends process 1 a SIGTERM that looks as if it came from outside the pod."""


@pytest.mark.namespaces
@pytest.mark.timeout(120)
async def test_a_forged_sigterm_is_an_outcome(
    pods: KubernetesNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: process 1 takes it for one from outside, and the API does not."""
    monkeypatch.setattr(kubernetes_engine, "NODE_LOST_S", 1.0)
    dual = {"podTemplate": "DualContainer"}
    async with engine_on(pods) as engine:
        bench = Bench(engine, tmp_path)
        with pytest.raises(SandboxDiedInside, match="SIGTERM") as raised:
            await execute(await bench.start(), ["python3", "-c", _FORGED_SIGTERM])
        assert raised.value.died_of is InsideCause.SIGNAL
        project = bench.project({"tools.py": _SIDECAR}, {"deployConfig": dual})
        sandbox = await bench.start(project, datasource=PYTHON_IMAGE)
        command = f"python3 -c {shlex.quote(_FORGED_SIGTERM)}"
        with pytest.raises(SandboxDiedInside, match=r"its sidecar: .*SIGTERM") as raised:
            await call(sandbox, "run", {"command": command})
        assert raised.value.died_of is InsideCause.SIGNAL
        await eventually(lambda: not pods.left_over(), "nothing is left")
