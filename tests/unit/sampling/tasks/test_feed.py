"""Tasks are taken when an episode can begin: a source may be slow, endless, or fail."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Task
from aenv_ray.sampling.tasks.feed import TaskFeed


def endless(read: list[int]) -> Iterator[dict[str, str]]:
    for n in itertools.count():
        read.append(threading.get_ident())
        yield {"id": f"t{n}"}


async def endless_async(read: list[int]) -> AsyncIterator[dict[str, str]]:
    for task in endless(read):
        await asyncio.sleep(0)
        yield task


def run(feed: TaskFeed, work: Callable[[TaskFeed], Coroutine[Any, Any, Any]]) -> Any:
    async def use() -> Any:
        try:
            return await work(feed)
        finally:
            feed.close()

    return asyncio.run(use())


async def all_of(feed: TaskFeed) -> list[tuple[int, str]]:
    found = []
    while taken := await feed.take(3):
        found += [(number, task.id) for number, task in taken]
    return found


@pytest.mark.parametrize("source", [endless, endless_async])
def test_nothing_is_read_before_it_is_taken(source: Callable[[list[int]], Any]) -> None:
    read: list[int] = []

    async def take_four(feed: TaskFeed) -> list[tuple[int, Task]]:
        async with asyncio.TaskGroup() as group:
            takes = [group.create_task(feed.take(1)) for _ in range(4)]
        return [one for take in takes for one in take.result()]

    feed = TaskFeed(source(read))
    assert (feed.total, feed.known) == (None, None)
    taken = run(feed, take_four)
    assert [(n, task.id) for n, task in taken] == [(0, "t0"), (1, "t1"), (2, "t2"), (3, "t3")]
    assert len(read) == 4
    assert len(set(read)) == 1, "one thread, for what may belong to it"


def test_a_blocking_iterator_does_not_block_the_event_loop() -> None:
    """The loop of all episodes goes on, and so does whoever leaves it."""
    goes_on = threading.Event()

    def slow() -> Iterator[Task]:
        goes_on.wait()
        yield Task(id="late")

    async def wait_beside(feed: TaskFeed) -> Any:
        take = asyncio.create_task(feed.take(1))
        await asyncio.sleep(0)
        goes_on.set()
        return await take

    assert run(TaskFeed(slow()), wait_beside) == [(0, Task(id="late"))]


def test_a_task_is_returned_before_the_next_one_is_read() -> None:
    """It may need the episode of this task, or take as long as one."""
    is_taken = threading.Event()

    def waiting() -> Iterator[Task]:
        yield Task(id="first")
        assert is_taken.wait(30.0)
        yield Task(id="second")

    async def take_both(feed: TaskFeed) -> list[tuple[int, Task]]:
        first = await feed.take(2)
        is_taken.set()
        return first + await feed.take(2)

    assert run(TaskFeed(waiting()), take_both) == [(0, Task(id="first")), (1, Task(id="second"))]


def test_tasks_found_while_the_loop_is_busy_are_returned_together() -> None:
    """A task by itself would be a message to a runner."""
    all_found = threading.Event()

    def quick() -> Iterator[dict[str, str]]:
        for n in range(8):
            yield {"id": f"t{n}"}
        all_found.set()

    async def take_twice(feed: TaskFeed) -> list[int]:
        first = await feed.take(9)
        all_found.wait(30.0)
        return [len(first), len(await feed.take(9))]

    first, second = run(TaskFeed(quick()), take_twice)
    assert first + second == 8
    assert second in {0, 8 - first}


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("end", "failure", "says"),
    [
        (ValueError("no more"), ValueError, "no more"),
        (SystemExit(3), RuntimeError, "the tasks raised SystemExit: 3"),
        ({"name": "b"}, ConfigError, "task 1: id: Field required"),
        (None, ConfigError, "task 1: Input should be"),
    ],
)
def test_a_failed_source_ends_and_keeps_its_error(
    is_async: bool, end: Any, failure: type[Exception], says: str
) -> None:
    def failing() -> Iterator[Any]:
        yield {"id": "a"}
        if isinstance(end, BaseException):
            raise end
        yield end
        raise AssertionError("not read")

    async def failing_async() -> AsyncIterator[Any]:
        for one in failing():
            yield one

    async def count(feed: TaskFeed) -> list[tuple[int, str]]:
        return await all_of(feed) + await all_of(feed)

    feed = TaskFeed(failing_async() if is_async else failing())
    assert run(feed, count) == [(0, "a")]
    assert isinstance(feed.failure, failure)
    assert says in str(feed.failure)


def test_a_list_is_checked_immediately_and_sized_sources_have_a_total() -> None:
    class Dataset:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[dict[str, str]]:
            return iter([{"id": "a"}, {"id": "b"}])

    feed = TaskFeed([{"id": "a"}])
    assert (feed.total, feed.known) == (1, [Task(id="a")])
    with pytest.raises(ConfigError, match="task 1: id"):
        TaskFeed([{"id": "a"}, {"name": "b"}])
    with pytest.raises(ConfigError, match="neither a file nor iterable"):
        TaskFeed(5)  # type: ignore[arg-type]
    lazy = TaskFeed(Dataset())
    assert (lazy.total, lazy.known) == (2, None)
    assert run(lazy, all_of) == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("is_list", [True, False])
def test_tasks_that_an_earlier_run_finished_are_skipped(is_list: bool) -> None:
    tasks = [{"id": f"t{n}"} for n in range(5)]

    async def rest(feed: TaskFeed) -> list[tuple[int, str]]:
        await feed.skip({0: "t0", 3: "t3"}, "out.jsonl")
        return await all_of(feed)

    feed = TaskFeed(tasks if is_list else iter(tasks))
    assert run(feed, rest) == [(1, "t1"), (2, "t2"), (4, "t4")]


@pytest.mark.parametrize("kept", [{1: "other"}, {2: "t2"}])
def test_output_of_other_tasks_is_refused_before_the_first_episode(kept: dict[int, str]) -> None:
    async def skip(feed: TaskFeed) -> None:
        await feed.skip(kept, "out.jsonl")

    ((number, name),) = kept.items()
    with pytest.raises(ConfigError, match=f"out.jsonl: episode {number} is of task '{name}'"):
        run(TaskFeed(iter([{"id": "t0"}, {"id": "t1"}])), skip)
