"""The engine contract on starting: what comes up, and what is said when something does not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import pytest

from aenv_ray.engines.base import RunningSandbox, Sandbox
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import (
    Bench,
    eventually,
    value_of,
)

_TOOL: Final = "from aenv_ray.runtime import register_tool\n\n@register_tool\ndef one(): return 1\n"
_BROKEN: Final[Mapping[str, tuple[dict[str, str], list[str]]]] = {
    "import error": (
        {"tools.py": _TOOL, "zebra.py": "import no_such_module_anywhere\n"},
        ["zebra.py", "ModuleNotFoundError", "no_such_module_anywhere"],
    ),
    "syntax error": (
        {"tools.py": "def broken(:\n    pass\n"},
        ["tools.py", "SyntaxError", "def broken(:"],
    ),
    "exception with its traceback": (
        {"tools.py": "def inner():\n    return {}['key']\n\ninner()\n"},
        ["tools.py", "KeyError", "in inner"],
    ),
    "a long message that is not ASCII": (
        {"tools.py": "raise ValueError('\\U0001f600' * 100_000 + 'the end')\n"},
        ["the end"],
    ),
    "exit": ({"tools.py": "import sys\nsys.exit(3)\n"}, ["tools.py", "SystemExit"]),
    "duplicate tool": (
        {"a.py": _TOOL, "b.py": _TOOL.replace("return 1", "return 2")},
        ["one", "already registered"],
    ),
    "nothing registered": ({"tools.py": "x = 1\n"}, ["registers no tool"]),
    "no code": ({"readme.txt": "nothing"}, ["no Python files"]),
    "impossible parameter": (
        {
            "tools.py": "import socket\n"
            + _TOOL
            + "\n@register_tool\ndef two(s: socket.socket): return 2\n"
        },
        ["two"],
    ),
}


class StartTests:
    """Starting sandboxes."""

    async def test_a_started_sandbox_answers_calls(self, bench: Bench) -> None:
        sandbox = await bench.start()
        assert await value_of(sandbox, "echo", text="hello", times=2) == "hellohello"
        assert sandbox.end_cause is None
        assert sandbox.start_mode
        assert sandbox.isolation.kind
        assert await bench.running() == {sandbox.instance_id}

    async def test_sandboxes_come_in_the_order_they_were_asked_for(self, bench: Bench) -> None:
        specs = [bench.spec() for _ in range(5)]
        started = await bench.engine.start_many(specs)
        assert [s.instance_id for s in started if isinstance(s, Sandbox)] == [
            spec.instance_id for spec in specs
        ]

    async def test_nothing_to_start_is_nothing_started(self, bench: Bench) -> None:
        assert await bench.engine.start_many([]) == []

    async def test_one_that_fails_stops_no_other_and_leaves_nothing(self, bench: Bench) -> None:
        bad = bench.spec(bench.project({"tools.py": "1 / 0\n"}))
        first, failed, last = await bench.engine.start_many([bench.spec(), bad, bench.spec()])
        assert isinstance(failed, SandboxStartFailed)
        for sandbox in (first, last):
            assert isinstance(sandbox, Sandbox)
            assert await value_of(sandbox, "echo", text="up") == "up"
        assert bad.instance_id not in await bench.running()

    @pytest.mark.parametrize("what", list(_BROKEN))
    async def test_code_that_does_not_load_is_a_failed_start_that_says_why(
        self, bench: Bench, what: str
    ) -> None:
        files, words = _BROKEN[what]
        with pytest.raises(SandboxStartFailed) as raised:
            await bench.start(bench.project(files))
        for word in words:
            assert word in raised.value.message
        assert await bench.running() == set()

    async def test_a_project_may_import_its_own_modules_in_every_way(self, bench: Bench) -> None:
        files = {
            "tools.py": "from aenv import register_tool\nimport helper\nfrom pack import inner\n"
            "@register_tool\ndef loads() -> list:\n    import pack.other\n"
            "    return [helper.LOADS, inner.VALUE, pack.other.WORD]\n",
            "helper.py": "from pathlib import Path\nLOADS = 1\n",
            "json.py": "NOT_THE_STANDARD_LIBRARY = True\n",
            "my-script.py": "from aenv import register_tool\n"
            "@register_tool(name='dashed')\ndef dashed() -> str:\n"
            "    import json\n    return json.dumps([1])\n",
            "pack/__init__.py": "",
            "pack/inner.py": "from .other import WORD\nVALUE = WORD.upper()\n",
            "pack/other.py": "WORD = 'word'\n",
        }
        sandbox = await bench.start(bench.project(files))
        assert await value_of(sandbox, "loads") == [1, "WORD", "word"]
        assert await value_of(sandbox, "dashed") == "[1]"

    async def test_a_cancelled_start_leaves_nothing(self, bench: Bench) -> None:
        """Invariant 3."""

        async def begin(count: int) -> asyncio.Task[object]:
            specs = [bench.spec() for _ in range(count)]
            task: asyncio.Task[object] = asyncio.create_task(bench.engine.start_many(specs))
            await eventually(bench.running, "one of them runs")
            return task

        count = 20
        task = await begin(count)
        while not task.cancel():  # all were made before anybody looked
            await bench.engine.stop([one.instance_id for one in await bench.engine.running()])
            task = await begin(count := 2 * count)
        with pytest.raises(asyncio.CancelledError):
            await task

        async def nothing_runs() -> bool:
            return not await bench.running()

        await eventually(nothing_runs, "nothing runs")

    async def test_the_listing_names_host_and_deadline(self, bench: Bench, host_id: HostId) -> None:
        spec = bench.spec(ttl_s=77.0)
        await bench.engine.start(spec)
        (listed,) = await bench.engine.running()
        assert listed == RunningSandbox(spec.instance_id, host_id, spec.deadline)
