"""``python -m benchmarks [--quick] [--json FILE]``: measures the budget and prints it.

``python -m benchmarks soak`` looks for growth over many cycles and calls: `benchmarks.soak`.
``python -m benchmarks concurrent-episodes`` plays thousands of episodes at the same time.
``python -m benchmarks control-plane`` creates thousands of instances on the fake engine.
``python -m benchmarks peers`` does the same work with other libraries.
``python -m benchmarks environments`` prints what the built-in environments cost.
``python -m benchmarks pods`` creates and releases pods on an emulated Kubernetes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ray

import aenv_ray
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.engines.census import live_processes
from benchmarks import (
    concurrent_episodes,
    containers,
    control_plane,
    environments,
    episodes,
    gateway,
    local_door,
    pods,
    soak,
)
from benchmarks.floor import bare_actor
from benchmarks.measure import p50_s, paired, per_s
from benchmarks.peers import compare
from benchmarks.pools import pools
from benchmarks.readme import machine, replace_section

ECHO = Path(__file__).parent / "echo_environment"
ARGUMENTS = {"text": "hi"}
BATCH = 100
LIVE = 4000
SPARE_DEADLINE_S = 60.0
BUDGET = {
    "call_p50_ratio": "<= 1.25 x a bare async actor call",
    "pipelined_ratio": ">= 0.85 x the bare actor",
    "batch_speedup": ">= 5 x single pipelined calls",
    **local_door.BUDGET,
    "terminal_call_ratio": "<= 2 x an echo call",
    "process_create_p50_ms": "<= 6 ms",
    "process_creates_per_s": ">= 300 with namespaces",
    "process_creates_per_s_no_namespaces": ">= 500",
    "dedicated_create_p50_ms": "<= 40 ms, with a spare host",
    "process_warm_acquire_p50_ms": "<= 5 ms",
    "warm_acquire_p50_ms": "<= 5 ms",
    "pool_burst_100_s": "<= 0.9 s",
    "live_instances": f"{LIVE}, all answering",
    "pss_mib_per_instance": "<= 4 MiB",
    **episodes.BUDGET,
    **containers.BUDGET,
    **gateway.BUDGET,
}


def echo(env: EnvHandle) -> Any:
    """Send one echo call."""
    return env.call_tool.remote("echo", ARGUMENTS)


def calls(figures: dict[str, float], quick: bool) -> None:
    """Measure calls on one shared instance against a bare actor."""
    env = aenv_ray.create(ECHO, actor="shared")
    actor = bare_actor()
    ray.get([echo(env) for _ in range(200)])
    ray.get([actor.echo.remote(ARGUMENTS) for _ in range(200)])
    blocks = 9 if quick else 15

    def ours() -> Any:
        return echo(env)

    def floor() -> Any:
        return actor.echo.remote(ARGUMENTS)

    ours_s, floor_s, ratio = paired(p50_s, ours, floor, 200, blocks)
    figures |= {"call_p50_ms": 1e3 * ours_s, "bare_call_p50_ms": 1e3 * floor_s}
    figures["call_p50_ratio"] = ratio
    ours_n, floor_n, ratio = paired(per_s, ours, floor, 1000, blocks)
    figures |= {"pipelined_per_s": ours_n, "bare_pipelined_per_s": floor_n}
    figures["pipelined_ratio"] = ratio

    def batch() -> Any:
        return env.call_tools.remote([("echo", ARGUMENTS)] * BATCH)

    batches, _, ratio = paired(per_s, batch, ours, 40, blocks)
    figures |= {"batched_per_s": BATCH * batches, "batch_speedup": BATCH * batches / ours_n}
    ray.get(env.release.remote())


def terminal(figures: dict[str, float], quick: bool) -> None:
    """Measure a shell command against an echo call."""
    shell = aenv_ray.create("mini-terminal", actor="shared")
    env = aenv_ray.create(ECHO, actor="shared")

    def command() -> Any:
        return shell.call_tool.remote("execute_command", {"command": "true"})

    ray.get([command(), echo(env)])
    ours_s, _, ratio = paired(p50_s, command, lambda: echo(env), 100, 7 if quick else 11)
    figures |= {"terminal_call_p50_ms": 1e3 * ours_s, "terminal_call_ratio": ratio}
    ray.get([shell.release.remote(), env.release.remote()])


def creates(figures: dict[str, float], quick: bool) -> None:
    """Measure the time from create to the first result, one by one and in one batch."""
    times = []
    for _ in range(60 if quick else 200):
        started = time.perf_counter()
        env = aenv_ray.create(ECHO, actor="shared")
        ray.get(echo(env))
        times.append(time.perf_counter() - started)
        ray.get(env.release.remote())
    figures["process_create_p50_ms"] = 1e3 * statistics.median(times)
    figures["process_creates_per_s"] = _burst(300, 3 if quick else 7)


def _burst(count: int, rounds: int) -> float:
    """Return the median creates per second of one `create_many`, after one warm-up round."""
    rates = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        group = aenv_ray.create_many(ECHO, count)
        rates.append(count / (time.perf_counter() - started))
        ray.get([echo(env) for env in group])  # every instance answers
        release(group)
    return statistics.median(rates[1:])


def dedicated_creates(figures: dict[str, float], quick: bool) -> None:
    """Measure the time from create to the first result when a spare host is ready."""
    times: list[float] = []
    used: set[str] = set()
    for _ in range(1 + (10 if quick else 20)):
        started = time.perf_counter()
        env = aenv_ray.create(ECHO)
        ray.get(echo(env))
        times.append(time.perf_counter() - started)
        used.add(env.instance_id)
        ray.get(env.release.remote())
        deadline = time.perf_counter() + SPARE_DEADLINE_S
        while not any(name.startswith("echo-") for name in set(ray_api.actor_names()) - used):
            if time.perf_counter() > deadline:
                raise SystemExit(f"no spare host within {SPARE_DEADLINE_S:g} s")
            time.sleep(0.1)
        time.sleep(2.0)  # a spare host is listed before it is ready
    figures["dedicated_create_first_ms"] = 1e3 * times[0]
    figures["dedicated_create_p50_ms"] = 1e3 * statistics.median(times[1:])


def release(group: list[EnvHandle]) -> None:
    """Release a group in one round trip."""
    aenv_ray.release_many(group)


def live(figures: dict[str, float]) -> None:
    """Measure how many instances live at once, and the memory of each."""
    group: list[EnvHandle] = []
    for _ in range(LIVE // 200):
        group += aenv_ray.create_many(ECHO, 200)
    answers = ray.get([echo(env) for env in group], timeout=300)
    figures["live_instances"] = sum(answer.data == "hi" for answer in answers)
    processes = live_processes()
    sample = processes[:: max(1, len(processes) // 100)]
    figures["pss_mib_per_instance"] = statistics.mean(soak.memory_mib(pid) for pid in sample)
    figures["processes"] = len(processes)
    release(group)
    figures["left_after_release"] = len(live_processes())


def without_namespaces(figures: dict[str, float], quick: bool) -> None:
    """Measure the batch again on a separate fabric with AENV_ISOLATION=none."""
    import subprocess

    script = "from benchmarks.__main__ import _burst; import aenv_ray; aenv_ray.init(); "
    script += f"print(_burst(300, {3 if quick else 7})); aenv_ray.shutdown()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "AENV_ISOLATION": "none"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    figures["process_creates_per_s_no_namespaces"] = float(done.stdout.split()[-1])


OTHERS = {
    "soak": soak.main,
    "concurrent-episodes": concurrent_episodes.main,
    "control-plane": control_plane.main,
    "peers": compare.main,
    "environments": environments.main,
    "pods": pods.main,
}


def main() -> None:
    """Measure and print; with ``--json``, write the figures to a file as well."""
    other = OTHERS.get(sys.argv[1]) if sys.argv[1:] else None
    if other is not None:
        other(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, about 3 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--readme", action="store_true", help="write them to benchmarks/README.md")
    parser.add_argument(
        "--image", default=settings().docker_image, help="for containers; or AENV_DOCKER_IMAGE"
    )
    options = parser.parse_args()
    no_containers = containers.refusal(options.image)
    if no_containers:
        print(f"containers are not measured: {no_containers}", file=sys.stderr)
    else:
        os.environ["AENV_DOCKER_IMAGE"] = options.image  # for the hosts
    figures: dict[str, float] = {}
    without_namespaces(figures, options.quick)  # before the release of thousands
    aenv_ray.init()
    try:
        calls(figures, options.quick)
        local_door.local_door(figures, ECHO, options.quick)
        terminal(figures, options.quick)
        creates(figures, options.quick)
        episodes.episodes(figures, options.quick)
        dedicated_creates(figures, options.quick)
        if not no_containers:
            containers.containers(figures, ECHO, options.image, options.quick)
        pools(figures, options.quick)
        no_peer = gateway.refusal()
        if no_peer:
            print(f"the gateway is not measured: {no_peer}", file=sys.stderr)
        else:
            gateway.gateway(figures, ECHO, options.quick)
        live(figures)
    finally:
        aenv_ray.shutdown()
    rounded = {name: round(value, 3) for name, value in figures.items()}
    if options.json:
        options.json.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    if options.readme:
        rows = [
            f"| `{key}` | {value:g} | {BUDGET.get(key, '')} |" for key, value in rounded.items()
        ]
        head = "| figure | value | budget |\n|---|--:|---|"
        replace_section("budget", "\n".join([machine(), "", head, *rows]))
    width = max(map(len, rounded))
    for name, value in rounded.items():
        print(f"{name:<{width}}  {value:>10g}  {BUDGET.get(name, '')}".rstrip())


if __name__ == "__main__":
    main()
