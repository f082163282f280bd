"""Which runner has which task: no episode is lost or reported twice."""

from __future__ import annotations

from aenv_ray.sampling import Task
from aenv_ray.sampling.runners.assignments import Assignment, Assignments, Group


def _group(*indices: int) -> Group:
    return Group(tuple(Assignment(index, Task(id=f"t{index}")) for index in indices))


def test_a_task_is_finished_once() -> None:
    """A runner that was thought lost may still report."""
    assignments = Assignments(most_attempts=3)
    assignments.give("a", _group(0))
    assert assignments.lose("a", 9) == []
    assert not assignments.finish("a", 0), "it was taken back"
    assignments.give("b", assignments.returned.popleft())
    assert assignments.finish("b", 0)
    assert not assignments.finish("b", 0)
    assert assignments.is_empty


def test_the_unfinished_tasks_of_a_lost_runner_are_handed_out_again_as_groups() -> None:
    """Each counts as another attempt; the runner's finished ones do not return."""
    assignments = Assignments(most_attempts=3)
    assignments.give("a", _group(0, 1, 2))
    assignments.give("a", _group(3))
    assignments.give("b", _group(4))
    assert assignments.finish("a", 1)
    assert (assignments.count("a"), assignments.count("b")) == (3, 1)
    assert assignments.lose("a", 9) == []
    returned = [
        [(one.index, one.attempt) for one in group.members] for group in assignments.returned
    ]
    assert returned == [[(0, 2), (2, 2)], [(3, 2)]]
    assert not assignments.is_empty


def test_a_task_that_was_lost_too_often_is_given_up() -> None:
    """Invariant 2: it is reported as an infrastructure failure instead of ending every runner."""
    assignments = Assignments(most_attempts=2)
    assignments.give("a", _group(0))
    assert assignments.lose("a", 9) == []
    ((group,),) = assignments.suspects
    assignments.suspects.clear()
    assignments.give("b", group)
    (lost,) = assignments.lose("b", 9, was_apart=True)
    assert (lost.index, lost.attempt) == (0, 2)
    assert assignments.is_empty


def test_a_loss_that_is_reported_twice_counts_once() -> None:
    """Its poll and its next tasks fail separately."""
    assignments = Assignments(most_attempts=3)
    assignments.give("a", _group(0))
    assignments.lose("a", 9)
    assert assignments.lose("a", 9) == []
    assert len(assignments.returned) == 1


def test_tasks_that_a_slow_runner_returns_keep_their_attempts() -> None:
    assignments = Assignments(most_attempts=2)
    groups = [Group((Assignment(n, Task(id=f"t{n}")),)) for n in range(3)]
    for group in groups:
        assignments.give("slow", group)
    assignments.take_back("slow", [2])
    assert list(assignments.returned) == [groups[2]]
    assert not assignments.finish("slow", 2)
    assert assignments.count("slow") == 2


def test_extra_samples_count_until_their_group_is_finished() -> None:
    """They are played: a runner with them has no place for others."""
    assignments = Assignments(most_attempts=2)
    groups = [Group(_group(n, n + 1).members, extra=2) for n in (0, 2, 4)]
    for group in groups:
        assignments.give("a", group)
    assert assignments.count("a") == 12
    assert assignments.finish("a", 0)
    assert assignments.count("a") == 11
    assert assignments.finish("a", 1)
    assert assignments.count("a") == 8
    assignments.take_back("a", [4, 5])
    assert assignments.count("a") == 4
    assignments.lose("a", 9)
    assert assignments.count("a") == 0


def test_tasks_that_were_lost_with_their_runner_are_not_returned_again() -> None:
    assignments = Assignments(most_attempts=2)
    assignments.give("slow", Group((Assignment(0, Task(id="t")),)))
    assert not assignments.lose("slow", 9)
    assignments.take_back("slow", [0])
    ((group,),) = assignments.suspects
    assert [one.attempt for one in group.members] == [2]


def test_tasks_that_a_lost_runner_had_not_begun_keep_their_attempts() -> None:
    """They can be hundreds, and none of them can have ended it."""
    assignments = Assignments(most_attempts=3)
    for group in (_group(0, 1), _group(2), _group(3, 4), _group(5)):
        assignments.give("a", group)
    assert assignments.finish("a", 0)
    assert not assignments.lose("a", 3)
    returned = [
        [(one.index, one.attempt) for one in group.members] for group in assignments.returned
    ]
    assert returned == [[(1, 2)], [(2, 2)], [(3, 1), (4, 1)], [(5, 1)]]


def test_a_batch_that_loses_its_runner_is_halved_until_one_group_was_alone() -> None:
    """Only a task that ended its last runner without others beside it is given up."""
    assignments = Assignments(most_attempts=2)
    for n in range(5):
        assignments.give("a", _group(n))
    assert not assignments.lose("a", 5)
    batches = [[n for group in assignments.suspects.popleft() for n in _indices(group)]]
    lost: list[int] = []
    sizes: list[int] = []
    while batches:
        batch = batches.pop(0)
        sizes.append(len(batch))
        for n in batch:
            assignments.give("b", Group((Assignment(n, Task(id=f"t{n}"), attempt=2),)))
        if 3 in batch:
            lost += (one.index for one in assignments.lose("b", 5, was_apart=True))
        for n in batch:
            assignments.finish("b", n)
        while assignments.suspects:
            batches.append([n for one in assignments.suspects.popleft() for n in _indices(one)])
    assert sizes == [5, 2, 3, 1, 2, 1, 1]
    assert lost == [3]
    assert assignments.is_empty
    assert not assignments.has_lost("b")


def _indices(group: Group) -> list[int]:
    return [one.index for one in group.members]
