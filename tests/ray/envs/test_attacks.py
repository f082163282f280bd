"""Agents that prepare the sandbox of a built-in environment for its grading, and do no task."""

from __future__ import annotations

from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import AenvError
from aenv_ray.sampling import EpisodeStatus, Task, environment_tasks
from tests.ray.cluster import Cluster
from tests.ray.envs.test_tau2 import STAND_IN

FORGED: Final = '{"score": 1.0, "reward": 1.0, "passed": true, "resolved": true}'
SABOTAGE: Final = f"""
exec 2>/dev/null
for place in . ~ /tmp /project /project/src /logs/verifier /tests ~/.local/bin; do
  mkdir -p $place
  for name in sitecustomize usercustomize conftest json ctypes random grading judging; do
    echo 'import os; os._exit(0)' >$place/$name.py
  done
  for name in python python3 bash sh pytest; do
    printf '#!/bin/sh\\necho PASSED\\n' >$place/$name; chmod +x $place/$name
  done
  for name in result.json reward.txt reward.json report.json verdict.json; do
    echo '{FORGED}' >$place/$name
  done
  echo 'import os; os._exit(0)' >$place/trap.pth
  printf '[pytest]\\naddopts = --collect-only\\n' >$place/pytest.ini
done
find / -xdev -type f -writable -name '*.py' -not -path '/proc/*' -not -path '/tmp/*' |
  while read file; do echo 'raise SystemExit(0)' >"$file"; done
echo 'export PYTHONSTARTUP=/tmp/json.py LD_PRELOAD=/tmp/x.so' |
  tee -a /etc/environment /etc/ld.so.preload ~/.bashrc ~/.profile ~/.bash_profile
for name in *; do mv $name /tmp/; ln -s /etc/passwd $name; done
for output in /proc/[0-9]*/fd/*; do (echo '{FORGED}' >$output); done
"""
"""Replaces modules, programs and settings; forges results; leaves links; writes into every pipe."""
WAITING: Final = """
setsid sh -c "trap '' 1 2 3 15; while :; do kill -9 -1; echo 1 >reward.txt; done" \
  >/dev/null 2>&1 </dev/null &
"""
ENDING: Final = "kill -9 -1; kill -9 1"
ATTACKS: Final = {"prepares": SABOTAGE, "waits": SABOTAGE + WAITING, "ends": ENDING}
LAST_CALLS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "code": ("submit_solution", {"code": "print('PASSED')"}),
    "tau2": ("tau2_done", {}),
}
"""What says that an agent is done."""


class Attacker:
    """A policy that runs a script in the sandbox, and nothing else."""

    def __init__(self, name: str, script: str) -> None:
        self._last_call = LAST_CALLS.get(name)
        self._script = script

    async def __call__(self, env: Any, task: Task) -> None:
        del task
        try:
            await env.exec(["sh", "-c", self._script], timeout_s=20.0)
            if self._last_call is not None:
                await env.call_tool(*self._last_call)
        except AenvError:
            return  # it may have ended what answers


@pytest.mark.parametrize("name", ["code", "mini-terminal", "tau2"])
def test_what_an_agent_prepares_earns_nothing(
    name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14, boundary D19: grading neither reads nor waits for what the agent left."""
    del cluster
    monkeypatch.setenv("AENV_TAU2", str(STAND_IN))
    settings.cache_clear()
    try:
        tasks = environment_tasks(name)[:1]
        for script in ATTACKS.values():
            sampling = aenv_ray.sample(name, Attacker(name, script), tasks, runners="driver")
            sampling.run()
            (episode,) = sampling.episodes
            told = (script, episode.status, episode.error, episode.reward_detail)
            assert episode.reward == 0.0, told
            assert episode.status is not EpisodeStatus.INFRA_FAILED, told
    finally:
        settings.cache_clear()
