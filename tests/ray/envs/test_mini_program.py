"""mini-program: its reference earns 1.0, doing nothing 0.0, and an attacker nothing either."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.project import project
from aenv_ray.sampling import EpisodeStatus, Task, load_tasks
from tests.conftest import require
from tests.ray.cluster import Cluster

NAME: Final = "mini-program"
TASKS: Final = {task.id: task for task in load_tasks(project.builtins()[NAME] / "tasks.jsonl")}


def page(body: str) -> str:
    """Return a valid page."""
    return f'<!doctype html><html lang="en"><head><title>x</title></head><body>{body}</body></html>'


ELEMENTS: Final = (
    '<output id="count">0</output><button id="increment">+</button>'
    '<button id="decrement" disabled>-</button><button id="reset">0</button>'
)
FORGED: Final = page(
    f"""{ELEMENTS}<form><input name="innerText" value="{{}}"></form><script>
for (const type of [HTMLElement, Element, Node])
  for (const name of ['innerText', 'textContent', 'outerText'])
    Object.defineProperty(type.prototype, name, {{get: () => 'passed', configurable: true}});
Document.prototype.querySelectorAll = () => ({{length: 1e9, includes: () => true}});
Array.prototype.filter = Array.prototype.map = () => ['passed'];
JSON.stringify = () => '{{"score": 1, "passed": true}}';
document.title = 'passed';
console.log(JSON.stringify({{score: 1.0, passed: true, checks: []}}));
fetch('/report', {{method: 'POST', body: JSON.stringify()}}).catch(() => 0);
</script>"""
)
HANGING: Final = page(f"{ELEMENTS}<script>onclick = () => {{ for (;;); }}</script>")
SABOTAGE: Final = """
mkdir -p real bin .config/chromium
echo '{"score": 1.0, "passed": true}' | tee report.json app.json
ln -s /etc/passwd app/passwd; ln -s /project app/project; mv app real; ln -s real/app app
printf '#!/bin/sh\\nexit 0\\n' > bin/python; chmod +x bin/python; cp bin/python bin/chromium
echo 'import os; os._exit(0)' > sitecustomize.py; cp sitecustomize.py bin/webapp.py
setsid sh -c 'while :; do pkill -9 chromium; rm -rf /tmp/mini-program-*; done' >/dev/null 2>&1 &
cat /project/tasks.jsonl /project/tasks/*/task.json 2>/dev/null | wc -c
"""


async def act(env: Any, task: Task) -> str:
    """Play the part that the task's id names."""
    seen = ""
    if task.id == "forges":
        await env.call_tool("write_file", {"path": "index.html", "content": FORGED})
    elif task.id == "hangs":
        await env.call_tool("write_file", {"path": "index.html", "content": HANGING})
    else:
        for call in task.reference:
            await env.call_tool(call.tool, call.arguments)
    if task.id == "sabotages":
        done = await env.exec(["sh", "-c", SABOTAGE])
        seen = done.text()
    return seen


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_references_pass_and_attackers_do_not(cluster: Cluster) -> None:
    """Invariant 14: nothing that an agent writes or runs decides the verdict."""
    del cluster
    browser = shutil.which("chromium")
    require("browser", browser is not None, "no Chromium on PATH")
    counter = TASKS["counter"]
    played = [
        counter.model_copy(update={"id": name})
        for name in ("solves", "forges", "hangs", "sabotages")
    ]
    sampling = aenv_ray.sample(NAME, act, played, concurrency=2)
    sampling.run()
    found = {one.task_id: one for one in sampling.episodes}
    told = {name: (one.status.value, one.reward, one.reward_detail) for name, one in found.items()}
    assert {name: one.reward for name, one in found.items()} == {
        "solves": 1.0,
        "forges": 0.0,
        "hangs": 0.0,
        "sabotages": 0.0,
    }, told
    assert all(one.status is EpisodeStatus.COMPLETED for one in found.values()), told
    assert found["sabotages"].output.split()[-1] == "0", "the sandbox contains the tasks"


def test_doing_nothing_earns_zero(cluster: Cluster) -> None:
    del cluster
    sampling = aenv_ray.sample(NAME, "null", [TASKS["landing-page"], TASKS["repair-stepper"]])
    summary = sampling.run()
    assert (summary.rollouts, summary.reward_mean, summary.reward_failed) == (2, 0.0, 0)


def test_without_a_browser_a_task_that_needs_one_is_void(cluster: Cluster) -> None:
    """A missing browser is an error, and not an easier or a failed task."""
    del cluster
    sampling = aenv_ray.sample(
        NAME, "reference", [TASKS["landing-page"], TASKS["counter"]],
        environment_variables={"MINI_PROGRAM_BROWSER": "/nonexistent"},
    )  # fmt: skip
    sampling.run()
    found = {one.task_id: one for one in sampling.episodes}
    assert found["landing-page"].reward == 1.0
    assert found["counter"].reward is None
    assert "install the package chromium" in str(found["counter"].error)


def test_malformed_checks_are_named(cluster: Cluster, tmp_path: Path) -> None:
    del cluster
    tasks = tmp_path / "tasks.jsonl"
    reward = {"name": "app_works", "arguments": {"structure": [{"name": "x", "selektor": "p"}]}}
    tasks.write_text(json.dumps({"id": "t", "reward": reward}))
    sampling = aenv_ray.sample(NAME, "null", tasks)
    sampling.run()
    (episode,) = sampling.episodes
    assert episode.status is EpisodeStatus.REWARD_FAILED
    assert "structure.0.selektor is malformed" in str(episode.error)
