"""The engine contract on life and death: deadlines, ends with a cause, hosts that come back."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import pytest

from aenv_ray.engines.base import EndCause, Engine, Sandbox
from aenv_ray.errors import CallOutcomeUnknown, InsideCause, SandboxDiedInside, SandboxLost
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.testing.contract_bench import (
    Bench,
    call,
    evaluate,
    eventually,
    execute,
    is_gone,
    runs,
    sleeper,
    value_of,
)

UNKNOWN = InstanceId("never-00000000")
_OPEN_ALL_FILES = """
import os, resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
sys.contract_files = []
try:
    while True:
        sys.contract_files.append(os.open("/dev/null", os.O_RDONLY))
except OSError as exc:
    result = exc.errno
"""
_IS_TURNED_AWAY = """
import sys, threading
waits_in = sys._current_frames()[threading.main_thread().ident].f_code.co_name
result = waits_in == "serve"  # for room; for connections it waits further in
"""
_CLOSE_ALL_FILES = """
import os, sys
result = [os.close(file) for file in sys.contract_files]
"""


class LifeTests:
    """How sandboxes end, and how they do not."""

    starts_in_s: ClassVar[float] = 4.0
    """Two that are started together are up within this, also on a busy machine."""
    signals_look_alike: ClassVar[bool] = False
    """Without a pid namespace, SIGKILL from inside cannot be told from one from outside."""

    if TYPE_CHECKING:

        async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None: ...

        def left_over(self) -> list[str]: ...

    # --- crashes (invariant 2) ----------------------------------------------------------------

    async def test_a_tool_that_ends_the_runtime_is_a_lost_sandbox(self, bench: Bench) -> None:
        """Invariants 2 and 14: never a result, never silence, and an outcome of the episode."""
        sandbox = await bench.start()
        other = asyncio.create_task(call(sandbox, "nap", {"seconds": 60.0}))
        with pytest.raises(SandboxDiedInside, match=r"code 3") as raised:
            await call(sandbox, "leave", {"code": 3})
        assert raised.value.died_of is InsideCause.EXIT
        assert raised.value.instance_id == sandbox.instance_id
        with pytest.raises(SandboxLost):
            await other
        with pytest.raises(SandboxLost):
            await call(sandbox, "echo", {"text": "anybody?"})
        assert sandbox.end_cause is not None
        assert await bench.running() == set()

    async def test_a_sandbox_that_sends_invalid_messages_does_not_run_on(
        self, bench: Bench
    ) -> None:
        """Invariants 3 and 14: nobody could reach it any more."""
        sandbox = await bench.start()
        if sandbox.isolation.kind == "thread":
            pytest.skip("its sockets are those of this process")
        source = (
            "import os, socket\n"
            "for fd in map(int, os.listdir('/proc/self/fd')):\n"
            "    try: socket.socket(fileno=os.dup(fd)).send(b'not a message\\n')\n"
            "    except OSError: pass\n"
        )
        with pytest.raises(SandboxDiedInside) as raised:
            await call(sandbox, "evaluate", {"source": source})
        assert raised.value.died_of is InsideCause.CONNECTION

        async def nothing_runs() -> bool:
            return not await bench.running()

        await eventually(nothing_runs, "it has ended")

    async def test_a_killed_sandbox_is_lost_with_a_cause(self, bench: Bench) -> None:
        """Invariant 2."""
        sandbox = await bench.start()
        told: list[EndCause] = []
        sandbox.on_end(told.append)
        under_way = asyncio.create_task(call(sandbox, "nap", {"seconds": 60.0}))
        await value_of(sandbox, "echo", text="up")
        await self.kill_sandbox(bench.engine, sandbox)
        with pytest.raises(SandboxLost, match="kill"):
            await under_way
        assert len(told) == 1
        assert "kill" in told[0].text
        assert told[0].inside is None or self.signals_look_alike
        sandbox.on_end(told.append)
        assert told == [sandbox.end_cause, sandbox.end_cause]

    # --- stop (invariant 4) -------------------------------------------------------------------

    async def test_stop_works_from_every_state_any_number_of_times(self, bench: Bench) -> None:
        """Invariant 4."""
        one, two = await bench.start(), await bench.start()
        await bench.engine.stop([one.instance_id])
        await bench.engine.stop([one.instance_id, UNKNOWN, two.instance_id])
        await bench.engine.stop([one.instance_id])
        await bench.engine.stop([])
        assert await bench.running() == set()
        for sandbox in (one, two):
            with pytest.raises(SandboxLost, match="released"):
                await call(sandbox, "echo", {"text": "x"})

    async def test_stop_during_calls_ends_them_as_lost(self, bench: Bench) -> None:
        """Invariants 2 and 4."""
        sandbox = await bench.start()
        calls = [
            asyncio.create_task(call(sandbox, tool, {"marker": tool}))
            for tool in ("until_stopped", "auntil_stopped")
        ]

        async def both_run() -> bool:
            # By the shell alone: not every kernel has all that `ls` asks of it.
            listed = await execute(sandbox, "echo *.began")
            return len(listed.stdout.split()) == 2

        await eventually(both_run, "both run")
        await bench.engine.stop([sandbox.instance_id])
        for task in calls:
            with pytest.raises(SandboxLost):
                await task

    async def test_calls_beside_a_slow_one_have_the_sandboxs_directory(self, bench: Bench) -> None:
        for sandbox in [await bench.start() for _ in range(2)]:
            slow = asyncio.create_task(call(sandbox, "until_stopped", {"marker": "slow"}))

            async def began(sandbox: Sandbox = sandbox) -> bool:
                return (await execute(sandbox, "echo *.began")).stdout.split() == [b"slow.began"]

            await eventually(began, "another call sees what the slow one wrote", 20.0)
            await bench.engine.stop([sandbox.instance_id])
            with pytest.raises(SandboxLost):
                await slow

    async def test_concurrent_stops_all_return(self, bench: Bench) -> None:
        """Invariant 4."""
        sandboxes = [await bench.start() for _ in range(3)]
        ids = [sandbox.instance_id for sandbox in sandboxes]
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(bench.engine.stop(ids))
        assert await bench.running() == set()

    @pytest.mark.parametrize("daemon", [False, True], ids=["child", "daemon"])
    async def test_stop_ends_whatever_was_started(self, bench: Bench, daemon: bool) -> None:
        """Invariant 3."""
        witness, command = await bench.start(), sleeper()
        before = len(self.left_over())
        sandbox = await bench.start()
        await value_of(sandbox, "spawn", command=command, daemon=daemon)
        await eventually(lambda: runs(sandbox, command[1]), "the program runs")
        await bench.engine.stop([sandbox.instance_id])
        await eventually(lambda: len(self.left_over()) <= before, "only the witness is left")
        await eventually(lambda: is_gone(witness, command[1]), "it is dead")

    async def test_a_crash_ends_whatever_was_started(self, bench: Bench) -> None:
        """Invariant 3."""
        sandbox = await bench.start()
        command = sleeper()
        await value_of(sandbox, "spawn", command=command, daemon=True)
        await self.kill_sandbox(bench.engine, sandbox)
        await eventually(lambda: sandbox.end_cause is not None, "it is known to be lost")
        await eventually(lambda: not self.left_over(), "nothing is left")
        witness = await bench.start()
        assert await value_of(witness, "running", argument=command[1]) == 0

    async def test_an_id_can_be_used_again_after_its_end(self, bench: Bench) -> None:
        spec = bench.spec()
        first = await bench.engine.start(spec)
        assert await value_of(first, "count", key="k") == 1
        await bench.engine.stop([spec.instance_id])
        again = await bench.engine.start(spec)
        assert await value_of(again, "count", key="k") == 1

    # --- deadlines (invariant 3) --------------------------------------------------------------

    async def test_the_deadline_ends_it(self, bench: Bench) -> None:
        """Invariant 3."""
        sandbox = await bench.start()  # however long that takes
        await bench.engine.set_deadline(sandbox.instance_id, bench.now() + 0.5)
        with pytest.raises(SandboxLost, match="TTL"):
            await call(sandbox, "nap", {"seconds": 60.0}, timeout_s=60.0)
        assert sandbox.end_cause == EndCause("its TTL passed")
        await eventually(lambda: not self.left_over(), "nothing is left")
        assert await bench.running() == set()

    async def test_a_deadline_that_was_moved_holds(self, bench: Bench) -> None:
        moved, left = await bench.engine.start_many(
            [bench.spec(ttl_s=self.starts_in_s) for _ in range(2)]
        )
        assert isinstance(moved, Sandbox)
        assert isinstance(left, Sandbox)
        later = bench.now() + 500.0
        await bench.engine.set_deadline(moved.instance_id, later)
        within_s = self.starts_in_s + 10.0
        await eventually(lambda: left.end_cause is not None, "the other one ended", within_s)
        assert await value_of(moved, "echo", text="alive") == "alive"
        (listed,) = await bench.engine.running()
        assert listed.deadline == pytest.approx(later)
        await bench.engine.set_deadline(moved.instance_id, bench.now() - 1.0)
        await eventually(lambda: moved.end_cause == EndCause("its TTL passed"), "it ended at once")

    async def test_a_deadline_of_what_does_not_run_is_a_lost_sandbox(self, bench: Bench) -> None:
        sandbox = await bench.start()
        await bench.engine.stop([sandbox.instance_id])
        for instance_id in (sandbox.instance_id, UNKNOWN):
            with pytest.raises(SandboxLost):
                await bench.engine.set_deadline(instance_id, bench.now() + 60.0)

    # --- hosts that come back ---------------------------------------------------------------------

    async def test_a_sandbox_outlives_its_host(
        self, bench: Bench, make_engine: Callable[[HostId], Engine], host_id: HostId
    ) -> None:
        """Invariant 1: the same state, the same call ids, the same facts."""
        sandbox = await bench.start()
        assert await value_of(sandbox, "count", key="k") == 1
        await call(sandbox, "count", {"key": "k"}, call_id="before")
        await bench.engine.close()
        second = make_engine(host_id)
        try:
            adopted = await second.attach(sandbox.instance_id)
            assert (await call(adopted, "count", {"key": "k"}, call_id="before")).data == 2
            assert await value_of(adopted, "count", key="k") == 3
            assert adopted.isolation == sandbox.isolation
            assert adopted.start_mode == sandbox.start_mode
            assert {s.instance_id for s in await second.running()} == {sandbox.instance_id}
            await second.set_deadline(sandbox.instance_id, bench.now() + 300.0)
            await second.stop([sandbox.instance_id])
            with pytest.raises(SandboxLost, match="released"):
                await call(adopted, "echo", {"text": "x"})
        finally:
            await second.close()

    async def test_a_call_that_its_host_left_goes_on(
        self, bench: Bench, make_engine: Callable[[HostId], Engine], host_id: HostId
    ) -> None:
        """Invariant 1: the next host gets the outcome of the call that was under way."""
        sandbox = await bench.start()
        arguments = {"key": "k", "seconds": 1.0}
        left = asyncio.create_task(call(sandbox, "count", arguments, call_id="left"))
        await value_of(sandbox, "echo", text="the call is on its way")
        await bench.engine.close()
        second = make_engine(host_id)
        try:
            adopted = await second.attach(sandbox.instance_id)
            assert (await call(adopted, "count", arguments, call_id="left")).data == 1
            assert await value_of(adopted, "count", key="k") == 2
            with pytest.raises(CallOutcomeUnknown):
                await left
        finally:
            await second.close()

    async def test_a_tool_that_opens_all_files_does_not_close_the_door(
        self, bench: Bench, make_engine: Callable[[HostId], Engine], host_id: HostId
    ) -> None:
        """A host that comes while there is no room is let in when there is some."""
        sandbox = await bench.start()
        assert await evaluate(sandbox, _OPEN_ALL_FILES) == errno.EMFILE
        second = make_engine(host_id)
        try:
            adopted = await second.attach(sandbox.instance_id)
            asking = asyncio.create_task(value_of(adopted, "echo", text="in"))
            await eventually(lambda: evaluate(sandbox, _IS_TURNED_AWAY), "there is no room")
            assert not asking.done()
            await evaluate(sandbox, _CLOSE_ALL_FILES)
            assert await asking == "in"
        finally:
            await second.close()

    async def test_what_does_not_run_cannot_be_attached_to(
        self, bench: Bench, make_engine: Callable[[HostId], Engine]
    ) -> None:
        sandbox = await bench.start()
        stranger = make_engine(HostId("another-host"))
        try:
            assert await stranger.running() == []
            for instance_id in (sandbox.instance_id, UNKNOWN):
                with pytest.raises(SandboxLost):
                    await stranger.attach(instance_id)
        finally:
            await stranger.close()

    async def test_closing_a_sandbox_leaves_it_running(self, bench: Bench) -> None:
        sandbox = await bench.start()
        assert await value_of(sandbox, "count", key="k") == 1
        await sandbox.close()
        await sandbox.close()
        again = await bench.engine.attach(sandbox.instance_id)
        assert await value_of(again, "count", key="k") == 2
