"""Tests of the engine contract: a sandbox's variables, and its isolation from others."""

from __future__ import annotations

import asyncio
import shlex
from typing import ClassVar

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.testing.contract_bench import (
    Bench,
    call,
    evaluate,
    eventually,
    execute,
    request,
    runs,
    sleeper,
    unique,
    value_of,
)

_FILL_BYTES = 256 * 1024 * 1024
"""More than the contract's environment is allowed to store."""

_GRADED = """
import sys
from pathlib import Path
from aenv_ray.runtime import register_reward, register_tool

GOLD = Path(__file__).with_name("gold.txt")


@register_tool
def places() -> list[str]:
    return [str(GOLD.parent), *filter(None, sys.path)]


@register_reward
def score(answer: str) -> float:
    import grading
    return grading.score(answer, GOLD.read_text())
"""
_FORGERY = """
cd {project} || exit
mount -o remount,rw /project
chmod u+w . gold.txt grading.py
echo forged > gold.txt
echo 'score = lambda answer, gold: 1.0' > grading.py
rm -f gold.txt grading.py
mv ../src ../away
"""
_LIST_WRITABLE = """
for place in {places}; do
    while [ ! -e "${{place:=/}}" ]; do place="${{place%/*}}"; done
    chmod u+w "$place"
    [ ! -w "$place" ] || echo "$place"
done
"""
"""Only asks: a sandbox that fails this test could otherwise change the machine that tests it."""


class IsolationTests:
    """What a sandbox is given, and tools that misbehave."""

    many: ClassVar[int] = 30
    """How many sandboxes are started at once."""

    # --- what it is given ---------------------------------------------------------------------

    async def test_variables_arguments_and_labels_reach_it(self, bench: Bench) -> None:
        variables = {"CONTRACT_BOTH": "caller", "CONTRACT_CALLER": "ü = 'x'\n"}
        sandbox = await bench.start(
            environment_variables=variables,
            arguments=("--task", "a b"),
            labels={"run": "seven"},
            datasource="s3://data",
        )
        facts = await value_of(sandbox, "facts")
        environ = facts["environ"]
        assert facts["arguments"] == ["--task", "a b"]
        assert environ["CONTRACT_CONFIG"] == "from the config"
        assert {name: environ[name] for name in variables} == variables
        assert environ["AENV_INSTANCE_ID"] == sandbox.instance_id
        assert environ["AENV_LABELS"] == "run=seven"
        assert environ["AENV_DATASOURCE"] == "s3://data"
        assert (environ["envNAME"], environ["envversion"]) == ("contract", "1.2.3")
        assert environ["HOME"] == facts["cwd"]

    async def test_commands_see_the_same_variables(self, bench: Bench) -> None:
        sandbox = await bench.start(environment_variables={"CONTRACT_CALLER": "here"})
        result = await execute(sandbox, "echo $CONTRACT_CALLER $envNAME")
        assert result.text() == "here contract\n"

    async def test_variables_of_the_host_do_not_reach_it(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Invariants 7 and 10."""
        monkeypatch.setenv("RAY_CONTRACT_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setenv("CONTRACT_SECRET", "hunter2")
        sandbox = await bench.start()
        environ = (await value_of(sandbox, "facts"))["environ"]
        assert not [name for name in environ if name.startswith("RAY_")]
        assert "CONTRACT_SECRET" not in environ
        shown = await execute(sandbox, "cat /proc/self/environ /proc/$PPID/environ")
        assert b"hunter2" not in shown.stdout

    async def test_variables_that_code_reads_when_imported_are_its_own(self, bench: Bench) -> None:
        source = (
            "import os\nfrom aenv_ray.runtime import register_tool\n"
            "SEEN = os.environ.get('CONTRACT_EARLY', 'nothing')\n"
            "@register_tool\ndef seen() -> str:\n    return SEEN\n"
        )
        project = bench.project({"tools.py": source})
        for word in ("one", "two"):
            variables = {"CONTRACT_EARLY": word}
            sandbox = await bench.start(project, environment_variables=variables)
            assert await value_of(sandbox, "seen") == word
        assert await value_of(await bench.start(project), "seen") == "nothing"

    async def test_no_command_changes_the_code_and_files_that_a_reward_uses(
        self, bench: Bench
    ) -> None:
        """Invariant 14: also those that the reward itself is the first to load."""
        grading = "def score(answer, gold):\n    return float(answer == gold)\n"
        files = {"tools.py": _GRADED, "grading.py": grading, "gold.txt": "right"}
        sandbox = await bench.start(bench.project(files))
        if sandbox.isolation.kind not in ("namespaces", "container", "pod"):
            pytest.skip("its commands may do whatever its user may")
        places = await value_of(sandbox, "places")
        listing = _LIST_WRITABLE.format(places=shlex.join(places))
        assert (await execute(sandbox, listing)).text() == ""
        forgery = _FORGERY.format(project=shlex.quote(places[0]))
        assert (await execute(sandbox, forgery)).stderr
        for answer, score in (("forged", 0.0), ("right", 1.0)):
            params = {"name": "score", "arguments": {"answer": answer}}
            assert await request(sandbox, "aenv/reward", params) == score

    # --- tools that misbehave -----------------------------------------------------------------

    async def test_a_tool_that_forks_and_returns_answers_once(self, bench: Bench) -> None:
        """Invariant 1."""
        sandbox = await bench.start()
        for _ in range(3):
            assert await value_of(sandbox, "fork_and_return") == "parent"
        assert await value_of(sandbox, "count", key="k") == 1
        assert await value_of(sandbox, "count", key="k") == 2

    async def test_a_tool_that_leaks_threads_harms_nobody(self, bench: Bench) -> None:
        sandbox = await bench.start()
        for _ in range(20):
            await value_of(sandbox, "leak_thread")
        assert await value_of(sandbox, "echo", text="fine") == "fine"

    async def test_a_full_directory_is_the_tools_own_error(self, bench: Bench) -> None:
        one, two = await bench.start(), await bench.start()
        result = await call(one, "fill", {"limit_bytes": _FILL_BYTES})
        assert result.is_error
        assert "No space left" in result.text()
        assert await value_of(one, "echo", text="alive") == "alive"
        await execute(two, "echo room > file")
        assert (await execute(two, ["cat", "file"])).text() == "room\n"

    async def test_many_sandboxes_answer_at_the_same_time(self, bench: Bench) -> None:
        started = await bench.engine.start_many([bench.spec() for _ in range(self.many)])
        async with asyncio.TaskGroup() as group:
            for index, sandbox in enumerate(started):
                assert not isinstance(sandbox, Exception)
                group.create_task(value_of(sandbox, "echo", text=str(index)))


class SharedIsolationTests:
    """Two sandboxes at the same time."""

    async def test_state_and_files_are_a_sandboxs_own(
        self, shared: Sandbox, second: Sandbox
    ) -> None:
        """Invariant 7."""
        key, note = unique("k"), unique("note")
        assert await value_of(shared, "count", key=key) == 1
        assert await value_of(second, "count", key=key) == 1
        await execute(shared, f"echo secret > {note}")
        assert (await execute(second, ["test", "-e", note])).exit_code == 1
        assert (await execute(shared, ["cat", note])).text() == "secret\n"

    async def test_temporary_files_are_a_sandboxs_own(
        self, shared: Sandbox, second: Sandbox
    ) -> None:
        """Invariant 7."""
        path = f"/tmp/{unique('contract')}"
        try:
            await execute(shared, f"echo secret > {path}")
            assert (await execute(second, ["cat", path])).exit_code != 0
        finally:
            await execute(shared, ["rm", "-f", path])

    async def test_processes_are_a_sandboxs_own(self, shared: Sandbox, second: Sandbox) -> None:
        """Invariant 7."""
        command = sleeper()
        pid = await value_of(shared, "spawn", command=command)

        try:
            await eventually(lambda: runs(shared, command[1]), "the program runs")
            assert await value_of(second, "running", argument=command[1]) == 0
        finally:
            await evaluate(shared, f"import os; os.kill({pid}, 9)")

    async def test_loopback_is_a_sandboxs_own(self, shared: Sandbox, second: Sandbox) -> None:
        """Invariant 7."""
        port = await value_of(shared, "listen")
        assert await value_of(shared, "connect", port=port) is True
        assert await value_of(second, "connect", port=port) is False

    async def test_a_tool_that_changes_directory_changes_only_its_own(
        self, shared: Sandbox, second: Sandbox
    ) -> None:
        own, others = [(await value_of(one, "facts"))["cwd"] for one in (shared, second)]
        # Slow, so that another thread listens by the time it ends.
        await evaluate(shared, "import os, time; os.chdir('/usr'); time.sleep(0.3)")
        assert (await value_of(shared, "facts"))["cwd"] == "/usr"
        assert (await value_of(second, "facts"))["cwd"] == others
        await evaluate(shared, f"import os; os.chdir({own!r})")
        assert (await value_of(shared, "facts"))["cwd"] == own
