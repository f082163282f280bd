"""The environment ``code``: its tasks, and agents and solutions that attack the grading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.sampling import EpisodeStatus, Task, environment_tasks
from tests.ray.cluster import Cluster

PROBLEM: Final[dict[str, Any]] = {
    "task_id": "Own/1",
    "prompt": 'def twice(x: int) -> int:\n    """Return twice x."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(21) == 42\n    assert candidate(0) == 0\n",
}

_READS: Final = """
import os
def parent(pid):
    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
def twice(x):
    starter = os.getppid()
    for pid in (starter, parent(starter), 1):
        for name in ('mem', 'environ', 'maps', 'fd/0'):
            try:
                os.close(os.open(f'/proc/{pid}/{name}', os.O_RDONLY))
            except PermissionError:
                continue
            return f'{pid}: {name}'
    return 'closed'
"""
SOLUTIONS: Final = {
    "reads the judge": _READS,
    "exits": "import os\nos._exit(0)",
    "kills all": "import os\nos.kill(-1, 9)",
    "stops all": "import os\nos.kill(-1, 19)",
    "equals all": "class E:\n __eq__ = lambda s, o: True\ntwice = lambda x: E()",
    "patches": "import builtins, sys\nbuiltins.AssertionError = str\ntwice = lambda x: 1",
    "fills memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "fills the disk": "for n in range(10**4): open(f'/tmp/{n}', 'w').write('x' * 10**6)",
    "leaves processes": "import os\nfor n in range(9):\n if not os.fork():\n  while 1: os.setsid",
}
TOOLS: Final = {
    "replaces Python and modules": """
import os, sys
for name in ('json', 'marshal', 'struct', 'sitecustomize', 'usercustomize', 'judge', 'ctypes'):
    for place in ('.', '/tmp', os.path.expanduser('~')):
        open(f'{place}/{name}.py', 'w').write('import os; os._exit(0)')
for path in (sys.executable, os.__file__, '/project/src/judging.py', '/project/tasks.jsonl'):
    try:
        os.unlink(path)
    except OSError:
        continue
""",
    "waits for grading": """
import os, signal
if not os.fork():
    os.setsid()
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except OSError: pass
    while True:
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try: command = open(f'/proc/{pid}/cmdline').read()
            except OSError: continue
            if 'marshal' in command: os.kill(int(pid), signal.SIGKILL)
""",
    "fills the disk": "while True: open('/tmp/full', 'ab').write(bytes(1 << 20))",
}


def test_reference_earns_all_and_null_nothing(cluster: Cluster) -> None:
    del cluster
    tasks = [*environment_tasks("code")[:4], Task.model_validate(_converted())]
    summary = aenv_ray.sample("code", "reference", tasks).run()
    assert (summary.reward_mean, summary.succeeded) == (1.0, 5)
    assert aenv_ray.sample("code", "null", tasks).run().reward_mean == 0.0
    wrong = [one.model_copy(update={"reference": one.wrong}) for one in tasks[:4]]
    assert aenv_ray.sample("code", "reference", wrong).run().reward_mean == 0.0


def _converted() -> dict[str, Any]:
    from aenv_ray.sampling import load_tasks

    return load_tasks([PROBLEM])[0].model_dump()


def _played(acts: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Play the problem once for each act, and return the episodes by its name."""
    tasks = [Task.model_validate(_converted() | {"id": name}) for name in acts]

    async def policy(env: Any, task: Task) -> None:
        await acts[task.id](env)

    sampling = aenv_ray.sample("code", policy, tasks, concurrency=4)
    sampling.run()
    return {episode.task_id: episode for episode in sampling.episodes}


def test_hostile_solutions_earn_nothing_and_void_nothing(cluster: Cluster) -> None:
    """Invariant 14: the solution under test can neither forge nor avoid its verdict."""
    del cluster

    def submitting(code: str) -> Callable[[Any], Any]:
        async def act(env: Any) -> None:
            await env.call_tool("submit_solution", {"code": code})

        return act

    episodes = _played({name: submitting(code) for name, code in SOLUTIONS.items()})
    assert {name: one.reward for name, one in episodes.items()} == dict.fromkeys(SOLUTIONS, 0.0)
    assert all(one.status is not EpisodeStatus.INFRA_FAILED for one in episodes.values())
    assert episodes["reads the judge"].reward_detail["tests"][0]["got"] == "'closed'"


def test_what_an_agent_prepares_does_not_reach_the_judge(cluster: Cluster) -> None:
    """Boundary D19: whatever the agent left, a right solution earns 1 and a wrong one 0."""
    del cluster

    def after(preparation: str, code: str) -> Callable[[Any], Any]:
        async def act(env: Any) -> None:
            with contextlib.suppress(AenvError):
                await env.call_tool("run_code", {"code": preparation, "timeout": 2})
            await env.call_tool("submit_solution", {"code": code})

        return act

    right, wrong = "    return 2 * x", "    return 3 * x"
    acts = {
        f"{name}: {code}": after(one, code)
        for name, one in TOOLS.items()
        for code in (right, wrong)
    }
    found = {name: one.reward for name, one in _played(acts).items()}
    assert found == {name: float(name.endswith(right)) for name in acts}


@pytest.mark.parametrize("tasks", ["no-such-file.jsonl", [PROBLEM | {"test": "def check(:"}]])
def test_bad_tasks_are_named_before_anything_starts(cluster: Cluster, tasks: Any) -> None:
    del cluster
    with pytest.raises(ConfigError, match=r"no-such-file|not Python"):
        aenv_ray.sample("code", "null", tasks)
