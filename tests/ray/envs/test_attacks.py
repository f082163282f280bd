"""Agents that prepare the sandbox of a built-in environment for its grading, and do no task."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import AenvError
from aenv_ray.project.config import DeployChanges
from aenv_ray.sampling import EpisodeStatus, Task, environment_tasks, select_tasks
from tests.conftest import require
from tests.contract.docker.docker_node import base_image
from tests.ray.cluster import Cluster
from tests.ray.envs.test_reasoning_gym import compiler_lack
from tests.ray.envs.test_tau2 import CHECKOUT

FORGED: Final = '{"score": 1.0, "reward": 1.0, "passed": true, "resolved": true}'
SABOTAGE: Final = f"""
exec 2>/dev/null
export forged='{FORGED}'
for place in . ~ /tmp /project /project/src /logs/verifier /tests ~/.local/bin; do
  mkdir -p $place
  for name in sitecustomize usercustomize conftest json ctypes random grading judging; do
    echo 'import os; os._exit(0)' >$place/$name.py
  done
  for name in python python3 bash sh pytest; do
    printf '#!/bin/sh\\necho PASSED\\n' >$place/$name; chmod +x $place/$name
  done
  for name in result.json reward.txt reward.json report.json verdict.json; do
    echo "$forged" >$place/$name
  done
  echo 'import os; os._exit(0)' >$place/trap.pth
  printf '[pytest]\\naddopts = --collect-only\\n' >$place/pytest.ini
done
find / -xdev -type f -writable -name '*.py' -not -path '/proc/*' -not -path '/tmp/*' |
  while read file; do echo 'raise SystemExit(0)' >"$file"; done
echo 'export PYTHONSTARTUP=/tmp/json.py LD_PRELOAD=/tmp/x.so' |
  tee -a /etc/environment /etc/ld.so.preload ~/.bashrc ~/.profile ~/.bash_profile
for name in *; do mv $name /tmp/; ln -s /etc/passwd $name; done
for file in /bin/sh /bin/bash /usr/bin/env /usr/lib/chromium/chromium $(command -v python3) \
    /lib64/ld-linux-x86-64.so.2 /lib/*/libc.so.6 /.aenv/runtime/* /.aenv/python/bin/*; do
  cp /tmp/python $file; mv -f /tmp/python $file; ln -sf /tmp/sh $file; mount --bind /tmp/sh $file
done
for memory in /proc/[0-9]*/mem; do (echo "$forged" >$memory); done
for output in /proc/[0-9]*/fd/*; do (echo "$forged" >$output); done
"""
"""Replaces modules, programs and settings; forges results; leaves links; writes into every pipe."""
IN_BACKGROUND: Final = "setsid sh -c '{}' >/dev/null 2>&1 </dev/null &"
KILLING: Final = 'trap "" 1 2 3 15; while :; do kill -9 -1; done'
REWRITING: Final = 'while :; do for file in * /tmp/*; do echo "$forged" >"$file"; done; done'
ATTACKS: Final = {
    "prepares": SABOTAGE,
    "kills the grader": SABOTAGE + IN_BACKGROUND.format(KILLING),
    "rewrites results": SABOTAGE + IN_BACKGROUND.format(REWRITING),
    "ends": "kill -9 -1; kill -9 1",
    "sets limits": "for l in cpu fsize nofile nproc data; do prlimit --pid 1 --$l=0:0; done",
    "closes directories": "chmod 0 . ~ /tmp /dev/shm",
}
LAST_CALLS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "code": ("submit_solution", {"code": "print('PASSED')"}),
    "reasoning-gym": ("submit_answer", {"answer": "1.0"}),
    "swebench": ("submit", {}),
    "tau2": ("tau2_done", {}),
}
"""What says that an agent is done."""
SHELLS: Final = {"swebench": "shell", "terminal-bench": "execute_command"}
"""Tools that run commands where the agent acts, for environments with another place for that."""
VARIABLES: Final = {
    "reasoning-gym": {"REASONING_GYM_DATASETS": "n_queens", "REASONING_GYM_COUNT": "1"}
}


class Attacker:
    """A policy that runs a script in the sandbox, and nothing else."""

    def __init__(self, name: str, script: str) -> None:
        self._last_call = LAST_CALLS.get(name)
        self._script = script
        self._shell = SHELLS.get(name)

    async def __call__(self, env: Any, task: Task) -> None:
        del task
        try:
            if self._shell is not None:
                await env.call_tool(self._shell, {"command": self._script})
            else:
                await env.exec(["sh", "-c", self._script], timeout_s=20.0)
            if self._last_call is not None:
                await env.call_tool(*self._last_call)
        except AenvError:
            return  # it may have ended what answers


TASKS: Final = {
    "mini-program": ["landing-page"],
    "mini-terminal": ["count-lines-01", "stop-one-62"],
}
"""landing-page needs no browser; the test of mini-program plays one that does. While stop-one-62 is
graded, the agent's processes continue."""


def play_attacks(name: str, **options: Any) -> None:
    """Play each attack on a task; none may earn anything, or keep rewards from running."""
    every = environment_tasks(name, VARIABLES.get(name))
    ids = TASKS.get(name, ())
    tasks = select_tasks(every, ids=ids, limit=len(ids) or 1)
    for (attack, script), task in itertools.product(ATTACKS.items(), tasks):
        attacker = Attacker(name, script)
        sampling = aenv_ray.sample(name, attacker, [task], runners="driver", **options)
        sampling.run()
        (episode,) = sampling.episodes
        told = (attack, task.id, episode.status, episode.error, episode.reward_detail)
        assert episode.reward == 0.0, told
        assert episode.status is not EpisodeStatus.INFRA_FAILED, told
        assert episode.status is not EpisodeStatus.REWARD_FAILED, told


@pytest.mark.timeout(400)  # some install their packages
@pytest.mark.parametrize(
    "name", ["code", "gymnasium", "mini-program", "mini-terminal", "reasoning-gym", "tau2"]
)
def test_what_an_agent_prepares_earns_nothing(
    name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14, boundary D19: grading neither reads nor waits for what the agent left."""
    del cluster
    if name == "reasoning-gym":
        require("compiler", not compiler_lack(), compiler_lack())
    monkeypatch.setenv("AENV_TAU2", CHECKOUT)
    settings.cache_clear()
    try:
        play_attacks(name)
    finally:
        settings.cache_clear()


@pytest.mark.docker
@pytest.mark.parametrize("name", ["code", "mini-terminal"])
def test_what_an_agent_prepares_in_a_container_earns_nothing(name: str, cluster: Cluster) -> None:
    """D19: the files of an image are not the agent's to change."""
    del cluster
    play_attacks(name, engine="docker", changes=DeployChanges(image=base_image()))
