"""The loss of the head is said once, and so is its return."""

from __future__ import annotations

from aenv_ray.actors.ray_shell.head_watch import MISSES, HeadContact


def test_a_loss_is_one_line_and_the_return_another() -> None:
    contact = HeadContact("head:6380")
    lines = [contact.note(is_up=up, now=float(n)) for n, up in enumerate([True] + [False] * 40)]
    lines.append(contact.note(is_up=True, now=41.0))
    lines += [contact.note(is_up=True, now=42.0)]
    said = [line for line in lines if line]
    assert len(said) == 2
    assert "head:6380 does not answer" in said[0]
    assert said[1].endswith("back after 40 s")
    assert not contact.is_lost


def test_a_single_miss_is_no_loss() -> None:
    contact = HeadContact("head:6380")
    for n in range(20):
        assert contact.note(is_up=n % MISSES == 0, now=float(n)) is None
        assert not contact.is_lost
