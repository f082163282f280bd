"""Forks of a process that has one thread, without what Python does at a fork for other threads.

At every fork `threading` and `logging` mend, in Python, what other threads may have held. A freshly
forked process copies each page that this touches, some 100 of them, which is a sixth of all that
becoming an instance costs. A template has one thread only, so there is nothing to mend.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any, Final

_FOR_THREADS: Final = frozenset({"logging", "threading"})
"""Whose hooks are left out; those of an environment's own code always run."""


class Forks:
    """Forks this process; made once all modules are imported that it knows before its forks."""

    def __init__(self) -> None:
        self._is_alone = False
        for hooks in _hooks():
            for index, hook in enumerate(hooks):
                if getattr(hook, "__module__", "") in _FOR_THREADS:
                    hooks[index] = functools.partial(self._unless_alone, hook)

    def fork_alone(self) -> int:
        """Fork as `os.fork` does; only for a process whose one thread calls this.

        Later forks, also of the forked process, run all hooks.
        """
        self._is_alone = True
        try:
            return os.fork()
        finally:
            self._is_alone = False

    def _unless_alone(self, hook: Callable[[], object]) -> None:
        if not self._is_alone:
            hook()


def _hooks() -> list[list[Any]]:
    """Return the interpreter's own lists of what it calls at forks, to change them in place.

    Python offers no way to them, but to whom refers to a hook. Where it keeps them otherwise, none
    is found, and forks are as they were.
    """

    def before() -> None: ...
    def in_child() -> None: ...
    def in_parent() -> None: ...

    os.register_at_fork(before=before, after_in_child=in_child, after_in_parent=in_parent)
    found = []
    for mark in (before, in_child, in_parent):
        for holder in gc.get_referrers(mark):
            if type(holder) is list and holder and holder[-1] is mark:
                del holder[-1]
                found.append(holder)
    return found
