"""Tests of the engine contract: resets, and the tasks that an environment brings."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import CallOutcomeUnknown, FunctionFailed, ResetFailed, ToolInputInvalid
from aenv_ray.models import ResetResult
from aenv_ray.testing.contract_bench import (
    Bench,
    call,
    evaluate,
    is_gone,
    request,
    sleeper,
    unique,
    value_of,
)

CLEAN = ResetResult(clean=True)


async def reset(sandbox: Sandbox, task: Any = None, seed: int | None = None) -> ResetResult:
    """Reset the sandbox."""
    arguments = {"task": task, "seed": seed}
    result: ResetResult = await request(sandbox, "aenv/reset", {"arguments": arguments})
    return result


class ResetTests:
    """A reset leaves nothing of an episode to the next one, or says that it could not."""

    async def test_a_reset_removes_what_the_agent_left(self, bench: Bench) -> None:
        sandbox = await bench.start()
        assert await reset(sandbox, {"id": "first"}, 7) == CLEAN
        seen = {"task": {"id": "first"}, "seed": 7, "current_seed": 7}
        assert await value_of(sandbox, "episode") == seen
        await value_of(sandbox, "put", item="apple")
        await value_of(sandbox, "run", command=["sh", "-c", _LEAVE_FILES])
        assert await reset(sandbox) == CLEAN
        listing = await request(sandbox, "aenv/list_files", {"arguments": {"path": "."}})
        assert [entry.name for entry in listing] == []
        assert await value_of(sandbox, "put", item="pear") == ["pear"]
        assert (await value_of(sandbox, "episode"))["current_seed"] is None

    async def test_a_reset_ends_what_the_agent_started(self, bench: Bench) -> None:
        sandbox = await bench.start()
        command = sleeper()
        await value_of(sandbox, "spawn", command=command, daemon=True)
        assert await reset(sandbox) == CLEAN
        assert await is_gone(sandbox, command[1])

    async def test_an_instance_that_is_not_clean_answers_no_call(self, bench: Bench) -> None:
        """Invariant 2: nothing of it can become a reward."""
        sandbox = await bench.start()
        await value_of(sandbox, "put", item="apple")
        result = await reset(sandbox, "forget")
        assert not result.clean
        assert "basket differs" in result.reasons[0]
        for method, name in (("tools/call", "echo"), ("aenv/reward", "score")):
            with pytest.raises(ResetFailed, match="basket differs"):
                await request(sandbox, method, {"name": name, "arguments": {}})
        with pytest.raises(FunctionFailed, match="the reset broke"):
            await reset(sandbox, "raise")
        with pytest.raises(ResetFailed, match="its reset failed"):
            await call(sandbox, "echo", {"text": "x"})
        assert await reset(sandbox) == CLEAN
        assert await value_of(sandbox, "echo", text="again") == "again"

    async def test_a_call_id_of_an_earlier_episode_neither_runs_nor_answers(
        self, bench: Bench
    ) -> None:
        """Invariant 1."""
        sandbox = await bench.start()
        key, same = unique("k"), unique("same")
        assert (await call(sandbox, "count", {"key": key}, call_id=same)).data == 1
        arguments: dict[str, Any] = {"arguments": {}}
        repeated = unique("reset")
        for _ in range(2):
            assert await request(sandbox, "aenv/reset", arguments, call_id=repeated) == CLEAN
        with pytest.raises(CallOutcomeUnknown):
            await call(sandbox, "count", {"key": key}, call_id=same)
        assert await value_of(sandbox, "count", key=key) == 2

    async def test_a_change_that_cannot_be_undone_is_found(self, bench: Bench) -> None:
        sandbox = await bench.start()
        await value_of(sandbox, "listen")
        await evaluate(sandbox, "import builtins; builtins.held = open('held', 'w')")
        found = await reset(sandbox)
        assert not found.clean
        assert "held" in found.reasons[0]
        assert "socket" in found.reasons[0]

    async def test_tasks_are_listed_in_pages(self, bench: Bench) -> None:
        sandbox = await bench.start()
        names: list[str] = []
        offset: int | None = 0
        while offset is not None:
            arguments = {"offset": offset, "limit": 2}
            page = await request(sandbox, "aenv/tasks", {"arguments": arguments})
            assert len(page.tasks) <= 2
            names += [task["id"] for task in page.tasks]
            offset = page.next_offset
        assert names == [f"task-{number}" for number in range(5)]
        with pytest.raises(ToolInputInvalid, match="limit 0"):
            await request(sandbox, "aenv/tasks", {"arguments": {"limit": 0}})


_LEAVE_FILES = "mkdir -p closed/in && echo x > closed/in/file && ln -s /etc link && chmod 0 closed"
