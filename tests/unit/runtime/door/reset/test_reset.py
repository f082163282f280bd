"""Resets: what an episode leaves behind, declared state, seeds, and calls meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aenv_ray.runtime.api.module_state import ModuleState
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.dispatch import REHEARSAL_METHOD
from aenv_ray.runtime.door.reset import leftovers
from aenv_ray.runtime.door.reset.leftovers import Leftovers
from aenv_ray.runtime.door.roles import DoorRole, check_method
from aenv_ray.runtime.faults import Fault
from tests.unit.runtime.door.dispatch_bench import (
    Answer,
    Bench,
    show_contexts,
    start_past_the_factory,
)

# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "first").write_text("first")
    return tmp_path


def test_files_of_an_episode_are_removed_and_those_of_the_start_stay(work: Path) -> None:
    state = Leftovers(("cache",), str(work))
    (work / "new" / "inner").mkdir(parents=True)
    (work / "new" / "inner" / "file").write_text("x")
    (work / "data" / "more").write_text("x")
    (work / "link").symlink_to("/")
    (work / "cache").mkdir()
    (work / "cache" / "kept").write_text("x")
    (work / "new").chmod(0)
    assert state.remove() == []
    found = sorted(str(path.relative_to(work)) for path in work.rglob("*"))
    assert found == ["cache", "cache/kept", "data", "data/first"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.write_text("other"), "changed"),
        (lambda file: (file.write_text("other"), os.utime(file, ns=(0, 0))), "changed"),
        (lambda file: file.unlink(), "deleted"),
        (lambda file: file.chmod(0o777), "changed"),
        (lambda file: os.link(file, file.with_name("second")), "changed"),
        (lambda file: (file.rename(file.with_name("x")), file.write_text("first")), "changed"),
    ],
    ids=["content", "content and time", "deleted", "mode", "hard link", "replaced"],
)
def test_a_changed_file_of_the_start_is_found(
    work: Path, change: Callable[[Path], Any], reason: str
) -> None:
    state = Leftovers((), str(work))
    change(work / "data" / "first")
    (found,) = state.remove()
    assert found == f"{reason}: {work}/data/first"


def test_an_agent_cannot_leave_a_message_in_a_directory_of_the_start(work: Path) -> None:
    """Its times, attributes and mode are as at the start, or the instance is not used again."""
    before = [(path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in (work, work / "data")]
    state = Leftovers((), str(work))
    (work / "data" / "more").write_text("x")
    os.utime(work, ns=(1, 2))
    os.utime(work / "data", ns=(3, 4))
    assert state.remove() == []
    after = [(path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in (work, work / "data")]
    assert after == before
    work.chmod(0o711)
    assert state.remove() == [f"changed: {work}"]


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="only Linux has them")
def test_extended_attributes_of_a_directory_are_found(work: Path) -> None:
    state = Leftovers((), str(work))
    try:
        os.setxattr(work / "data", "user.note", b"hint")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    assert state.remove() == [f"changed: {work}/data"]


def test_too_many_files_or_directories_are_not_clean(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a reset is bounded, whatever an agent creates."""
    state = Leftovers((), str(work))
    monkeypatch.setattr(leftovers, "MAX_DEPTH", 3)
    (work / "a" / "b" / "c" / "d" / "e").mkdir(parents=True)
    assert "nested more than 3 deep" in state.remove()[0]
    monkeypatch.setattr(leftovers, "MAX_FILES", 3)
    assert "more than 3 files" in state.remove()[0]


# --- declared state -------------------------------------------------------------------------------


class _Point:
    def __init__(self, x: int) -> None:
        self.x = x


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", made)
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["list"].append(1),
        lambda value: value["set"].add("z"),
        lambda value: setattr(value["point"], "x", 2),
        lambda value: value["nested"]["deep"].update(key=True),
        lambda value: value.pop("set"),
    ],
    ids=["list", "set", "attribute", "nested", "missing"],
)
def test_a_change_of_declared_state_is_found(
    module: ModuleType, change: Callable[[dict[str, Any]], Any]
) -> None:
    value: dict[str, Any] = {
        "list": [1, 2], "set": {"a", "b"}, "point": _Point(1), "nested": {"deep": {}},
    }  # fmt: skip
    value["nested"]["cycle"] = value
    module.value = value  # type: ignore[attr-defined]
    state = ModuleState(["shop.value"])
    assert state.changed() == []
    change(value)
    assert state.changed() == ["shop.value differs from its value at the start"]


def test_state_that_does_not_exist_is_an_error_of_the_project(module: ModuleType) -> None:
    del module
    with pytest.raises(LookupError, match=r"shop\.value"):
        ModuleState(["shop.value"])


# --- registration ---------------------------------------------------------------------------------


def test_a_reset_takes_task_and_seed_and_nothing_else() -> None:
    def good(seed: int | None = None) -> None: ...
    def bad(task: Any, level: int) -> None: ...

    registry = Registry()
    assert registry.set_reset(good).kind == "reset"
    with pytest.raises(TypeError, match="takes level"):
        Registry().set_reset(bad)
    with pytest.raises(ValueError, match="already registered"):
        registry.set_reset(lambda: None, keep_files=())
    for path in ("/etc", "../x", ""):
        with pytest.raises(ValueError, match="work directory"):
            Registry().set_reset(good, keep_files=[path])


def test_an_agent_may_not_reset() -> None:
    """Invariant 8."""
    for method in ("aenv/reset", "aenv/seed", "aenv/tasks", "aenv/rehearsal"):
        with pytest.raises(Fault, match="cannot call"):
            check_method(DoorRole.AGENT, method)


# --- calls ----------------------------------------------------------------------------------------


class ResetBench(Bench):
    """A dispatcher with a tool that waits, and a reset."""

    def __init__(self, directory: Path, reset: Callable[..., Any]) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()

        def hold() -> None:
            self.entered.set()
            self.leave.wait()

        def seed() -> int | None:
            return current_call().seed

        super().__init__(hold, seed)
        self.registry.set_reset(reset)
        self.registry.note_state()
        self.dispatcher.begin(directory=str(directory), variables={"AENV_SEED": "5"})

    def reset(self, **arguments: Any) -> Answer:
        return self.submit("aenv/reset", {"arguments": arguments})


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_reset_gives_task_and_seed_to_the_function_and_to_calls(
    tmp_path: Path, is_async: bool
) -> None:
    seen: list[Any] = []

    def reset(task: Any, seed: int | None) -> None:
        seen.append((task, seed, current_call().name))

    async def reset_later(task: Any, seed: int | None) -> None:
        reset(task, seed)

    bench = ResetBench(tmp_path, reset_later if is_async else reset)
    assert bench.tool("seed").text == "5"
    name = "reset_later" if is_async else "reset"
    assert bench.reset(task=[1], seed=9).result["data"] == {"clean": True, "reasons": []}
    assert seen == [([1], 9, name)]
    assert bench.tool("seed").text == "9"


def test_a_seed_is_set_without_a_reset(tmp_path: Path) -> None:
    """The instance still counts as new, and a reset sets the next seed."""
    bench = ResetBench(tmp_path, lambda: None)
    assert bench.submit("aenv/seed", {"arguments": {"seed": 2**70}}).result["data"] == {}
    assert bench.reset(seed=9).result["data"] == {"clean": True, "reasons": []}
    assert bench.tool("seed").text == "9"
    bench.submit("aenv/seed", {"arguments": {"seed": 2**70}})
    assert bench.tool("seed").text == str(2**70)


def test_an_instance_that_has_rehearsed_a_call_still_counts_as_new(tmp_path: Path) -> None:
    """Without namespaces, a reset refuses instances that were used."""
    bench = ResetBench(tmp_path, lambda: None)
    assert bench.submit(REHEARSAL_METHOD, {"arguments": {"text": "x"}}).text == "x"
    assert not bench.dispatcher._gate.was_used
    bench.tool("seed")
    assert bench.dispatcher._gate.was_used


def test_a_call_that_does_not_end_keeps_the_instance_from_being_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv_ray.runtime.door.reset.reset._END_CALLS_S", 0.05)
    bench = ResetBench(tmp_path, nothing_to_do)
    held = threading.Thread(target=bench.tool, args=("hold",))
    held.start()
    bench.entered.wait()
    answer = bench.reset()
    assert answer.result["data"] == {"clean": False, "reasons": ["a call of 'hold' does not end"]}
    assert bench.tool("seed").error["code"] == "reset_failed"
    bench.leave.set()
    held.join()
    assert bench.reset().result["data"]["clean"] is True
    assert bench.tool("seed").result["content"] == []


@pytest.mark.parametrize("tool", ["note", "note_later"])
def test_a_call_that_a_whole_reset_overtakes_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """It was admitted before. A repeat with its id runs nothing in the next episode either."""
    ran: list[int] = []

    def note() -> None:
        ran.append(1)

    async def note_later() -> None:
        note()

    bench = ResetBench(tmp_path, nothing_to_do)
    for function in (note, note_later):
        bench.registry.add_tool(function)
    gate = bench.dispatcher._gate
    admit = gate.admit

    def slow(name: str, meta: Any, **options: bool) -> int:
        generation = admit(name, meta, **options)
        bench.reset().wait()
        return generation

    monkeypatch.setattr(gate, "admit", slow)
    meta = {"aenv/call_id": "1"}
    first = bench.tool(tool, meta).error
    monkeypatch.undo()
    again = bench.tool(tool, meta).error
    assert first["code"] == again["code"] == "call_cancelled"
    assert "the instance is being reset" in first["message"]
    assert ran == []
    assert bench.tool(tool, {"aenv/call_id": "2"}).result
    assert ran == [1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("leaves", ["task", "task past the factory", "timer"])
def test_what_a_tool_has_left_on_the_loop_does_not_act_in_the_next_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str, is_async: bool
) -> None:
    """Invariant 14: it has the arguments of another agent."""
    show_contexts(monkeypatch)
    acted: list[int] = []
    tasks: list[asyncio.Task[None]] = []
    over = threading.Event()

    async def act() -> None:
        acted.append(1)

    async def go_on() -> None:
        while not over.is_set():
            await act()
            await asyncio.sleep(0.001)

    def tick() -> None:
        loop = asyncio.get_running_loop()
        tasks.append(loop.create_task(act()))
        if not over.is_set():
            loop.call_later(0.001, tick)

    async def leave() -> None:
        if leaves == "task":
            tasks.append(asyncio.create_task(go_on()))
        elif leaves == "timer":
            tick()
        else:
            tasks.append(start_past_the_factory(go_on()))

    async def later() -> None:
        pass

    bench = ResetBench(tmp_path, later if is_async else nothing_to_do)
    bench.registry.add_tool(leave)
    bench.tool("leave").wait()
    while not acted:
        threading.Event().wait(0.001)
    assert bench.reset().result["data"] == {"clean": True, "reasons": []}
    acted.clear()
    threading.Event().wait(0.05)
    assert bench.tool("seed").wait()
    over.set()
    assert acted == []


def test_a_task_that_does_not_end_keeps_the_instance_from_being_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv_ray.runtime.door.reset.reset._END_CALLS_S", 0.05)
    tasks: list[asyncio.Task[None]] = []
    over = threading.Event()

    async def stay() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def leave() -> None:
        tasks.append(asyncio.create_task(stay()))

    bench = ResetBench(tmp_path, nothing_to_do)
    bench.registry.add_tool(leave)
    bench.tool("leave").wait()
    answer = bench.reset().result["data"]
    assert answer == {"clean": False, "reasons": ["1 tasks of tools do not end"]}
    over.set()
    monkeypatch.undo()
    assert bench.reset().result["data"]["clean"] is True


def nothing_to_do() -> None:
    """Do nothing."""
