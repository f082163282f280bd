"""Which tests one process runs one after another, because they share a Ray.

Starting a Ray takes four seconds of a core, so three of them serve all tests that can share one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TESTS: Final = Path(__file__).parent
GROUPS: Final = {
    "serve": ("ray/services", "ray/gateway"),
    "ray": (
        "ray/instances",
        "ray/hub",
        "ray/nodes/test_remote_tasks.py",
        "e2e/test_quickstart.py",
        "e2e/test_examples.py",
    ),
    "sampling": ("ray/envs", "ray/sampling"),
}
"""Directories and modules by group; a group shares a Ray, and "serve" runs Serve on it."""


class GroupScheduling(LoadScopeScheduling):
    """Gives a worker a whole group, or else a module or class.

    xdist's own ``loadgroup`` has no effect with pytest 9.2, whose node ids xdist 3.8 cannot change.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Give the tests that a crashed worker had not begun to others; return the one that it ran.

        xdist would run that one again, and would give others what the worker had finished: nothing,
        for which they would wait.
        """
        workload = self.assigned_work.pop(node)
        left = [test for unit in workload.values() for test, is_done in unit.items() if not is_done]
        if not left:
            return None
        for scope, unit in workload.items():
            rest = {test: False for test in unit if test in left[1:]}
            if rest:
                self.workqueue[scope] = rest
        for other in self.nodes:
            self._reschedule(other)
        return left[0]

    def schedule(self) -> None:
        """Also end the workers once nothing is left to give them.

        A worker keeps its last test until it gets another one or is told to end. xdist forgets the
        worker that replaces a crashed one and is given a single test: both wait for each other.
        """
        super().schedule()
        if self.collection is not None and not self.workqueue:
            for node in self.nodes:
                if not node.shutting_down:
                    node.shutdown()

    def _split_scope(self, nodeid: str) -> str:
        group = group_of(TESTS.parent / nodeid.partition("::")[0])
        return str(super()._split_scope(nodeid)) if group is None else f"group {group}"


def group_of(path: Path) -> str | None:
    """Return the group of a module; None if it shares no Ray."""
    for group, places in GROUPS.items():
        if any(TESTS / place in (path, *path.parents) for place in places):
            return group
    return None
