"""Creates, releases, pools and bursts of pods on an emulated cluster with a real one's delays.

Run it as ``python -m benchmarks pods``. The pods are processes of this machine, so the share of our
own code depends on it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.pool import WarmRequest
from aenv_ray.engines.kubernetes.engine import KubernetesEngine
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, new_instance_id
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project import project
from aenv_ray.project.project import Project

ECHO = Path(__file__).parent / "echo_environment"
ROUNDS = 10
POOL = 8
BURST = 200
LIMIT = 30
_WAIT_S = 300.0


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    argparse.ArgumentParser(prog="python -m benchmarks pods", description=__doc__).parse_args(
        arguments
    )
    for name, value in asyncio.run(measured()).items():
        print(f"{name:44} {value:8.3f}")


async def measured() -> dict[str, float]:
    """Return all figures."""
    from tests.contract.kubernetes.kubernetes_node import KubernetesNode
    from tests.emulators.kubernetes.node import REAL

    figures: dict[str, float] = {}
    with KubernetesNode() as node, tempfile.TemporaryDirectory() as directory:
        engine = node.engine(HostId("host"))
        host = Host(
            HostId("host"), node_id="node", density=ActorDensity.SHARED,
            make_engine=lambda _: engine, store=FileInstanceStore(Path(directory, "records")),
            projects_dir=Path(directory, "projects"),
        )  # fmt: skip
        source = project.resolve(ECHO)
        await host.open()
        await host.put_project(source.digest, source.archive())
        await _create(host, source)  # builds the runtime for pods
        node.cluster.slow_down(REAL)
        await _one_after_another(figures, host, source, engine)
        await _from_a_pool(figures, host, source)
        await _bursts(figures, node)
        await host.close()
    return figures


def _spec(source: Project) -> InstanceSpec:
    return InstanceSpec(
        instance_id=new_instance_id("echo"), reference=source.reference, digest=source.digest,
        ttl_s=600.0, engine="kubernetes",
    )  # fmt: skip


async def _create(host: Host, source: Project) -> InstanceInfo:
    (outcome,) = await host.start([_spec(source)])
    assert isinstance(outcome, InstanceInfo), outcome
    return outcome


async def _timed(work: Awaitable[Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = await work
    return time.perf_counter() - started, result


async def _one_after_another(
    figures: dict[str, float], host: Host, source: Project, engine: KubernetesEngine
) -> None:
    await host.warm(WarmRequest(spec=_spec(source), count=0, idle_timeout_s=60.0), None)
    creates, releases, gone = [], [], []
    for _ in range(ROUNDS):
        seconds, info = await _timed(_create(host, source))
        creates.append(seconds)
        seconds, _ = await _timed(host.release([info.id]))
        releases.append(seconds)
        seconds, _ = await _timed(_until_gone(engine))
        gone.append(releases[-1] + seconds)
    figures["create, s"] = statistics.median(creates)
    figures["release acknowledged, s"] = statistics.median(releases)
    figures["pod gone after release, s"] = statistics.median(gone)


async def _until_gone(engine: KubernetesEngine) -> None:
    while engine.ending():  # noqa: ASYNC110  # an engine has no event for it
        await asyncio.sleep(0.01)


async def _from_a_pool(figures: dict[str, float], host: Host, source: Project) -> None:
    request = WarmRequest(spec=_spec(source), count=POOL, idle_timeout_s=600.0)
    seconds, _ = await _timed(host.warm(request, _WAIT_S))
    figures[f"{POOL} warm pods ready, s"] = seconds
    times = []
    for _ in range(POOL):
        seconds, info = await _timed(_create(host, source))
        assert info.start_mode.startswith("warm, "), info.start_mode
        times.append(seconds)
        await host.release([info.id])
    figures["create from the pool, s"] = statistics.median(times)
    await host.warm(WarmRequest(spec=_spec(source), count=0, idle_timeout_s=60.0), None)


async def _bursts(figures: dict[str, float], node: Any) -> None:
    """Measure how fast pods get into the API; no node takes them, so that none has to boot."""
    from aenv_ray.testing.contract_bench import Bench
    from tests.contract.engines import engine_on

    node.cluster.fill_nodes(True)
    for limit in (None, LIMIT):
        with tempfile.TemporaryDirectory() as directory:
            async with engine_on(node) as engine:
                specs = [Bench(engine, Path(directory)).spec() for _ in range(BURST)]
                await engine.running()  # connects
                node.cluster.limit_rate(limit)
                started = time.perf_counter()
                starting = asyncio.create_task(engine.start_many(specs))
                while len(node.sandboxes()) < BURST:  # noqa: ASYNC110  # in another thread
                    await asyncio.sleep(0.02)
                rate = BURST / (time.perf_counter() - started)
                node.cluster.limit_rate(None)
                starting.cancel()
                await asyncio.wait([starting])
        what = f", where the API allows {limit}/s" if limit else ""
        figures[f"pods created/s{what}"] = rate
