"""Tests of the engine contract: logs, their last lines, and following them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import SandboxLost
from aenv_ray.ids import InstanceId
from aenv_ray.testing.contract_bench import Bench, evaluate, eventually


async def log_of(bench: Bench, sandbox: Sandbox, tail_lines: int | None = None) -> bytes:
    """Return the present content of a sandbox's log."""
    pieces = bench.engine.logs(sandbox.instance_id, tail_lines=tail_lines)
    return b"".join([piece async for piece in pieces])


async def say(sandbox: Sandbox, *lines: str, stream: str = "stdout") -> None:
    """Let a tool print lines."""
    what = f"*{list(lines)!r}, sep='\\n', file=sys.{stream}, flush=True"
    await evaluate(sandbox, f"import sys; print({what}); result = 1")


class Listener:
    """Follows a log in the background."""

    def __init__(self, bench: Bench, sandbox: Sandbox, tail_lines: int | None = None) -> None:
        self.heard = b""
        self._pieces = bench.engine.logs(sandbox.instance_id, tail_lines=tail_lines, follow=True)
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._pieces):
            async for piece in self._pieces:
                self.heard += piece

    async def hears(self, text: bytes) -> None:
        """Wait until the log contains `text`."""
        await eventually(lambda: text in self.heard, f"{text!r} is heard")


class SharedLogTests:
    """Logs of sandboxes that keep running."""

    async def test_a_log_has_what_was_printed(
        self, shared_bench: Bench, shared: Sandbox, second: Sandbox
    ) -> None:
        await say(shared, "by a tool")
        await say(shared, "as an error", stream="stderr")
        await evaluate(
            shared, "import subprocess; result = subprocess.call(['echo', 'by a program'])"
        )
        await say(second, "by another")

        async def all_is_there() -> bool:
            log = await log_of(shared_bench, shared)
            return all(text in log for text in (b"by a tool", b"as an error", b"by a program"))

        await eventually(all_is_there, "everything is in the log")
        assert b"by another" not in await log_of(shared_bench, shared)

    async def test_a_log_can_begin_with_its_last_lines(
        self, shared_bench: Bench, shared: Sandbox
    ) -> None:
        await say(shared, "one", "two", "three")

        async def is_there() -> bool:
            return (await log_of(shared_bench, shared, 1)) == b"three\n"

        await eventually(is_there, "the last line is there")
        assert await log_of(shared_bench, shared, 2) == b"two\nthree\n"
        assert await log_of(shared_bench, shared, 0) == b""
        assert (await log_of(shared_bench, shared, 1000)).endswith(b"one\ntwo\nthree\n")

    async def test_who_stops_following_a_log_leaves_the_sandbox_running(
        self, shared_bench: Bench, shared: Sandbox
    ) -> None:
        listener = Listener(shared_bench, shared)
        listener.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener.task
        assert await evaluate(shared, "result = 7") == 7


class LogTests:
    """Logs of sandboxes that end."""

    async def test_a_log_that_is_followed_tells_what_comes_until_the_end(
        self, bench: Bench
    ) -> None:
        """Invariant 12: including the last output of a sandbox that ends by itself."""
        sandbox = await bench.start()
        await say(sandbox, "before", "the last")
        from_all = Listener(bench, sandbox)
        await from_all.hears(b"before\nthe last\n")
        from_last = Listener(bench, sandbox, 1)
        await from_last.hears(b"the last\n")
        await say(sandbox, "later")
        for listener in (from_all, from_last):
            await listener.hears(b"later\n")
        with pytest.raises(SandboxLost):
            await evaluate(sandbox, "import os; os.write(1, b'last words'); os._exit(3)")
        for listener in (from_all, from_last):
            await asyncio.wait_for(listener.task, 30.0)
            assert listener.heard.endswith(b"last words")
        assert from_last.heard == b"the last\nlater\nlast words"

    async def test_a_log_that_is_followed_ends_with_a_release(self, bench: Bench) -> None:
        sandbox = await bench.start()
        listener = Listener(bench, sandbox)
        await bench.engine.stop([sandbox.instance_id])
        await asyncio.wait_for(listener.task, 30.0)

    async def test_what_does_not_run_has_no_log(self, bench: Bench) -> None:
        sandbox = await bench.start()
        await bench.engine.stop([sandbox.instance_id])
        for instance_id in (sandbox.instance_id, InstanceId("never-00000000")):
            with pytest.raises(SandboxLost):
                [piece async for piece in bench.engine.logs(instance_id)]
